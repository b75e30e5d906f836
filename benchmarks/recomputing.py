"""What computing blocks twice (trainer_config.activation_checkpointing) saves in memory and costs in time.

One thread, in turns, each measurement in a fresh process: the bytes that the process grows by at most while the model
is made and takes steps (Linux), beside what the plan says, and the seconds of a step.

    python benchmarks/recomputing.py [--rounds N] [--steps N] [--quick] [--text FILE] [group.key=value ...]
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import PROJECT, Figures, measure_in_turns, print_table, report, run_measurement
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from config import Config
from distributed import leave, process_group
from large.plan import work_out
from main import build_trainer

SIZES = ["data_config.block_size=256", "gpt_config.n_layer=8", "gpt_config.n_embd=256", "trainer_config.batch_size=16"]
SMALL = ["data_config.block_size=32", "gpt_config.n_layer=1", "gpt_config.n_embd=32", "trainer_config.batch_size=2"]


def memory_of_this_process(key: str) -> float:
    """MB that the kernel counts: VmRSS now, VmHWM at most up to now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{key}:"))


def measure(text: str, steps: int, overrides: list[str]) -> Figures:
    """Take steps of a run, after a few of a small one, which load whatever is loaded late."""
    for words, number in (([*overrides, *SMALL], 2), (overrides, steps)):
        with initialize_config_dir(str(PROJECT), version_base="1.3"):
            cfg = compose("gpt2_train_cfg", overrides=words)
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), cfg))
        before, seconds = memory_of_this_process("VmRSS"), []
        with tempfile.TemporaryDirectory() as run_dir, process_group(1.0, "cpu") as ranks:
            trainer = build_trainer(config, text, ranks, run_dir)
            batches = trainer._batches()
            trainer.model.train()
            for _ in range(number):
                began = time.perf_counter()
                trainer._train_step(batches)
                trainer.state.step += 1
                seconds.append(time.perf_counter() - began)
    peak = memory_of_this_process("VmHWM") - before
    needs = work_out(
        *(trainer.raw_model.config, trainer.config, trainer.optimizer_config, ranks, trainer.micro_batch_size)
    )
    return {
        "seconds": statistics.median(seconds[1:]),  # the first step makes the optimizer's state
        "peak_mb": peak,
        "planned_mb": needs.peak / 1e6,
        "activations_mb": needs.activations / 1e6,
    }


def main() -> None:
    """Measure and print the table; with --measure, be one of the processes that do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps in a measurement, two at least")
    parser.add_argument("--text", type=Path, default=PROJECT / "data" / "input.txt")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="changes of the configuration, of both contestants")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, 2
    if arguments.measure:
        report(measure(str(arguments.text), arguments.steps, arguments.overrides))
        leave(0)
    options = ["--measure", "--steps", arguments.steps, "--text", arguments.text.resolve()]
    words = [*(SMALL if arguments.quick else SIZES), *arguments.overrides]
    contestants: dict[str, Callable[[], Figures]] = {
        name: functools.partial(
            run_measurement,
            *(__file__, *options, *words, f"trainer_config.activation_checkpointing={key}"),
            threads=1,
        )
        for name, key in (("kept", "false"), ("computed twice", "true"))
    }
    medians = measure_in_turns(contestants, arguments.rounds)
    rows: list[list[object]] = [
        [name, *(figures[key] for key in ("activations_mb", "planned_mb", "peak_mb", "seconds"))]
        for name, figures in medians.items()
    ]
    kept, twice = medians["kept"], medians["computed twice"]
    ratios = (
        f"Peak {twice['peak_mb'] / kept['peak_mb']:.2f} times, a step {twice['seconds'] / kept['seconds']:.2f} times."
    )
    header = ["activations", "MB of them, planned", "peak, MB, planned", "peak, MB", "s a step"]
    print_table([*header], rows, ratios)


if __name__ == "__main__":
    main()
