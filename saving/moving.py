"""What a run directory remembers, how a run is moved aside as a whole, and the lock on the directory."""

import logging
import os
from pathlib import Path
from typing import Any

import yaml  # comes with hydra-core

from console.errors import described
from snapshot import best_url, is_in, move, previous_url, stamp, temporary_beside, write_to_disk

log = logging.getLogger(__name__)

SNAPSHOT = "gpt_snapshot.pt"
CONFIG = "config.yaml"  # says where the run keeps its snapshots
RUN_FILES = ("events.out.tfevents.*", "main.log", "trace.json")  # what else a run leaves beside them


def snapshot_url(run_dir: str) -> str:
    """Where the run in a directory keeps its latest snapshot; ValueError if its config.yaml can't be read.

    A name without a folder is that of a file in the run directory, wherever that has moved.
    """
    place = _read_config(run_dir)["trainer_config"].get("snapshot_path") or SNAPSHOT
    return place if "://" in place else str(Path(run_dir) / place)


def write_config(run_dir: str | Path, config: dict[str, Any]) -> None:
    """Write a run's config.yaml as a whole or not at all: the run is where it says."""
    path = str(Path(run_dir) / CONFIG)
    with temporary_beside(path) as temporary:
        write_to_disk(temporary, yaml.safe_dump(config, allow_unicode=True, sort_keys=False).encode())
        os.replace(temporary, path)


def _read_config(run_dir: str) -> dict[str, Any]:
    path = Path(run_dir) / CONFIG
    try:
        config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        config["trainer_config"].get("snapshot_path")
    except FileNotFoundError:  # no run has begun here
        return {"trainer_config": {}}
    except Exception as error:  # whatever somebody has written into it
        raise ValueError(
            f"{path} doesn't say where the run there keeps its snapshots ({described(error)}); mend it, or remove it if"
            " they are there"
        ) from error
    return config


def snapshots_at(url: str) -> list[str]:
    """The snapshots of a run that are there, beginning with the latest, and what has been put aside as damaged."""
    names = [url, previous_url(url), best_url(url), f"{url}.damaged", f"{best_url(url)}.damaged"]
    return [name for name in names if stamp(name)]


def set_aside(run_dir: str) -> str:
    """Move all that the run in a directory has written to a folder in it, which is then a run directory itself.

    Snapshots that lie elsewhere stay in their store: they move to a folder of the same name beside them. A move that is
    interrupted is finished by the next call. ValueError: they can't be moved.

    Returns:
        The folder, run_dir/old-1 or the next free number; "" where there was nothing to move.
    """
    folder, url = Path(run_dir), snapshot_url(run_dir)
    begun = next(folder.glob("old-*.moving"), None)  # the program was killed in the middle of this
    snapshots = [*dict.fromkeys(snapshots_at(url) + snapshots_at(str(folder / SNAPSHOT)))]
    has_config = (folder / CONFIG).exists()
    if not (begun or snapshots or has_config):
        return ""
    number = 1
    while (folder / f"old-{number}").exists() or any(stamp(beside(u, f"old-{number}")) for u in snapshots):
        number += 1
    moving = begun or folder / f"old-{number}.moving"
    name = moving.name.removesuffix(".moving")
    try:
        moving.mkdir(exist_ok=True)
        for u in snapshots:
            move(u, beside(u, moving.name if is_in(u, run_dir) else name))
        for path in [path for pattern in RUN_FILES for path in folder.glob(pattern)]:
            os.replace(path, moving / path.name)
        if has_config:  # last: until then it says what is still to be moved
            config = _read_config(run_dir)
            if not is_in(url, run_dir):
                config["trainer_config"]["snapshot_path"] = beside(url, name)
            write_config(moving, config)
            (folder / CONFIG).unlink()
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
