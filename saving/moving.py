"""A run that is started over: all files of the old one move together. And the lock on a run directory."""

import logging
import os
import posixpath
from pathlib import Path

from snapshot import best_url, is_in, move, previous_url, stamp

log = logging.getLogger(__name__)

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
    while (folder / f"old-{number}").exists() or any(stamp(beside(u, f"old-{number}")) for u in snapshots):
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
            move(u, str(moving / posixpath.basename(u)) if is_in(u, run_dir) else beside(u, name))
        moving.rename(folder / name)
    except OSError as error:
        raise ValueError(
            f"the run in {run_dir} can't be moved aside ({error}); get permission, or give the new run a directory of "
            "its own with hydra.run.dir=runs/NAME"
        ) from error
    return str(folder / name)


def beside(url: str, name: str) -> str:
    """Where a file moves to from its place: a folder of that name there."""
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
