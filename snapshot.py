"""What a snapshot is, and how it gets to the disk whole or not at all.

Read it after `distributed.py`; `config.py` comes next. It alone writes through fsspec, so a snapshot can live at any
URL (a local path, s3://, gs://, memory://). `Trainer._save` says what is in it.

A snapshot is a plain dictionary of tensors, numbers and strings: `torch.load` reads it without running any code.
"""

import glob
import hashlib
import io
import logging
import os
import posixpath
import re
import stat
import struct
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pickletools import genops
from typing import Any

import fsspec
import torch
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from console.errors import described

log = logging.getLogger(__name__)

FORMAT_VERSION = 3  # raise it when another program would misread what this one writes

Snapshot = dict[str, Any]


class DamagedSnapshotError(ValueError):
    """A file that is no usable snapshot: cut off, altered, empty, of odd content, or something else altogether."""


def save_snapshot(snapshot: Snapshot, url: str, keep_previous: bool = True, is_first: bool = False) -> None:
    """Write a snapshot; from the first one on, there is a whole one at `url` at every moment.

    The state is copied once, into memory, and written from there: that much memory is needed for a moment.

    Args:
        snapshot: tensors, numbers, strings, and lists, tuples and dictionaries of them.
        url: a path or any fsspec URL.
        keep_previous: keep what was there before at `previous_url(url)`.
        is_first: nothing is to be replaced. On a local disk, of two that come at the same moment one fails; a store
            keeps the later one.

    Raises:
        OSError: the target can't be written, or a store doesn't answer in time; what was there before is unharmed.
    """
    buffer = io.BytesIO()
    # Without what a snapshot that was loaded brings along.
    contents = {key: value for key, value in snapshot.items() if key not in ("format_version", "digest")}
    torch.save({"format_version": FORMAT_VERSION, "digest": digest(contents), **contents}, buffer)
    filesystem, path = store_of(url)
    if not isinstance(filesystem, LocalFileSystem):
        until = time.monotonic() + SECONDS_TO_ANSWER + buffer.tell() / BYTES_A_SECOND
        with suppress(FileNotFoundError):  # the first one has no previous
            if keep_previous:
                ask(filesystem, "cp_file", path, previous_url(path), until=until)
        # Object stores can't rename, but one whole PUT appears at once or not at all.
        ask(filesystem, "pipe_file", path, buffer.getvalue(), until=until)
        return

    os.makedirs(os.path.dirname(path), exist_ok=True)
    for name in (path, previous_url(path)):
        if os.path.isdir(name):  # somebody's; no file can be put in its place
            put_aside(name)
    with temporary_beside(path) as temporary:
        write_to_disk(temporary, buffer.getbuffer())  # before the name points to it
        if is_first:
            _link(temporary, path)  # a rename would replace what another run may just have put there
        elif keep_previous and os.path.isfile(path):
            with temporary_beside(previous_url(path)) as second:
                os.replace(second if _link(path, second) else path, previous_url(path))
        os.replace(temporary, path)
    _force_to_disk(os.path.dirname(path))  # a rename is an entry in the directory, and that must reach the disk too


def store_of(url: str) -> tuple[Any, str]:
    """The store that a URL leads to, and the path in it. What begins with no protocol is a path, "::" and all."""
    protocol = re.match(r"(\w[\w+.-]*)(://|::)", url)
    if protocol and (protocol[2] == "://" or protocol[1] in fsspec.available_protocols()):
        return tuple(fsspec.url_to_fs(url))
    return LocalFileSystem(), LocalFileSystem._strip_protocol(url)


def write_to_disk(path: str, content: Any) -> None:
    """Write bytes to a new file, and wait until they are on the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def temporary_beside(path: str) -> Iterator[str]:
    """A name beside a file's own, to write it under and to rename it from: readers see all of a file or nothing."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        yield temporary
    finally:
        with suppress(FileNotFoundError):  # it has its own name now; if not, the rest of it goes
            os.unlink(temporary)


def load_snapshot(url: str) -> Snapshot:
    """Read a snapshot and verify every byte that counts; tensors arrive on the CPU.

    Raises:
        FileNotFoundError: there is none.
        DamagedSnapshotError: the file, or the directory that is there, is not a whole snapshot.
        ValueError: it was written by another version of this program.
        OSError: it can't be read for another reason, a refused permission for example.
    """
    try:
        filesystem, path = store_of(url)
        is_local = isinstance(filesystem, LocalFileSystem)
        if is_local:
            check_is_file(path)
        file: Any = open(path, "rb") if is_local else io.BytesIO(filesystem.cat_file(path))  # noqa: SIM115
    except FileNotFoundError:
        raise
    except IsADirectoryError as error:
        raise DamagedSnapshotError(f"{url} is a directory; name a file in it") from error
    except Exception as error:  # each of fsspec's backends raises errors of its own
        raise OSError(f"{url} can't be read ({described(error)})") from error
    with file:
        try:
            check_archive(file)
            # weights_only: a pickle can run any program; this reads data and refuses everything else.
            snapshot = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(snapshot, dict) or type(snapshot.get("format_version")) is not int:
                raise ValueError("not a snapshot of this program")
            check_digest(snapshot)
        except Exception as error:  # damaged files raise almost anything: zip, pickle, key, value, Unicode errors, EOF
            raise DamagedSnapshotError(f"{url} is not a whole snapshot ({described(error)})") from error
    if snapshot["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{url} has format {snapshot['format_version']}, and this program reads format {FORMAT_VERSION}; "
            "use the version of the program that wrote it, or start over with trainer_config.resume=false"
        )
    return snapshot


