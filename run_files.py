"""The files of one run: which snapshot it goes on from, what it saves, and what keeps two runs apart.

Read it after `snapshot.py`, which writes and reads a single snapshot. `corpus.py` comes next.

A *run* is what a run directory holds. A *launch* is one command: it begins a run or goes on with one. After a failure,
torchrun may *restart* a launch. All of this is rank 0's business.
"""

import hashlib
import logging
import math
import os
import posixpath
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from distributed import load_weights
from from_hugging_face import is_directory, read_directory
from snapshot import (
    Snapshot,
    best_url,
    duplicate,
    is_in,
    is_same_place,
    load_newest,
    load_snapshot,
    move,
    prepare,
    previous_url,
    save_snapshot,
    stamp,
)
from snapshot_contents import check_contents, check_model, check_optimizer

log = logging.getLogger(__name__)


class RunError(Exception):
    """The run can't go on, and it is no bug: the message says, in one line, what happened and what to do."""


class RunSnapshots:
    """The snapshots of one run, as rank 0 keeps them: the latest, the one before it, and the best.

    Args:
        run_dir: the run directory.
        url: path or fsspec URL of the latest.
        identity: what a snapshot must share with this run to be continued by it.
        launch: tells this start of the program, with its restarts by the launcher, from every other one.
        optimizer, parameters: whose state they hold, and what it trains, by name.

    Attributes:
        errors: by URL, why the last save there failed; empty while all is well.
        last_step: the optimizer step of the latest snapshot; None where there is none.
    """

    def __init__(
        self,
        run_dir: str,
        url: str,
        identity: Snapshot,
        launch: str,
        optimizer: Optimizer,
        parameters: dict[str, torch.nn.Parameter],
    ):
        self.run_dir, self.url, self.identity = run_dir, url, identity
        self.optimizer, self.parameters = optimizer, parameters
        self.written_by = {"directory": os.path.abspath(run_dir), "launch": launch}  # "run" in every snapshot
        self.errors: dict[str, str] = {}
        self.last_step: int | None = None
        self._stamps: dict[str, str | None] = {}  # by URL, what this process has last found or written there

    def save(self, state: Snapshot, is_best: bool = False) -> None:
        """Save the state of the run as the latest snapshot or as the best one. A failure is logged and remembered.

        Raises:
            RunError: what is there now was written by another run.
        """
        url = best_url(self.url) if is_best else self.url
        try:
            self._check_owner(url)
            # Just saved: the same file, by a second name.
            if is_best and state["step"] == self.last_step and self._stamps.get(self.url):
                duplicate(self.url, url)
            else:
                save_snapshot({**self.identity, **state, "run": self.written_by}, url, keep_previous=not is_best)
            self._stamps[url] = stamp(url)
            self.last_step = self.last_step if is_best else state["step"]
            self.errors.pop(url, None)
        except RunError:
            raise
        except Exception as error:  # a full disk, a store that answers 500: the next save may work again
            self.errors[url] = f"{url}: {type(error).__name__}: {error}"
            log.error("step %d could not be saved, training goes on: %s", state["step"], self.errors[url])

    def open(self, resume: bool, is_restart: bool) -> Snapshot | None:
        """Get ready for saving, and find the snapshot to go on from, with the best one's loss and step as "best".

        Args:
            resume: False moves the run that is there aside.
            is_restart: whether the launcher has started this launch again. What it has written itself, it goes on from.

        Raises:
            ValueError: the snapshot is of another run, or damaged beyond its predecessor; nothing can be saved there.
        """
        prepare(self.url)
        # First, and only two numbers of it: otherwise two whole snapshots would be in memory at once.
        best_loss, best_step, problem = self._best_so_far() if resume or is_restart else (None, 0, "")
        snapshot = load_own(self.url, resume, self.written_by["launch"] if is_restart else None, self._check)
        # Restarted before its first save, a launch finds its own log and curves, and nothing else.
        is_fresh = is_restart and not any(map(stamp, (self.url, previous_url(self.url), best_url(self.url))))
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
                best_loss, best_step = snapshot["best_eval_loss"], snapshot.get("best_step", 0)
            snapshot["best"] = math.inf if best_loss is None else best_loss, best_step
            self.last_step = snapshot["step"]
            log.info("going on from %s after step %d", self.url, snapshot["step"])
        self._stamps = {url: stamp(url) for url in (self.url, best_url(self.url))}
        return snapshot

    def _best_so_far(self) -> tuple[float | None, int, str]:
        """(Loss, step, why it can't be used) of the best snapshot, which may be newer than the latest.

        In a step that is both saved and evaluated, the latest snapshot is written first. If the evaluation finds that
        it is the best, the best snapshot is a second name of the same file, in which the best loss is still an older
        one; the loss is None then. Later snapshots have it. If there is no later one, the run goes on from this very
        step, and evaluates it again (`Trainer._start`).
        """
        url = best_url(self.url)
        try:
            best = load_snapshot(url)
            self._check(best, url)
        except FileNotFoundError:  # there was no evaluation yet
            return math.inf, 0, ""
        except ValueError as error:  # damaged, or of another run
            return math.inf, 0, str(error)
        is_known = best.get("best_step", best["step"]) == best["step"]
        return best["best_eval_loss"] if is_known else None, best["step"], ""

    def _command(self, folder: str) -> str:
        """What to type to go on with a run that was moved to a folder."""
        words = ["python", "main.py", f"hydra.run.dir={folder}"]
        if not is_in(self.url, self.run_dir):
            words.append(f"trainer_config.snapshot_path={_aside(self.url, Path(folder).name)}")
        return shlex.join(words)

    def _check(self, snapshot: Snapshot, url: str) -> None:
        """Raise ValueError unless this run can go on from a snapshot, DamagedSnapshotError where nobody can."""
        check_contents(snapshot, url)
        check_matches(snapshot, self.identity)
        check_optimizer(snapshot, url, self.optimizer, self.parameters)

    def _check_directory(self, snapshot: Snapshot) -> None:
        """Raise ValueError where a snapshot outside of the run directory belongs to the run in another one."""
        other = snapshot.get("run", {}).get("directory", self.run_dir)
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


