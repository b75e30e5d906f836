"""Question: how long does a reader wait between the command and the first optimizer step?

Measured: seconds from the start of the process until "step 1/1" stands on standard error, for the default command (the
default configuration, text and model, but a single step), with and without torchrun; beside them
`python -c "import torch, hydra"`, which is the least that any program with these two libraries takes. All are started
in turns, and each figure is the median of five (--rounds) starts. One start before the first round fills the file cache
and is not counted.

    python benchmarks/startup.py [--quick]

Unit: seconds of wall time.
"""

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from _common import PROJECT, Figures, environment, measure_in_turns, print_table


def seconds_to_first_step(launcher: list[str], threads: int, settings: Sequence[str] = ()) -> Figures:
    """Start a run of one step in a directory of its own, and look at the clock when it reports that step."""
    with tempfile.TemporaryDirectory() as run_dir:
        overrides = ["trainer_config.max_steps=1", "trainer_config.sample_tokens=0", f"hydra.run.dir={run_dir}"]
        overrides = [*settings, *overrides]  # of a key that stands there twice, the last value counts
        seconds = None
        begin = time.perf_counter()
        process = subprocess.Popen(
            [*launcher, str(PROJECT / "main.py"), *overrides],
            env=environment(threads),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if seconds is None and "step 1/1" in line:
                seconds = time.perf_counter() - begin
        if process.wait() or seconds is None:
            sys.exit("".join(lines))
    return {"seconds": seconds}


def seconds_to_import(threads: int) -> Figures:
    """The floor: nothing but the two largest imports."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, hydra"], env=environment(threads), check=True)
    return {"seconds": time.perf_counter() - begin}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # what the command torchrun does
    floor = 'python -c "import torch, hydra"'
    contestants = {
        floor: functools.partial(seconds_to_import, arguments.threads),
        "python main.py": functools.partial(seconds_to_first_step, [sys.executable], arguments.threads),
        "torchrun --standalone main.py": functools.partial(seconds_to_first_step, torchrun, arguments.threads),
    }
    if not arguments.quick:
        measure_in_turns(contestants, rounds=1)
    medians = measure_in_turns(contestants, rounds=1 if arguments.quick else arguments.rounds)
    least = medians[floor]["seconds"]
    print_table(
        ["command", "seconds", "times the floor", "1.5 times the floor + 2 s"],
        [[f"`{name}`", m["seconds"], m["seconds"] / least, 1.5 * least + 2] for name, m in medians.items()],
        f"{arguments.threads} threads.",
    )


if __name__ == "__main__":
    main()
