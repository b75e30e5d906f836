"""Who am I among the ranks: set-up, tear-down, and the few collectives that the trainer needs.

Fourth module of the reading order; after it come `snapshot.py` and `trainer.py`. It alone reads the environment that
a launcher sets. There is one path: a run without a launcher is a world of one rank.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run.

    Args:
        rank: 0 ... world_size - 1 over all nodes; rank 0 alone writes, logs and reports.
        local_rank: the same, counted on this node; local rank 0 does what must be done once for each node.
        world_size: how many processes train together.
        device: where this process computes.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that writes."""
        return self.rank == 0


def choose_device(local_rank: int) -> torch.device:
    """This rank's own accelerator (CUDA, XPU, MPS, ...), or the CPU where there is none.

    Raises:
        ValueError: the node has accelerators, but fewer than ranks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no device of its own: this node has {count} of type {accelerator.type}; "
            f"start at most {count} processes on it, for example with --nproc_per_node=gpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


@contextmanager
def process_group(timeout_minutes: float) -> Iterator[Ranks]:
    """Join the other ranks for the length of a with-block.

    Args:
        timeout_minutes: after this long in one collective the other ranks count as lost, and the run fails.

    Raises:
        ValueError: there are not enough devices for the ranks.
    """
    # A launcher's values always win; these are for a start without one. Port 0: any that is free.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        for key, value in alone.items():
            os.environ.setdefault(key, value)
    device = choose_device(int(os.environ["LOCAL_RANK"]))

    # Numbers on the CPU (losses, decisions) travel by gloo, gradients by the device's own backend. MPS has none: one
    # Mac is a world of one rank.
    backend = "cpu:gloo"
    if device.type not in ("cpu", "mps"):
        backend += f",{device.type}:{dist.get_default_backend_for_device(device)}"

    # After a restart torchrun's store still holds the addresses of the workers that died, and half of all restarts
    # fail with "connection refused". A prefix for each attempt keeps them apart.
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=timeout_minutes),
        device_id=None if device.type in ("cpu", "mps") else device,
    )
    yield Ranks(rank, int(os.environ["LOCAL_RANK"]), world_size, device)
    dist.destroy_process_group()  # not after an error: it may wait for ranks that are waiting for this one


def all_reduce_sum(values: list[float]) -> list[float]:
    """Each value's sum over all ranks, in float64, on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def gather_on_main(values: list[float], ranks: Ranks) -> list[list[float]]:
    """The values of every rank, in order of ranks, on rank 0; an empty list on the others."""
    tensor = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(tensor) for _ in range(ranks.world_size)] if ranks.is_main else None
    dist.gather(tensor, gathered, dst=0)
    return [t.tolist() for t in gathered or []]


def all_gather(value: Any) -> list[Any]:
    """The values of all ranks, in order of ranks, on every rank; any objects that pickle knows."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_from_main(value: Any) -> Any:
    """Rank 0's value, on every rank; any object that pickle knows."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
