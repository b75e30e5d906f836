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
    "/stop": (str, "end before this string; nothing: end at the length only"),
}
HELP = "\n".join(
    [
        "Type how a text begins, and the model goes on. \\n is a newline, and so is an",
        "empty line. Ctrl-C stops the text; quit, /quit or Ctrl-D ends the program.",
        "/settings shows all settings, and a number's command alone shows that one:",
        *(f"  {name + ' VALUE':18} {words}" for name, (_, words) in COMMANDS.items()),
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
    print("/help says what can be set; quit or Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            line = ask()
            if line.strip() in ("quit", "/quit"):
                return
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
    """Change a setting, or none where no value is given, and say what it is.

    Raises:
        ValueError: there is no such setting, or the value is outside its range.
    """
    name, _, value = line.partition(" ")
    if line.strip() == "/help":
        return HELP
    if line.strip() == "/settings":
        return "\n".join(shown(name, arguments) for name in COMMANDS)
    if line.split() == ["/seed", "none"]:
        arguments.seed = None
        return f"{shown(name, arguments)} now"
    if name not in COMMANDS:
        raise ValueError(
            f"{name}: the commands are {', '.join(COMMANDS)}, /settings, /help and /quit; a text can't begin with /"
        )
    kind, words = COMMANDS[name]
    if kind is not str and not value.strip():
        return shown(name, arguments)
    number: Any
    try:
        number = kind(value.strip()) if kind is not str else unescape(value)
    except ValueError as error:
        raise ValueError(f"{name} {value}: must be a {'whole ' if kind is int else ''}number ({words})") from error
    if kind is int and not 0 <= number < 2**64:
        raise ValueError(f"{name} {value}: must be at least 0 and below 2^64")
    key = key_of(name)
    new = {key: None if key == "top_k" and number == 0 else number}
    settings = {**vars(arguments), **new}
    Sampling(settings["temperature"], True, settings["top_k"], settings["top_p"])  # raises where one is out of range
    vars(arguments).update(new)
    return f"{shown(name, arguments)} now"


def key_of(name: str) -> str:
    """The name that the command line has for a setting."""
    return {"/length": "max_new_tokens"}.get(name, name[1:].replace("-", "_"))


def shown(name: str, arguments: argparse.Namespace) -> str:
    """What a setting is, in words."""
    value = getattr(arguments, key_of(name))
    return f"{name[1:]} is {'none' if value is None else repr(value)}"


def unescape(text: str) -> str:
    r"""A typed text with \n for a newline, \t for a tab and \\ for a backslash."""
    return text.replace("\\\\", "\0").replace("\\n", "\n").replace("\\t", "\t").replace("\0", "\\")
