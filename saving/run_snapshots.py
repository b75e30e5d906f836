"""The snapshots of one run: which one it goes on from, what it saves, and what keeps two runs apart.

A *run* is what a run directory holds. A *launch* is one command: it begins a run or goes on with one. After a failure,
torchrun may *restart* a launch. All of this is rank 0's business.
"""

import logging
import math
import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from config import TrainerConfig
from console.errors import described
from distributed import Ranks
from saving.moving import CONFIG, SNAPSHOT, set_aside, snapshot_url, snapshots_at
from snapshot import (
    DamagedSnapshotError,
    Snapshot,
    best_url,
    is_in,
    load_newest,
    load_snapshot,
    local_path,
    prepare,
    put_aside,
    save_snapshot,
    stamp,
    store_of,
)

log = logging.getLogger(__name__)

Check = Callable[[Snapshot, str], None]  # looks at a snapshot and its URL


class RunError(Exception):
    """The run can't go on, and it is no bug: the message says, in one line, what happened and what to do."""


class RunSnapshots:
    """The snapshots of one run: the latest, the one before it, and the best.

    Rank 0 keeps them. On the other ranks, and in a dry run, nothing is read and nothing is written.

    Args:
        run_dir: the run directory. If a run that was in it is half moved aside, the other half follows first.
        settings: snapshot_path is the place of the latest; None: where the run in this directory has it. With
            resume=False that run is moved aside; yet a launch that the launcher has started again goes on from what it
            has written itself. A dry_run or a plan leaves all files alone.
        ranks: this process's place among the ranks, and the launch that it belongs to.

    Attributes:
        url, best_url: where the latest and the best are, absolute.
        setting: the snapshot_path for config.yaml to remember; in the run directory, which may move, without a folder.
        errors: by URL, why the last save there failed; empty while all is well.
        last_step: the optimizer step of the latest snapshot; None where there is none.
    """

    def __init__(self, run_dir: str, settings: TrainerConfig, ranks: Ranks):
        self.run_dir, self.resume = run_dir, settings.resume
        self.is_active = ranks.is_main and not (settings.dry_run or settings.plan)
        if self.is_active and any(Path(run_dir).glob("old-*.moving")):  # the order to start over still holds
            log.info("moved the run that was to be started over to %s", set_aside(run_dir))
        self.own_url = str(Path(run_dir) / SNAPSHOT)
        url = settings.snapshot_path or (snapshot_url(run_dir) if self.resume else self.own_url)
        self.url = local_path(url) or url  # absolute: the next start may come from another working directory
        name = os.path.basename(self.url) if is_in(self.url, run_dir) else self.url
        self.setting = None if name == SNAPSHOT else name
        self.is_remembered = settings.snapshot_path is None and self.setting is not None
        self.best_url = best_url(self.url)
        self.launch_of_restart = ranks.launch if ranks.is_restart else None
        self.written_by = {"directory": os.path.abspath(run_dir), "launch": ranks.launch}  # "run" in every snapshot
        self.errors: dict[str, str] = {}
        self.last_step: int | None = None
        self._stamps: dict[str, str | None] = {}  # by URL, what this process has last found or written there

    def save(self, state: Snapshot, is_best: bool = False) -> None:
        """Save the state of the run as the latest snapshot or as the best one; RunError if another run's is there now.

        Another failure is logged and remembered.
        """
        if not self.is_active:
            return
        if is_best and self.last_step is None:  # the best one alone would be what is left of a run whose latest is lost
            self.save(state)
        url = self.best_url if is_best else self.url
        try:
            is_first = self._make_way(url)
            save_snapshot({**state, "run": self.written_by}, url, not is_best, is_first)
            self._stamps[url] = stamp(url)
            self.last_step = self.last_step if is_best else state["step"]
            self.errors.pop(url, None)
        except RunError:
            raise
        except Exception as error:  # a full disk, a store that answers 500: the next save may work again
            self.errors[url] = f"{url}: {described(error)}"
            log.error("step %d could not be saved, training goes on: %s", state["step"], self.errors[url])

    def open(self, check: Check) -> Snapshot | None:
        """Get ready for saving, and find the snapshot to go on from, with the best one's loss and step as "best".

        Raises ValueError if this run can't go on from the snapshots that are there (`check` raises it, and
        DamagedSnapshotError where no run can), or where nothing can be saved.
        """
        if not self.is_active:
            return None
        prepare(self.url)
        best, problem = self._best_so_far(check)  # first: otherwise two whole snapshots would be in memory at once
        snapshot = self.newest(check)
        if snapshot is None:
            self._begin()
        else:
            self._check_directory(snapshot, self.url)
            if problem:
                log.warning("no usable best snapshot, the next evaluation makes one: %s", problem)
            snapshot["best"] = best or (snapshot["best_eval_loss"], snapshot["best_step"])
            self.last_step = snapshot["step"]
            log.info("going on from %s after step %d", self.url, snapshot["step"])
        self._stamps = {url: stamp(url) for url in (self.url, self.best_url)}
        return snapshot

    def newest(self, check: Check) -> Snapshot | None:
        """The snapshot that the run goes on from, if there is one; `check` and errors as in `open`."""
        if not self.is_active or not (self.resume or self.launch_of_restart):
            return None
        snapshot = None
        with nullcontext() if self.resume else suppress(ValueError):  # to start over, nothing that is there is needed
            snapshot = load_newest(self.url, check)
        is_own = self.resume or (snapshot or {}).get("run", {}).get("launch") == self.launch_of_restart
        return snapshot if is_own else None

    def _best_so_far(self, check: Check) -> tuple[tuple[float, int] | None, str]:
        """((loss, step) of the best snapshot, which may be newer than the one to go on from; why it can't be used)."""
        try:
            best = load_snapshot(self.best_url)
            check(best, self.best_url)
        except FileNotFoundError:  # there was no evaluation yet
            return (math.inf, 0), ""
        except ValueError as error:  # damaged, or of another run
            return (math.inf, 0), str(error)
        # Former versions wrote it before its loss was known: the latest knows it.
        return (best["best_eval_loss"], best["best_step"]) if best["best_step"] == best["step"] else None, ""

    def _begin(self) -> None:
        """Make room for a new run, and never in silence: what the directory says of an old one counts."""
        old = snapshot_url(self.run_dir)
        kept, start_over = snapshots_at(old), "to start over and move the rest aside, trainer_config.resume=false"
        if self.resume and kept:
            best = "" if "damaged" in kept[0] else f"to go on, say trainer_config.snapshot_path={kept[0]}; "
            problem = f"has {kept[0]}, and no snapshot to go on from at {self.url}; {best}{start_over}"
            raise ValueError(f"the run in {self.run_dir} {problem}")
        if self.is_remembered:
            problem = f"{old}, where nothing is now; to begin anew there, say trainer_config.snapshot_path={old}"
            raise ValueError(f"the run in {self.run_dir} had its snapshots at {problem}; {start_over}")
        if store_of(self.url) not in (store_of(old), store_of(self.own_url)) and (taken := snapshots_at(self.url)):
            raise ValueError(
                f"{taken[0]} is there already; move it away, or name another place with trainer_config.snapshot_path"
            )
        # Restarted before its first save, a launch finds its own log and curves, and nothing else.
        if not self.resume and (kept or self.launch_of_restart is None):
            if kept and not is_in(old, self.run_dir):
                with suppress(DamagedSnapshotError, FileNotFoundError):  # nobody can tell whose it was
                    self._check_directory(load_snapshot(old), old)
            if folder := set_aside(self.run_dir):
                how = shlex.quote(f"hydra.run.dir={folder}")
                log.info("moved the run that was there to %s; to go on with it: its settings and %s", folder, how)
        elif (Path(self.run_dir) / CONFIG).exists():
            log.info("there is no snapshot at %s: the run begins with step 1", self.url)

    def _check_directory(self, snapshot: Snapshot, url: str) -> None:
        """Raise ValueError if a snapshot outside of the run directory belongs to the run in another one."""
        other = snapshot["run"]["directory"]
        is_ours = is_in(url, self.run_dir) or os.path.realpath(other) == os.path.realpath(self.run_dir)
        # Renamed or moved aside: this directory's config.yaml names the place, and the other's doesn't any more.
        if not (is_ours or store_of(snapshot_url(self.run_dir)) == store_of(url) != store_of(snapshot_url(other))):
            raise ValueError(
                f"{url} holds step {snapshot['step']} of the run in {other}, and this run's directory is "
                f"{self.written_by['directory']}; go on with that run by hydra.run.dir={other}, or give this one "
                "another trainer_config.snapshot_path"
            )

    def _make_way(self, url: str) -> bool:
        """Whether nothing is at a URL. What is damaged there moves off it; RunError if another run has written it."""
        present = stamp(url)
        if present is None or present == self._stamps.get(url):
            return present is None
        try:
            other = load_snapshot(url)
        except DamagedSnapshotError as error:
            log.warning("%s; it is kept as %s", error, put_aside(url))
            return True
        writer = other["run"] if isinstance(other.get("run"), dict) else {}
        if writer != self.written_by:  # equal: a save that seemed to have failed has arrived after all
            raise RunError(
                f"{url} now holds step {other.get('step')} of another run ({writer.get('directory', 'unknown')}), and "
                f"this run ({self.written_by['directory']}) does not overwrite it; give each run its own "
                "trainer_config.snapshot_path, or none, and its own hydra.run.dir"
            )
        return False
