"""The snapshots of one run: which one it goes on from, what it saves, and what keeps two runs apart.

A *run* is what a run directory holds. A *launch* is one command: it begins a run or goes on with one. After a failure,
torchrun may *restart* a launch. All of this is rank 0's business.
"""

import logging
import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from console.errors import described
from distributed import Ranks
from saving.moving import beside, is_half_moved, set_aside
from snapshot import (
    Snapshot,
    best_url,
    duplicate,
    is_in,
    load_newest,
    load_snapshot,
    prepare,
    previous_url,
    save_snapshot,
    stamp,
)

log = logging.getLogger(__name__)

Check = Callable[[Snapshot, str], None]  # looks at a snapshot and its URL


class RunError(Exception):
    """The run can't go on, and it is no bug: the message says, in one line, what happened and what to do."""


class RunSnapshots:
    """The snapshots of one run: the latest, the one before it, and the best.

    Rank 0 keeps them. On the other ranks, and in a dry run, nothing is read and nothing is written.

    Args:
        run_dir: the run directory.
        url: path or fsspec URL of the latest; None: gpt_snapshot.pt in the run directory.
        ranks: this process's place among the ranks, and the launch that it belongs to.
        dry_run: whether this start leaves all files alone.

    Attributes:
        errors: by URL, why the last save there failed; empty while all is well.
        last_step: the optimizer step of the latest snapshot; None where there is none.
    """

    def __init__(self, run_dir: str, url: str | None, ranks: Ranks, dry_run: bool = False):
        self.run_dir, self.url = run_dir, url or str(Path(run_dir) / "gpt_snapshot.pt")
        self.is_active = ranks.is_main and not dry_run
        self.launch_of_restart = ranks.launch if ranks.is_restart else None
        self.written_by = {"directory": os.path.abspath(run_dir), "launch": ranks.launch}  # "run" in every snapshot
        self.best_url = best_url(self.url)
        self.errors: dict[str, str] = {}
        self.last_step: int | None = None
        self._stamps: dict[str, str | None] = {}  # by URL, what this process has last found or written there

    def save(self, state: Snapshot, is_best: bool = False) -> None:
        """Save the state of the run as the latest snapshot or as the best one. A failure is logged and remembered.

        Raises:
            RunError: what is there now was written by another run.
        """
        if not self.is_active:
            return
        url = self.best_url if is_best else self.url
        try:
            self._check_owner(url)
            # Just saved: the same file, by a second name.
            if is_best and state["step"] == self.last_step and self._stamps.get(self.url):
                duplicate(self.url, url)
            else:
                save_snapshot({**state, "run": self.written_by}, url, keep_previous=not is_best)
            self._stamps[url] = stamp(url)
            self.last_step = self.last_step if is_best else state["step"]
            self.errors.pop(url, None)
        except RunError:
            raise
        except Exception as error:  # a full disk, a store that answers 500: the next save may work again
            self.errors[url] = f"{url}: {described(error)}"
            log.error("step %d could not be saved, training goes on: %s", state["step"], self.errors[url])

    def open(self, resume: bool, check: Check) -> Snapshot | None:
        """Get ready for saving, and find the snapshot to go on from, with the best one's loss and step as "best".

        Args:
            resume: False moves the run that is there aside. A launch that the launcher has started again goes on from
                what it has written itself all the same.
            check: raises ValueError unless this run can go on from a snapshot, DamagedSnapshotError where nobody can.

        Raises:
            ValueError: the snapshot is of another run, or damaged beyond its predecessor; nothing can be saved there.
        """
        if not self.is_active:
            return None
        prepare(self.url)
        is_restart = self.launch_of_restart is not None
        # First, and only two numbers of it: otherwise two whole snapshots would be in memory at once.
        best_loss, best_step, problem = self._best_so_far(check) if resume or is_restart else (None, 0, "")
        snapshot = load_own(self.url, resume, self.launch_of_restart, check)
        # Restarted before its first save, a launch finds its own log and curves, and nothing else.
        is_fresh = is_restart and not any(map(stamp, (self.url, previous_url(self.url), self.best_url)))
        goes_on = resume or snapshot is not None or is_fresh
        if is_half_moved(self.run_dir) or not goes_on:
            folder = set_aside(self.run_dir, self.url)
            if folder:
                log.info("moved the run that was there to %s; to go on with it: %s", folder, self._command(folder))
            snapshot = None
        if snapshot is not None:
            self._check_directory(snapshot)
            if problem:
                log.warning("no usable best snapshot, the next evaluation makes one: %s", problem)
            if best_loss is None and best_step != snapshot["step"]:
                best_loss, best_step = snapshot["best_eval_loss"], snapshot["best_step"]
            snapshot["best"] = math.inf if best_loss is None else best_loss, best_step
            self.last_step = snapshot["step"]
            log.info("going on from %s after step %d", self.url, snapshot["step"])
        self._stamps = {url: stamp(url) for url in (self.url, self.best_url)}
        return snapshot

    def _best_so_far(self, check: Check) -> tuple[float | None, int, str]:
        """(Loss, step, why it can't be used) of the best snapshot, which may be newer than the latest.

        In a step that is both saved and evaluated, the latest snapshot is written first. If the evaluation finds that
        it is the best, the best snapshot is a second name of the same file, in which the best loss is still an older
        one; the loss is None then. Later snapshots have it. If there is no later one, the run goes on from this very
        step, and evaluates it again (`Trainer._start`).
        """
        url = self.best_url
        try:
            best = load_snapshot(url)
            check(best, url)
        except FileNotFoundError:  # there was no evaluation yet
            return math.inf, 0, ""
        except ValueError as error:  # damaged, or of another run
            return math.inf, 0, str(error)
        is_known = best["best_step"] == best["step"]
        return best["best_eval_loss"] if is_known else None, best["step"], ""

    def _command(self, folder: str) -> str:
        """What to type to go on with a run that was moved to a folder."""
        words = ["python", "main.py", f"hydra.run.dir={folder}"]
        if not is_in(self.url, self.run_dir):
            words.append(f"trainer_config.snapshot_path={beside(self.url, Path(folder).name)}")
        return shlex.join(words)

    def _check_directory(self, snapshot: Snapshot) -> None:
        """Raise ValueError where a snapshot outside of the run directory belongs to the run in another one."""
        other = snapshot["run"]["directory"]
        if not is_in(self.url, self.run_dir) and os.path.realpath(other) != os.path.realpath(self.run_dir):
            raise ValueError(
                f"{self.url} holds step {snapshot['step']} of the run in {other}, and this run's directory is "
                f"{self.written_by['directory']}; go on with that run by hydra.run.dir={other}, or give this one "
                "another trainer_config.snapshot_path"
            )

    def _check_owner(self, url: str) -> None:
        """Raise RunError where another run has written to a URL since this one last did."""
        present = stamp(url)
        if present is None or present == self._stamps.get(url):
            return
        other = load_snapshot(url)
        written_by = other.get("run")
        writer = written_by if isinstance(written_by, dict) else {}
        if writer != self.written_by:  # equal: a save that seemed to have failed has arrived after all
            raise RunError(
                f"{url} now holds step {other.get('step')} of another run ({writer.get('directory', 'unknown')}), and "
                f"this run ({self.written_by['directory']}) does not overwrite it; give each run its own "
                "trainer_config.snapshot_path, or none, and its own hydra.run.dir"
            )


def load_own(url: str, resume: bool, launch: str | None, check: Check) -> Snapshot | None:
    """The snapshot that a run goes on from, if there is one.

    Args:
        url: path or fsspec URL of the latest.
        resume: whether the run may go on from whatever is there.
        launch: a launch that was told to start over (resume is False), and was restarted, goes on from what it has
            written itself, and from nothing else; None: it was not restarted.
        check: see `load_newest`.

    Raises:
        ValueError: resume is True, and all snapshots that there are can't be used.
    """
    if not resume and launch is None:
        return None
    try:
        snapshot = load_newest(url, check)
    except ValueError:
        if resume:
            raise
        return None
    if snapshot is not None and not resume and snapshot.get("run", {}).get("launch") != launch:
        return None
    return snapshot
