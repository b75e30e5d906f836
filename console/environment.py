"""What must be settled before torch is loaded, which takes a second or more.

The commands import it before everything else. A Python that is too old for the project must be able to
read it as well: no new syntax here, and nothing new that is evaluated before the first check.
"""

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType
from typing import Any

if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    sys.exit(
        f"error: this is Python {sys.version_info[0]}.{sys.version_info[1]}, and the project needs 3.10 to 3.14; "
        "install one of them, for example with uv venv --python 3.12"
    )


def _is_busy() -> bool:
    """Whether other programs want the cores at this moment: Linux counts the threads that run or are ready to."""
    try:
        with open("/proc/loadavg") as file:
            return int(file.read().split()[3].split("/")[0]) > len(os.sched_getaffinity(0)) // 2
    except (AttributeError, IndexError, OSError, ValueError):
        return False


# OpenMP's threads spin for a while when they have no work. Alone, a long spin saves waking them; where another program
# wants the same cores, it makes a step several times slower. This is the number of turns; a user's own choice stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000" if _is_busy() else "20000")

PARENT = os.getppid()  # seen before torch is loaded: a launcher may die meanwhile

_missing_directories: set[str] = set()  # that this process has asked for, and that weren't there


def guard() -> None:
    """Prepare this process for being the program itself, not a test or a loader's worker that imports it.

    Until `signals.StopRequest` listens there is nothing to save, so Ctrl-C ends the program at once. An exception
    could be swallowed, or shown with a traceback, by whatever library is at work.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by 2>&-: the next file to be opened would get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    sys.stderr = Console(sys.stderr)
    keep_freed_memory()
    # Hydra makes the run directory before our code runs. If the command is refused then, or was a dry run, this empty
    # directory should go again. An audit hook, which Python calls before such operations, notes what was new.
    sys.addaudithook(_note_directory)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # some launchers ignore it, as nohup does SIGHUP
        signal.signal(signal.SIGINT, _leave_at_once)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, in pieces up to 32 MB and up to 1 GB in all, unless the user has told it otherwise.

    By itself it gives a step's activations back to the system, and the next step fetches them again: thousands of page
    faults, a seventh of a step's time. The price: what was used once stays with the process.
    """
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        with contextlib.suppress(AttributeError, OSError, TypeError):  # other C libraries have no mallopt
            for option, limit in ((-3, 32 << 20), (-1, 1 << 30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
                ctypes.CDLL(None).mallopt(option, limit)


class Console:
    """Standard error that may be full, or a terminal that was closed: then its words are lost, and nothing else."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """All but writing is the stream's own."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or lose the words."""
        try:
            return int(self._stream.write(text))
        except (OSError, ValueError):  # ValueError: somebody has closed it
            return len(text)

    def flush(self) -> None:
        """Write what is waiting, or lose it."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def remove_directories(path: str = "") -> None:
    """Remove the directories that this process has made, if they are empty: all, or those on an absolute path."""
    for directory in sorted(_missing_directories, key=len, reverse=True):  # the deepest first
        if not path or (path + os.sep).startswith(directory + os.sep):
            with contextlib.suppress(OSError):  # not empty: somebody needs it
                os.rmdir(directory)


def _note_directory(event: str, arguments: Any) -> None:
    """Remember directories that are about to be made; Python calls this at many other events, too."""
    if event == "os.mkdir" and not os.path.lexists(arguments[0]):
        _missing_directories.add(os.path.abspath(os.fsdecode(arguments[0])))


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"stopped\n")  # sys.stderr may be in the middle of a line
    remove_directories()
    os._exit(128 + number)
