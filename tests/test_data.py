"""Where a text comes from: odd files, URLs, and downloads that fail or meet each other."""

import gzip
import hashlib
import http.server
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from conftest import HANGS

from data.corpus import download_corpus, read_text

# --- Reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "Größe\n𝄞 line\n".encode(),
        "\ufeffGröße\n𝄞 line\n".encode(),
        "\ufeffGröße\r\n𝄞 line\r\n".encode(),
        "Größe\r𝄞 line\r".encode(),
    ],
    ids=["plain", "byte-order mark", "byte-order mark and CRLF", "CR"],
)
def test_byte_order_mark_and_line_ends_are_not_text(tmp_path, content):
    """Catches a BOM or a carriage return that becomes a symbol of the vocabulary."""
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert read_text(str(path)) == "Größe\n𝄞 line\n"


def test_compressed_text_is_read(tmp_path):
    """Catches reading the compressed bytes themselves."""
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress("häuser\n".encode()))
    assert read_text(str(path)) == "häuser\n"


def test_any_url_is_read():
    """Catches built-in open() where fsspec is promised."""
    fsspec.filesystem("memory").pipe("/test_any_url/text.txt", b"abc\n")
    assert read_text("memory://test_any_url/text.txt") == "abc\n"


@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [(b"caf\xe9 au lait", 3, "0xe9"), (b"\xef\xbb\xbfab\xff", 5, "0xff"), ("ä".encode() + b"\x80", 2, "0x80")],
)
def test_text_that_is_not_utf8_is_located(tmp_path, content, offset, byte):
    """Catches a traceback, a silent replacement character, and an offset in characters instead of bytes."""
    path = tmp_path / "latin.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"not UTF-8: byte {byte} at offset {offset};") as caught:
        read_text(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"], ids=["nothing", "only a byte-order mark"])
def test_empty_text_is_refused(tmp_path, content):
    """Catches an empty text that fails later, as `__len__() should return >= 0`."""
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is empty") as caught:
        read_text(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["missing.txt", "", "broken.txt.gz"], ids=["missing", "a directory", "not a gzip file"]
)
def test_unreadable_text_is_named(tmp_path, name):
    """Catches a traceback of the file system's own where one line should name the path."""
    (tmp_path / "broken.txt.gz").write_bytes(b"this is no gzip file")
    with pytest.raises(ValueError, match="can't be read") as caught:
        read_text(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_files_are_read(tmp_path, kind):
    """Catches a start that waits for ever for a pipe's other end, and one that reads from a device without an end."""
    path = tmp_path / "text.txt"
    if kind == "pipe":
        os.mkfifo(path)
        other_end = os.open(path, os.O_RDWR)  # a reader that is let in finds it, and doesn't wait
        os.write(other_end, b"text")
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(ValueError, match=r"can't be read .*text\.txt is a pipe or a device, not a file"):
        read_text(str(path))
    if kind == "pipe":
        os.close(other_end)


# --- Download --------------------------------------------------------------------------------------------------------

BODY = bytes(range(256)) * 32768  # 8 MiB: writing them takes long enough to be caught in the act
DIGEST = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves BODY as a whole, or in the broken ways that the path asks for."""

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        """Send the head of the answer, and perhaps a body."""
        if self.path == "/absent":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path != "/cut-without-length":
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        if not with_body:
            return
        if self.path == "/together":
            self.server.together.wait(timeout=HANGS)
        is_cut = self.path.startswith("/cut")
        self.wfile.write(BODY[: len(BODY) // 3] if is_cut else BODY)  # HTTP/1.0: the connection closes after this

    def log_message(self, *args):
        """Nothing on standard error."""


class Server(http.server.ThreadingHTTPServer):
    """A server that can hold two downloads until both have begun."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.together = threading.Barrier(2)

    def handle_error(self, *args):
        """A client that hangs up early is part of these tests."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # a proxy of the machine would not find this server
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_download_is_complete(server, tmp_path):
    """Catches a directory that isn't created, altered bytes, and temporary files left behind."""
    path = tmp_path / "new" / "directory" / "corpus.txt"
    download_corpus(path, f"{server}/good", DIGEST)
    assert path.read_bytes() == BODY
    assert os.listdir(path.parent) == ["corpus.txt"]


@pytest.mark.parametrize(
    ("page", "sha256", "reason"),
    [
        ("good", "0" * 64, f"got {len(BODY)} bytes with SHA-256 {DIGEST}, expected {'0' * 64}"),
        ("absent", DIGEST, "404, message='Not Found'"),
        ("cut", DIGEST, "received 2796202 of 8388608 bytes"),
        ("cut-without-length", DIGEST, f"expected {DIGEST}"),
    ],
)
def test_failed_download_leaves_nothing(server, tmp_path, page, sha256, reason):
    """Catches an error page or half a text taken for the corpus, now or by the next run."""
    with pytest.raises(OSError, match=re.escape(reason)) as caught:
        download_corpus(tmp_path / "corpus.txt", f"{server}/{page}", sha256)
    assert f"{server}/{page}" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_download_without_a_server_fails(tmp_path, server):
    """Catches an error of the HTTP library's own type, which a caller that falls back on OSError lets through."""
    closed = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    port = closed.server_port
    closed.server_close()
    with pytest.raises(OSError, match=f"http://127.0.0.1:{port}/good: "):
        download_corpus(tmp_path / "corpus.txt", f"http://127.0.0.1:{port}/good", DIGEST)
    assert os.listdir(tmp_path) == []


def test_full_disk_leaves_nothing(server, tmp_path):
    """Catches writing under the final name: half a text would be taken for the corpus by the next run."""
    resource = pytest.importorskip("resource", reason="only Unix can limit the size of a file")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(BODY) // 2, hard))  # fails after half a file, as a full disk does
    try:
        with pytest.raises(OSError, match="too large"):
            download_corpus(tmp_path / "corpus.txt", f"{server}/good", DIGEST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_two_downloads_meet_before_the_rename(server, tmp_path, monkeypatch):
    """Catches two writers that share one temporary file: here both have written before either renames."""
    path, rename, both_have_written = tmp_path / "corpus.txt", os.replace, threading.Barrier(2)

    def rename_together(source, target):
        both_have_written.wait(timeout=HANGS)
        rename(source, target)

    monkeypatch.setattr(os, "replace", rename_together)
    with ThreadPoolExecutor(2) as pool:
        downloads = [pool.submit(download_corpus, path, f"{server}/good", DIGEST) for _ in range(2)]
    for download in downloads:
        download.result()
    assert path.read_bytes() == BODY
    assert os.listdir(tmp_path) == ["corpus.txt"]
