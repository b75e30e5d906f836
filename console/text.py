"""Text that fits a terminal: no signs that it would obey, no lines that are too long."""

import re
import textwrap


def printable(text: str) -> str:
    r"""A text with its control characters, but for newlines and tabs, as one would type them: \x1b."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class _Column(textwrap.TextWrapper):
    """Breaks lines at blanks, and within names and settings: behind a comma, a slash, or the name of a group."""

    wordsep_simple_re = re.compile(r"(\s+|(?<=[,/])|(?<=[a-z]\.))")


def run_row(left: str, name: str, why: str, settings: list[str], of_all: list[list[str]], width: int = 80) -> str:
    """A row of a table of runs, of one or more lines. Its last column says which run this is.

    Args:
        left: the other columns.
        name: of the run.
        why: what has ended it; empty where that isn't known.
        settings: the run's, "group.key=value". Those that all runs share are left out, and those that its name has.
        of_all: the settings of all runs in the table.
        width: of the table, in characters.
    """
    shared = set(of_all[0]).intersection(*of_all)
    own = [setting for setting in settings if setting not in shared and f"{setting.split('=')[0]}=" not in name]
    reason = [f"({textwrap.shorten(why, 80, placeholder=' ...')})"] if why else []
    words = printable(" ".join([name, *reason, *own]))
    lines = _Column(max(20, width - len(left)), break_on_hyphens=False).wrap(words)
    return "\n".join([left + lines[0], *(" " * len(left) + line for line in lines[1:])])
