"""What does fault tolerance cost? The agreement of the ranks in every step, the stall of a snapshot; and an evaluation.

The default model is trained for some steps, with and without the agreement on signals, orphans and finite numbers, in
turns; then it is saved again and again, with and without fsync, and evaluated. Milliseconds, medians.
`torchrun --standalone --nproc_per_node=2 benchmarks/fault_tolerance.py` measures it between ranks.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _common
from _common import PROJECT, print_table
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from config import Config
from console.reporter import Reporter
from distributed import process_group
from main import build_trainer
from trainer import Trainer


def milliseconds(function: object, times: int) -> float:
    """Median duration of so many calls."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        function()  # type: ignore[operator]
        durations.append((time.perf_counter() - began) * 1e3)
    return statistics.median(durations)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default=str(PROJECT / "data" / "input.txt"))
    parser.add_argument("--quick", action="store_true", help="a smoke test of seconds")
    arguments = parser.parse_args()
    steps, rounds = (3, 1) if arguments.quick else (20, 5)
    with tempfile.TemporaryDirectory() as run_dir, process_group(10) as ranks, contextlib.ExitStack() as stack:
        stack.enter_context(initialize_config_dir(str(PROJECT), version_base="1.3"))
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), compose("gpt2_train_cfg")))
        trainer: Trainer = build_trainer(config, arguments.text, ranks, run_dir)
        trainer.reporter = Reporter(run_dir, is_main=False)
        batches, agree = trainer._batches(), trainer._agree_to_step

        def step() -> None:
            trainer._train_step(batches)
            trainer.state.step += 1

        milliseconds(step, steps)
        durations: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(rounds):
            for name, check in (("with", agree), ("without", lambda loss, norm: None)):
                trainer._agree_to_step = check  # type: ignore[method-assign]
                durations[name].append(milliseconds(step, steps))
        loss, norm = trainer._train_step(batches)
        alone = milliseconds(lambda: agree(loss, norm), 200)

        url = str(Path(run_dir) / "gpt_snapshot.pt")
        saving = milliseconds(lambda: trainer._save(), rounds * 4)
        fsync = os.fsync
        os.fsync = lambda descriptor: None  # type: ignore[assignment]
        without_fsync = milliseconds(lambda: trainer._save(), rounds * 4)
        os.fsync = fsync
        evaluation = milliseconds(trainer.evaluate, rounds)
        passage = milliseconds(lambda: trainer.evaluate_on(trainer._train_passage()), rounds)
        line = milliseconds(lambda: trainer.sample(64), rounds)
        if ranks.is_main:
            size = os.path.getsize(url) / 1e6
            with_, without = (statistics.median(durations[name]) for name in ("with", "without"))
            rows: list[list[object]] = [
                ["a training step with the agreement", f"{with_:.1f}"],
                ["without", f"{without:.1f}"],
                ["the agreement alone", f"{alone:.3f} ({100 * alone / without:.2f} % of a step)"],
                [f"a snapshot ({size:.1f} MB)", f"{saving:.1f}"],
                ["the same without fsync", f"{without_fsync:.1f}"],
                ["an evaluation", f"{evaluation:.1f}"],
                ["the loss on the passage of the training text", f"{passage:.1f}"],
                ["a sample of 64 characters", f"{line:.1f}"],
            ]
            print_table([f"{ranks.world_size} ranks", "ms"], rows)


if __name__ == "__main__":
    assert _common  # puts the project's modules on the path
    main()
    from distributed import leave

    leave(0)
