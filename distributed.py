"""Who am I among the ranks: set-up, tear-down, and the few collectives that the trainer needs.

Read it after `trainer.py`; `snapshot.py` comes next. It alone reads the environment that a launcher
sets. There is one path: without a launcher, a run is a group of one rank.
"""

import io
import itertools
import logging
import os
import pickle
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist


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
def process_group(timeout_minutes: float, device_wish: str = "auto") -> Iterator[Ranks]:
    """Join the other ranks for the length of a with-block.

    Args:
        timeout_minutes: after this long in one collective the other ranks count as lost, and the run fails.
        device_wish: "auto", or "cpu" although there are accelerators.

    Raises:
        ValueError: there are not enough devices for the ranks.
    """
    # In a sweep, a failed run leaves its group open. Ranks that still wait in it see a lost connection now, and leave.
    if dist.is_initialized():
        dist.destroy_process_group()
    # A launcher's values always win; these are for a start without one. Port 0: any that is free.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        for key, value in alone.items():
            os.environ.setdefault(key, value)
    missing = [key for key in alone if key not in os.environ]
    if missing:
        raise ValueError(
            f"RANK is set, and {', '.join(missing)} not; a launcher sets all of them, and a start alone none"
        )
    local_rank, restarts = int(os.environ["LOCAL_RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    device = choose_device(local_rank, device_wish)
    timeout = timedelta(minutes=timeout_minutes)
    store, rank, world_size, launch = meet_the_others(timeout, restarts)
    # Numbers on the CPU (losses, decisions) travel by gloo, gradients by the device's own backend. One rank alone has
    # no gradients to share; nor has a Mac, whose GPU serves one process only.
    shares_gradients = world_size > 1 and device.type not in ("cpu", "mps")
    backend, bound_device = "gloo", None
    if shares_gradients:
        backend, bound_device = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}", device
    dist.init_process_group(
        backend, timeout=timeout, world_size=world_size, rank=rank, store=store, device_id=bound_device
    )
    # Agents count the restarts of their own node only.
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
    """Rank 0's value, on every rank; any object that pickle knows. Tensors in it, on the CPU, travel one by one."""
    file, is_main = io.BytesIO(), dist.get_rank() == 0
    pickler = PicklerWithoutTensors(file)
    if is_main:
        pickler.dump(value)
    box = [(file.getvalue(), [storage.nbytes() for storage in pickler.storages])]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    pickled, sizes = box[0]
    # Whole storages, each once: tensors that share one here, as the embedding and the head do, share one there.
    storages = pickler.storages if is_main else [torch.UntypedStorage(size) for size in sizes]
    for storage in storages:
        dist.broadcast(torch.empty(0, dtype=torch.uint8).set_(storage), src=0)
    return value if is_main else UnpicklerWithTensors(io.BytesIO(pickled), storages).load()


# ------------------------------------------------------------------ armour: restarts, signals, lost ranks, endings

_launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # seen early: it may die while we start
_groups = itertools.count()  # numbers the process groups of this process


def meet_the_others(timeout: timedelta, restarts: int) -> tuple[Any, int, int, str]:
    """The rendezvous: (store through which the ranks find each other, rank, world size, identity of the launch).

    After a restart, a store that torchrun keeps still holds the addresses of the workers that died, and half of all
    restarts fail with "connection refused". A prefix for each attempt (and each run of a sweep) keeps them apart.
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
            f"({in_one_line(error)}); set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there, "
            "alike for all ranks; a process that trains alone needs neither"
        ) from error
    launch = uuid.uuid4().hex
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        launch = store.compare_set("launch", "", launch).decode()  # the first one stays, for all ranks and restarts
        store = dist.PrefixStore(f"attempt-{restarts}-{next(_groups)}", store)  # type: ignore[attr-defined]
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # nothing but its --rdzv_id outlasts a restart
        launch = os.environ["TORCHELASTIC_RUN_ID"]
    return store, rank, world_size, launch


class PicklerWithoutTensors(pickle.Pickler):
    """Pickles the places of tensors instead of the tensors: a pickled snapshot would be in memory several times.

    Attributes:
        storages: the memory of the tensors that were met, each once.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # by address

    def persistent_id(self, value: Any) -> Any:
        """What stands for a tensor: (number of its storage, type, and where in the storage it is)."""
        if not isinstance(value, torch.Tensor):
            return None
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._numbers:
            self._numbers[storage.data_ptr()] = len(self.storages)
            self.storages.append(storage)
        number = self._numbers[storage.data_ptr()]
        return number, value.dtype, value.storage_offset(), value.shape, value.stride()


class UnpicklerWithTensors(pickle.Unpickler):
    """The inverse of `PicklerWithoutTensors`, given the same storages."""

    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage]):
        super().__init__(file)
        self.storages = storages

    def persistent_load(self, place: Any) -> torch.Tensor:
        """The tensor that was there."""
        number, dtype, *where = place
        return torch.empty(0, dtype=dtype).set_(self.storages[number], *where)


