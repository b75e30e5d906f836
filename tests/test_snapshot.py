"""What is saved, and how it survives: real files, a store in memory, and an S3 server on the loopback interface."""

import io
import os
import pickle
import resource
import shutil
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import SAMPLE_TEXT
from test_trainer import make_trainer, world_of_one

from char_dataset import CharVocabulary
from model import GPT, GPTConfig
from saving.contents import check_matches
from saving.moving import set_aside
from snapshot import (
    FORMAT_VERSION,
    DamagedSnapshotError,
    best_url,
    load_newest,
    load_snapshot,
    previous_url,
    save_snapshot,
)


def small_snapshot(step: int) -> dict[str, Any]:
    """Something of every type that snapshots hold; a step tells which one it is."""
    return {
        "step": step,
        "model": {"weight": torch.arange(200.0) + step, "shape": torch.ones(2, 3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.95), "x": None}]},
        "vocabulary": "\n abcäß李",
        "flags": [True, 1.5, "text"],
    }


def is_equal(a: Any, b: Any) -> bool:
    """Whether two snapshots are the same: types, names, and tensors to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_equal, a, b))
    return type(a) is type(b) and a == b


def is_snapshot_of(step: int, loaded: dict[str, Any] | None) -> bool:
    return loaded is not None and is_equal(
        {**loaded, "format_version": 0}, {"format_version": 0, **small_snapshot(step)}
    )


@pytest.fixture(scope="module")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket on a server that speaks S3."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="snapshots")
        s3fs.S3FileSystem.clear_instance_cache()
        yield "s3://snapshots"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture(params=["local", "memory", "s3"])
def url(request, tmp_path) -> str:
    """Where a snapshot goes, in each kind of store; nothing is there yet."""
    if request.param == "local":
        return str(tmp_path / "run" / "gpt_snapshot.pt")  # the directory is made when it is needed
    folder = "memory://" if request.param == "memory" else request.getfixturevalue("s3_bucket")
    return f"{folder}/{uuid.uuid4().hex}/gpt_snapshot.pt"


# ------------------------------------------------------------------------------------ every kind of store


def test_round_trip(url):
    """Catches types, orders and tensors that don't come back as they were, and stores that can't rename."""
    save_snapshot(small_snapshot(1), url)
    assert is_snapshot_of(1, load_snapshot(url))
    assert is_snapshot_of(1, load_newest(url))


def test_the_last_but_one_is_kept(url):
    """Catches a save that leaves nothing to fall back on, and one that leaves more and more files."""
    for step in (1, 2, 3):
        save_snapshot(small_snapshot(step), url)
    assert is_snapshot_of(3, load_snapshot(url))
    assert is_snapshot_of(2, load_snapshot(previous_url(url)))
    filesystem, path = fsspec.url_to_fs(url)
    filesystem.invalidate_cache()
    names = sorted(name.rsplit("/", 1)[1] for name in filesystem.ls(path.rsplit("/", 1)[0], detail=False))
    assert names == ["gpt_snapshot.prev.pt", "gpt_snapshot.pt"]


def test_keep_previous_can_be_switched_off(url):
    """Catches the best snapshot pushing the latest one's predecessor away, or gathering predecessors of its own."""
    save_snapshot(small_snapshot(1), url)
    save_snapshot(small_snapshot(2), url, keep_previous=False)
    assert is_snapshot_of(2, load_snapshot(url))
    with pytest.raises(FileNotFoundError):
        load_snapshot(previous_url(url))


def test_nothing_there_is_a_fresh_start(url):
    """Catches an error where a run simply begins."""
    assert load_newest(url) is None
    with pytest.raises(FileNotFoundError):
        load_snapshot(url)


def test_the_previous_one_stands_in_for_a_missing_or_damaged_one(url, caplog):
    """Catches a run that starts afresh, or fails, although a good snapshot lies beside the bad one."""
    save_snapshot(small_snapshot(1), url)
    save_snapshot(small_snapshot(2), url)
    filesystem, path = fsspec.url_to_fs(url)
    filesystem.pipe_file(path, filesystem.cat_file(path)[:-50])
    assert is_snapshot_of(1, load_newest(url))
    assert any(url in message for message in caplog.messages)
    # The next save would make a damaged newest file the previous one, in the place of the only good one.
    assert filesystem.exists(f"{path}.damaged")
    assert not filesystem.exists(path)
    assert is_snapshot_of(1, load_newest(url))


BEST = "gpt_snapshot.best.pt"


