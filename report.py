"""The table of all runs: `python report.py [FOLDER]`."""

from console import environment  # isort: skip, settles what torch reads when it is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from config import PROJECT, Config
from console.curves import ended, read_events, scalars
from console.errors import one_line, one_line_at_the_end
from console.text import printable, run_row
from model import GPT, GPTConfig
from saving.contents import check_contents
from saving.moving import snapshot_url
from snapshot import load_snapshot, previous_url


@dataclass
class Run:
    """What a run directory says of its run."""

    name: str
    text: str  # fingerprint of the text: losses on different texts can't be compared
    loss: float  # the lowest on the evaluation text, nats per character; infinite before the first evaluation
    steps: int
    parameters: int
    seconds: float  # of training, without evaluations and snapshots; 0 where there are no curves
    speed: float  # tokens per second in these seconds
    settings: list[str]  # that are not the defaults: "group.key=value"
    end: str = ""  # why it ended; empty where nothing is known of it


def read_runs(folder: Path) -> list[Run]:
    """All runs below a folder; those that can't be read are named on standard error.

    Raises:
        ValueError: there is none.
    """
    places = {path.parent for name in ("gpt_snapshot.pt", "config.yaml") for path in folder.rglob(name)}
    if not places:
        raise ValueError(f"no runs in {folder}; train one with python main.py, or name the folder that holds them")
    runs = []
    for place in sorted(places):
        try:
            runs.append(read_run(place, str(place.relative_to(folder.parent if place == folder else folder))))
        except Exception as error:  # noqa: PERF203 - odd contents raise almost anything
            print(printable(f"skipped {place}: {type(error).__name__}: {one_line(error)}"), file=sys.stderr)
    if not runs:
        raise ValueError("none of these runs can be read")
    return runs


def read_run(run_dir: Path, name: str) -> Run:
    """Read a run's latest snapshot and its curves; what is wrong with them is raised as it comes."""
    url = latest = snapshot_url(str(run_dir))
    try:
        try:
            snapshot = load_snapshot(url)
        except FileNotFoundError:
            url = previous_url(url)
            snapshot = load_snapshot(url)
    except FileNotFoundError as error:
        raise ValueError(f"there is no snapshot at {latest}: it hasn't saved yet, or what it saved is gone") from error
    check_contents(snapshot, url)
    with torch.device("meta"):  # no memory: it is only counted
        parameters = GPT(GPTConfig(**snapshot["model_config"])).num_parameters()
    config, step = snapshot["config"], snapshot["step"]
    defaults = Config().as_dict()
    settings = [  # as one types them
        f"{group}.{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for group, values in config.items()
        for key, value in values.items()
        if value != defaults[group].get(key) and key != "resume"  # how it was started, and not what it is
    ]
    events = read_events(run_dir)
    losses, speeds = scalars(events, "eval/loss"), scalars(events, "train/tokens_per_second")
    # The latest snapshot was written before the evaluation of its own step; the curve may end early, on a full disk.
    loss = min([snapshot["best_eval_loss"], *(value for _, value in losses if math.isfinite(value))])
    tokens_per_step = config["trainer_config"]["batch_size"] * snapshot["model_config"]["block_size"]
    before, seconds = 0, 0.0
    for at, speed in speeds:  # of the steps since the last report
        before, seconds = at, seconds + (at - before) * tokens_per_step / speed
    speed = before * tokens_per_step / seconds if seconds else 0.0
    ended_at, why = ended(events)
    if ended_at < step:  # it has gone on since; or it came to its end when runs didn't say yet by what
        why = "" if step in dict(scalars(events, "eval/best_loss")) else "unfinished"
    return Run(name, snapshot["corpus"], loss, step, parameters, seconds, speed, settings, why)


def run_table(runs: list[Run], width: int = 80) -> str:
    """One row for each run, the lowest loss first; runs of one text stand together.

    Args:
        runs: all that are to be shown. Of their settings, those that differ are.
        width: of the table, in characters.
    """

    def order(run: Run) -> tuple[bool, float]:
        return not math.isfinite(run.loss), run.loss

    lines = ["  loss    steps   parameters  seconds  tokens/s  run (why it ended) settings"]
    texts = list(dict.fromkeys(run.text for run in sorted(runs, key=order)))  # that of the lowest loss first
    for text in texts:
        if text != texts[0]:
            lines.append("another text, whose losses don't compare with those above:")
        for run in sorted((run for run in runs if run.text == text), key=order):
            speed = f"{run.seconds:7,.0f}  {run.speed:8,.0f}" if run.seconds else f"{'?':>7}  {'?':>8}"
            left = f"{run.loss:6.4f}  {run.steps:7,}  {run.parameters:11,}  {speed}  "
            lines.append(run_row(left, run.name, run.end, run.settings, [other.settings for other in runs], width))
    return "\n".join(lines)


def main() -> None:
    """Print the table of all runs below a folder."""
    parser = argparse.ArgumentParser(description="Print a table of all runs, the lowest evaluation loss first.")
    parser.add_argument("folder", nargs="?", type=Path, default=PROJECT / "runs", help="where they are (runs)")
    folder = parser.parse_args().folder
    with one_line_at_the_end():
        print(run_table(read_runs(folder), shutil.get_terminal_size().columns), flush=True)


if __name__ == "__main__":
    main()