class StopRequest:
    """Remembers the first SIGTERM, SIGINT or SIGHUP, so that the loop can stop at the end of a step.

    Attributes:
        signal: its number; 0 while there is none.
    """

    def __init__(self) -> None:
        self.signal, self._since = 0, 0.0
        self._former: dict[int, Any] = {}  # what the signals did before, by their numbers

    def listen(self) -> None:
        """Install the handler, in place of what the signals would do."""
        if not self._former:
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                number = getattr(signal, name, None)
                if number is None:  # Windows has no SIGHUP
                    continue
                if name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._former[number] = signal.signal(number, self._remember)

    def stop_listening(self) -> None:
        """Give the signals their former effect again: the next run of a sweep listens for itself."""
        while self._former:
            signal.signal(*self._former.popitem())

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # One Ctrl-C can arrive twice, from the terminal and from torchrun; a second one comes later, and means now.
        if self.signal and number == signal.SIGINT and time.monotonic() - self._since > 1.0:
            os._exit(128 + number)
        if not self.signal:
            self.signal, self._since = number, time.monotonic()

    def is_orphaned(self) -> bool:
        """Whether the launcher is gone. Nobody would restart or stop this process, so it should leave."""
        return _launcher is not None and os.getppid() != _launcher


def settle_buckets(model: torch.nn.Module, autocast: AbstractContextManager[Any], tokens: torch.Tensor) -> None:
    """Let DDP arrange its buckets before the first step, in two passes whose gradients nobody uses.

    A bucket is a block of memory in which DDP sends several gradients. After its first backward pass, DDP sorts the
    gradients anew, in the order in which they came. With three or more ranks, a gradient's place decides in which order
    the ranks' shares of it are added, and so its last bits. Without these passes, a run that was started again would
    take one step with other sums than the run that went through.

    Args:
        model: wrapped in DistributedDataParallel; it isn't changed.
        autocast: the context of its forward passes.
        tokens: some micro-batch, int64 (B, T), of the shape that all have: the model is compiled for it, perhaps.
    """
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
    words = in_one_line(error)
    if not isinstance(error, dist.DistError) and "gloo/" not in words:
        return
    rank = os.environ["RANK"]
    # While the ranks set up their connections, nobody is lost yet: a wrong address or a firewall is as likely.
    is_lost = any(sign in words.lower() for sign in SIGNS_OF_A_LOST_RANK) and "connectFullMesh" not in words
    if is_lost:
        sys.stderr.write(f"rank {rank} has lost another rank, whose own output may say why ({words})\n")
    else:
        sys.stderr.write(f"error: rank {rank}: {words}\n")
    sys.stderr.flush()
    if is_lost:
        time.sleep(3)  # torchrun names the first process that ends as the root cause: that isn't this one
    leave(1)


# What gloo, NCCL and torch's store say when a connection that was there is gone, or silent for too long.
SIGNS_OF_A_LOST_RANK = (
    *("closed by peer", "reset by peer", "broken pipe", "connection was likely closed"),
    *("timed out waiting", "timeout", "remote process exit"),
)


def in_one_line(error: Exception) -> str:
    """An error's words, without the frames of C++ that torch can add to them."""
    words = str(error).split("Exception raised from")[0]
    return " ".join(line.strip() for line in words.splitlines() if line.strip()).rstrip(".")


def is_alone() -> bool:
    """Whether this is the only rank, also where there is no process group (any more)."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_rank_0() -> bool:
    """Whether this is rank 0, also where there is no process group (any more)."""
    return os.environ.get("RANK", "0") == "0"


def ignore_signals(worker_id: int) -> None:
    """For the loader's worker processes: signals go to the whole process group, and stopping is the rank's business."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """iter(loader), whose processes inherit blocked signals; `ignore_signals` may come seconds after their start."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return iter(loader)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)  # what came in between arrives now


def leave(code: int) -> NoReturn:
    """End this process with an exit code, and without Python's own clean-up.

    gloo's threads outlive `destroy_process_group` where DDP has used them, and when Python clears away the tensors
    that they still hold, it sometimes aborts: a run that succeeded would end with SIGABRT, and be restarted.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