def test_set_aside_loses_nothing(url, tmp_path):
    """Catches starting over that deletes, or that overwrites what was set aside before."""
    filesystem, path = fsspec.url_to_fs(url)
    run_dir = tmp_path / "run"
    kept: dict[str, bytes] = {}
    for step in (1, 5):
        save_snapshot(small_snapshot(step), url)
        save_snapshot(small_snapshot(step + 1), url)
        save_snapshot(small_snapshot(step + 2), best_url(url), keep_previous=False)
        files = [filesystem.cat_file(fsspec.url_to_fs(u)[1]) for u in (url, previous_url(url), best_url(url))]
        run_dir.mkdir(exist_ok=True)
        (run_dir / "main.log").write_text(f"step {step}")
        (run_dir / "config.yaml").write_text(f"trainer_config: {{snapshot_path: '{url}'}}")
        folder = Path(set_aside(str(run_dir)))
        assert (folder / "main.log").read_text() == f"step {step}"
        place = path.rsplit("/", 1)[0]
        names = [f"{place}/{folder.name}/{name}" for name in ("gpt_snapshot.pt", "gpt_snapshot.prev.pt", BEST)]
        assert len(set(names)) == 3
        assert not kept.keys() & set(names)
        kept |= zip(names, files, strict=True)
        assert load_newest(url) is None
    filesystem.invalidate_cache()
    for name, content in kept.items():
        assert filesystem.cat_file(name) == content


@pytest.mark.skipif(os.name != "posix", reason="only there can a directory be brought to the disk")
def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    """Catches a power cut that leaves an empty snapshot: no fsync of file or directory, one too early, one too late."""
    url = str(tmp_path / "gpt_snapshot.pt")
    save_snapshot(small_snapshot(1), url)
    done: list[tuple[str, int, int]] = []  # (what, which inode, how many bytes it had)
    fsync, rename = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        done.append(("fsync", status.st_ino, status.st_size))
        fsync(descriptor)

    def noted_rename(source: str, target: str) -> None:
        done.append(("rename", os.stat(source).st_ino, os.path.getsize(source)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_rename)
    save_snapshot(small_snapshot(2), url)
    there = os.stat(url)
    written = done.index(("fsync", there.st_ino, there.st_size))  # with all its bytes, none of them in Python's buffer
    renames = [i for i, (what, *_) in enumerate(done) if what == "rename"]
    assert done[renames[-1]][1] == there.st_ino
    assert written < renames[0]  # before the old one leaves its place, too
    assert (
        max(i for i, (what, inode, _) in enumerate(done) if (what, inode) == ("fsync", os.stat(tmp_path).st_ino))
        > (renames[-1])
    )


def test_a_store_that_does_not_answer_is_not_an_empty_one(monkeypatch):
    """Catches fsspec's own `exists`, which takes a time-out for "no": the predecessor would be lost in silence."""
    url = f"memory://{uuid.uuid4().hex}/gpt_snapshot.pt"
    filesystem, _ = fsspec.url_to_fs(url)
    save_snapshot(small_snapshot(1), url)

    def no_answer(*_: Any, **__: Any) -> None:
        raise TimeoutError("no answer")

    with pytest.MonkeyPatch.context() as patch:
        for question in ("info", "cp_file"):  # whichever is asked
            patch.setattr(type(filesystem), question, no_answer)
        with pytest.raises(OSError, match="no answer"):
            save_snapshot(small_snapshot(2), url)
    assert is_snapshot_of(1, load_snapshot(url))


def test_tensors_arrive_on_the_cpu(tmp_path, monkeypatch):
    """Catches a snapshot from a GPU that can't be read where there is none. No GPU here: what torch is asked counts."""
    asked = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *a, **options: asked.append(options["map_location"]) or load(*a, **options)
    )
    save_snapshot(small_snapshot(1), str(tmp_path / "gpt_snapshot.pt"))
    load_snapshot(str(tmp_path / "gpt_snapshot.pt"))
    assert [torch.device(place).type for place in asked] == ["cpu"]


# ------------------------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def whole_file() -> bytes:
    """A snapshot's bytes."""
    buffer = io.BytesIO()
    torch.save({"format_version": FORMAT_VERSION, **small_snapshot(1)}, buffer)
    return buffer.getvalue()


def test_every_truncation_is_detected(tmp_path, whole_file):
    """Catches a half-written file that loads: nothing but the whole one may."""
    path = tmp_path / "gpt_snapshot.pt"
    lengths = {*range(0, len(whole_file), 61), len(whole_file) - 1}
    for length in lengths:
        path.write_bytes(whole_file[:length])
        with pytest.raises(DamagedSnapshotError, match=r"gpt_snapshot\.pt"):
            load_snapshot(str(path))
    path.write_bytes(whole_file)
    assert is_snapshot_of(1, load_snapshot(str(path)))


def test_no_flipped_bit_changes_what_is_loaded(tmp_path, whole_file):
    """Catches altered weights: torch.load alone doesn't look at the checksums and lets most flips through."""
    path = tmp_path / "gpt_snapshot.pt"
    detected = 0
    for position in range(0, len(whole_file), 13):
        altered = bytearray(whole_file)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)
        try:
            # Bytes that say nothing, padding for example, may be anything.
            assert is_snapshot_of(1, load_snapshot(str(path))), position
        except (DamagedSnapshotError, ValueError):
            detected += 1
    assert detected > 50


