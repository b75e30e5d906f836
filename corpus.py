"""Armour: where a text comes from, that is, a file, a URL, a download, or the short play beside this program.

A first reader can skip this file: `read_text` returns a string, and everything after that is in `char_dataset.py`. It
imports nothing of the project. `report.py` comes next.
"""

import hashlib
import os
import uuid
from pathlib import Path

import fsspec

CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BUNDLED_TEXT = Path(__file__).resolve().parent / "data" / "sample.txt"


def read_text(path: str) -> str:
    """Read a whole text from any fsspec URL; `.gz` and other compressions are recognised by the name.

    A byte-order mark is dropped and Windows line ends become newlines: neither is part of what the author wrote.

    Raises:
        ValueError: the text can't be read, is empty, or is not UTF-8 (with the offset of the first bad byte).
    """
    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            content = file.read()
    except Exception as error:  # each of fsspec's backends raises errors of its own
        raise ValueError(
            f"data_config.path={path} can't be read ({describe(error)}); "
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
        raise OSError(f"{url}: {describe(error)}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise OSError(f"{url}: got {len(content)} bytes with SHA-256 {digest}, expected {sha256}")

    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its target and then renamed: a reader sees no file or the whole file, however many write at once.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def describe(error: BaseException) -> str:
    """An error's type and text in one line, of the first in a chain: fsspec says "not found" for most others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())
