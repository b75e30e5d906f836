"""What a run will need of memory and time, before it begins.

`python main.py trainer_config.plan=true` prints it. For the memory, a training step is taken with fake tensors, which
have a type, a shape and a device, but no memory: torch works out every result's shape and computes nothing. Where the
model fits, a few real steps tell the time.
"""

import dataclasses
import itertools
import math
import os
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from char_dataset import CharDataset, WindowSampler, evaluation_batches
from config import MODEL_TYPES, Config, TrainerConfig, ranks_in_words
from distributed import Ranks, all_gather, broadcast_from_main, choose_dtype
from large.memory import recompute_in_backward, smaller
from large.sharding import check_shardable
from model import GPT, GPTConfig, sum_losses
from optimizer import OptimizerConfig, create_optimizer, split_parameters


@dataclass
class Needs:
    """What a model needs on each rank: bytes, unless something else is said."""

    parameters: int  # trainable numbers in all
    micro_batch: int  # windows in one forward pass
    weights: int
    gradients: int
    optimizer: int
    activations: int  # alive at the end of a forward pass, the logits included
    peak: int  # the most that is alive at once in a step
    operations: float  # floating-point operations of the matrix products in an optimizer step


class LiveBytes(TorchDispatchMode):
    """Within it, counts the bytes of tensors that were made and are still alive.

    Attributes:
        now: bytes at this moment.
        peak: the most there ever were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()  # pieces of memory; several tensors can share one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._known:
                storage = tensor.untyped_storage()
                self._known[storage] = True
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def work_out(
    sizes: GPTConfig, config: TrainerConfig, optimizer_config: OptimizerConfig, ranks: Ranks, micro_batch: int
) -> Needs:
    """What training needs with so many windows in a forward pass: two steps with fake tensors."""
    dtype, live = choose_dtype(ranks.device, config.use_amp, config.amp_dtype), LiveBytes()
    accumulation_steps = config.batch_size // (micro_batch * ranks.world_size)
    with FakeTensorMode(), torch.device(ranks.device), live:
        model = GPT(sizes)
        weights = live.now
        if config.activation_checkpointing:
            recompute_in_backward(model)
        optimizer = create_optimizer(model, optimizer_config, dtype)
        tokens = torch.zeros(micro_batch, sizes.block_size, dtype=torch.int64)  # (B, T)
        activations = state = 0
        for _ in range(2):  # the first step makes the optimizer's state
            for _ in range(min(2, accumulation_steps)):  # in the second pass, there are gradients already
                before = live.now
                with torch.autocast(ranks.device.type, dtype, enabled=dtype != torch.float32):
                    logits, loss = model(tokens, tokens)
                activations = max(activations, live.now - before)
                loss.backward()
            del loss  # but not the logits, which the trainer holds as long
            clip_grad_norm_(model.parameters(), 1.0)
            before = live.now
            optimizer.step()
            state = max(state, live.now - before)
            optimizer.zero_grad(set_to_none=ranks.world_size == 1)
        del logits
    tokens_per_rank = config.batch_size * sizes.block_size / ranks.world_size
    operations = model_flops(model, config.activation_checkpointing) * tokens_per_rank
    if optimizer_config.name == "muon":
        operations += muon_flops(model) / ranks.world_size  # shared out
    needs = Needs(model.num_parameters(), micro_batch, weights, weights, state, activations, live.peak, operations)
    if config.strategy == "fsdp":
        shard_evenly(needs, model, ranks.world_size, dtype, accumulation_steps > 1)
    return needs


def shard_evenly(needs: Needs, model: GPT, world_size: int, dtype: torch.dtype, accumulates: bool) -> None:
    """Take from a rank's needs what the others hold.

    Two units (blocks, or the rest of the model) are in each rank's memory in whole while they are in use, and of one
    the gradients, in the type of its weights and in float32 to be added up. Gradients that several micro-batches add up
    are whole on every rank until the last of them.
    """
    before = needs.weights + needs.gradients + needs.optimizer
    needs.weights, needs.optimizer = math.ceil(needs.weights / world_size), math.ceil(needs.optimizer / world_size)
    if not accumulates:
        needs.gradients = math.ceil(needs.gradients / world_size)
    block = sum(p.numel() for p in model.h[0].parameters())
    width = 4 if dtype == torch.float32 else 2  # bytes of a number; the rest of the model is gathered in float32
    units = [(block * width, block * (width + 4)), ((needs.parameters - block * len(model.h)) * 4,) * 2]
    in_use = sum(weights for weights, _ in units) + max(gradients for _, gradients in units)
    needs.peak += needs.weights + needs.gradients + needs.optimizer + in_use - before


def model_flops(model: GPT, recomputes: bool = False) -> float:
    """Floating-point operations per token in the matrix products of forward and backward.

    A product of a matrix with M numbers costs 2 M per token forward and 4 M backward, the two products of attention
    4 T C and 8 T C. Blocks that are computed twice go forward once more.
    """
    c = model.config
    matrices = sum(p.numel() for p in split_parameters(model)[0])
    blocks = 2.0 * matrices + 4.0 * c.n_layer * c.block_size * c.n_embd
    return blocks * (4 if recomputes else 3) + 6.0 * c.vocab_size * c.n_embd


def muon_flops(model: GPT, ns_steps: int = 4) -> float:
    """Floating-point operations per step of Muon's Newton-Schulz products.

    A round takes X Xᵀ and B X with 2 r² c each, and A A with 2 r³, for a matrix of r x c with r <= c.
    """
    operations = 0.0
    for p in split_parameters(model)[0]:
        pieces = 3 if p.size(0) == 3 * p.size(1) else 1  # queries, keys and values are taken apart
        r, c = sorted((p.size(0) // pieces, p.size(1)))
        operations += ns_steps * pieces * (4 * r * r * c + 2 * r**3)
    return operations


def matrix_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Floating-point operations per second in products of n x n matrices: the best of several."""
    matrix, best = torch.randn(n, n, device=device).to(dtype), math.inf
    for _ in range(5):
        began = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2.0 * n**3 / best


