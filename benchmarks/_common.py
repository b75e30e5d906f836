"""What the benchmarks share: naming the machine, measuring in turns, printing tables.

Other work on a machine makes absolute figures drift by tens of per cent within minutes. Contestants that are measured
one after the other, round after round, drift together: their medians compare, and their ratios can be trusted.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # a benchmark can be started from anywhere, and imports the project's modules

USERS = dict(os.environ)  # before anything of the project settles what it needs: contestants settle it for themselves

Figures = dict[str, float]  # what one measurement yields, by name


def machine() -> str:
    """The machine in one line: processor, cores, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} cores; torch {version('torch')}, Python {platform.python_version()}"


def measure_in_turns(contestants: Mapping[str, Callable[[], Figures]], rounds: int) -> dict[str, Figures]:
    """Let every contestant measure once in each round.

    Args:
        contestants: name: a function that does one measurement and returns its figures.
        rounds: how often each contestant is measured.

    Returns:
        name: the median of each of its figures.
    """
    results: dict[str, list[Figures]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, measure in contestants.items():
            results[name].append(measure())
            print(f"round {number + 1}/{rounds}: {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return {
        name: {key: statistics.median(figures[key] for figures in measured) for key in measured[0]}
        for name, measured in results.items()
    }


def environment(threads: int) -> dict[str, str]:
    """The environment of a process that is to compute with this many threads."""
    return {**USERS, "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}


def run_measurement(script: str, *arguments: object, threads: int, ranks: int = 1) -> Figures:
    """Measure in a fresh process: no contestant inherits the threads, caches or memory of the one before it.

    Args:
        script: the benchmark's own file; `arguments` tell it to measure, and to print its figures by `report`.
        threads: of each rank.
        ranks: more than one are started by torchrun.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [script, *map(str, arguments)]
    done = subprocess.run(command, env=environment(threads), stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def report(figures: Figures) -> None:
    """What a measuring process prints last, for `run_measurement`."""
    sys.stdout.write(f"{json.dumps(figures)}\n")  # in one piece: several ranks report into one pipe
    sys.stdout.flush()


def print_table(header: list[str], rows: list[list[object]], note: str = "") -> None:
    """Print a Markdown table, then the note and the machine."""
    lines: list[list[object]] = [[*header], ["---"] * len(header), *rows]
    for row in lines:
        print("| " + " | ".join(f"{cell:,.3g}" if isinstance(cell, float) else str(cell) for cell in row) + " |")
    print(f"\n{note}{' ' if note else ''}Machine: {machine()}.", flush=True)
