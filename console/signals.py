"""Ctrl-C and what schedulers send: a run stops at the end of its step; its loader's processes leave that to it."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

# Ctrl-C, schedulers and terminals send the first three; SIGUSR1 is what SLURM sends before the time limit.
# Windows has only two of them.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


class StopRequest:
    """Remembers the first signal of `STOP_SIGNALS`, so that the loop can stop at the end of a step.

    Attributes:
        signal: its number; 0 while there is none.
    """

    def __init__(self) -> None:
        self.signal, self._since = 0, 0.0
        self._former: dict[int, Any] = {}  # what the signals did before, by their numbers

    def listen(self) -> None:
        """Install the handler, in place of what the signals would do."""
        if not self._former:
            for number in STOP_SIGNALS:
                is_hangup = number == getattr(signal, "SIGHUP", None)
                if not (is_hangup and signal.getsignal(number) is signal.SIG_IGN):  # as under nohup
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


def ignore_signals(worker_id: int) -> None:
    """For the loader's worker processes: signals go to the whole process group, and stopping is the rank's business."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """iter(loader), whose processes inherit blocked signals; `ignore_signals` may come seconds after their start."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return iter(loader)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)  # what came in between arrives now
