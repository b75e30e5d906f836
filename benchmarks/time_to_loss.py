"""Question: how soon is the model as good as nanoGPT's CPU recipe makes it, and how good is it when that one is done?

Measured: whole runs of the command `python main.py`, in turns, on the same text: recipes/nanogpt_cpu.yaml (the
yardstick), the default, the default with fewer steps, recipes/adamw.yaml; once for each seed. With --nanogpt DIR, a
checkout of https://github.com/karpathy/nanoGPT, the yardstick is the command that nanoGPT's README gives for a CPU, in
a copy of that folder. Losses are means over the whole evaluation text, in nats, each with the time at which it was
written to TensorBoard's events; of nanoGPT, which estimates its loss from 20 batches, that of its last checkpoint,
scored here, after the seconds of all the iterations that it prints.

* wall: seconds from the command to its end: imports, training, evaluations, snapshots and the sample.
* training: seconds from right before the first step to the end of the last evaluation, with all evaluations and
  snapshots on the way.
* final loss: the evaluation at the end of the run.
* seconds to the yardstick's loss: training seconds until the first evaluation at or below the loss at which the
  yardstick of the same seed ended.
* loss after the yardstick's seconds: the last evaluation not later than the yardstick's training seconds.

The last two need evaluations more often than every 250 steps: --eval-every 50. Each costs some tenths of a second, is
part of the seconds, and nothing is subtracted; so take wall times from a run without --eval-every.

    python benchmarks/time_to_loss.py [--nanogpt DIR] [--seeds 1337 1 2] [--eval-every 50] [--text PATH] [--quick]

Units: seconds; nats per character.
"""

import argparse
import pickle
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _common import PROJECT, environment, print_table

from char_dataset import DataConfig, Text, evaluation_batches
from data.corpus import read_text
from model import sum_losses

# The command that nanoGPT's README gives for a CPU, with a text of ours, and the last checkpoint in place of the best.
NANOGPT = [
    *("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1"),
    *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000"),
    *("--lr_decay_iters=2000", "--dropout=0.0", "--always_save_checkpoint=True", "--dataset=text", "--out_dir=out"),
]
CONTESTANTS = {
    "nanogpt_cpu": ["+recipe=nanogpt_cpu"],
    "default": [],
    # Told to be short, its learning rate falls in time; and it is evaluated at its end only.
    "default, 300 steps": ["trainer_config.max_steps=300", "trainer_config.eval_every_steps=300"],
    "adamw": ["+recipe=adamw"],
    # As on a CPU that doesn't compute in bfloat16.
    "default, float32": ["trainer_config.use_amp=false"],
    "default, 300 steps, float32": [
        *("trainer_config.max_steps=300", "trainer_config.eval_every_steps=300", "trainer_config.use_amp=false"),
    ],
}


@dataclass
class Run:
    """One finished run.

    Args:
        wall: seconds from the command to its end.
        curve: (training seconds, evaluation loss) of every evaluation, in order.
    """

    wall: float
    curve: list[tuple[float, float]]

    @property
    def training(self) -> float:
        """Training seconds until the last evaluation."""
        return self.curve[-1][0]

    @property
    def final_loss(self) -> float:
        """The last evaluation's loss."""
        return self.curve[-1][1]

    def seconds_to(self, loss: float) -> float:
        """Training seconds until the first evaluation at or below a loss; infinite if there is none."""
        return next((seconds for seconds, reached in self.curve if reached <= loss), float("inf"))

    def loss_after(self, seconds: float) -> float:
        """The loss of the last evaluation not later than so many training seconds; infinite if there is none."""
        return next((loss for at, loss in reversed(self.curve) if at <= seconds), float("inf"))


def read_curve(run_dir: str) -> list[tuple[float, float]]:
    """The evaluations of a run; the clock starts where the trainer opens its events, right before the first step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(run_dir, size_guidance={"scalars": 0})
    events.Reload()
    begin = events.FirstEventTimestamp()
    return [(event.wall_time - begin, event.value) for event in events.Scalars("eval/loss")]


def train(name: str, seed: int, threads: int, overrides: list[str]) -> Run:
    """Run the program as a reader would, in a directory of its own."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, str(PROJECT / "main.py"), f"hydra.run.dir={run_dir}", f"trainer_config.seed={seed}"]
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, *CONTESTANTS[name], *overrides], env=environment(threads), stderr=subprocess.PIPE, text=True
        )
        wall = time.perf_counter() - begin
        if done.returncode:
            sys.exit(done.stderr)
        run = Run(wall, read_curve(run_dir))
    print(f"seed {seed}: {name}: {run.wall:.1f} s, loss {run.final_loss:.4f}", file=sys.stderr, flush=True)
    return run


