"""Several processes as one training: who am I among the ranks, DDP, and the few collectives that the trainer needs.

Read it after `trainer.py`; `snapshot.py` comes next. A rank is a process. This module alone reads the environment that
a launcher sets. There is one path: without a launcher, a run is a group of one rank.
"""

import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from console import environment
from console.errors import one_line


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run."""

    rank: int  # 0 ... world_size - 1 over all nodes; rank 0 alone writes, logs and reports
    local_rank: int  # the same, counted on this node; local rank 0 does what must be done once for each node
    world_size: int  # how many processes train together
    device: torch.device  # where this process computes
    launch: str = ""  # tells one start of the program, with its restarts by the launcher, from every other
    is_restart: bool = False  # whether a launcher has started this launch again after a failure

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that writes."""
        return self.rank == 0


@contextmanager
def process_group(timeout_minutes: float, device_wish: str = "auto", is_sharded: bool = False) -> Iterator[Ranks]:
    """Join the other ranks for the length of a with-block.

    Args:
        timeout_minutes: after this long in one collective the other ranks count as lost, and the run fails.
        device_wish: "auto", or "cpu" although there are accelerators.
        is_sharded: whether the model will be: even one rank then sends tensors, to itself.

    Raises:
        ValueError: there are not enough devices for the ranks.
    """
    # In a sweep, a failed run leaves its group open.
    if dist.is_initialized():
        dist.destroy_process_group()
    settle_environment()
    leave_with_launcher()
    local_rank, restarts = int(os.environ["LOCAL_RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    device = choose_device(local_rank, device_wish)
    timeout = timedelta(minutes=timeout_minutes)
    store, rank, world_size, launch = meet_the_others(timeout, restarts)
    # Numbers on the CPU (losses, decisions) travel by gloo, gradients by the device's own backend. One rank alone has
    # no gradients to share; nor has a Mac, whose GPU serves one process only.
    shares_gradients = (world_size > 1 or is_sharded) and device.type not in ("cpu", "mps")
    backend, bound_device = "gloo", None
    if shares_gradients:
        backend, bound_device = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}", device
    dist.init_process_group(
        backend, timeout=timeout, world_size=world_size, rank=rank, store=store, device_id=bound_device
    )
    _kept_alive[:] = [dist.group.WORLD]
    # torchrun's agents count the restarts of their own node only.
    yield Ranks(rank, local_rank, world_size, device, launch, is_restart=all_reduce_max([restarts])[0] > 0)
    dist.destroy_process_group()  # not after an error: it may wait for ranks that are waiting for this one


def choose_device(local_rank: int, wish: str = "auto") -> torch.device:
    """This rank's own accelerator (CUDA, XPU, MPS, ...); the CPU where there is none, or where the wish is "cpu".

    The ranks of torchrun see all devices of their node, and each takes the one of its number. Other launchers can show
    each task its own device alone (srun --gpus-per-task=1): then that is it, whatever the task's number.

    Raises:
        ValueError: the node has accelerators, but fewer than ranks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or wish == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if count == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local_rank = 0
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no device of its own: this node has {count} of type {accelerator.type}; "
            f"start at most {count} processes on it, for example with --nproc_per_node=gpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def choose_dtype(device: torch.device, use_amp: bool, amp_dtype: str) -> torch.dtype:
    """The type that a device computes matrix products in; the weights themselves stay float32.

    Args:
        device: where.
        use_amp: whether to use mixed precision at all.
        amp_dtype: "auto", "bfloat16", "float16" or "float32".

    Raises:
        ValueError: the type that was asked for isn't available on this device.
    """
    # 1. No mixed precision.
    if not use_amp or amp_dtype == "float32":
        return torch.float32
    can_bfloat16 = _computes_in_bfloat16(device)
    # 2. The best that the hardware really computes in. bfloat16 has float32's range and needs no scaler; float16 is
    #    for older GPUs that only have that; elsewhere narrow types are emulated and only cost.
    if amp_dtype == "auto":
        if can_bfloat16:
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" else torch.float32
    # 3. What the user insists on, wherever torch can do it at all (slowly, perhaps: that is how CPUs test float16).
    if not torch.amp.is_autocast_available(device.type):
        raise ValueError(
            f"trainer_config.amp_dtype={amp_dtype} isn't available on device {device.type}, which has no "
            "mixed precision in this torch; use amp_dtype=auto"
        )
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[amp_dtype]


def _computes_in_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # older ones can't tell: float32
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return device.type == "xpu"


def distribute(model: Any, strategy: str, dtype: torch.dtype, is_compiled: bool, device: torch.device) -> nn.Module:
    """Move a model to this rank's device, and wrap it so that its gradients are the mean over all ranks.

    Args:
        model: a GPT on the CPU, or for "fsdp" on "meta". It is changed, and goes on to be what is saved and evaluated.
        strategy: "ddp", every rank holds the whole model; or "fsdp", each a shard of it (`large/sharding.py`).
        dtype: of matrix products; the weights themselves stay float32.
        is_compiled: whether to compile it.
        device: this rank's.

    Returns:
        The module to call in training.

    Raises:
        ValueError: this strategy doesn't work with this type or device.
    """
    if strategy == "fsdp":
        from large.sharding import shard  # a second of imports that other runs save

        return shard(model, dtype, is_compiled, device)
    model.to(device)
    if is_compiled:
        model.compile()
    if dist.get_world_size() == 1:  # nobody to share with
        return model
    # Each backward pass ends with an all-reduce: every rank gets the mean of all ranks' gradients. They are sent from
    # where they are ("bucket view"), instead of being copied to where DDP sends from.
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


@contextmanager
def gradients_stay_local(model: Any, is_last: bool) -> Iterator[None]:
    """Around forward and backward: the ranks don't add up their gradients, except at the last micro-batch of a step.

    Gradients that add up over micro-batches first, and over ranks once, are the same and cost one all-reduce a step.

    Args:
        model: what `distribute` has returned.
        is_last: whether this is the last micro-batch.
    """
    no_sync: AbstractContextManager[Any] = nullcontext()
    if isinstance(model, DistributedDataParallel):
        no_sync = nullcontext() if is_last else model.no_sync()
    elif is_sharded(model):
        model.set_requires_gradient_sync(is_last)
    with no_sync:
        yield


def all_reduce_max(values: list[int]) -> list[int]:
    """Each value's maximum over all ranks, on every rank: how ranks agree on something that any of them noticed."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def all_reduce_sum(values: list[float]) -> list[float]:
    """Each value's sum over all ranks, in float64, on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_gather(value: Any) -> list[Any]:
    """The values of all ranks, in order of ranks, on every rank; any objects that pickle knows."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_from_main(value: Any) -> Any:
    """Rank 0's value, on every rank; any object that pickle knows. For large tensors, see `copy_from_main`."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@torch.no_grad()
def copy_from_main(source: Tensor, target: Tensor) -> None:
    """Copy rank 0's tensor to a target on every rank, or to each rank's shard of one.

    Args:
        source: on rank 0 the values, on the CPU; on the others any tensor of that shape and type, without data perhaps.
        target: of the same shape.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = source.contiguous() if dist.get_rank() == 0 else torch.empty(source.shape, dtype=source.dtype)
        dist.broadcast(values, src=0)
        source = values
    target.copy_(like(source.to(target.device), target))


def load_weights(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Give a model, on all ranks, the weights that rank 0 has, by their names."""
    for name, parameter in parameters.items():
        copy_from_main(weights[name], parameter)


def broadcast_form(value: Any) -> Any:
    """Rank 0's nested dictionaries, on all ranks; the others get no data of tensors, which `load_weights` sends."""
    form = broadcast_from_main(without_data(value))
    return value if dist.get_rank() == 0 else form


def without_data(value: Any) -> Any:
    """Nested dictionaries with every tensor replaced by its shape and type alone: small enough to send around."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta")
    return {key: without_data(part) for key, part in value.items()} if isinstance(value, dict) else value


# ------------------------------------------------------ tensors of which each rank may have only a part (fsdp)


def is_sharded(model: Any) -> bool:
    """Whether a model is shared out among the ranks. (Asked so that torch's module for it needs no import.)"""
    return hasattr(model, "set_requires_gradient_sync")


def is_shard(tensor: Any) -> bool:
    """Whether this rank has only a part of a tensor (one of torch's DTensors)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which each rank may have a shard; all ranks must ask. A plain tensor is whole already."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def like(tensor: Tensor, other: Any) -> Tensor:
    """A whole tensor that all ranks have, sharded as another one of its shape is; plain where that is plain."""
    if not is_shard(other):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # a second of imports that other runs save

    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def local(tensor: Any) -> Tensor:
    """This rank's own part of a tensor."""
    return tensor.to_local() if is_shard(tensor) else tensor


def norm(tensors: Iterable[Tensor]) -> float:
    """Euclidean norm of all numbers in some tensors together."""
    return float(whole(torch.nn.utils.get_total_norm([tensor.detach() for tensor in tensors])))


def gather_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries of whole tensors for rank 0; the other ranks help to gather them, and get nothing in them.

    One tensor after the other is gathered, in rank 0's main memory, wherever it computes; what two names share, once.
    """
    gathered: dict[int, Tensor | None] = {}  # by identity

    def gather(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: gather(part) for name, part in value.items()}
        if id(value) not in gathered:
            tensor = whole(value.detach())
            gathered[id(value)] = tensor.cpu() if dist.get_rank() == 0 else None
        return gathered[id(value)]

    return gather(values)


# --------------------------------------------------------------------------- armour: restarts, lost ranks, endings

_launcher = environment.PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun
_groups: Counter[str] = Counter()  # how many process groups this process has joined, by where they met
# gloo's thread needs Python's lock to let go of the last tensor that it has sent. Where Python frees the group at that
# moment, it holds that lock and waits for the thread: a run that is done would hang at its very end. So a group stays
# until the next one stands, or for ever, and its store with it.
_kept_alive: list[Any] = []


def settle_environment() -> None:
    """Set what a launcher would have set, where there is none. Raises ValueError if what is set doesn't fit."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:  # a launcher's values always win; port 0: any that is free
        for key, value in alone.items():
            os.environ.setdefault(key, value)
    missing = [key for key in alone if key not in os.environ]
    if missing:
        raise ValueError(f"RANK is set without {', '.join(missing)}; set all of them, as a launcher does, or none")
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not 0 <= int(rank) < int(world_size):
        raise ValueError(
            f"RANK={rank}, WORLD_SIZE={world_size}: the ranks are numbered from 0 to {int(world_size) - 1}; set "
            "both, as a launcher does, or neither"
        )


def meet_the_others(timeout: timedelta, restarts: int) -> tuple[Any, int, int, str]:
    """The rendezvous: (store through which the ranks find each other, rank, world size, identity of the launch).

    After a restart, a store that torchrun keeps still holds the addresses of the workers that died, and half of all
    restarts fail with "connection refused". A prefix for each attempt keeps them apart, another the runs of a sweep.
    Between nodes the counts can differ; there torchrun is told to make a new store each time: see docs/faults.md.

    Raises:
        ValueError: the port is taken, the address leads nowhere, or the others don't come.
    """
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    except dist.DistError as error:
        address, port, own_rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
        raise ValueError(
            f"rank {own_rank} can't meet the others at MASTER_ADDR={address}, MASTER_PORT={port} "
            f"({one_line(error)}); set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there, "
            "the same for all ranks; a single process without a launcher needs neither"
        ) from error
    launch = uuid.uuid4().hex
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        launch = store.compare_set("launch", "", launch).decode()  # the first one stays, for all ranks and restarts
        store = dist.PrefixStore(f"attempt-{restarts}", store)  # type: ignore[attr-defined]
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # nothing but its --rdzv_id outlasts a restart
        launch = os.environ["TORCHELASTIC_RUN_ID"]
    place = os.environ["MASTER_ADDR"] + os.environ["MASTER_PORT"]
    _groups[place] += 1
    store = dist.PrefixStore(f"group-{_groups[place]}", store)  # type: ignore[attr-defined]
    return store, rank, world_size, launch


def is_orphaned() -> bool:
    """Whether the launcher is gone. Nobody would restart or stop this process, so it should leave."""
    return _launcher is not None and os.getppid() != _launcher


@cache
def leave_with_launcher() -> None:
    """Look for the launcher every second from now on, and leave when it is gone, whatever this process waits for.

    The ranks meet in a store that dies with it: they would look for it until their time is over. (In training, they
    notice it themselves at the end of a step, and leave together.)
    """

    def watch() -> None:
        while not is_orphaned():
            time.sleep(1)
        sys.stderr.write("torchrun is gone; leaving\n")
        os._exit(1)

    if _launcher is not None:
        threading.Thread(target=watch, daemon=True).start()


def settle_buckets(model: torch.nn.Module, autocast: AbstractContextManager[Any], tokens: torch.Tensor) -> None:
    """Let DDP arrange its buckets before the first step, in two passes whose gradients nobody uses.

    A bucket is a block of memory in which DDP sends several gradients. After its first backward pass, DDP sorts the
    gradients anew, in the order in which they came. With three or more ranks, a gradient's place decides in which order
    the ranks' shares of it are added, and so its last bits. Without these passes, a run that was started again would
    take one step with other sums than the run that went through.

    Args:
        model: it isn't changed; nothing is done unless it is wrapped in DistributedDataParallel.
        autocast: the context of its forward passes.
        tokens: some micro-batch, int64 (B, T), of the shape that all have: the model is compiled for it, perhaps.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    targets = tokens.clone()  # a tensor of its own, as in training: compiled code distinguishes that
    for _ in range(2):  # the second one puts the new order into effect
        with autocast:
            _, loss = model(tokens, targets)
        loss.backward()
    model.zero_grad(set_to_none=False)


def leave_if_lost(error: RuntimeError) -> None:
    """Leave, with one line, where ranks failed to communicate; return where the error is another one.

    Where another rank is gone, that one's error is the root cause, and not this.
    """
    words = one_line(error)
    if not isinstance(error, dist.DistError) and "gloo/" not in words:
        return
    rank = os.environ["RANK"]
    # While the ranks set up their connections, nobody is lost yet: a wrong address or a firewall is as likely.
    is_lost = any(sign in words.lower() for sign in SIGNS_OF_A_LOST_RANK) and "connectFullMesh" not in words
    if is_lost:
        sys.stderr.write(f"rank {rank} has lost another rank, whose own output may say why ({words})\n")
    else:
        sys.stderr.write(f"error: rank {rank}: {words}{hint_at_the_address(words)}\n")
    sys.stderr.flush()
    if is_lost:
        time.sleep(3)  # torchrun names the first process that ends as the root cause: that isn't this one
    leave(1)


# What gloo, NCCL and torch's store say when a connection that was there is gone, or silent for too long.
SIGNS_OF_A_LOST_RANK = (
    *("closed by peer", "reset by peer", "broken pipe", "connection was likely closed"),
    *("timed out waiting", "timeout", "remote process exit"),
)


def hint_at_the_address(words: str) -> str:
    """What to do where ranks on several machines don't connect, and this one's own name leads to itself alone."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if "connectFullMesh" not in words or os.environ.get("LOCAL_WORLD_SIZE", world_size) == world_size:
        return ""
    name, address = socket.gethostname(), ""
    with suppress(OSError):
        address = socket.gethostbyname(name)
    if not address.startswith("127.") or "GLOO_SOCKET_IFNAME" in os.environ:
        return ""
    return (
        f"; this machine's name, {name}, leads to {address}, where no other machine finds it: set GLOO_SOCKET_IFNAME "
        "to the name of its network interface, which `ip address` lists"
    )


def is_alone() -> bool:
    """Whether this is the only rank, also where there is no process group (any more)."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_rank_0() -> bool:
    """Whether this is rank 0, also where there is no process group (any more)."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> NoReturn:
    """End this process with an exit code, and without Python's own clean-up.

    gloo's threads outlive `destroy_process_group` where DDP has used them, and when Python clears away the tensors
    that they still hold, it sometimes aborts: a run that succeeded would end with SIGABRT, and be restarted.
    """
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # of a loader that has ended: what it still holds would count as leaked
            thread.join(timeout=5)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
