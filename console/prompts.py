"""One prompt after the other, for `python generate.py` on a terminal.

The texts go to standard output and nothing else does, so that it can be sent to a file.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from char_dataset import CharVocabulary
from sampling import Sampling

COMMANDS = {  # name: (type, what it sets)
    "/temperature": (float, "0 is greedy, above 1 wild"),
    "/top-k": (int, "draw from the K likeliest characters only; 0: from all"),
    "/top-p": (float, "draw from the likeliest that together have P; 1: from all"),
    "/length": (int, "characters to add"),
    "/seed": (int, "makes each text repeatable; none: another text every time"),
    "/stop": (str, "end before this string; nothing: no end but the length"),
}
HELP = "\n".join(
    [
        "Type how a text begins, and the model goes on; \\n is a newline, and nothing at all stands for one.",
        "Ctrl-C stops the text, Ctrl-D ends the program. The settings:",
        *(f"    {name + ' VALUE':20} {words}" for name, (_, words) in COMMANDS.items()),
    ]
)


def converse(
    vocabulary: CharVocabulary,
    arguments: argparse.Namespace,
    random: torch.Generator,
    write: Callable[[str, argparse.Namespace, torch.Generator, Callable[[], bool]], None],
) -> None:
    """Read prompts and settings until the end of the input.

    Args:
        vocabulary: the characters that a prompt may have.
        arguments: the command line's; the settings change them.
        random: the source of randomness.
        write: writes one text: (prompt, arguments, random, whether to stop).
    """
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  (gives `input` a history and arrow keys)
    typed: Any = sys.stdin
    typed.reconfigure(errors="replace")  # a byte that isn't UTF-8 would take all with it that was read at once
    asked: list[int] = []  # signals since the last prompt

    def remember(number: int, frame: Any) -> None:
        asked.append(number)
        raise KeyboardInterrupt  # ends `input`; while a text is written, some destructor may swallow it

    signal.signal(signal.SIGINT, remember)
    print("/help says what can be set; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            line = ask()
            if line.startswith("/"):
                print(obey(line, arguments), file=sys.stderr)
                continue
            if arguments.seed is not None:
                random.manual_seed(arguments.seed)
            asked.clear()
            write(unescape(line) or vocabulary.start, arguments, random, lambda: bool(asked))
        except KeyboardInterrupt:
            print(flush=True)
        except EOFError:
            print(file=sys.stderr)
            return
        except ValueError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)


def ask() -> str:
    """A line from the user, behind a sign that it is their turn."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")  # so that the arrow keys know of it
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return input()


def obey(line: str, arguments: argparse.Namespace) -> str:
    """Change a setting, and say what it is now.

    Raises:
        ValueError: there is no such setting, or the value is outside its range.
    """
    name, _, value = line.partition(" ")
    if name == "/help":
        return HELP
    if line.split() == ["/seed", "none"]:
        arguments.seed = None
        return "seed is none now"
    if name not in COMMANDS:
        raise ValueError(
            f"{name}: there are {', '.join(COMMANDS)} and /help; a text can't begin with /, and Ctrl-D ends"
        )
    kind, words = COMMANDS[name]
    number: Any
    try:
        number = kind(value.strip()) if kind is not str else unescape(value)
    except ValueError as error:
        raise ValueError(f"{name} {value}: must be a {'whole ' if kind is int else ''}number ({words})") from error
    key = {"/length": "max_new_tokens"}.get(name, name[1:].replace("-", "_"))
    if kind is int and not 0 <= number < 2**64:
        raise ValueError(f"{name} {value}: must be at least 0 and below 2^64")
    new = {key: None if key == "top_k" and number == 0 else number}
    settings = {**vars(arguments), **new}
    Sampling(settings["temperature"], True, settings["top_k"], settings["top_p"])  # raises where one is out of range
    vars(arguments).update(new)
    return f"{name[1:]} is {number!r} now"


def unescape(text: str) -> str:
    r"""A typed text with \n for a newline, \t for a tab and \\ for a backslash."""
    return text.replace("\\\\", "\0").replace("\\n", "\n").replace("\\t", "\t").replace("\0", "\\")
