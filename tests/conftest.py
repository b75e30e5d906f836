"""What the tests share: small models, small texts, and real processes that run the program."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

PROJECT = Path(__file__).resolve().parent.parent
SAMPLE_TEXT = PROJECT / "data" / "sample.txt"

# Two processes that each use all cores wait for each other actively, and are many times slower than one.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# In the background of a shell and under nohup, signals are ignored, and the programs that the tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# What is compared to the bit is compared on the CPU, also where there are GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Seconds after which something counts as hanging. A loaded machine may take ten times as long as an idle one, so no
# test asks how long something takes: what must happen at once is counted in steps, or by a clock that the test moves.
HANGS = 300.0

# A run of seconds: a model of 8,000 parameters, 20 steps, in float32 so that results compare exactly.
TINY_SIZES = [
    "data_config.block_size=16",
    "data_config.truncate=0.1",
    "gpt_config.n_layer=2",
    "gpt_config.n_head=2",
    "gpt_config.n_embd=16",
    "trainer_config.batch_size=12",
    "trainer_config.max_steps=20",
    "trainer_config.max_epochs=1",
    "trainer_config.use_amp=false",
    "trainer_config.device=cpu",
    "trainer_config.sample_tokens=20",
    "trainer_config.log_every_steps=1",
    "trainer_config.eval_every_steps=10",
    "trainer_config.save_every_steps=5",
]
TINY_RUN = [f"data_config.path={SAMPLE_TEXT}", *TINY_SIZES]


def run_program(
    *command: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = HANGS,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command of the project in a process of its own, wait for it, and return what it printed."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd or PROJECT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        input=stdin,
        check=False,
    )


def train(run_dir: Path, *overrides: object, ranks: int | None = None, **kwargs) -> subprocess.CompletedProcess[str]:
    """Run main.py on the tiny configuration: without torchrun, or under it with so many ranks."""
    launcher: list[object] = [sys.executable]
    if ranks is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return run_program(*launcher, PROJECT / "main.py", f"hydra.run.dir={run_dir}", *TINY_RUN, *overrides, **kwargs)


def read_losses(run_dir: Path, tag: str = "train/loss") -> dict[int, float]:
    """A run's recorded scalars, by optimizer step, from its TensorBoard events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


@pytest.fixture(scope="session")
def two_rank_run(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """(Folder, process) of the tiny run on two ranks, made once for all tests, which only look at folder/run."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":  # one of pytest-xdist's workers: whoever comes first makes it for all of them
        shared = shared.parent
    folder, record = shared / "two_ranks", shared / "two_ranks.pickle"
    with FileLock(f"{folder}.lock"):
        if not record.exists():
            folder.mkdir()
            record.write_bytes(pickle.dumps(train(folder / "run", ranks=2)))
    return folder, pickle.loads(record.read_bytes())


@pytest.fixture
def sample_text() -> str:
    return SAMPLE_TEXT.read_text(encoding="utf-8")