def test_a_flipped_bit_in_a_weight_is_named(tmp_path):
    """Catches the checksum test left out: this file is a perfect archive but for one number."""
    path = tmp_path / "gpt_snapshot.pt"
    save_snapshot(small_snapshot(1), str(path))
    content = path.read_bytes()
    weights = small_snapshot(1)["model"]["weight"].numpy().tobytes()
    altered = bytearray(content)
    altered[content.index(weights) + 402] ^= 1
    path.write_bytes(altered)
    changed = torch.load(path, weights_only=True)["model"]["weight"]
    assert not torch.equal(changed, small_snapshot(1)["model"]["weight"])  # torch itself notices nothing
    with pytest.raises(DamagedSnapshotError, match="checksum"):
        load_snapshot(str(path))


class Malicious:
    """Unpickling this makes a directory; it could do anything."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


def foreign_file(kind: str, folder: Path) -> bytes:
    """Bytes that are no snapshot of this program."""
    buffer = io.BytesIO()
    if kind == "text":
        return b"Not a snapshot at all.\n" * 100
    if kind == "malicious pickle":
        return pickle.dumps(Malicious(folder / "broken into"))
    if kind == "another archive":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("readme.txt", "hello")
    elif kind == "another program's":
        torch.save({"model": torch.ones(3)}, buffer)
    elif kind == "not a dictionary":
        torch.save([1, 2, 3], buffer)
    elif kind == "malicious":
        torch.save({"format_version": 1, "step": 1, "model": Malicious(folder / "broken into")}, buffer)
    return buffer.getvalue()


FOREIGN = [
    *("empty", "text", "another archive", "another program's", "not a dictionary", "malicious", "malicious pickle")
]


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused_and_not_executed(tmp_path, kind):
    """Catches weights_only=False, with which a snapshot from elsewhere runs any program, and unclear errors."""
    path = tmp_path / "gpt_snapshot.pt"
    path.write_bytes(foreign_file(kind, tmp_path))
    with pytest.raises(DamagedSnapshotError, match=r"gpt_snapshot\.pt is not a") as error:
        load_snapshot(str(path))
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["gpt_snapshot.pt"]
    # What is there and can't be used is never taken for a fresh start, and stays where it is.
    with pytest.raises(ValueError, match=r"no usable snapshot is left.*resume=false"):
        load_newest(str(path))
    assert path.read_bytes() == foreign_file(kind, tmp_path)
    # But a good predecessor is used.
    save_snapshot(small_snapshot(1), previous_url(str(path)))
    assert is_snapshot_of(1, load_newest(str(path)))


def test_two_damaged_snapshots_are_both_named(tmp_path):
    """Catches an error that doesn't say which files were tried."""
    url = str(tmp_path / "gpt_snapshot.pt")
    for u in (url, previous_url(url)):
        Path(u).write_bytes(b"")
    with pytest.raises(ValueError, match=r"gpt_snapshot\.pt is not.*gpt_snapshot\.prev\.pt is not"):
        load_newest(url)


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_refused(tmp_path, version):
    """Catches a program that misreads another version's file, or falls back behind it and trains on."""
    url = str(tmp_path / "gpt_snapshot.pt")
    save_snapshot(small_snapshot(1), url)
    other = load_snapshot(url) | {"format_version": version}
    save_snapshot(small_snapshot(2), url)
    torch.save(other, url)
    with pytest.raises(ValueError, match=rf"format {version}, .* reads format {FORMAT_VERSION};"):
        load_newest(url)


