"""Where a run's lines go: rank 0's to the console and to main.log; those of the others only when something is wrong."""

import logging
import sys
import threading
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from console.text import printable

log = logging.getLogger(__name__)


def set_up_logging(is_main: bool, prefix: str, log_file: Path | None) -> None:
    """Rank 0 reports on the console and in main.log; the others speak up only when something is wrong."""
    level = logging.INFO if is_main else logging.WARNING
    form = Form(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S")
    handlers: list[logging.Handler] = [ConsoleHandler(level)]
    handlers[0].setFormatter(form)
    if log_file is not None:
        target = LogFile(log_file, encoding="utf-8", delay=True)
        target.setFormatter(form)
        handlers.append(WaitingLines(target))
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.getLogger("hydra").setLevel(logging.WARNING)  # it counts the runs of a sweep from 0, and we from 1


def open_log_file() -> None:
    """Begin main.log, with what was said up to now: only now it is clear whose run directory this is.

    A run that was moved aside takes its log with it, and must not get lines of the run that comes after it.
    """
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, WaitingLines):
            root.removeHandler(handler)
            root.addHandler(handler.file)
            for record in handler.buffer:
                if handler.file in root.handlers:  # a full disk may have ended it
                    handler.file.handle(record)


class Form(logging.Formatter):
    """The time, and the line. A terminal would obey control characters: a model may write them, and names have them."""

    def format(self, record: logging.LogRecord) -> str:
        """The words of one line."""
        return printable(super().format(record))


class WaitingLines(MemoryHandler):
    """Lines that are to go to main.log, if it is opened at all: a command that is refused leaves no word in it."""

    def __init__(self, file: "LogFile"):
        super().__init__(10_000, logging.CRITICAL + 1)
        self.file = file  # not MemoryHandler's own target, to which Python 3.11 would write at the end of the program


class ConsoleHandler(logging.Handler):
    """Writes log lines to standard error, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        load_tqdm().write(self.format(record), file=sys.stderr)


class LogFile(logging.FileHandler):
    """main.log. It is not worth a run either: on a full disk it ends, and the run goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or none."""
        try:
            super().emit(record)  # opens the file at the first line
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        """Say once why the lines end here; logging's own way is a traceback for each of them."""
        logging.getLogger().removeHandler(self)
        log.error("no more lines in %s: %s", self.baseFilename, sys.exc_info()[1])


_lock = threading.RLock()  # of the console


def load_tqdm() -> Any:
    """tqdm's class of bars, imported late because it takes a while.

    Its own lock is one among processes. Where these aren't forked, multiprocessing would say at the end of a run that
    a semaphore has leaked.
    """
    from tqdm import tqdm

    tqdm.set_lock(_lock)
    return tqdm
