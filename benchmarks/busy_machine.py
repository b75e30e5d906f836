"""Question: how much slower is training while another program wants the same cores?

Measured: milliseconds of an optimizer step of the default configuration, the median of a fresh process's last steps: on
the machine alone, beside one busy loop, and two trainings at once, each in as many threads as there are cores. The
contestants are settings of how long OpenMP's threads spin when they wait for work. libgomp's own is 300,000 turns;
`console/environment.py` chooses by what runs at the start. All are measured in turns; each figure is the median of the
rounds.

    python benchmarks/busy_machine.py [--quick]

Units: milliseconds per step; ratios.
"""

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import PROJECT, Figures, measure_in_turns, print_table, report

SETTINGS = {
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "console/environment.py's": {},
    "its choice for an idle machine": {"GOMP_SPINCOUNT": "20000"},  # where the other program comes later
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}


def train(text: str, steps: int, precision: str) -> None:
    """Train, and report the median milliseconds of the steps in the second half."""
    from console import environment  # isort: skip, before torch is loaded

    environment.keep_freed_memory()  # as main.py does it
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from config import Config
    from console.reporter import Reporter
    from distributed import leave, process_group
    from main import build_trainer

    with tempfile.TemporaryDirectory() as run_dir, process_group(10) as ranks:
        with initialize_config_dir(str(PROJECT), version_base="1.3"):
            overrides = compose("gpt2_train_cfg", [f"trainer_config.amp_dtype={precision}"])
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), overrides))
        trainer = build_trainer(config, text, ranks, run_dir)
        trainer.reporter = Reporter(run_dir, is_main=False)
        batches, durations = trainer._batches(), []
        for _ in range(steps):
            began = time.perf_counter()
            trainer._train_step(batches)
            trainer.state.step += 1
            durations.append((time.perf_counter() - began) * 1e3)
    report({"milliseconds": statistics.median(durations[steps // 2 :])})
    leave(0)


def measure(arguments: argparse.Namespace, situation: str, setting: dict[str, str]) -> Figures:
    """One fresh training process, or two at once, perhaps beside a busy loop."""
    import json

    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment |= {"OMP_NUM_THREADS": str(arguments.threads), **setting}
    command = [sys.executable, __file__, "--child", "--text", arguments.text, "--precision", arguments.precision]
    command += ["--steps", str(arguments.steps)]
    with contextlib.ExitStack() as stack:
        if situation == "beside a busy loop":
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        count = 2 if situation == "two at once" else 1
        processes = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a training process failed")
    return {"ms": statistics.mean(json.loads(output.splitlines()[-1])["milliseconds"] for output in outputs)}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--text", default=str(PROJECT / "data" / "input.txt"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        train(arguments.text, arguments.steps, arguments.precision)
    if arguments.quick:
        arguments.steps, arguments.rounds = 4, 1
        arguments.text = str(Path(PROJECT) / "data" / "sample.txt")

    situations = ["alone", "beside a busy loop", "two at once"]
    contestants = {
        f"{situation}: {name}": functools.partial(measure, arguments, situation, setting)
        for situation in situations
        for name, setting in SETTINGS.items()
    }
    medians = measure_in_turns(contestants, arguments.rounds)
    rows: list[list[object]] = []
    for name in SETTINGS:
        alone, busy, two = (medians[f"{situation}: {name}"]["ms"] for situation in situations)
        usual = medians["alone: libgomp's own"]["ms"]
        rows.append([name, alone, alone / usual, busy, busy / alone, two, two / alone])
    header = [
        "setting",
        "alone, ms",
        ": libgomp's own",
        "beside a busy loop, ms",
        ": alone",
        "two at once, ms",
        ": alone",
    ]
    print_table(header, rows, f"{arguments.threads} threads, {arguments.precision}, {arguments.rounds} rounds.")


if __name__ == "__main__":
    main()
