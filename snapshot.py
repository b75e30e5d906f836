"""What is saved of a run, and how it gets to the disk whole or not at all.

Read it after `distributed.py`; `corpus.py` comes next. It alone writes through fsspec, so
a snapshot can live at any URL (a local path, s3://, gs://, memory://).

A snapshot is a plain dictionary of tensors, numbers and strings: `torch.load` reads it without running any code.
"""

import glob
import hashlib
import io
import logging
import os
import posixpath
import uuid
import zipfile
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem

log = logging.getLogger(__name__)

FORMAT_VERSION = 1  # raise it when an older program would misread what this one writes

Snapshot = dict[str, Any]


class DamagedSnapshotError(ValueError):
    """A file that is no whole snapshot: cut off, altered, empty, or something else altogether."""


def save_snapshot(snapshot: Snapshot, url: str, keep_previous: bool = True) -> None:
    """Write a snapshot; at every moment there is a whole one, at `url` or at `previous_url(url)`.

    The state is copied once, into memory, and written from there: that much memory is needed for a moment.

    Args:
        snapshot: tensors, numbers, strings, and lists, tuples and dictionaries of them.
        url: a path or any fsspec URL.
        keep_previous: keep what was there before at `previous_url(url)`.

    Raises:
        OSError: the target can't be written; what was there before is unharmed.
    """
    buffer = io.BytesIO()
    torch.save({"format_version": FORMAT_VERSION, **snapshot}, buffer)
    filesystem, path = fsspec.url_to_fs(url)
    if not isinstance(filesystem, LocalFileSystem):
        if keep_previous and _exists(filesystem, path):
            filesystem.copy(path, previous_url(path))
        # Object stores can't rename, but one whole PUT appears at once or not at all.
        filesystem.pipe_file(path, buffer.getvalue())
        return

    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())  # the bytes must be on the disk before the name points to them
        if keep_previous and os.path.exists(path):
            os.replace(path, previous_url(path))
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    if os.name == "posix":  # a rename is an entry in the directory, and that must reach the disk too
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def load_snapshot(url: str) -> Snapshot:
    """Read a snapshot and verify every byte that counts; tensors arrive on the CPU.

    Raises:
        FileNotFoundError: there is none.
        DamagedSnapshotError: the file is not a whole snapshot.
        ValueError: it was written by a newer version of this program.
        OSError: it can't be read for another reason, a refused permission for example.
    """
    try:
        filesystem, path = fsspec.url_to_fs(url)
        buffer = io.BytesIO(filesystem.cat_file(path))
    except FileNotFoundError:
        raise
    except Exception as error:  # each of fsspec's backends raises errors of its own
        raise OSError(f"{url} can't be read ({type(error).__name__}: {error})") from error
    try:
        # torch.load doesn't look at the checksums: a flipped bit in a tensor would pass.
        with zipfile.ZipFile(buffer) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"checksum of {damaged} is wrong")
        buffer.seek(0)
        # weights_only: a pickle can run any program; this reads data and refuses everything else.
        snapshot = torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise almost anything: zip, pickle, key, value, Unicode errors, EOF
        reason = str(error).split("\n")[0]
        raise DamagedSnapshotError(f"{url} is not a whole snapshot ({type(error).__name__}: {reason})") from error
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("format_version"), int):
        raise DamagedSnapshotError(f"{url} is not a snapshot of this program")
    if snapshot["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{url} has format {snapshot['format_version']}, and this program reads up to {FORMAT_VERSION}; "
            "use the newer program that wrote it"
        )
    return snapshot


class RunSnapshots:
    """The snapshots of one run, as rank 0 keeps them: the latest, the one before it, and the best.

    Args:
        url: path or fsspec URL of the latest.
        identity: what a snapshot must share with this run to be continued by it.

    Attributes:
        errors: by URL, why the last save there failed; empty while all is well.
    """

    def __init__(self, url: str, identity: Snapshot):
        self.url, self.identity = url, identity
        self.errors: dict[str, str] = {}

    def save(self, state: Snapshot, is_best: bool = False) -> None:
        """Save the state of the run as the latest snapshot or as the best one. A failure is logged and remembered."""
        url = best_url(self.url) if is_best else self.url
        try:
            save_snapshot({**self.identity, **state}, url, keep_previous=not is_best)
            self.errors.pop(url, None)
        except Exception as error:  # a full disk, a store that answers 500: the next save may work again
            self.errors[url] = f"{url}: {type(error).__name__}: {error}"
            log.error("step %d could not be saved, training goes on: %s", state["step"], self.errors[url])

    def open(self, may_resume: bool) -> Snapshot | None:
        """Get ready for saving, and find the snapshot to go on from, with the best one's loss and step as "best".

        Args:
            may_resume: False moves existing snapshots aside.

        Raises:
            ValueError: the snapshot is of another run, or damaged beyond its predecessor; nothing can be saved there.
        """
        prepare(self.url)
        if not may_resume:
            for name in set_aside(self.url):
                log.info("moved an old snapshot aside: %s", name)
            return None
        snapshot = load_newest(self.url)
        if snapshot is not None:
            check_matches(snapshot, self.identity)
            snapshot["best"] = self._best_so_far()
            log.info("going on from %s after step %d", self.url, snapshot["step"])
        return snapshot

    def _best_so_far(self) -> tuple[float, int]:
        """(Loss, step) of the best snapshot, which may be newer than the last one; (inf, 0) where none can be used."""
        try:
            best = load_snapshot(best_url(self.url))
            check_matches(best, self.identity)
        except FileNotFoundError:  # there was no evaluation yet
            return float("inf"), 0
        except ValueError as error:  # damaged, or of another run
            log.warning("no usable best snapshot, the next evaluation makes one: %s", error)
            return float("inf"), 0
        return best["best_eval_loss"], best["step"]