def previous_url(url: str) -> str:
    """Where the last but one snapshot is kept: gpt_snapshot.pt -> gpt_snapshot.prev.pt."""
    return ".prev".join(posixpath.splitext(url))


def best_url(url: str) -> str:
    """Where the snapshot with the lowest evaluation loss is kept: gpt_snapshot.pt -> gpt_snapshot.best.pt."""
    return ".best".join(posixpath.splitext(url))


# ------------------------------------------------------------- armour: damaged files, stores that fail or don't answer

# A save to a store has failed after SECONDS_TO_ANSWER + its bytes / BYTES_A_SECOND: training goes on without it, and
# the other ranks don't wait longer. Reading has no such limit: at the start there is no training to hold up.
SECONDS_TO_ANSWER = 60.0
BYTES_A_SECOND = 10e6


def check_archive(file: Any) -> None:
    """Raise ValueError or zipfile.BadZipFile unless a file is an archive as torch writes it, to the last checksum."""
    with zipfile.ZipFile(file) as archive:
        records, size = archive.infolist(), file.seek(-98, os.SEEK_END) + 98
        if sum(record.file_size for record in records) > size:  # it would fill the memory
            raise zipfile.BadZipFile("it unpacks to more bytes than it has")
        # What zipfile has found must be what torch will find: the first record begins the file, three more end it, and
        # below 4 GB no size is in an extra field.
        end = struct.unpack("<4s44xQ4s4xQ4x4s16xH", file.read())
        is_odd = end != (b"PK\6\6", archive.start_dir, b"PK\6\7", size - 98, b"PK\5\6", 0) or records[0].header_offset
        if is_odd or any(record.compress_type or (record.extra and size < 2**32) for record in records):
            raise zipfile.BadZipFile("not as torch writes it")
        # torch.load doesn't look at the checksums: a flipped bit in a tensor would pass.
        damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"checksum of {damaged} is wrong")
        # torch lets a pickle call more than what makes tensors: bytearray(10**10), for example.
        for record in records:
            for opcode, name, _ in genops(archive.read(record)) if "data.pkl" in record.filename.lower() else ():
                if opcode.name == "GLOBAL" and not re.fullmatch(CALLED, str(name)):
                    raise ValueError(f"it would call {name}")
    file.seek(0)


CALLED = r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage"  # by the pickle of a snapshot


def digest(value: Any) -> str:
    """SHA-256 of all that is in a snapshot, hexadecimal: tells whether its parts belong together as they were saved."""
    sha, waiting = hashlib.sha256(), [value]
    for _ in range(1_000_000):  # parts that hold each other would never end
        if not waiting:
            return sha.hexdigest()
        part = waiting.pop()
        if isinstance(part, Tensor):
            if part.numel() * part.element_size() > part.untyped_storage().nbytes():
                raise ValueError("a tensor that is larger than its data")
            sha.update(f"{part.dtype} {tuple(part.shape)}".encode())
            sha.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(part, dict):
            sha.update(f"{len(part)} entries {[*part]}".encode())
            waiting += part.values()
        elif isinstance(part, list | tuple):
            sha.update(f"{type(part).__name__} of {len(part)}".encode())
            waiting += part
        else:
            sha.update(f"{part!r},".encode())
    raise ValueError("a million parts or more")


def check_digest(snapshot: Snapshot) -> None:
    """Take the digest out of a snapshot, and raise ValueError unless it is that of the rest.

    Checksums tell that a file is as somebody wrote it; this tells that this program did. A snapshot made by hand may
    have none, and that of another version counts otherwise.
    """
    expected = snapshot.pop("digest", None)
    contents = {key: value for key, value in snapshot.items() if key != "format_version"}
    if expected is not None and snapshot["format_version"] == FORMAT_VERSION and expected != digest(contents):
        raise ValueError("its parts are not those that were saved together")


