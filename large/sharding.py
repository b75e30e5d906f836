"""Models that one device can't hold, shared out among the ranks (`trainer_config.strategy=fsdp`).

Under `ddp`, every rank holds the whole model, its gradients and the optimizer's state. Under `fsdp` ("fully sharded
data parallel", FSDP2 in torch), a rank holds a *shard* of every tensor: some of its rows. Before a block computes, the
ranks gather its weights; afterwards each forgets those that aren't its own. After the backward pass of a block, the
gradients are summed, and each rank keeps its shard of the sum. Shards are DTensors, which know what they are a part of.
The results agree with those of `ddp` up to rounding, and the snapshots have the same form.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT


def shard(model: GPT, dtype: torch.dtype, is_compiled: bool, device: torch.device) -> nn.Module:
    """`distributed.distribute` for the strategy "fsdp". The weights are drawn here: the whole may fit on no rank."""
    check_shardable(dtype, device)
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
    model.to_empty(device=device)
    draw_weights(model)
    return model


@torch.no_grad()
def draw_weights(model: GPT) -> None:
    """Give a sharded model the weights that `GPT(config)` would draw, to the bit, with one whole tensor in memory.

    Each rank draws all tensors, on the CPU and in the constructor's order, and keeps its own rows. The first pass, with
    a twin that has shapes alone, finds out what there is to draw.
    """
    with torch.device("meta"), Writes() as writes:
        twin = GPT(model.config)
    names = {id(p): name for name, p in twin.named_parameters()}
    shards: dict[str, Any] = dict(model.named_parameters())
    for write, tensor, arguments in writes.calls:
        values = write(torch.empty(tensor.shape), *arguments)  # not kept perhaps, but it moves the generator on
        if id(tensor) in names:
            p = shards[names[id(tensor)]]
            p.copy_(distribute_tensor(values.to(p.device), p.device_mesh, p.placements, src_data_rank=None))


class Writes(TorchDispatchMode):
    """Within it, remembers the calls that write into a tensor, such as normal_: (function, tensor, other arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Tensor, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            self.calls.append((func, args[0], args[1:]))
        return func(*args, **(kwargs or {}))


class WideLayerNorm(nn.LayerNorm):
    """A norm in its input's float32, although its weights were gathered in bfloat16; CPUs refuse the mix."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def check_shardable(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError if a model can't be sharded."""
    if dtype == torch.float16:
        raise ValueError(
            "trainer_config.strategy=fsdp doesn't work with float16: each rank would see overflows in its own shards "
            "only, and so the ranks would leave out different steps; use amp_dtype=bfloat16 or float32"
        )
    if device.type == "mps":
        raise ValueError("trainer_config.strategy=fsdp doesn't work on device mps; use trainer_config.strategy=ddp")
