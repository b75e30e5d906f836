"""Where a text comes from: a file, a URL, a download, or the short play beside this module."""

import hashlib
import logging
import os
from pathlib import Path

import fsspec

from char_dataset import DataConfig
from config import PROJECT
from console.errors import cause, described
from distributed import Ranks, all_gather
from snapshot import check_is_file, local_path, temporary_beside

log = logging.getLogger(__name__)

CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BUNDLED_TEXT = PROJECT / "data" / "sample.txt"


def find_text(path: str, ranks: Ranks) -> tuple[str, str]:
    """Where the text of a run is. The default text is downloaded if it is missing; one of the user is not replaced.

    Returns:
        (path or URL of the text to train on, a warning if that is the bundled one, so that nobody can miss it).
    """
    if path != DataConfig.path:
        return path, ""
    default = PROJECT / path
    failure = ""
    if ranks.local_rank == 0 and not default.exists():  # one rank of each node fetches
        try:
            download_corpus(default)
            log.info("downloaded tiny-shakespeare to %s", default)
        except OSError as error:
            failure = str(error)
    failures = [reason for reason in all_gather(failure) if reason]  # makes the others wait, and all nodes agree
    if not failures:
        return str(default), ""
    return str(BUNDLED_TEXT), (
        f"WARNING: no tiny-shakespeare ({failures[0]}). Training on the short text that comes with the project, "
        f"{BUNDLED_TEXT}: its losses can't be compared. Put a text at data/input.txt, or connect to the network, and "
        "start with trainer_config.resume=false."
    )


def read_text(path: str) -> str:
    """Read a whole text from any fsspec URL; `.gz` and other compressions are recognised by the name.

    A byte-order mark is dropped and Windows line ends become newlines: neither is part of what the author wrote.

    Raises:
        ValueError: the text can't be read, is empty, or is not UTF-8 (with the offset of the first bad byte).
    """
    try:
        if place := local_path(path):
            check_is_file(place)
        with fsspec.open(path, "rb", compression="infer") as file:
            content = file.read()
    except Exception as error:  # each of fsspec's backends raises errors of its own
        raise ValueError(
            f"data_config.path={path} can't be read ({described(cause(error))}); "
            "give a UTF-8 text file, or any fsspec URL of one"
        ) from error
    try:
        text: str = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data_config.path={path} is not UTF-8: byte {content[error.start]:#04x} at offset {error.start}; "
            "convert it, for example with iconv -t utf-8"
        ) from error
    del content  # a text of a gigabyte need not be in memory twice
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.removeprefix("\ufeff")
    if not text:
        raise ValueError(f"data_config.path={path} is empty: there is nothing to train on")
    return text


def download_corpus(path: Path, url: str = CORPUS_URL, sha256: str = CORPUS_SHA256) -> None:
    """Download a text to `path`, which appears complete and verified, or not at all.

    Args:
        path: the local file to create.
        url: any fsspec URL.
        sha256: the hexadecimal digest that the bytes must have.

    Raises:
        OSError: the download failed, was cut off, or does not have the digest.
    """
    options = {}
    if url.startswith("http"):
        import aiohttp  # what fsspec's http extra brings

        # A firewall that silently drops packets: give up after 10 seconds. Proxies come from the system.
        timeout = aiohttp.ClientTimeout(total=300, sock_connect=10, sock_read=10)
        options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    try:
        with fsspec.open(url, "rb", **options) as source:
            content = source.read()
    except Exception as error:  # each of fsspec's backends raises errors of its own
        raise OSError(f"{url}: {described(cause(error))}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise OSError(f"{url}: got {len(content)} bytes with SHA-256 {digest}, expected {sha256}")

    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(str(path)) as temporary:  # however many download at once
        Path(temporary).write_bytes(content)
        os.replace(temporary, path)
