"""Machines that train together and are not alike, in their programs, their texts or their disks.

docs/cluster.md says the rest about many machines.
"""

import hashlib
import logging
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from char_dataset import DataConfig
from config import PROJECT
from distributed import Ranks, all_gather, broadcast_from_main
from snapshot import local_path

log = logging.getLogger(__name__)


def versions(values: dict[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks before they begin; paths may differ, for the text itself is compared later."""
    program, paths = hashlib.sha256(), ("path", "snapshot_path", "init_from")
    for path in program_files():
        program.update(str(path.relative_to(PROJECT)).encode() + path.read_bytes())
    settings = [  # of a path, whether there is one, or the default's
        (group, key, value if key not in paths else value in (None, DataConfig.path))
        for group, keys in values.items()
        for key, value in keys.items()
    ]
    return {
        "program": program.hexdigest()[:12],
        "configuration": hashlib.sha256(repr(settings).encode()).hexdigest()[:12],
        "torch": str(torch.__version__),
    }


def program_files() -> list[Path]:
    """The modules that a run can be made of: those in the root, and those in the folders for one subject each."""
    rooms = [init.parent for init in PROJECT.glob("*/__init__.py")]
    return sorted(path for room in (PROJECT, *rooms) for path in room.glob("*.py"))


def warn_of_separate_disks(snapshot_path: str, ranks: Ranks) -> None:
    """Warn where other nodes don't see the files that rank 0 writes, the snapshots above all."""
    path, name = local_path(snapshot_path), ""
    if ranks.is_main and path is not None:
        name = f".{uuid.uuid4().hex}.tmp"  # `snapshot.prepare` removes what a killed process has left
        Path(path + name).touch()
    looked_for = broadcast_from_main(name)
    is_blind = bool(looked_for) and not (path is not None and Path(path + looked_for).exists())
    blind = [f"{rank} ({host})" for rank, (host, b) in enumerate(all_gather((socket.gethostname(), is_blind))) if b]
    if name:
        Path(str(path) + name).unlink(missing_ok=True)  # another run that begins there may have taken it away
    if blind and ranks.is_main:
        log.warning(
            "WARNING: the disk of %s isn't that of rank %s: if rank 0 were there after a restart, the run would "
            "find no snapshot and begin from step 0. Put the run directory (hydra.run.dir) on a disk that all machines "
            "share, or let trainer_config.snapshot_path name a URL such as s3://BUCKET/gpt_snapshot.pt",
            *(path, ", ".join(blind)),
        )


def check_alike(own: dict[str, str], ranks: Ranks) -> None:
    """End all ranks with one line where they don't start from the same, before that costs a result.

    Args:
        own: what this rank starts from, by name: digests and versions.
        ranks: this process's place among the ranks.

    Raises:
        ValueError: on rank 0, somebody has something else than rank 0.
        SystemExit: on the other ranks then. They say nothing.
    """
    places: dict[tuple[str, str], list[str]] = {}  # (what it is, what it should be): on which ranks
    for rank, (host, theirs) in enumerate(all_gather((socket.gethostname(), own))):
        if rank == 0:
            first, first_host = theirs, host
        for name in own:
            if theirs.get(name) != first.get(name):
                key = f"{name} {theirs.get(name)}", f"{first.get(name)} on rank 0 ({first_host})"
                places.setdefault(key, []).append(f"{rank} ({host})")
    if not places:
        return
    if not ranks.is_main:
        time.sleep(3)  # torchrun stops all ranks when the first one ends: that should be the one that says why
        sys.exit(1)
    listed = "; ".join(f"{there} on rank {', '.join(where)}, {here}" for (there, here), where in places.items())
    raise ValueError(
        f"not all ranks start from the same: {listed}; give all machines the same project, text and torch (a disk "
        "that they share does), and start all ranks by the same command"
    )
