"""Armour: models that one device can't hold, shared out among the ranks (`trainer_config.strategy=fsdp`).

A first reader can skip this file. Read it after `distributed.py`; `snapshot.py` comes next.

Under `ddp`, every rank holds the whole model, its gradients and the optimizer's state. Under `fsdp` ("fully sharded
data parallel", FSDP2 in torch), a rank holds a *shard* of every tensor: some of its rows. Before a block computes, the
ranks gather its weights; afterwards each forgets those that aren't its own. After the backward pass of a block, the
gradients are summed, and each rank keeps its shard of the sum. Shards are DTensors, which know what they are a part of.
The results agree with those of `ddp` up to rounding, and the snapshots have the same form.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed import is_shard, whole
from model import GPT


def distribute(model: GPT, strategy: str, dtype: torch.dtype, is_compiled: bool, device: torch.device) -> nn.Module:
    """Put a model, alike on all ranks, on their devices, so that its gradients come out as those of the global batch.

    Args:
        model: a GPT, on the CPU. It is changed, and goes on to be what is saved and evaluated.
        strategy: "ddp" or "fsdp".
        dtype: of matrix products; the weights themselves stay float32.
        is_compiled: whether to compile it.
        device: this rank's.

    Returns:
        The module to call in training.

    Raises:
        ValueError: this strategy can't be had with this type or device.
    """
    if strategy == "fsdp":
        check_shardable(dtype, device)
        return _shard(model, dtype, is_compiled, device)
    model.to(device)
    if is_compiled:
        model.compile()
    # One rank alone has nobody to share with.
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.get_world_size() > 1 else model


def _shard(model: GPT, dtype: torch.dtype, is_compiled: bool, device: torch.device) -> nn.Module:
    # A second of imports that other runs save.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Gathered in bfloat16, which is half the bytes; gradients are added up in float32. What is left over for the root,
    # the embeddings and the last norm, stays float32: the residual stream begins there, and is float32 under `ddp` too.
    narrow = dtype if dtype == torch.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.h:
        for module in block.modules():
            if isinstance(module, nn.LayerNorm):
                module.__class__ = WideLayerNorm
        if is_compiled:
            block.compile()  # block by block: the gathering in between is no part of a graph
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # By default, the root's weights stay gathered after a forward pass, and an evaluation would leave them so.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


class WideLayerNorm(nn.LayerNorm):
    """A norm in its input's float32, although its weights were gathered in bfloat16; CPUs refuse the mix."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def is_sharded(model: Any) -> bool:
    """Whether a model is shared out among the ranks. (Asked so that torch's module for it needs no import.)"""
    return hasattr(model, "set_requires_gradient_sync")


def check_shardable(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError where a model can't be sharded."""
    if dtype == torch.float16:
        raise ValueError(
            "trainer_config.strategy=fsdp can't be had with float16: each rank would see overflows in its own shards "
            "alone, and leave out other steps than the rest; use amp_dtype=bfloat16 or float32"
        )
    if device.type == "mps":
        raise ValueError("trainer_config.strategy=fsdp can't be had on device mps; use trainer_config.strategy=ddp")


@contextmanager
def gradients_stay_local(model: Any, is_last: bool) -> Iterator[None]:
    """Around forward and backward: the ranks don't add up their gradients, except at the last micro-batch of a step.

    Args:
        model: what `distribute` has returned.
        is_last: whether this is the last micro-batch.
    """
    no_sync: AbstractContextManager[Any] = nullcontext()
    if is_sharded(model):
        model.set_requires_gradient_sync(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        no_sync = model.no_sync()
    with no_sync:
        yield


def local(tensor: Any) -> Tensor:
    """This rank's own part of a tensor."""
    return tensor.to_local() if is_shard(tensor) else tensor


def norm(tensors: Iterable[Tensor]) -> float:
    """Euclidean norm of all numbers in some tensors together."""
    return float(whole(torch.nn.utils.get_total_norm([tensor.detach() for tensor in tensors])))


# ------------------------------------------------------------------ snapshots: whole tensors, whatever the strategy


def gather_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries of whole tensors for rank 0; the other ranks help to gather them, and get nothing in them.

    One tensor after the other is gathered, in rank 0's main memory; what two names share, once.
    """
    gathered: dict[int, Tensor | None] = {}  # by identity

    def gather(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: gather(part) for name, part in value.items()}
        if id(value) not in gathered:
            tensor = whole(value.detach())
            tensor = tensor.cpu() if is_shard(value) else tensor
            gathered[id(value)] = tensor if dist.get_rank() == 0 else None
        return gathered[id(value)]

    return gather(values)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights by all of their names; the head and the embedding are one tensor with two."""
    return dict(model.named_parameters(remove_duplicate=False))


def plain_copy(model: GPT) -> GPT | None:
    """A model that works without the other ranks, to write text with: the model itself where it isn't sharded.

    A sharded one is gathered in rank 0's main memory, where the largest model fits; the other ranks get None.
    """
    if not is_sharded(model):
        return model
    weights = gather_tensors(named_weights(model))
    if dist.get_rank() != 0:
        return None
    with torch.device("meta"):
        copy = GPT(model.config)
    copy.load_state_dict(weights, assign=True)  # the head, too: it has the embedding's name as well
    return copy