def previous_url(url: str) -> str:
    """Where the last but one snapshot is kept: gpt_snapshot.pt -> gpt_snapshot.prev.pt."""
    return _with_tag(url, "prev")


def best_url(url: str) -> str:
    """Where the snapshot with the lowest evaluation loss is kept: gpt_snapshot.pt -> gpt_snapshot.best.pt."""
    return _with_tag(url, "best")


def _with_tag(url: str, tag: str) -> str:
    stem, extension = posixpath.splitext(url)
    return f"{stem}.{tag}{extension}"


# ------------------------------------------- armour: damaged files, other runs, stores that fail, two runs at once


def load_newest(url: str) -> Snapshot | None:
    """The snapshot at `url`, or the previous one where that is missing or damaged; None where there never was one.

    A damaged file is kept as `url`.damaged when the previous one stands in for it.

    Raises:
        ValueError: there are snapshots, and all are damaged. That is never taken for a fresh start.
        OSError: it can't be known whether there is one.
    """
    problems = []
    for candidate in (url, previous_url(url)):
        try:
            snapshot = load_snapshot(candidate)
        except FileNotFoundError:
            continue
        except DamagedSnapshotError as error:
            log.warning("%s", error)
            problems.append(str(error))
            continue
        if problems:
            log.warning("going on from the previous snapshot, %s", candidate)
            # Off the name: the next save makes the newest file the previous one, and this must not take its place.
            filesystem, path = fsspec.url_to_fs(url)
            filesystem.mv(path, f"{path}.damaged")
        return snapshot
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}: no usable snapshot is left. "
            "Put one back, or start over with trainer_config.resume=false, which moves these files aside"
        )
    return None


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


def load_base(url: str, own_url: str, may_resume: bool) -> Snapshot:
    """The model to fine-tune and its vocabulary: {"model_config", "vocabulary", "model"}.

    A run that goes on has them in its own snapshot: the one that it began with may be gone by then.

    Args:
        url: the snapshot of another run.
        own_url: where this run's snapshot is, if there is one.
        may_resume: whether this run goes on from it.

    Raises:
        ValueError, OSError: there is no usable snapshot.
    """
    base = load_newest(own_url) if may_resume else None
    try:
        if base is None:
            base = load_snapshot(url)
    except FileNotFoundError as error:
        raise ValueError(
            f"trainer_config.init_from={url}: there is no snapshot; train that model first, or name another"
        ) from error
    return {key: base[key] for key in ("model_config", "vocabulary", "model")}


def start_from(model: torch.nn.Module, base: Snapshot) -> None:
    """Give a new model the weights of another run's; its optimizer, its step and its data order start afresh.

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
    model.load_state_dict(base["model"])


def fingerprint(*parts: np.ndarray) -> str:
    """SHA-256 of arrays in their order, hexadecimal: tells whether a snapshot was trained on the same text."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(str(part.shape).encode())
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def set_aside(url: str) -> list[str]:
    """Rename a run's snapshots to names that are free, so that a new run can take their place.

    Returns:
        The new names.
    """
    filesystem, path = fsspec.url_to_fs(url)
    existing = [p for p in (path, previous_url(path), best_url(path)) if _exists(filesystem, p)]
    number = 1
    while any(_exists(filesystem, f"{p}.old{number}") for p in existing):
        number += 1
    renamed = [f"{p}.old{number}" for p in existing]
    for old, new in zip(existing, renamed, strict=True):
        filesystem.mv(old, new)
    return renamed


def prepare(url: str) -> None:
    """Remove what a killed process left half-written, and find out whether a snapshot can be written, before training.

    Raises:
        ValueError: it can't.
    """
    try:
        filesystem, path = fsspec.url_to_fs(url)
        probe = f"{path}.{uuid.uuid4().hex}.tmp"
        if isinstance(filesystem, LocalFileSystem):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            for target in (path, best_url(path)):
                for leftover in glob.glob(f"{glob.escape(target)}.{'[0-9a-f]' * 32}.tmp"):
                    os.unlink(leftover)
        filesystem.pipe_file(probe, b"can this be written?")
        filesystem.rm_file(probe)
    except Exception as error:  # each of fsspec's backends raises errors of its own
        raise ValueError(
            f"snapshots can't be written to {url} ({type(error).__name__}: {error}); free some space, get permission, "
            "or name another place with trainer_config.snapshot_path"
        ) from error


def _exists(filesystem: Any, path: str) -> bool:
    """Whether a file is there; fsspec's own `exists` says no for every error, a time-out too."""
    try:
        filesystem.info(path)
    except FileNotFoundError:
        return False
    return True


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