def memory_found(device: torch.device) -> int:
    """Bytes for each rank: what is free on its GPU; elsewhere the machine's memory, shared by its ranks; or 0."""
    ranks_here = all_gather(platform.node()).count(platform.node())
    if device.type in ("cuda", "xpu"):
        return torch.accelerator.get_memory_info(device)[0]
    if not hasattr(os, "sysconf"):  # Windows
        return 0
    found, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():  # what a container or a scheduler allows, or "max"
        found = min(found, int(limit.read_text()))
    return found // ranks_here


def work_out_what_fits(sizes: GPTConfig, config: Config, ranks: Ranks, memory: int) -> Needs:
    """`work_out` with the micro-batch that was asked for; for "auto" with the largest that fits, or with one window."""
    share = size = config.trainer_config.sequences_per_forward(ranks.world_size)
    while True:
        needs = work_out(sizes, config.trainer_config, config.optimizer_config, ranks, size)
        is_asked_for = config.trainer_config.micro_batch_size != "auto"
        if is_asked_for or size == 1 or not memory or needs.peak <= memory:
            return needs
        size = smaller(size, share)


def largest_that_fits(sizes: GPTConfig, config: Config, ranks: Ranks, memory: int) -> str:
    """The largest of the named models that fits, with its needs, in words."""
    by_size = sorted(MODEL_TYPES.items(), key=lambda item: item[1][0] * item[1][2] ** 2, reverse=True)
    shards = ranks.world_size if config.trainer_config.strategy == "fsdp" else 1
    for name, (n_layer, n_head, n_embd) in by_size:
        if 3 * 4 * 12 * n_layer * n_embd**2 / shards > memory:  # weights, gradients and an average of theirs, at least
            continue
        named = dataclasses.replace(sizes, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        needs = work_out_what_fits(named, config, ranks, memory)
        if needs.peak <= memory:
            return f"{name} ({needs.parameters / 1e6:,.1f} M parameters, peak {in_words(needs.peak)})"
    return "none"


def plan(config: Config, vocab_size: int, train_codes: np.ndarray, ranks: Ranks) -> tuple[list[str], bool]:
    """What a run will need, in lines, and whether its time is to be found by real steps. All ranks call it.

    Real steps are for a model that fits, and for steps of a few seconds. On a CPU it must fit twice: other programs use
    the memory too, and a process that finds none left is killed. The other runs get a bound, in the last line.
    """
    settings, block_size = config.trainer_config, config.data_config.block_size
    sizes = config.model_config(vocab_size)
    dtype = choose_dtype(ranks.device, settings.use_amp, settings.amp_dtype)
    memory = memory_found(ranks.device)
    if settings.strategy == "fsdp":
        check_shardable(dtype, ranks.device)
    rate = matrix_rate(ranks.device, dtype, 1024 if ranks.device.type == "cpu" else 8192)
    slowest = min(all_gather(rate))
    if not ranks.is_main:
        return [], broadcast_from_main(None)
    sampler = WindowSampler(
        CharDataset(train_codes, block_size), settings.batch_size, ranks.world_size, 0, settings.seed
    )
    steps = settings.steps_in_all(sampler.steps_per_epoch)
    needs = work_out_what_fits(sizes, config, ranks, memory)
    lines = [
        f"model: {needs.parameters:,} parameters ({sizes.n_layer} layers, {sizes.n_head} heads, width {sizes.n_embd})",
        f"on each rank ({ranks_in_words(ranks.world_size)}, {settings.strategy}), at {needs.micro_batch} windows "
        f"of {block_size} characters per forward pass:",
        f"    weights          {in_words(needs.weights):>10}",
        f"    gradients        {in_words(needs.gradients):>10}",
        f"    optimizer state  {in_words(needs.optimizer):>10}",
        f"    activations      {in_words(needs.activations):>10}  at the end of a forward pass",
        f"    peak             {in_words(needs.peak):>10}  the most at once in a step; torch and the text need more",
    ]
    if memory:
        largest = largest_that_fits(sizes, config, ranks, memory)
        lines += [f"memory found for each rank: {in_words(memory)} ({ranks.device})"]
        lines += [f"largest named model that fits there, with the other keys as they are: {largest}"]
    lines += [f"work of each rank: {needs.operations / 1e9:,.1f} GFLOP per step in matrix products, {steps:,} steps"]
    bound, room = needs.operations / slowest, memory / 2 if ranks.device.type == "cpu" else memory
    is_timed = needs.peak <= room and bound <= SECONDS_OF_A_STEP
    if not is_timed:
        lines += [
            f"time: at least {duration(steps * bound)}, if all of it ran at the {slowest / 1e9:,.0f} GFLOP/s that "
            f"large products of {str(dtype).removeprefix('torch.')} reach here; runs have taken 4 to 14 times as long"
        ]
    return lines, broadcast_from_main(is_timed)


SECONDS_OF_A_STEP = 2.0  # by the bound; a real step takes several times as long


def time_steps(trainer: Any) -> float:
    """Seconds of an optimizer step: the median of some real ones, which all ranks take together."""
    batches, seconds = trainer._batches(), list[float]()
    trainer.model.train()
    while broadcast_from_main(len(seconds) < 4 or (len(seconds) < 20 and sum(seconds) < 5.0)):
        if trainer.state.stop_signal:  # all ranks have agreed
            sys.exit(128 + trainer.state.stop_signal)
        seconds.append(seconds_of(lambda: trainer._train_step(batches), trainer.ranks.device))
        trainer.state.step += 1
    return statistics.median(seconds[2:])  # the first ones allocate, and compile perhaps


def time_evaluation(trainer: Any) -> float:
    """Seconds of an evaluation with its sample, by the first batches of one."""
    ranks, T, B = trainer.ranks, trainer.block_size, trainer.micro_batch_size
    texts = trainer.text.eval_codes, trainer._train_passage()
    batches = [*itertools.islice(evaluation_batches(texts[0], T, B, ranks.rank, ranks.world_size), 3)]
    for _ in range(2):  # the first time, it allocates
        with trainer.autocast:
            seconds = seconds_of(lambda: sum_losses(trainer.raw_model, batches), ranks.device)
    in_all = sum(math.ceil((len(codes) - 1) / (T * B * ranks.world_size)) for codes in texts)
    sample = seconds_of(lambda: trainer.sample(min(trainer.config.sample_tokens, 64)), ranks.device)
    return seconds * in_all / len(batches) + sample


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """How long a call takes, until its results are there."""
    began = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began


def time_line(trainer: Any, step: float, evaluation: float) -> str:
    """The time of a whole run, in words, where a step and an evaluation take so many seconds."""
    c, steps = trainer.config, trainer.state.total_steps
    evaluations = math.ceil(steps / c.eval_every_steps) + (c.init_from is not None)  # the base model's comes first
    return (
        f"time: about {duration(steps * step + evaluations * evaluation)} ({step:.2g} s per step, "
        f"{evaluation:.2g} s per evaluation, measured just now), without start and snapshots"
    )


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    units = [(90.0, 1.0, "s"), (5400.0, 60.0, "minutes"), (129600.0, 3600.0, "hours"), (math.inf, 86400.0, "days")]
    size, unit = next((size, unit) for limit, size, unit in units if seconds < limit)
    return f"{seconds / size:,.{0 if size <= 60 else 1}f} {unit}"


def in_words(size: int) -> str:
    """Bytes in MB or GB."""
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"
