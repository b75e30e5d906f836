"""Models and batches that don't fit into memory.

What a step needs grows with its micro-batch, because each layer keeps its inputs until the backward pass has used them.
This module keeps fewer of them, or finds a micro-batch that fits. `plan.py` works out the memory beforehand.
"""

import dataclasses
import gc
import logging

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from config import TrainerConfig
from console.errors import one_line
from distributed import all_reduce_max, local
from model import GPT, Block

log = logging.getLogger(__name__)


def recompute_in_backward(model: GPT) -> None:
    """Let every block keep its input only, and compute the rest again in the backward pass.

    That is activation checkpointing (Chen et al. 2016, arXiv:1604.06174). Dropout draws the same mask both times, so
    the gradients are the same to the bit. Names of modules and parameters stay as they are.
    """
    for block in model.h:
        # A class: with a `forward` of its own in each block, torch.compile would compile each.
        block.__class__ = TwiceComputedBlock


class TwiceComputedBlock(Block):
    """A block that keeps nothing but its input for the backward pass."""

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """(B, T, C) -> (B, T, C), as in `Block`."""
        if not torch.is_grad_enabled():  # evaluation and generation keep nothing anyway
            return super().forward(x, cache, start)
        output: Tensor = checkpoint(super().forward, x, cache, start, use_reentrant=False)
        return output


def largest_micro_batch(share: int, model: GPT, optimizer: Optimizer, config: TrainerConfig, dtype: torch.dtype) -> int:
    """How many windows fit into a forward pass on every rank (`trainer_config.micro_batch_size=auto`).

    All ranks try the same number at the same time, since they may share a memory. Where one of them runs out of it,
    all go on to the next divisor of the rank's share that is at most half as large.

    Args:
        share: a rank's share of an optimizer step, in windows.
        model: the model of the run, on its device, in whole or in shards.
        optimizer: the run's own, before its first step.
        config: what the user chose.
        dtype: what matrix products are computed in.

    Raises:
        ValueError: on some rank not even one window fits; all ranks raise it.
    """
    size, recomputes = share, config.activation_checkpointing
    while size and all_reduce_max([not fits(size, model, optimizer, dtype, recomputes, accumulates=size < share)])[0]:
        size = smaller(size, share)
    device = next(model.parameters()).device
    if not size:
        raise ValueError(
            f"trainer_config.micro_batch_size=auto: a step of one window of {model.config.block_size} characters does "
            f"not fit into the memory of every rank (this one: {device}); lower data_config.block_size or the sizes in "
            "gpt_config, or set trainer_config.activation_checkpointing=true"
        )
    log.info("trainer_config.micro_batch_size=auto: %d of a rank's %d windows fit into memory at once", size, share)
    return size


def smaller(size: int, share: int) -> int:
    """The next number of windows to try: a divisor of a rank's share that is at most half of `size`; 0 after 1."""
    return max((n for n in range(1, size // 2 + 1) if share % n == 0), default=0)


def fits(
    size: int, model: GPT, optimizer: Optimizer, dtype: torch.dtype, recomputes: bool, accumulates: bool = False
) -> bool:
    """Whether this rank's memory is enough for a step of so many windows in a forward pass."""
    try:
        try_step(size, model, optimizer, dtype, recomputes, accumulates)
        is_enough = True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        is_enough = False
    # Not while the error is handled, which holds on to the tensors of the trial.
    gc.collect()
    if next(model.parameters()).device.type != "cpu":
        torch.accelerator.empty_cache()
    return is_enough


def try_step(
    size: int, model: GPT, optimizer: Optimizer, dtype: torch.dtype, recomputes: bool, accumulates: bool = False
) -> None:
    """Forward and backward of a stand-in, while placeholders take the memory that gradients and averages will need.

    The stand-in goes through one block again and again: activations as large as the model's, with the weights and
    gradients of a single block. The model itself would communicate, and where one rank ran out of memory in the middle
    of that, the others would wait for it.
    """
    device = next(model.parameters()).device
    room = room_for_later(model, optimizer, dtype, accumulates)
    with torch.device(device):
        stand_in = GPT(dataclasses.replace(model.config, n_layer=1))
        tokens = torch.zeros(size, model.config.block_size, dtype=torch.int64)  # (B, T)
    if recomputes:
        recompute_in_backward(stand_in)
    stand_in.h = nn.ModuleList([*stand_in.h] * model.config.n_layer)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        _, loss = stand_in(tokens, tokens)
    loss.backward()
    del room  # up to here it was taken


def room_for_later(model: GPT, optimizer: Optimizer, dtype: torch.dtype, accumulates: bool = False) -> list[Tensor]:
    """Tensors as large as what a step holds besides weights and activations, on this rank: its shards, if sharded.

    Only gradients that several micro-batches add up are whole on every rank until the last of them.
    """
    room = []
    for group in optimizer.param_groups:
        averages = 2 if "betas" in group else 1  # AdamW's or Muon's
        for p in group["params"]:
            own = local(p.detach())
            room += [torch.empty_like(own) for _ in range(averages)]
            room.append(own.new_empty(p.shape) if accumulates else torch.empty_like(own))
    if dtype != torch.float32:  # autocast's narrow copies of the matrices live until the backward pass
        room += [torch.empty_like(local(p.detach()), dtype=dtype) for p in model.h.parameters() if p.ndim == 2]
    return room


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted; on CPUs torch has no type of its own for that."""
    words = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in words)
    )


def out_of_memory(error: BaseException) -> str:
    """The same error in words that say what to do."""
    return (
        "out of memory: set trainer_config.micro_batch_size=auto, which halves it until it fits, or a smaller number; "
        "trainer_config.activation_checkpointing=true needs less memory for each window, trainer_config.strategy=fsdp "
        "shares the model out among several ranks, and trainer_config.plan=true says how much is needed "
        f"({one_line(error)})"
    )
