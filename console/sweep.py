"""The runs of a sweep: how each ended, the table of all, the name of each one's directory."""

import hashlib
import math
import os
import re
import sys
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field

from console.text import printable, run_row


@dataclass
class Outcome:
    """How a run of a sweep ended."""

    number: int  # in the order of the runs, from 1 on
    run_dir: str
    settings: list[str] = field(default_factory=list)  # as they were typed: "group.key=value"
    loss: float = math.nan  # the lowest evaluation loss, nats per character
    end: str = ""  # what has ended it: "max_steps", for example
    failure: str = ""  # why it failed, in one line; empty where it didn't

    def note(self, error: BaseException) -> bool:
        """Say and remember what has ended the run; tell whether it was a failure, and not a signal."""
        code = error.code if isinstance(error, SystemExit) else None
        if not isinstance(error, Exception | SystemExit) or (isinstance(code, int) and code > 128):
            self.failure = "stopped"
            return False
        if isinstance(error, Exception):  # a bug
            traceback.print_exception(error)
            code = f"{type(error).__name__}: {error}"
        self.failure = " ".join(str(code).split()).removeprefix("error: ")
        if not isinstance(code, int):  # the other ranks leave the word to rank 0
            sys.stderr.write(f"run {self.number} failed: {printable(self.failure)}\n")
        return True


def sweep_table(outcomes: list[Outcome]) -> str:
    """The runs of a sweep, one in each line: the lowest loss first, then those without a number, then the failed."""

    def place(run: Outcome) -> tuple[bool, bool, float, int]:
        is_number = math.isfinite(run.loss)
        return bool(run.failure), not is_number, run.loss if is_number else 0.0, run.number

    folder, lines = os.path.commonpath([os.path.dirname(run.run_dir) for run in outcomes]), []
    for run in sorted(outcomes, key=place):
        result = "failed" if run.failure else f"evaluation loss {run.loss:.4f}"
        name, why = os.path.relpath(run.run_dir, folder), run.failure or run.end
        left = f"  run {run.number}: {result:22}  "
        lines.append(run_row(left, name, why, run.settings, [other.settings for other in outcomes]))
    return "\n".join(["", "the runs of this sweep, best first:", *lines, f"in {printable(folder)}", ""])


def note_on_rates(tried: dict[str, str], name: str) -> str:
    """What the beginning of a sweep says where it tries a learning rate that most of the weights don't have.

    Args:
        tried: of each key that the sweep tries several values of, these, as they were typed.
        name: the optimizer's, where the sweep tries no others.
    """
    key = "optimizer_config.learning_rate"
    if key not in tried or "optimizer_config.muon_learning_rate" in tried:
        return ""
    if "muon" not in tried.get("optimizer_config.name", name):
        return ""
    return (
        f"note: {key} is AdamW's: embeddings, norms, biases;\n"
        "      the matrices of the blocks have optimizer_config.muon_learning_rate\n"
    )


def directory_name(overrides: str, tried: Collection[str] = ()) -> str:
    """The name of a sweep's run directory: what is tried in it, and another for every other list of overrides.

    Where something is left out, replaced or cut off, a digest of the whole makes the difference. 255 bytes is what most
    file systems allow; the rest is for names that are made from this one.

    Args:
        overrides: all of the run's, "group.key=value,group.key=value".
        tried: the keys of which the sweep tries several values; none: the name has all keys.
    """
    parts = re.split(r",(?=[^,=]+=)", overrides)  # a list has commas too
    name = ",".join(part for part in parts if part.split("=")[0] in tried) or overrides
    name = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", name)
    name = name.encode(errors="replace")[:200].decode(errors="ignore")
    digest = hashlib.sha256(overrides.encode(errors="surrogatepass")).hexdigest()[:8]
    return name if name == overrides else f"{name}-{digest}"