def train_nanogpt(checkout: Path, text: Path, seed: int, threads: int, quick: bool) -> Run:
    """Run nanoGPT's own program in a copy of it, and score its last checkpoint as our runs are scored."""
    parts = Text.of(read_text(str(text)), DataConfig(str(text), 64))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(
            shutil.copytree(checkout, Path(folder) / "nanoGPT", ignore=shutil.ignore_patterns(".git", "data", "out*"))
        )
        before = (copy / "train.py").read_text()
        after = before.replace("torch.manual_seed(1337", f"torch.manual_seed({seed}")
        if after == before and seed != 1337:
            sys.exit(f"{checkout / 'train.py'} sets its seed in another way")
        (copy / "train.py").write_text(after)
        (copy / "data" / "text").mkdir(parents=True)
        for name, codes in (("train", parts.train_codes), ("val", parts.eval_codes)):
            codes.astype(np.uint16).tofile(copy / "data" / "text" / f"{name}.bin")
        (copy / "data" / "text" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(parts.vocabulary)}))
        short = ["--max_iters=20", "--eval_interval=20", "--eval_iters=1"] if quick else []
        begin = time.perf_counter()
        command = [sys.executable, "train.py", *NANOGPT, *short]
        done = subprocess.run(command, cwd=copy, env=environment(threads), capture_output=True, text=True)
        wall = time.perf_counter() - begin
        if done.returncode:
            sys.exit(done.stderr)
        theirs = runpy.run_path(str(copy / "model.py"))
        checkpoint = torch.load(copy / "out" / "ckpt.pt")
    model = theirs["GPT"](theirs["GPTConfig"](**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    model.wte = model.transformer.wte  # where `sum_losses` looks for the device
    total, count = sum_losses(model, evaluation_batches(parts.eval_codes, 64, 32, rank=0, world_size=1))
    print(f"seed {seed}: nanoGPT: {wall:.1f} s, loss {total / count:.4f}", file=sys.stderr, flush=True)
    training = sum(float(ms) for ms in re.findall(r"^iter .* time ([\d.]+)ms", done.stdout, flags=re.MULTILINE)) / 1e3
    return Run(wall, [(training, total / count)])


def figures(run: Run, yardstick: Run) -> list[float]:
    """The columns of one run, as the module's docstring defines them."""
    return [
        *(run.wall, run.wall / yardstick.wall, run.training, run.final_loss),
        run.seconds_to(yardstick.final_loss),
        run.seconds_to(yardstick.final_loss) / yardstick.training,
        run.loss_after(yardstick.training),
    ]


def as_cells(values: list[float]) -> list[object]:
    """Seconds with one decimal, ratios with two, losses with four."""
    return [f"{value:.{digits}f}" for value, digits in zip(values, (1, 2, 1, 4, 1, 3, 4), strict=True)]


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps on the bundled text, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    parser.add_argument("--eval-every", type=int, metavar="STEPS", help="default: as often as the configuration says")
    parser.add_argument("--text", type=Path, help="default: the configuration's, tiny-shakespeare")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    parser.add_argument(
        "--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT, which is then the yardstick"
    )
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    overrides = []
    if arguments.quick:
        arguments.seeds, arguments.eval_every = arguments.seeds[:1], 10
        arguments.text = arguments.text or PROJECT / "data" / "sample.txt"
        overrides += ["trainer_config.max_steps=20"]
    if arguments.eval_every:
        overrides += [f"trainer_config.eval_every_steps={arguments.eval_every}"]
    if arguments.text:
        overrides += [f"data_config.path={arguments.text.resolve()}"]

    names = [*(["nanoGPT"] if arguments.nanogpt else []), *arguments.only]
    text = arguments.text or PROJECT / "data" / "input.txt"
    if arguments.nanogpt and not text.exists():
        sys.exit(f"there is no {text}; python main.py downloads it, or name one with --text")
    yardstick = names[0]
    table: dict[str, list[list[float]]] = {name: [] for name in names}
    rows: list[list[object]] = []
    for seed in arguments.seeds:
        runs = {}
        for name in names:
            if name == "nanoGPT":
                runs[name] = train_nanogpt(arguments.nanogpt, text, seed, arguments.threads, arguments.quick)
            else:
                runs[name] = train(name, seed, arguments.threads, overrides)
        for name, run in runs.items():
            table[name].append(figures(run, runs[yardstick]))
            rows.append([name, seed, *as_cells(table[name][-1])])
    if len(arguments.seeds) > 1:
        for word, summary in (("median", statistics.median), ("worst", max)):
            for name in names:  # of every column, smaller is better
                values = [float(summary(column)) for column in zip(*table[name], strict=True)]
                rows.append([name, word, *as_cells(values)])
    print_table(
        [
            *("configuration", "seed", "wall, s", f"wall : `{yardstick}`", "training, s", "final loss"),
            *(f"seconds to `{yardstick}`'s loss", f"in `{yardstick}`'s seconds", f"loss after `{yardstick}`'s seconds"),
        ],
        rows,
        f"{arguments.threads} threads; evaluation every {arguments.eval_every or 250} steps.",
    )


if __name__ == "__main__":
    main()