def load_newest(url: str, check: Callable[[Snapshot, str], None] = lambda snapshot, url: None) -> Snapshot | None:
    """The snapshot at `url`, or the previous one where that is missing or damaged; None where there never was one.

    A damaged file is kept as `url`.damaged when the previous one stands in for it. Damaged is also what `check`, called
    with a snapshot and its URL, raises DamagedSnapshotError for.

    Raises:
        ValueError: there are snapshots, and all are damaged. That is never taken for a fresh start.
        OSError: it can't be known whether there is one.
    """
    problems = []
    for candidate in (url, previous_url(url)):
        try:
            snapshot = load_snapshot(candidate)
            check(snapshot, candidate)
        except FileNotFoundError:
            continue
        except DamagedSnapshotError as error:
            log.warning("%s", error)
            problems.append(str(error))
            continue
        if candidate != url:
            log.warning("going on from the previous snapshot, %s", candidate)
        if problems:
            # Off the name: the next save makes the newest file the previous one, and this must not take its place.
            put_aside(url)
        return snapshot
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}: no usable snapshot is left. "
            "Put one back, or start over with trainer_config.resume=false, which moves these files aside"
        )
    return None


def prepare(url: str) -> None:
    """Remove what a killed process left half-written, and raise ValueError where no snapshot could be written."""
    try:
        filesystem, path = store_of(url)
        is_directory = ask(filesystem, "isdir", path)
        if not is_directory:
            probe = f"{path}.{uuid.uuid4().hex}.tmp"
            if isinstance(filesystem, LocalFileSystem):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                for target in (path, previous_url(path), best_url(path)):
                    for leftover in glob.glob(f"{glob.escape(target)}.{'[0-9a-f]' * 32}.tmp"):
                        os.unlink(leftover)
            ask(filesystem, "pipe_file", probe, b"can this be written?")
            with suppress(FileNotFoundError):  # another run that begins there took it for a killed one's
                ask(filesystem, "rm_file", probe)
    except Exception as error:  # each of fsspec's backends raises errors of its own
        raise ValueError(
            f"snapshots can't be written to {url} ({described(error)}); free some space, get permission, "
            "or name another place with trainer_config.snapshot_path"
        ) from error
    if is_directory:
        raise ValueError(
            f"trainer_config.snapshot_path={url} is a directory; name a file in it, for example "
            f"{url.rstrip('/')}/gpt_snapshot.pt"
        )


def ask(filesystem: Any, method: str, *args: Any, until: float | None = None) -> Any:
    """Call a method of a store; TimeoutError at `until` (time.monotonic()): its own client would try for many minutes.

    Only network stores can be given up; what a disk is asked, it answers when it can.
    """
    if not filesystem.async_impl:
        return getattr(filesystem, method)(*args)
    seconds = SECONDS_TO_ANSWER if until is None else max(until - time.monotonic(), 0.001)
    try:
        return sync(filesystem.loop, getattr(filesystem, f"_{method}"), *args, timeout=seconds)
    except FSTimeoutError as error:
        raise TimeoutError(f"no answer from the store within {seconds:.0f} s") from error


def stamp(url: str) -> str | None:
    """What changes whenever another file is written to a URL; None where nothing is there."""
    filesystem, path = store_of(url)
    filesystem.invalidate_cache()
    try:
        if isinstance(filesystem, LocalFileSystem):
            status = os.stat(path)
            return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"  # a second name changes its other entries
        return str(ask(filesystem, "info", path))
    except FileNotFoundError:
        return None


def put_aside(url: str) -> str:
    """Move what is damaged off its name, and return the new one. One damaged file is kept, and every directory."""
    target = f"{url}.damaged" if not os.path.isdir(local_path(url) or "") else f"{url}.{uuid.uuid4().hex[:8]}"
    move(url, target)
    return target


def move(url: str, target: str) -> None:
    """Move a file within its store."""
    filesystem, path = store_of(url)
    goal = store_of(target)[1]
    if isinstance(filesystem, LocalFileSystem):
        os.makedirs(os.path.dirname(goal), exist_ok=True)
        os.replace(path, goal)
    else:
        filesystem.mv(path, goal)


def is_in(url: str, folder: str) -> bool:
    """Whether a file lies in a folder of this machine's disks."""
    path = local_path(url)
    return path is not None and os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)


def local_path(url: str) -> str | None:
    """The path of a file on this machine's disks; None where a URL leads to a store."""
    filesystem, path = store_of(url)
    return path if isinstance(filesystem, LocalFileSystem) else None


def _link(path: str, name: str) -> bool:
    """Give a file a second name, unless the name is taken (FileExistsError). False on a file system that has none."""
    try:
        os.link(path, name)
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise
        return False
    return True


def check_is_file(path: str) -> None:
    """Raise OSError if a path leads to a pipe or a device: whoever reads one may wait, or read on, for ever."""
    if stat.S_IFMT(os.stat(path).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):  # reading a directory says what it is
        raise OSError(f"{posixpath.basename(path)} is a pipe or a device, not a file")


def _force_to_disk(path: str) -> None:
    """Force a directory's entries to the disk."""
    if os.name == "posix":  # other systems can't open a directory
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
