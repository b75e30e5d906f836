"""An error as one line, and as the end of a command."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from console import environment
from console.text import printable


def one_line(error: BaseException) -> str:
    """An error's words, without the frames of C++ that torch can add to them, nor what a terminal would obey."""
    return printable(" ".join(str(error).split("Exception raised from")[0].split()).rstrip("."))


def described(error: BaseException) -> str:
    """The type of a library's error, and the beginning of what it says."""
    words = one_line(error) or "no reason given"
    return f"{type(error).__name__}: {words if len(words) <= 300 else words[:296] + ' ...'}"


def cause(error: BaseException) -> BaseException:
    """The first of a chain of errors: fsspec says "not found" for most others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def one_line_at_the_end() -> Iterator[None]:
    """Around a command: what the user can mend ends it with one line and exit code 1."""
    try:
        yield
    except BrokenPipeError:  # the reader has seen enough, as in `| head`; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        environment.remove_directories()
        sys.exit(f"error: {one_line(error)}")
