"""Question: how many tokens does training get through in a second, and how far is that from the machine's limit?

Measured: tokens per second over whole optimizer steps: fetching the batch, forward, backward, clipping, the optimizer.
Each measurement is a process of its own; contestants take turns, and each figure is the median over the rounds.

1. Ours: the `Trainer` that the default configuration builds, step by step through its own `_train_step`.
2. Ours with use_amp=false and AdamW: what precision and optimizer change.
3. Hugging Face's GPT2LMHeadModel in the same sizes, no dropout, otherwise as its class comes, in eager float32 with
   fused AdamW; the same batches and clipping.

How far from the limit: the arithmetic of a token, times tokens per second, divided by the rate of large square matrix
products (2 n³ operations each, the best of several) that the same threads reach in the same rounds:

    model:      6 M + 12 L T C      a token
    optimizer:  4 (4 r² c + 2 r³)   a matrix of r x c (r <= c) and step, in Muon's four Newton-Schulz rounds

M counts the weights of the matrices that a token is multiplied with: those of the blocks, and the head (V x C), though
it shares its numbers with the embedding; looking an embedding up multiplies nothing. A product costs 2 operations a
weight forward, and twice that backward. Attention's two products (q kᵀ, and weights times values) cost 4 T C a token
and layer forward, 12 T C with the backward, if each query is counted against all T keys (as PaLM, 2204.02311,
appendix B, does; causality would allow half). In a Newton-Schulz round, X Xᵀ and B X cost 2 r² c each, A A costs 2 r³.
Norms, GELU, softmax and the element-wise part of the optimizers count nothing, though they take time.

Then data parallelism: 1 and 2 ranks of 1 thread each (torchrun), at the default's batch and at twice that.

    python benchmarks/train_throughput.py [--quick]

Units: tokens per second over all ranks; GFLOP/s; shares of the measured matrix rate.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _common import PROJECT, Figures, measure_in_turns, print_table, report, run_measurement  # isort: skip
from console import environment  # isort: skip, before torch is loaded
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from config import Config
from distributed import leave, process_group
from large.plan import matrix_rate, model_flops, muon_flops
from main import build_trainer
from trainer import Trainer

PLAIN = ["trainer_config.use_amp=false", "optimizer_config.name=adamw"]  # ours without bfloat16 and Muon
WARM_UP = 5  # optimizer steps before the clock starts


def hugging_face_step(trainer: Trainer, batches: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """One optimizer step of their GPT-2 in the same sizes, on the trainer's batches."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = trainer.raw_model.config
    config = GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def step() -> None:
        x, y = next(batches)  # (B, T) each
        logits = model(x).logits  # (B, T, V)
        F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure_training(name: str, text: str, steps: int, overrides: list[str]) -> Figures:
    """Train some steps and count tokens per second; under torchrun, in every rank."""
    if name != "hugging_face":  # as main.py does it
        environment.keep_freed_memory()
    with initialize_config_dir(str(PROJECT), version_base="1.3"):
        cfg = compose("gpt2_train_cfg", overrides=overrides)
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), cfg))
    with tempfile.TemporaryDirectory() as run_dir, process_group(config.trainer_config.timeout_minutes) as ranks:
        trainer = build_trainer(config, text, ranks, run_dir)
        batches = trainer._batches()
        trainer.model.train()

        def our_step() -> None:
            trainer._train_step(batches)
            trainer.state.step += 1

        step = hugging_face_step(trainer, batches) if name == "hugging_face" else our_step
        for _ in range(WARM_UP):
            step()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - begin
        tokens = trainer.config.batch_size * trainer.block_size  # in a step
        return {
            "tokens_per_second": steps * tokens / seconds,
            "model_flops": model_flops(trainer.raw_model),
            "muon_flops": muon_flops(trainer.raw_model) / tokens if trainer.optimizer_config.name == "muon" else 0.0,
        }


def measure_matrix_rate(n: int) -> Figures:
    """Operations per second of square matrix products, the best of several, in bfloat16 and float32."""
    types = (torch.bfloat16, torch.float32)
    return {str(dtype).removeprefix("torch."): matrix_rate(torch.device("cpu"), dtype, n) for dtype in types}


