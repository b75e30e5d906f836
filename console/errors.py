"""An error as one line, and as the end of a command."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from console import environment


def one_line(error: BaseException) -> str:
    """An error's words, without the frames of C++ that torch can add to them."""
    return " ".join(str(error).split("Exception raised from")[0].split()).rstrip(".")


def described(error: BaseException) -> str:
    """The type and the first line of what a library's error says; of the first in a chain, which is the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


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