def load_own(url: str, resume: bool, launch: str | None, check: Callable[[Snapshot, str], None]) -> Snapshot | None:
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


# ----------------------------------------------------------- armour: other runs, base models, moving aside, two at once


def differences(there: Snapshot, here: Snapshot) -> list[tuple[str, Any, Any]]:
    """(Name, value there, value here) of all that differs, the entries of inner dictionaries one by one."""

    def flatten(values: Snapshot) -> Snapshot:
        flat: Snapshot = {}
        for name, value in values.items():
            flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        return flat

    old, new = flatten(there), flatten(here)
    return [(name, old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)]


def check_matches(snapshot: Snapshot, expected: Snapshot) -> None:
    """Raise ValueError, with both values side by side, where a snapshot doesn't belong to this run.

    Args:
        snapshot: what was loaded.
        expected: entries that must be equal, of the same names; dictionaries are compared key by key.
    """
    differing = differences({name: snapshot.get(name) for name in expected}, expected)
    if differing:
        listed = "; ".join(f"{name}: {there!r} there, {here!r} here" for name, there, here in differing)
        raise ValueError(
            f"the snapshot is of another run ({listed}); give this run a directory of its own with "
            "hydra.run.dir=runs/NAME, or start over with trainer_config.resume=false, which moves the old files aside"
        )


def load_base(url: str, own: Snapshot | None) -> Snapshot:
    """The model to fine-tune and its vocabulary: {"model_config", "vocabulary", "model"}.

    Args:
        url: the snapshot of another run, or the directory of a Hugging Face GPT-2, trainer_config.init_from.
        own: the snapshot that this run goes on from. It has them too: the one that it began with may be gone by then.

    Raises:
        ValueError, OSError: there is no usable snapshot, or the run that goes on did not begin with this one.
    """
    if own is None:
        try:
            base = read_directory(url) if is_directory(url) else load_snapshot(url)
        except FileNotFoundError as error:
            raise ValueError(
                f"trainer_config.init_from={url}: there is no snapshot; train that model first, or name another"
            ) from error
        check_model(base, url)
    else:
        base, began = own, own["config"].get("trainer_config", {}).get("init_from")
        if began is None or not is_same_place(began, url):
            raise ValueError(
                f"trainer_config.init_from={url}: the run in this run directory began with {began or 'a new model'} "
                f"and is at step {own['step']}; begin another one with hydra.run.dir=runs/NAME, or in its place with "
                "trainer_config.resume=false, which moves it aside"
            )
        log.info("this run began with %s and goes on from its own snapshot; to begin anew: resume=false", began)
    return {key: base[key] for key in ("model_config", "vocabulary", "model")}