# ------------------------------------------------------------------------------------ targets that can't be written


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow beyond 500 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_snapshots(tmp_path):
    """Catches writing in place, which destroys the old snapshot before the new one is there, and left-over files."""
    url = str(tmp_path / "gpt_snapshot.pt")
    save_snapshot(small_snapshot(1), url)
    save_snapshot(small_snapshot(2), url)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        save_snapshot(small_snapshot(3), url)
    assert is_snapshot_of(2, load_snapshot(url))
    assert is_snapshot_of(1, load_snapshot(previous_url(url)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt_snapshot.prev.pt", "gpt_snapshot.pt"]
    save_snapshot(small_snapshot(3), url)  # and when there is room again, it works again
    assert is_snapshot_of(3, load_snapshot(url))


def test_a_directory_that_is_none(tmp_path):
    """Catches an error of another kind than those that a caller of save_snapshot is promised."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        save_snapshot(small_snapshot(1), str(tmp_path / "file" / "gpt_snapshot.pt"))
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_missing_bucket(s3_bucket):
    """Catches a save that fails without a word."""
    with pytest.raises(OSError, match=r"(?i)bucket"):
        save_snapshot(small_snapshot(1), "s3://no-such-bucket/gpt_snapshot.pt")


# ------------------------------------------------------------------------------------ what a run saves


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of 7 steps in float16, saved after 5 and after 7."""
    folder = tmp_path_factory.mktemp("run")
    settings = ["trainer_config.use_amp=true", "trainer_config.amp_dtype=float16", "trainer_config.max_steps=7"]
    settings += ["trainer_config.eval_every_steps=5"]
    with world_of_one() as ranks:
        make_trainer(folder, *settings, ranks=ranks).fit()
    return folder


def test_a_snapshot_remembers_what_produced_it(run_dir):
    """Catches anything left out that resuming, generating or a reader needs; and types that only pickle can load."""
    # weights_only: tensors, numbers, strings and plain containers pass, no dataclass, no configuration object.
    snapshot = torch.load(run_dir / "gpt_snapshot.pt", weights_only=True)
    assert (snapshot["step"], snapshot["samples"]) == (7, 7 * 12)
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    assert snapshot["vocabulary"] == CharVocabulary.of(text).characters
    model = GPT(GPTConfig(**snapshot["model_config"]))
    assert list(snapshot["model"]) == list(model.state_dict())
    model.load_state_dict(snapshot["model"])
    assert len(snapshot["corpus"]) == 64  # SHA-256, hexadecimal
    assert snapshot["config"]["trainer_config"]["max_steps"] == 7
    assert set(snapshot["config"]) == {"data_config", "gpt_config", "optimizer_config", "trainer_config"}
    assert snapshot["scaler"]["scale"] > 1
    assert snapshot["torch_version"] == str(torch.__version__)
    assert 0 < snapshot["best_eval_loss"] < 10
    moments = [t for t in flat_tensors(snapshot["optimizer"]) if t.ndim]
    # Every parameter has a momentum at least.
    assert sum(t.numel() for t in moments) >= model.num_parameters()


def flat_tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nested state."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from flat_tensors(part)


def test_a_snapshot_holds_every_tensor_once(run_dir):
    """Catches copies, as dataclasses.asdict makes: the tied head shares the embedding's memory, in the file too."""
    snapshot = torch.load(run_dir / "gpt_snapshot.pt", weights_only=True)
    assert type(snapshot) is dict
    tied = snapshot["model"]["lm_head.weight"], snapshot["model"]["wte.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()


def test_saving_takes_tensors_as_they_are(tmp_path, monkeypatch):
    """Catches a deep copy of the whole state before it is written."""
    copies = []
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda self, memo: copies.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **_: copies.append(self) or self)
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, "trainer_config.max_steps=1", ranks=ranks)
        trainer.fit()
    assert (tmp_path / "gpt_snapshot.pt").exists()
    assert copies == []


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ("gpt_config.n_layer=3", ["(n_layer is 2 there, 3 here)"]),
        ("data_config.block_size=8", ["(block_size is 16 there, 8 here)"]),
        ("optimizer_config.name=adamw", ["(optimizer_name is muon there, adamw here)"]),
        ("data_config.train_split=0.8", ["(the text differs)"]),
        ("data_config.path={other}", ["is 60 there, 29 here; the text differs)"]),
    ],
    ids=["architecture", "context", "optimizer", "split", "text"],
)
def test_a_snapshot_of_another_run_is_refused(run_dir, tmp_path, change, needed):
    """Catches states loaded into another model or text, which fits by shape now and then, and is always wrong."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    other = tmp_path / "other.txt"
    other.write_text("Quite another text, with other characters: 0123456789!\n" * 500)
    with world_of_one() as ranks:
        trainer = make_trainer(copy, change.format(other=other), ranks=ranks)
        with pytest.raises(ValueError, match=r"another run; .*resume=false") as error:
            trainer.resume()
    for part in needed:
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_differences_are_shown_side_by_side():
    """Catches a refusal that leaves it to the user to find out what differs."""
    saved = {"vocabulary": "abc", "model_config": {"n_layer": 2, "bias": True}, "corpus": "1f", "step": 3}
    check_matches(saved, {"vocabulary": "abc", "model_config": {"n_layer": 2, "bias": True}, "corpus": "1f"})
    with pytest.raises(ValueError, match=r"\(the text differs\)$"):
        check_matches(saved, {"vocabulary": "abd", "corpus": "2e"})  # once, and without alphabets and digests
    with pytest.raises(ValueError, match=r"aside \(bias is True there, False here\)$"):
        check_matches(saved, {"model_config": {"n_layer": 2, "bias": False}})
    with pytest.raises(ValueError, match=r"\(the text differs\)$"):
        check_matches(saved, {"corpus": "2e"})
