"""What the tests share: small models, small texts, and processes that run the program."""

import contextlib
import itertools
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from warm import MARK, Child, Warm, end_all

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

# What tests draw, such as the step at which a rank is killed, they draw again with the same SEED in the environment.
SEED = os.environ.setdefault("SEED", str(random.randrange(10**6)))

# Seconds after which something counts as hanging. A loaded machine may take ten times as long as an idle one, so no
# test asks how long something takes: what must happen at once is counted in steps, or by a clock that the test moves.
HANGS = 180.0

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

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

SERVERS, LOCK = list[Warm](), threading.Lock()  # none yet, or one

NUMBERS, PORTS = itertools.count(), itertools.count()  # of the tests


def warm() -> Warm | None:
    """The process that forks for each start; only on Linux: elsewhere, a fork can't use what was loaded before it."""
    with LOCK:
        if not SERVERS and sys.platform == "linux":
            SERVERS.append(Warm())
    return SERVERS[0] if SERVERS else None


def run_program(
    *command: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = HANGS,
    stdin: str = "",
    is_real: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, wait for it, and return what it printed.

    Args:
        command: a program and its arguments. Python's programs start in a fork of a process that is warm already.
        cwd: its working directory; None: the project.
        env: what is different in its environment.
        timeout: seconds until it counts as hanging.
        stdin: its standard input.
        is_real: start it by its own Python all the same, because that start is what is tested.
    """
    words = [str(part) for part in command]
    if is_loaded(words) and not is_real and (server := warm()):
        return server.run(words[1:], {**os.environ, **(env or {})}, cwd or PROJECT, stdin, timeout)
    return subprocess.run(
        words,
        cwd=cwd or PROJECT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        input=stdin,
        check=False,
    )


def is_loaded(words: list[str]) -> bool:
    """Whether a command is Python with a program of this project: a copy of it has modules of its own."""
    return words[0] == sys.executable and (words[1] in ("-c", "-m") or (PROJECT / words[1]).is_relative_to(PROJECT))


Started = subprocess.Popen[str] | Child


def start_program(*command: object, out: Path, cwd: Path | None = None, is_real: bool = False) -> Started:
    """Start a command in a session of its own, and don't wait for it; what it prints goes to the end of a file."""
    words = [str(part) for part in command]
    with open(out, "a") as file, open(os.devnull) as nothing:
        if is_loaded(words) and not is_real and (server := warm()):
            streams = [nothing.fileno(), file.fileno(), file.fileno()]
            return server.start(words[1:], {**os.environ}, cwd or PROJECT, streams)
        return subprocess.Popen(
            *(words,), stdin=nothing, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            cwd=cwd or PROJECT,
        )  # fmt: skip


def run_ranks(n: int, *command: object, nodes: bool = False, **how) -> subprocess.CompletedProcess[str]:
    """Run a program as n ranks, as a launcher would that does nothing else; what all of them printed, rank by rank.

    On nodes of their own, each is local rank 0: a program that takes that for its place among all ranks is wrong.
    """
    common = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= how.pop("env", {})
    places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(0 if nodes else rank)} for rank in range(n)]
    with ThreadPoolExecutor(n) as pool:
        ranks = list(pool.map(lambda place: run_program(sys.executable, *command, env=place, **how), places))
    code = next((rank.returncode for rank in ranks if rank.returncode), 0)
    return subprocess.CompletedProcess(
        [*map(str, command)], code, "".join(r.stdout for r in ranks), "".join(r.stderr for r in ranks)
    )


def spawn(function: Callable[..., None], n: int, *args: object) -> None:
    """`torch.multiprocessing.spawn` without its wait for torch: function(rank, *args) in each of n processes."""

    def start(rank: int) -> None:
        script = (
            f"import pickle, sys; sys.path[:0] = [{str(PROJECT)!r}, {str(PROJECT / 'tests')!r}]\n"
            f"from {function.__module__} import {function.__name__} as function\n"
            f"function({rank}, *pickle.loads({pickle.dumps(args)!r}))\n"
            "from distributed import leave; leave(0)"  # as main.py ends: gloo's threads may still run
        )
        process = run_program(sys.executable, "-c", script)
        assert process.returncode == 0, process.stderr

    with ThreadPoolExecutor(n) as pool:
        list(pool.map(start, range(n)))


def free_port() -> int:
    """A port of this machine that nobody uses, and that no test beside this one gets."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + 1_000 * worker + next(PORTS) % 1_000  # below those that the system gives out by itself
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def train(
    run_dir: Path, *overrides: object, ranks: int = 1, torchrun: bool = False, **how
) -> subprocess.CompletedProcess[str]:
    """Run main.py on the tiny configuration, as so many ranks; under torchrun where that is what is tested."""
    command = [PROJECT / "main.py", f"hydra.run.dir={run_dir}", *TINY_RUN, *overrides]
    if torchrun:
        return run_program(*TORCHRUN, f"--nproc_per_node={ranks}", *command, **how)
    return run_program(sys.executable, *command, **how) if ranks == 1 else run_ranks(ranks, *command, **how)


def take_place(rank: int, world_size: int, port: int) -> None:
    """Be one of so many ranks of this machine, as a launcher would say it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")


def memory_of_this_process(key: str) -> int:
    """Bytes that the kernel counts: VmRSS now, VmHWM at most up to now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
            record.write_bytes(pickle.dumps(train(folder / "run", ranks=2, torchrun=True, is_real=True)))
    return folder, pickle.loads(record.read_bytes())


def pytest_configure(config: pytest.Config) -> None:
    """Whatever the tests start inherits this, and by it is found and ended when they end."""
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    os.environ[MARK] = f"{folder.name}/{os.getpid()}."


def pytest_report_header() -> str:
    """A line at the top of what pytest says."""
    return f"SEED={SEED}"


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Each test draws on its own, whichever ran before it."""
    random.seed(f"{SEED} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """What a test has started and has not ended, because it failed, ends with it. (What a fixture started, stays.)"""
    before, os.environ[MARK] = os.environ[MARK], f"{os.environ[MARK]}{next(NUMBERS)};"
    yield
    end_all(os.environ[MARK])
    os.environ[MARK] = before


@pytest.fixture
def sample_text() -> str:
    return SAMPLE_TEXT.read_text(encoding="utf-8")