def start_from(model: torch.nn.Module, base: Snapshot) -> None:
    """Give a new model, on all ranks, the weights of another run's, which rank 0 has.

    Its optimizer, its step and its data order start afresh.

    Raises:
        ValueError: the sizes differ. Dropout may differ: it is no part of the weights.
    """
    differing = differences(base["model_config"], vars(model.config))
    sizes = [f"{key} is {there} there and {here} here" for key, there, here in differing if not key.endswith("pdrop")]
    if sizes:
        raise ValueError(
            f"the model of trainer_config.init_from has another shape: {', '.join(sizes)}; set gpt_config and "
            "data_config.block_size as they are there"
        )
    load_weights(dict(model.named_parameters()), base["model"])


def fingerprint(*parts: np.ndarray) -> str:
    """SHA-256 of arrays in their order, hexadecimal: tells whether a snapshot was trained on the same text."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(str(part.shape).encode())
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


RUN_FILES = ("events.out.tfevents.*", "main.log", "config.yaml", "trace.json")  # beside the snapshots


def set_aside(run_dir: str, url: str) -> str:
    """Move all files of a run to one folder in its run directory, which is then a run directory itself.

    A snapshot that lies elsewhere stays in its store: it moves to a folder of the same name beside it. A move that is
    interrupted is finished by the next start.

    Args:
        run_dir: the run directory; other files in it stay.
        url: path or fsspec URL of the latest snapshot.

    Returns:
        The folder, run_dir/old-1 or the next free number; "" where there was nothing to move.

    Raises:
        ValueError: they can't be moved.
    """
    folder = Path(run_dir)
    begun = next(folder.glob("old-*.moving"), None)
    files = [path for pattern in RUN_FILES for path in folder.glob(pattern)]
    snapshots = [u for u in (previous_url(url), best_url(url), f"{url}.damaged", url) if stamp(u)]
    if not (begun or snapshots or any(path.name != "main.log" for path in files)):  # a log alone is this start's own
        return ""
    number = 1
    while (folder / f"old-{number}").exists() or any(stamp(_aside(u, f"old-{number}")) for u in snapshots):
        number += 1
    moving = begun or folder / f"old-{number}.moving"
    name = moving.name.removesuffix(".moving")
    try:
        moving.mkdir(exist_ok=True)
        for path in files:
            target = moving / path.name
            while target.exists():  # of a start between the interrupted move and this one
                target = target.with_name(f"{target.name}+")
            os.replace(path, target)
        for u in snapshots:
            move(u, str(moving / posixpath.basename(u)) if is_in(u, run_dir) else _aside(u, name))
        moving.rename(folder / name)
    except OSError as error:
        raise ValueError(
            f"the run in {run_dir} can't be moved aside ({error}); get permission, or give the new run a directory of "
            "its own with hydra.run.dir=runs/NAME"
        ) from error
    return str(folder / name)


def _aside(url: str, name: str) -> str:
    """Where a file moves to: a folder of that name beside it."""
    folder, slash, file = url.rpartition("/")
    return f"{folder}{slash}{name}/{file}"


def is_half_moved(run_dir: str) -> bool:
    """Whether the program was killed in the middle of `set_aside`."""
    return any(Path(run_dir).glob("old-*.moving"))


def lock(run_dir: str) -> None:
    """Claim a run directory until this process ends, however it ends.

    Raises:
        ValueError: another process has it; two runs would overwrite each other's snapshots.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such locks: there it is up to the user
        return
    directory = os.open(run_dir, os.O_RDONLY)  # stays open: the lock goes when the process goes, killed or not
    # The loader's workers are forked, outlive a killed process by seconds, and must not hold its lock.
    os.register_at_fork(after_in_child=lambda: os.close(directory))
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"another run is at work in {run_dir}; wait for its end, or give this one a directory of its own with "
            "hydra.run.dir=runs/NAME"
        ) from error
    except OSError as error:  # some network file systems know no locks
        log.warning("%s can't be locked (%s): start no second run there", run_dir, error)