def compare_with_others(measure: Callable[..., Callable[[], Figures]], rounds: int, thread_counts: list[int]) -> None:
    """The table of questions 1 to 3."""
    contestants: dict[str, Callable[[], Figures]] = {}
    for threads in thread_counts:
        contestants |= {
            f"matrix rate, {threads}": measure("matrices", threads=threads),
            f"ours, default, {threads}": measure("ours", threads=threads),
            f"ours, float32, AdamW, {threads}": measure("ours", *PLAIN, threads=threads),
            f"Hugging Face, {threads}": measure("hugging_face", *PLAIN, threads=threads),
        }
    medians = measure_in_turns(contestants, rounds)
    rows: list[list[object]] = []
    for threads in thread_counts:
        rates = medians[f"matrix rate, {threads}"]
        theirs = medians[f"Hugging Face, {threads}"]["tokens_per_second"]
        for name in ("ours, default", "ours, float32, AdamW", "Hugging Face"):
            figures = medians[f"{name}, {threads}"]
            speed, model, muon = (figures[key] for key in ("tokens_per_second", "model_flops", "muon_flops"))
            rate = rates["bfloat16" if name == "ours, default" else "float32"]
            rows.append(
                [
                    *(threads, name, f"{speed:,.0f}", speed / theirs, model / 1e6, muon / 1e6),
                    *(f"{speed * model / 1e9:.0f}", f"{speed * model / rate:.0%}"),
                    f"{speed * (model + muon) / rate:.0%}",
                ]
            )
    rates_text = "; ".join(
        f"{threads} threads: {medians[f'matrix rate, {threads}']['bfloat16'] / 1e9:.0f} GFLOP/s in bfloat16, "
        f"{medians[f'matrix rate, {threads}']['float32'] / 1e9:.0f} in float32"
        for threads in thread_counts
    )
    print_table(
        [
            *("threads", "contestant", "tokens/s", "times Hugging Face", "model, MFLOP a token"),
            *("Newton-Schulz, MFLOP a token", "model, GFLOP/s", "share of the matrix rate"),
            "share with Newton-Schulz",
        ],
        rows,
        f"Matrix rate (that of bfloat16 for the default, of float32 for the others): {rates_text}.",
    )


def compare_ranks(measure: Callable[..., Callable[[], Figures]], rounds: int, batch_sizes: list[int]) -> None:
    """The table of data parallelism."""
    contestants = {
        f"{ranks} ranks, batch {B}": measure("ours", f"trainer_config.batch_size={B}", threads=1, ranks=ranks)
        for B in batch_sizes
        for ranks in (1, 2)
    }
    medians = measure_in_turns(contestants, rounds)
    first = medians[f"1 ranks, batch {batch_sizes[0]}"]["tokens_per_second"]
    rows: list[list[object]] = []
    for B in batch_sizes:
        one, two = (medians[f"{ranks} ranks, batch {B}"]["tokens_per_second"] for ranks in (1, 2))
        rows.append([B, f"{one:,.0f}", f"{two:,.0f}", two / one, two / first])
    print_table(
        [
            *("windows in a step, all ranks", "1 rank, tokens/s", "2 ranks, tokens/s"),
            *("2 ranks : 1 rank", f"2 ranks : 1 rank at batch {batch_sizes[0]}"),
        ],
        rows,
        "1 thread each rank.",
    )


def main() -> None:
    """Measure and print the tables; with --measure, be one of the processes that do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, one round, 1 thread")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps in a measurement")
    parser.add_argument("--text", type=Path, default=PROJECT / "data" / "input.txt")
    parser.add_argument("--only", choices=["others", "ranks"], help="one of the two tables")
    parser.add_argument("--measure", choices=["ours", "hugging_face", "matrices"], help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="changes of the configuration, of every contestant")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, 5
    if arguments.measure == "matrices":
        report(measure_matrix_rate(n=1024 if arguments.quick else 2048))
        return
    if arguments.measure:
        report(measure_training(arguments.measure, str(arguments.text), arguments.steps, arguments.overrides))
        leave(0)

    def measure(name: str, *overrides: str, threads: int, ranks: int = 1) -> Callable[[], Figures]:
        options = ["--measure", name, "--steps", arguments.steps, "--text", arguments.text.resolve()]
        options += ["--quick"] * arguments.quick
        return functools.partial(
            run_measurement, __file__, *options, *arguments.overrides, *overrides, threads=threads, ranks=ranks
        )

    if arguments.only != "ranks":
        compare_with_others(measure, arguments.rounds, [1] if arguments.quick else [1, 2])
        print()
    if arguments.only != "others":
        compare_ranks(measure, arguments.rounds, batch_sizes=[16, 32])


if __name__ == "__main__":
    main()
