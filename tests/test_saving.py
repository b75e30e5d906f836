"""The files of one run: started over, moved aside, shared by mistake, or of odd content."""

import dataclasses
import errno
import io
import itertools
import logging
import math
import os
import random
import shutil
import socket
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from alterations import alterations
from conftest import PROJECT, SAMPLE_TEXT, TINY_RUN, contents, memory_of_this_process, read_losses, run_program, train
from omegaconf import OmegaConf
from test_snapshot import s3_bucket, url  # noqa: F401 (fixtures)
from test_trainer import make_trainer, world_of_one

import generate
import snapshot as snapshot_module
from config import TrainerConfig
from distributed import Ranks
from saving.contents import check_contents
from saving.finding import load_model
from saving.moving import set_aside, snapshot_url, write_config
from saving.run_snapshots import RunError, RunSnapshots
from snapshot import FORMAT_VERSION, best_url, load_snapshot, previous_url, save_snapshot


@pytest.fixture(scope="module")
def old_run(tmp_path_factory) -> Path:
    """The run directory of a finished tiny run, by a real start of the program."""
    run_dir = tmp_path_factory.mktemp("old") / "run"
    done = train(run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture
def copied_run(old_run, tmp_path) -> Path:
    return Path(shutil.copytree(old_run, tmp_path / "run"))


def move_out(run_dir: Path, path: Path) -> None:
    """Let a run keep its snapshots elsewhere: as if it had been started with that snapshot_path."""
    path.parent.mkdir()
    for place in (str, previous_url, best_url):
        Path(place(str(run_dir / "gpt_snapshot.pt"))).rename(place(str(path)))
    config = OmegaConf.load(run_dir / "config.yaml")
    config.trainer_config.snapshot_path = str(path)
    OmegaConf.save(config, run_dir / "config.yaml")


# ------------------------------------------------------------------------------------ starting over


def test_a_launch_told_to_start_over_never_goes_on_from_an_older_run(copied_run):
    """Catches a restart that takes the old run's snapshot for its own, finds it finished, and exits with 0.

    Rank 1 dies before the old files are moved aside; torchrun starts both ranks again.
    """
    old = contents(copied_run)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    run = run_program(
        *(sys.executable, *launcher, PROJECT / "tests" / "sabotage.py", "die early", 0, 1),
        *(f"hydra.run.dir={copied_run}", *TINY_RUN, "trainer_config.resume=false"),
    )
    assert run.returncode == 0, run.stderr
    assert "step 1/20" in (copied_run / "main.log").read_text(encoding="utf-8")
    assert "already finished" not in run.stderr
    aside = contents(copied_run / "old-1")
    assert old.items() <= aside.items()
    assert not (copied_run / "old-2").exists()


@pytest.mark.parametrize(("kept", "is_moved"), [("gpt_snapshot.best.pt", True), (None, False)])
def test_a_restart_before_the_first_save(copied_run, kept, is_moved):
    """Catches an old run's best snapshot that is overwritten, and a launch that moves its own log and curves aside."""
    for path in copied_run.glob("*.pt"):
        if path.name != kept:
            path.unlink()
    with world_of_one() as ranks:
        restarted = dataclasses.replace(ranks, is_restart=True)
        trainer = make_trainer(copied_run, "trainer_config.resume=false", ranks=restarted)
        trainer.resume()
        assert trainer.step == 0
    assert (copied_run / "old-1").exists() == is_moved


def test_a_run_moves_aside_as_a_whole_and_back_as_one_thing(copied_run, tmp_path):
    """Catches two runs in one curve and one log, and an old run that has to be put together again by hand."""
    before, losses = contents(copied_run), read_losses(copied_run)
    (copied_run / "notes.txt").write_text("mine")
    over = train(copied_run, "trainer_config.resume=false", "trainer_config.max_steps=6")
    assert over.returncode == 0, over.stderr
    assert f"hydra.run.dir={copied_run / 'old-1'}" in over.stderr
    assert contents(copied_run / "old-1") == before
    assert (copied_run / "notes.txt").read_text() == "mine"
    assert sorted(read_losses(copied_run)) == [1, 2, 3, 4, 5, 6]
    assert "/20" not in (copied_run / "main.log").read_text(encoding="utf-8")
    os.rename(copied_run / "old-1", tmp_path / "again")
    again = train(tmp_path / "again")
    assert again.returncode == 0
    assert "already finished" in again.stderr
    assert read_losses(tmp_path / "again") == losses


def test_fine_tuning_after_an_interrupted_move_starts_from_its_base(old_run, copied_run, tmp_path):
    """Catches a model that is taken from the half-moved run, and trained from its first step on."""
    (copied_run / "old-1.moving").mkdir()
    (copied_run / "main.log").rename(copied_run / "old-1.moving" / "main.log")
    base = load_snapshot(str(old_run / "gpt_snapshot.prev.pt"))
    save_snapshot(base, str(tmp_path / "base.pt"))
    with world_of_one() as ranks:
        trainer = make_trainer(copied_run, f"trainer_config.init_from={tmp_path / 'base.pt'}", ranks=ranks)
        trainer.resume()
    assert trainer.step == 0
    assert torch.equal(trainer.raw_model.wte.weight, base["model"]["wte.weight"])


def test_a_first_start_leaves_no_empty_run_behind(tmp_path):
    """Catches resume=false in a new directory that moves this start's own log aside."""
    (tmp_path / "main.log").write_text("downloaded tiny-shakespeare")
    assert set_aside(str(tmp_path)) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["main.log"]


def test_the_best_snapshot_after_a_damaged_latest(tmp_path):
    """Catches a best snapshot that should be a second name of a file that isn't there any more."""
    with world_of_one() as ranks:
        make_trainer(tmp_path, "trainer_config.max_steps=10", ranks=ranks).fit()
        latest = tmp_path / "gpt_snapshot.pt"
        latest.write_bytes(latest.read_bytes()[:-100])
        trainer = make_trainer(tmp_path, ranks=ranks)
        trainer.resume()
        assert trainer.step == 5
        trainer._save(is_best=True)
    assert trainer.snapshots.errors == {}
    assert load_snapshot(best_url(str(latest)))["step"] == 5


def test_a_dry_run_leaves_damaged_snapshots_alone(copied_run, tmp_path):
    """Catches a dry run that renames the damaged snapshot of a run, which may be at work."""
    shutil.copy(copied_run / "gpt_snapshot.prev.pt", tmp_path / "base.pt")
    (copied_run / "gpt_snapshot.pt").write_bytes(b"damaged")
    before = contents(copied_run)
    run = train(copied_run, "trainer_config.dry_run=true", f"trainer_config.init_from={tmp_path / 'base.pt'}")
    assert run.returncode == 0, run.stderr
    assert contents(copied_run) == before


@pytest.mark.parametrize("done", range(8))
@pytest.mark.parametrize("is_outside", [False, True])
def test_a_move_that_was_interrupted_is_finished(copied_run, tmp_path, monkeypatch, done, is_outside):
    """Catches a kill in the middle of starting over that leaves the old run in two places, or half of it in use.

    And one that is compared with a start that has another model first: "another run", and no way out.
    """
    outside = f"trainer_config.snapshot_path={tmp_path / 'store' / 'mine.pt'}"
    if is_outside:
        move_out(copied_run, tmp_path / "store" / "mine.pt")
    before, count = contents(copied_run) | contents(tmp_path / "store"), itertools.count()

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*paths: Any) -> Any:
            if next(count) == done:
                raise KeyboardInterrupt
            return function(*paths)

        return dying

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "rename"):  # five files, config.yaml's old place, the folder's name
            patch.setattr(os, name, deadly(getattr(os, name)))
        if done < 7:
            with pytest.raises(KeyboardInterrupt):
                set_aside(str(copied_run))
    with world_of_one() as ranks:  # resume=true: the order to start over holds until it is carried out
        trainer = make_trainer(copied_run, *([] if done == 7 else ["gpt_config.n_embd=32"]), ranks=ranks)
        trainer.resume()
    assert trainer.step == (20 if done == 7 else 0)
    if done < 7:
        assert sorted(path.name for path in copied_run.iterdir()) == ["old-1"]
        aside = contents(copied_run / "old-1") | contents(tmp_path / "store" / "old-1")
        assert {**before, "config.yaml": aside["config.yaml"]} == aside
        with world_of_one() as ranks:
            old = make_trainer(copied_run / "old-1", ranks=ranks)
            old.resume()
        assert old.step == 20
        with world_of_one() as ranks, pytest.raises(ValueError, match="holds step 20") if is_outside else nullcontext():
            make_trainer(tmp_path / "other", outside.replace("mine", "old-1/mine"), ranks=ranks).resume()


def test_a_launch_knows_its_own_snapshots(tmp_path):
    """Catches a restart that throws away what its own launch has done, or keeps what another one has done."""
    path = str(tmp_path / "gpt_snapshot.pt")

    def found(resume: bool, launch: str | None) -> bool:
        ranks = Ranks(0, 0, 1, torch.device("cpu"), launch or "c", is_restart=launch is not None)
        return RunSnapshots(str(tmp_path), TrainerConfig(resume=resume), ranks).newest(lambda *_: None) is not None

    save_snapshot({"step": 1, "run": {"launch": "a"}}, path)
    assert [found(True, None), found(True, "b"), found(False, "a")] == [True] * 3
    assert [found(False, None), found(False, "b")] == [False] * 2
    save_snapshot({"step": 1}, path)  # made by hand: by another launch, whichever
    assert not found(False, "a")
    Path(path).write_bytes(b"damaged")
    Path(previous_url(path)).write_bytes(b"damaged")
    assert not found(False, "a")  # to start over, nothing of what is there is needed
    with pytest.raises(ValueError, match="no usable snapshot is left"):
        found(True, None)


# ------------------------------------------------------------------------------------ what a run directory remembers


@pytest.mark.parametrize("is_outside", [False, True])
def test_a_run_whose_latest_is_gone_is_not_begun_afresh(copied_run, tmp_path, is_outside):
    """Catches step 0 without a word where a run lies, and its best snapshot overwritten by a worse one."""
    latest = tmp_path / "store" / "mine.pt" if is_outside else copied_run / "gpt_snapshot.pt"
    if is_outside:
        move_out(copied_run, latest)
    latest.unlink()
    Path(previous_url(str(latest))).unlink()
    best = best_url(str(latest))
    before, best_step = contents(tmp_path), load_snapshot(best)["step"]
    refused = train(copied_run)
    assert refused.returncode == 1
    line = f"error: the run in {copied_run} has {best}, and no snapshot to go on from at {latest}; to go on, say "
    assert refused.stderr.splitlines()[-1].startswith(f"{line}trainer_config.snapshot_path={best}; to start over and ")
    assert contents(tmp_path) == before
    with world_of_one() as ranks:
        going_on = make_trainer(copied_run, f"trainer_config.snapshot_path={best}", ranks=ranks)
        if not is_outside:  # outside, a snapshot names its directory, and this copied one names another
            going_on.resume()
            assert going_on.step == best_step
        make_trainer(copied_run, "trainer_config.resume=false", ranks=ranks).resume()
    assert not Path(best).exists()


def test_a_run_without_any_snapshot_says_so(copied_run, caplog):
    """Catches a run that begins with its first step in a directory with a log and curves, and nobody notices."""
    for path in copied_run.glob("*.pt"):
        path.unlink()
    with world_of_one() as ranks, caplog.at_level(logging.INFO):
        make_trainer(copied_run, ranks=ranks).resume()
    assert f"there is no snapshot at {copied_run / 'gpt_snapshot.pt'}: the run begins with step 1" in caplog.messages


@pytest.mark.parametrize("resume", ["true", "false"])
def test_another_snapshot_path_is_no_fresh_start(copied_run, tmp_path, resume):
    """Catches a run that begins again in the same directory, and snapshots of others moved away to make room."""
    elsewhere = tmp_path / "elsewhere.pt"
    if resume == "false":
        elsewhere.write_text("somebody's")
    before = contents(tmp_path)
    refused = train(copied_run, f"trainer_config.snapshot_path={elsewhere}", f"trainer_config.resume={resume}")
    assert refused.returncode == 1
    named = str(copied_run / "gpt_snapshot.pt" if resume == "true" else elsewhere)
    assert named in refused.stderr.splitlines()[-1]
    assert contents(tmp_path) == before


def test_a_directory_knows_where_its_snapshots_are(tmp_path, monkeypatch):
    """Catches a place that counts only while it is typed: a run begun again, or half of it moved aside.

    The new command names no place, or another one, and comes from another working directory.
    """
    run_dir, store = tmp_path / "run", tmp_path / "store"
    store.mkdir()
    first = train(run_dir, "trainer_config.snapshot_path=mine.pt", "trainer_config.max_steps=10", cwd=store)
    assert first.returncode == 0, first.stderr
    names = {"mine.pt", "mine.prev.pt", "mine.best.pt"}
    assert {path.name for path in store.iterdir()} == names
    prolonged = train(run_dir, "trainer_config.max_steps=15")
    assert f"going on from {store / 'mine.pt'} after step 10" in prolonged.stderr
    files = contents(run_dir)
    over = train(run_dir, "trainer_config.resume=false", "trainer_config.max_steps=5")
    assert over.returncode == 0, over.stderr
    assert {path.name for path in (store / "old-1").iterdir()} == names
    assert contents(run_dir / "old-1").keys() == files.keys()
    assert (run_dir / "gpt_snapshot.pt").exists()
    again = train(run_dir, "trainer_config.resume=false", f"trainer_config.snapshot_path={store / 'mine.pt'}")
    assert again.returncode == 0, again.stderr
    assert load_snapshot(str(run_dir / "old-2" / "gpt_snapshot.pt"))["step"] == 5
    going_on = train(run_dir / "old-1", "trainer_config.max_steps=20")
    assert f"going on from {store / 'old-1' / 'mine.pt'} after step 15" in going_on.stderr
    assert going_on.returncode == 0, going_on.stderr


@pytest.mark.parametrize("content", ["trainer_config: 3", "[", "trainer_config: {snapshot_path: ["])
def test_a_config_that_can_t_be_read_is_one_line(copied_run, content):
    """Catches a traceback, and a run that is begun afresh because nobody knows where it is."""
    (copied_run / "config.yaml").write_text(content)
    with world_of_one() as ranks, pytest.raises(ValueError, match=r"^[^\n]*config\.yaml doesn't say where[^\n]*$"):
        make_trainer(copied_run, ranks=ranks)


@pytest.mark.parametrize("name", ["gpt_snapshot.pt", "gpt_snapshot.best.pt", "gpt_snapshot.prev.pt"])
@pytest.mark.parametrize("damages", ["cut off", "directory", "cut off, directory, cut off", "directory, directory"])
def test_a_snapshot_damaged_in_mid_run_costs_no_later_save(tmp_path, name, damages):
    """Catches a run that can't save any more, and loses its end, because of files that somebody has broken."""
    path = tmp_path / name
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, ranks=ranks)
        trainer.resume()
        trainer.state.step = 5
        trainer._save()
        for trainer.state.step, damage in enumerate(damages.split(", "), 10):
            trainer._save()
            trainer._save(is_best=True)
            if damage == "cut off":
                path.write_bytes(path.read_bytes()[:-100])
            else:
                path.unlink()
                path.mkdir()
                (path / "somebody's").touch()
            before = load_snapshot(str(tmp_path / "gpt_snapshot.prev.pt"))["step"] if "prev" not in name else None
            trainer.state.step += 50
            trainer._save()
            trainer._save(is_best=True)
            assert trainer.snapshots.errors == {}
            for place in (str, best_url):
                assert load_snapshot(place(str(tmp_path / "gpt_snapshot.pt")))["step"] == trainer.state.step
            if name == "gpt_snapshot.pt":  # the damaged one never takes its place
                assert load_snapshot(str(tmp_path / "gpt_snapshot.prev.pt"))["step"] == before
    assert len(list(tmp_path.glob("*/somebody's"))) == damages.count("directory")
    assert len(list(tmp_path.glob("*.damaged"))) == ("cut off" in damages and "prev" not in name)


def test_config_is_there_as_a_whole(tmp_path, monkeypatch):
    """Catches a kill while config.yaml is written, after which no start can tell where the run is, for ever."""
    write_config(tmp_path, {"trainer_config": {"snapshot_path": "s3://here/x.pt"}})

    def die(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write_config(tmp_path, {"trainer_config": {"snapshot_path": "s3://there/x.pt"}})
    assert snapshot_url(str(tmp_path)) == "s3://here/x.pt"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_run_directory_may_move_whatever_its_snapshot_is_called(tmp_path):
    """Catches a run that begins anew, and writes to where its directory was, because its config.yaml says so."""
    for name in ("a", "b"):
        settings = ["trainer_config.max_steps=5", f"trainer_config.snapshot_path={tmp_path / name / 'my.pt'}"]
        assert train(tmp_path / name, *settings, f"trainer_config.resume={str(name == 'a').lower()}").returncode == 0
    (tmp_path / "a").rename(tmp_path / "moved")
    assert "already finished" in train(tmp_path / "moved", "trainer_config.max_steps=5").stderr
    train(tmp_path / "b", "trainer_config.max_steps=5", "trainer_config.resume=false")
    (tmp_path / "b" / "old-1").rename(tmp_path / "old")
    assert "already finished" in train(tmp_path / "old", "trainer_config.max_steps=5").stderr
    assert not (tmp_path / "a").exists()


def test_a_run_directory_with_snapshots_elsewhere_may_be_renamed(tmp_path):
    """Catches a run that can't go on under its new name, and is told to use the one that isn't there any more."""
    settings = ["trainer_config.max_steps=5", f"trainer_config.snapshot_path={tmp_path / 'x.pt'}"]
    assert train(tmp_path / "a", *settings).returncode == 0
    (tmp_path / "a").rename(tmp_path / "b")
    assert "already finished" in train(tmp_path / "b", *settings).stderr


def test_a_place_that_is_not_there_is_no_fresh_start(tmp_path):
    """Catches a disk that isn't mounted, or a relative path of an older program, taken for a run without a snapshot."""
    place = tmp_path / "disk" / "x.pt"
    write_config(tmp_path, {"trainer_config": {"snapshot_path": str(place)}})
    refused = train(tmp_path, "trainer_config.max_steps=5")
    assert refused.returncode == 1
    assert f"had its snapshots at {place}, where nothing is now; to begin anew there, say" in refused.stderr
    assert train(tmp_path, "trainer_config.max_steps=5", f"trainer_config.snapshot_path={place}").returncode == 0


def test_what_is_damaged_alone_is_no_fresh_start(copied_run):
    """Catches step 0 without a word, although something of the run is left, and advice to go on with what is broken."""
    (copied_run / "gpt_snapshot.pt").rename(copied_run / "gpt_snapshot.pt.damaged")
    for name in ("prev", "best"):
        (copied_run / f"gpt_snapshot.{name}.pt").unlink()
    with (
        world_of_one() as ranks,
        pytest.raises(ValueError, match=r"has .*\.damaged, and no snapshot .*resume=false$") as e,
    ):
        make_trainer(copied_run, ranks=ranks).resume()
    assert "to go on" not in str(e.value).split("; ", 1)[1]


def test_a_copied_directory_does_not_take_the_snapshots_of_the_other(tmp_path):
    """Catches resume=false that moves another run's snapshots aside, perhaps while that is at work."""
    settings = ["trainer_config.max_steps=5", f"trainer_config.snapshot_path={tmp_path / 'store' / 'x.pt'}"]
    assert train(tmp_path / "a", *settings).returncode == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    before = contents(tmp_path)
    refused = train(tmp_path / "b", "trainer_config.resume=false")
    assert refused.returncode == 1
    assert f"holds step 5 of the run in {tmp_path / 'a'}" in refused.stderr
    assert contents(tmp_path) == before


def test_a_run_that_went_on_from_its_best_can_be_started_over(copied_run):
    """Catches a way on that the program has named itself, and that ends in a refusal."""
    best = copied_run / "gpt_snapshot.best.pt"
    with world_of_one() as ranks:
        make_trainer(copied_run, f"trainer_config.snapshot_path={best}", ranks=ranks).resume()
        write_config(copied_run, {"trainer_config": {"snapshot_path": best.name}})
        make_trainer(copied_run, "trainer_config.resume=false", ranks=ranks).resume()
    assert [path.name for path in copied_run.iterdir()] == ["old-1"]
    assert len(list((copied_run / "old-1").glob("*.pt"))) == 3


def test_the_best_loss_of_all_is_to_be_beaten(copied_run):
    """Catches a best snapshot that counts as worse than it is, and is overwritten by a worse one.

    It may be newer than the one to go on from; or of an older program, which wrote it before its loss was known.
    """
    latest, best = str(copied_run / "gpt_snapshot.pt"), str(copied_run / "gpt_snapshot.best.pt")
    kept = load_snapshot(best)
    pair = {key: kept[key] for key in ("best_eval_loss", "best_step")}
    with world_of_one() as ranks:
        for step, told in ((15, {}), (20, {"best_eval_loss": 9.0, "best_step": 5})):
            save_snapshot(load_snapshot(latest) | ({"step": step} if step == 15 else pair), latest)
            save_snapshot(kept | told, best, keep_previous=False)
            trainer = make_trainer(copied_run, ranks=ranks)
            trainer.resume()
            assert {key: getattr(trainer.state, key) for key in pair} == pair


@pytest.mark.parametrize("name", ["a::b", "s3::run", "memory:"])
def test_a_path_is_a_path(tmp_path, name):
    """Catches a run directory that is taken for a chain of URLs: the latest and the best one file somewhere else."""
    run_dir = tmp_path / name / "run"
    run = train(run_dir, "trainer_config.max_steps=5")
    assert run.returncode == 0, run.stderr
    assert {path.name for path in run_dir.glob("*.pt")} == {"gpt_snapshot.pt", "gpt_snapshot.best.pt"}
    assert train(run_dir, "trainer_config.max_steps=5", "trainer_config.resume=false").returncode == 0
    assert load_snapshot(str(run_dir / "old-1" / "gpt_snapshot.pt"))["step"] == 5


# ------------------------------------------------------------------------------------ two runs, one place


def test_two_runs_never_overwrite_each_other(url, tmp_path):  # noqa: F811
    """Catches two runs at one snapshot_path, in whatever store, that take turns in destroying each other's work."""
    settings = [f"trainer_config.snapshot_path={url}"]
    with world_of_one() as ranks:
        first, second = (make_trainer(tmp_path / name, *settings, ranks=ranks) for name in ("first", "second"))
        for trainer in (first, second):
            trainer.resume()
        first.state.step = 5
        first._save()
        first._save(is_best=True)
        for is_best in (False, True):
            with pytest.raises(RunError) as error:
                second._save(is_best)
            assert str(tmp_path / "first") in str(error.value)
            assert str(tmp_path / "second") in str(error.value)
        first.state.step = 10
        first._save()  # the first is undisturbed
    assert (load_snapshot(url)["step"], load_snapshot(previous_url(url))["step"]) == (10, 5)
    assert load_snapshot(best_url(url))["run"]["directory"] == str(tmp_path / "first")


def test_two_runs_that_save_at_the_same_moment(tmp_path, monkeypatch):
    """Catches a snapshot that is taken away between the other run's look at the owner and its rename."""
    settings = [f"trainer_config.snapshot_path={tmp_path / 'shared.pt'}"]
    with world_of_one() as ranks:
        first, second = (make_trainer(tmp_path / name, *settings, ranks=ranks) for name in ("first", "second"))
        for trainer in (first, second):
            trainer.resume()
            trainer.state.step = 5
        make_way = first.snapshots._make_way

        def overtaken(url: str) -> bool:
            is_first = make_way(url)
            second._save()
            return is_first

        monkeypatch.setattr(first.snapshots, "_make_way", overtaken)
        first._save()
        assert list(tmp_path.glob("shared*")) == [tmp_path / "shared.pt"]
        assert load_snapshot(str(tmp_path / "shared.pt"))["run"]["directory"] == str(tmp_path / "second")
        assert "File exists" in str(first.snapshots.errors)
        monkeypatch.setattr(first.snapshots, "_make_way", make_way)
        with pytest.raises(RunError, match="of another run"):
            first._save()


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    """Catches a memory stick or a network disk on which no snapshot can be saved, or none is kept as the previous."""

    def refuse(*_: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = str(tmp_path / "gpt_snapshot.pt")
    for step in (1, 2, 3):
        save_snapshot({"step": step}, path, is_first=step == 1)
    assert (load_snapshot(path)["step"], load_snapshot(previous_url(path))["step"]) == (3, 2)
    assert len([*tmp_path.iterdir()]) == 2


def test_a_run_in_another_directory_does_not_take_a_snapshot_over(url, tmp_path):  # noqa: F811
    """Catches a second run that goes on from the first one's snapshot, and replaces it while that is at work."""
    settings = [f"trainer_config.snapshot_path={url}"]
    with world_of_one() as ranks:
        first, again, second = (
            make_trainer(tmp_path / name, *settings, ranks=ranks) for name in ("first", "first", "second")
        )
        first.resume()
        first.state.step = 5
        first._save()
        with pytest.raises(ValueError, match=f"of the run in {tmp_path / 'first'}, and .*{tmp_path / 'second'}"):
            second.resume()
        again.resume()
        assert again.step == 5


def snapshots_of(run_dir: Path, place: Path, ranks: Ranks, launch: str, **settings: Any) -> RunSnapshots:
    """The snapshots of a run, as a launch of that name opens them."""
    ranks = dataclasses.replace(ranks, launch=launch, is_restart=settings.pop("is_restart", False))
    return RunSnapshots(str(run_dir), TrainerConfig(snapshot_path=str(place), **settings), ranks)


def test_a_file_of_the_same_size_can_be_another_runs(old_run, tmp_path):
    """Catches files told apart by their sizes: snapshots of two runs of one model are equally large."""
    place, state = tmp_path / "gpt_snapshot.pt", load_snapshot(str(old_run / "gpt_snapshot.pt"))
    with world_of_one() as ranks:
        one = snapshots_of(tmp_path / "one", place, ranks, "1")
        one.open(lambda *_: None)
        one.save(state)
    size, mine = place.stat().st_size, load_snapshot(str(place))
    save_snapshot({**mine, "run": {**mine["run"], "directory": str(tmp_path / "two")}}, str(place))
    assert place.stat().st_size == size
    with pytest.raises(RunError, match=str(tmp_path / "two")):
        one.save({**state, "step": 21})


def test_two_launches_of_one_run_never_overwrite_each_other(old_run, tmp_path):
    """Catches an owner that is known by its directory alone, where a lock on that can't keep a second start away."""
    place, state = tmp_path / "store" / "gpt_snapshot.pt", load_snapshot(str(old_run / "gpt_snapshot.pt"))
    with world_of_one() as ranks:
        first, second = (snapshots_of(tmp_path / "run", place, ranks, launch) for launch in "12")
        for launch in (first, second):
            launch.open(lambda *_: None)
        first.save({**state, "step": 5})
        with pytest.raises(RunError, match="does not overwrite it"):
            second.save({**state, "step": 6})
    assert load_snapshot(str(place))["step"] == 5


@pytest.mark.parametrize(("is_restart", "found"), [(True, 5), (False, None)])
def test_a_second_start_under_the_same_name_is_no_restart(old_run, tmp_path, is_restart, found):
    """Catches resume=false that goes on, because the launcher was given the same --rdzv_id as the time before."""
    run_dir, state = tmp_path / "run", load_snapshot(str(old_run / "gpt_snapshot.pt"))
    with world_of_one() as ranks:
        first = snapshots_of(run_dir, run_dir / "gpt_snapshot.pt", ranks, "job")
        first.open(lambda *_: None)
        first.save({**state, "step": 5})
        place, how = run_dir / "gpt_snapshot.pt", {"resume": False, "is_restart": is_restart}
        snapshot = snapshots_of(run_dir, place, ranks, "job", **how).open(lambda *_: None)
    assert (snapshot and snapshot["step"]) == found
    assert (run_dir / "old-1" / "gpt_snapshot.pt").exists() != is_restart


def test_a_restart_of_a_run_that_began_with_the_one_before_it(copied_run):
    """Catches a base model that is looked for where it was: the run that it belonged to has been moved aside."""
    settings = [f"trainer_config.init_from={copied_run / 'gpt_snapshot.best.pt'}", "trainer_config.resume=false"]
    with world_of_one() as ranks:
        for is_restart in (False, True):
            launch = dataclasses.replace(ranks, is_restart=is_restart)
            trainer = make_trainer(copied_run, *settings, ranks=launch)
            trainer.resume()
            assert trainer.step == (5 if is_restart else 0)
            trainer.state.step = 5
            trainer._save()
    assert (copied_run / "old-1" / "gpt_snapshot.best.pt").exists()
    assert not (copied_run / "old-2").exists()


@pytest.mark.parametrize("taken", ["run", "store"])
def test_an_old_run_gets_a_number_that_is_free_in_both_places(tmp_path, taken):
    """Catches an old run that is mixed with an older one: in its directory, or where its snapshots lie."""
    settings = [f"trainer_config.snapshot_path={tmp_path / 'store' / 'gpt_snapshot.pt'}", "trainer_config.max_steps=1"]
    older = tmp_path / taken / "old-1" / "gpt_snapshot.pt"
    older.parent.mkdir(parents=True)
    older.write_text("older")
    for resume in ("true", "false"):
        run = train(tmp_path / "run", *settings, f"trainer_config.resume={resume}")
        assert run.returncode == 0, run.stderr
    assert older.read_text() == "older"
    assert {path.name for path in (tmp_path / "store" / "old-2").iterdir()} >= {"gpt_snapshot.pt"}
    assert (tmp_path / "run" / "old-2" / "main.log").exists()


def test_a_save_that_arrives_late_is_no_other_run(tmp_path):
    """Catches a run that ends because its own save, which had seemed to fail, was written after all."""
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, ranks=ranks)
        trainer.resume()
        trainer._save()
        trainer.snapshots._stamps.clear()
        trainer.state.step = 5
        trainer._save()
    assert load_snapshot(str(tmp_path / "gpt_snapshot.pt"))["step"] == 5


def test_a_sweep_with_one_snapshot_path_is_refused(tmp_path):
    """Catches the runs of a sweep that go on from each other's snapshots; each may have a path of its own."""
    sweep = [sys.executable, PROJECT / "main.py", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", *TINY_RUN]
    refused = run_program(*sweep, "trainer_config.seed=1,2", f"trainer_config.snapshot_path={tmp_path / 'x.pt'}")
    assert refused.returncode == 1
    assert "all runs of a sweep would save there" in refused.stderr
    assert not (tmp_path / "x.pt").exists()
    short = ["trainer_config.max_steps=1", "trainer_config.seed=1,2", "hydra.sweep.subdir=${hydra.job.num}"]
    path = f"trainer_config.snapshot_path={tmp_path}/${{trainer_config.seed}}.pt"
    allowed = run_program(*sweep, *short, path)
    assert allowed.returncode == 0, allowed.stderr
    assert (tmp_path / "1.pt").exists()
    assert (tmp_path / "2.pt").exists()


@pytest.mark.parametrize("resume", ["true", "false"])
def test_a_directory_is_no_snapshot_path(copied_run, resume):
    """Catches a directory, perhaps the run's own, that is renamed as if it were an old snapshot."""
    before = contents(copied_run)
    run = train(copied_run, f"trainer_config.snapshot_path={copied_run}", f"trainer_config.resume={resume}")
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: trainer_config.snapshot_path={copied_run} is a directory; name a file in it")
    assert len(run.stderr.splitlines()) == 1
    assert contents(copied_run) == before


# ------------------------------------------------------------------------------------ fine-tuning


def test_fine_tuning_starts_from_the_other_model(old_run, tmp_path):
    """Catches weights that aren't taken over, a vocabulary made anew, and progress or moments that come along.

    And a run that can't go on, or starts anew, when the snapshot that it began with is gone or another.
    """
    base = tmp_path / "base.pt"
    shutil.copy(old_run / "gpt_snapshot.best.pt", base)
    text = tmp_path / "mine.txt"
    text.write_text(SAMPLE_TEXT.read_text(encoding="utf-8")[-3000:].replace("e", "a"), encoding="utf-8")
    settings = [f"data_config.path={text}", "data_config.truncate=1.0", "trainer_config.max_steps=2"]
    settings += ["optimizer_config.learning_rate=1e-30", "optimizer_config.muon_learning_rate=1e-30"]
    settings += [f"trainer_config.init_from={base}", "optimizer_config.layer_decay=0.5", "gpt_config.attn_pdrop=0.1"]
    run = train(tmp_path / "run", *settings, ranks=2)
    assert run.returncode == 0, run.stderr
    assert "step 0: evaluation loss" in run.stderr
    old, new = load_snapshot(str(base)), load_snapshot(str(tmp_path / "run" / "gpt_snapshot.pt"))
    assert new["step"] == 2
    assert new["vocabulary"] == old["vocabulary"]
    assert all(torch.equal(new["model"][name], old["model"][name]) for name in old["model"])
    assert {float(state["step"]) for state in new["optimizer"].values() if "step" in state} == {2.0}
    base.unlink()
    again = train(tmp_path / "run", *settings, "trainer_config.max_steps=4")  # its own snapshot wins
    assert again.returncode == 0, again.stderr
    assert "going on from" in again.stderr
    assert "step 4/4" in again.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gpt_config.n_layer=3"], "n_layer is 2 there and 3 here"),
        (["data_config.block_size=8"], "block_size is 16 there and 8 here"),
        (["data_config.path={folder}/greek.txt"], r"greek\.txt.*unknown characters 'αβ'"),
        (["trainer_config.init_from={folder}/none.pt"], r"none\.pt.*there is no snapshot"),
        (["trainer_config.init_from={folder}/greek.txt"], r"greek\.txt is not a whole snapshot"),
    ],
)
def test_what_can_t_be_fine_tuned_is_one_line(old_run, tmp_path, overrides, message):
    """Catches a model that is cut to fit, characters that are left out, and tracebacks."""
    (tmp_path / "greek.txt").write_text("αβ" * 2000, encoding="utf-8")
    base = f"trainer_config.init_from={old_run / 'gpt_snapshot.pt'}"
    with world_of_one() as ranks, pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        make_trainer(tmp_path / "run", base, *(o.format(folder=tmp_path) for o in overrides), ranks=ranks)


def test_init_from_beside_a_snapshot(copied_run, tmp_path, caplog):
    """Catches a base model that is ignored without a word because the run directory has a snapshot already."""
    base, other, tuned = str(copied_run / "gpt_snapshot.pt"), str(tmp_path / "other.pt"), tmp_path / "tuned"
    shutil.copy(base, other)
    from_base, from_other = (f"trainer_config.init_from={place}" for place in (base, other))
    with world_of_one() as ranks, caplog.at_level(logging.INFO):
        make_trainer(tuned, from_base, "trainer_config.max_steps=6", ranks=ranks).fit()
        for settings in ([from_base], []):
            again = make_trainer(tuned, *settings, ranks=ranks)
            again.resume()
            assert again.step == 6
        said = [message for message in caplog.messages if "goes on from its own snapshot" in message]
        assert said == [f"this run began with {base} and goes on from its own snapshot; to start over: resume=false"]
        for run_dir, began in ((tuned, base), (copied_run, "a new model")):  # the run without it has not forgotten
            with pytest.raises(ValueError, match=f"began with {began} .*resume=false"):
                make_trainer(run_dir, from_other, ranks=ranks).resume()
        over = make_trainer(tuned, from_other, "trainer_config.resume=false", ranks=ranks)
        over.resume()
        assert over.step == 0


# ------------------------------------------------------------------------------------ odd contents


@pytest.fixture(scope="module", params=[80, pytest.param(240, marks=pytest.mark.slow)])
def odd_snapshots(request, old_run, tmp_path_factory) -> list[tuple[str, dict[str, Any]]]:
    """Snapshots with one alteration each, as (what was done, snapshot without a digest)."""
    mine = load_snapshot(str(old_run / "gpt_snapshot.pt"))
    folder = tmp_path_factory.mktemp("others")
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    (folder / "other.txt").write_text(text.swapcase())
    others = {}
    for name, setting in (("seed", "trainer_config.seed=2"), ("text", f"data_config.path={folder / 'other.txt'}")):
        assert train(folder / name, setting, "trainer_config.max_steps=5").returncode == 0
        others[name] = load_snapshot(str(folder / name / "gpt_snapshot.pt"))
    cases = alterations(mine, others, share=7)
    return random.Random(7).sample(cases, request.param)  # all of them would take minutes: the stress test has the time


def test_no_altered_snapshot_is_used(old_run, odd_snapshots, tmp_path, monkeypatch, capsys):
    """Catches parts of other types, other sizes or another run that are used, or that end in a traceback.

    Each file is whole for torch.load and for its checksums. The run goes on from the snapshot before it.
    """
    genuine = torch.load(old_run / "gpt_snapshot.pt")
    save = tmp_path / "run" / "gpt_snapshot.pt"
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path / "run", ranks=ranks)
        for what, odd in odd_snapshots:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            save.parent.mkdir()
            shutil.copy(old_run / "gpt_snapshot.prev.pt", save.parent)
            torch.save({"digest": genuine["digest"], **odd}, save)

            monkeypatch.setattr(sys, "argv", ["generate.py", "A", "--max-new-tokens=1", f"--snapshot={save}"])
            with pytest.raises(SystemExit) as ending:
                generate.main()
            assert str(ending.value.code).startswith(f"error: {save} "), what
            assert "\n" not in str(ending.value.code), what
            assert capsys.readouterr().out == "", what

            trainer.resume()
            assert trainer.step == 15, what
            assert (save.parent / "gpt_snapshot.pt.damaged").exists(), what


def test_odd_contents_without_a_digest_are_no_traceback(old_run, odd_snapshots, tmp_path, monkeypatch, capsys):
    """Catches snapshots that somebody has made by hand, whose parts contradict each other.

    Nothing tells here that a weight is not the one that was saved; but what can't be used must be damage, in one line.
    """
    save, uses = tmp_path / "gpt_snapshot.pt", 0
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, ranks=ranks)
        for what, odd in odd_snapshots[::2]:
            save.unlink(missing_ok=True)
            torch.save(odd, save)
            shutil.copy(old_run / "gpt_snapshot.prev.pt", tmp_path)
            monkeypatch.setattr(sys, "argv", ["generate.py", "A", "--max-new-tokens=1", f"--snapshot={save}"])
            complaint = ending(generate.main)
            uses += not complaint
            assert len(complaint.splitlines()) <= 1, what
            is_model = any(part in what for part in ("('model',", "('vocabulary',", "('model_config',"))
            has_default = any(key in what for key in ("pdrop", "bias", "model_type"))
            assert complaint or not is_model or has_default or "another" in what, what
            complaint = ending(trainer.resume)
            assert not complaint or "is of another run" in complaint, what
    assert 0 < uses < len(odd_snapshots) // 2  # what only a run needs, generating leaves alone


def ending(program: Callable[[], Any]) -> str:
    """What a program complains about at its end; empty if it doesn't."""
    try:
        program()
    except (SystemExit, ValueError) as error:
        return str(error)
    return ""


@contextmanager
def bytes_at_most(more: int) -> Iterator[None]:
    """Let this process have so much more address space, and no more: a larger allocation is a MemoryError here.

    A peak can't be looked at afterwards: it is that of all tests of this process.
    """
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process how much it has, and keeps it to that")
    import resource

    now = memory_of_this_process("VmSize")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_an_archive_that_unpacks_to_much_more_is_not_unpacked(old_run, tmp_path):
    """Catches a file of three megabytes that fills three gigabytes of memory before anything is looked at."""
    path = tmp_path / "gpt_snapshot.pt"
    shutil.copy(old_run / "gpt_snapshot.pt", path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("archive/data/999", "w") as member:
        for _ in range(50):
            member.write(bytes(1_000_000))
    with bytes_at_most(20_000_000), pytest.raises(snapshot_module.DamagedSnapshotError, match="unpacks to more bytes"):
        load_snapshot(str(path))


def test_an_archive_with_two_directories_is_refused(tmp_path):
    """Catches 60 kB that pass as 16 bytes and become 60 MB: the directory that is checked isn't the one torch reads."""
    genuine, file = io.BytesIO(), io.BytesIO()
    torch.save({"format_version": FORMAT_VERSION, "w": torch.zeros(15_000_000)}, genuine)
    with zipfile.ZipFile(genuine) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, record[:16] if name.endswith("data/0") else record)
    directory = file.getvalue()[archive.start_dir : -22]
    # zipfile takes the directory that ends where the last record begins, and thinks of what is too many bytes as put
    # in front. torch takes the one that the record names.
    file = io.BytesIO(b"PK\3\4".ljust(len(directory)) + file.getvalue()[: archive.start_dir])
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    odd = tmp_path / "odd.pt"
    odd.write_bytes(file.getvalue()[:-22] + directory + file.getvalue()[-22:])
    assert sum(info.file_size for info in zipfile.ZipFile(odd).infolist()) < odd.stat().st_size < 100_000
    with bytes_at_most(20_000_000), pytest.raises(snapshot_module.DamagedSnapshotError, match="not as torch writes it"):
        load_snapshot(str(odd))


HOSTILE = b"\x80\x02c__builtin__\nbytearray\nJ\x00\xca\x9a\x3b\x85R."  # a pickle: bytearray(1000000000)


def test_a_pickle_makes_tensors_only(tmp_path):
    """Catches thirty bytes that become a gigabyte: torch lets a pickle call bytearray. (And it finds DATA.PKL.)"""
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "odd.pt"))
    writer.write_record("DATA.PKL", HOSTILE, len(HOSTILE))
    writer.write_end_of_file()
    called = "it would call __builtin__ bytearray"
    with bytes_at_most(20_000_000), pytest.raises(snapshot_module.DamagedSnapshotError, match=called):
        load_snapshot(str(tmp_path / "odd.pt"))


def test_a_pickle_before_an_archive_is_refused(tmp_path):
    """Catches a whole archive behind an old-fashioned pickle: zipfile sees the one, and torch reads the other."""
    genuine, begin = io.BytesIO(), len(HOSTILE)
    torch.save({"format_version": FORMAT_VERSION}, genuine)
    odd = bytearray(HOSTILE + genuine.getvalue())
    with zipfile.ZipFile(genuine) as archive:  # all places in its directory and in its end lie further on now
        place = archive.start_dir + begin
        for record in archive.infolist():
            struct.pack_into("<I", odd, place + 42, record.header_offset + begin)
            place += 46 + len(record.filename)
        struct.pack_into("<Q", odd, len(odd) - 50, archive.start_dir + begin)
        struct.pack_into("<Q", odd, len(odd) - 34, len(odd) - 98)
        struct.pack_into("<I", odd, len(odd) - 6, archive.start_dir + begin)
    (tmp_path / "odd.pt").write_bytes(odd)
    with bytes_at_most(20_000_000), pytest.raises(snapshot_module.DamagedSnapshotError, match="not as torch writes it"):
        load_snapshot(str(tmp_path / "odd.pt"))


def test_a_device_is_not_read(tmp_path):
    """Catches a snapshot that is a link to /dev/zero, which has no end: reading it takes all memory."""
    (tmp_path / "odd.pt").symlink_to("/dev/zero")
    with bytes_at_most(100_000_000), pytest.raises(OSError, match=r"odd\.pt can't be read .*a pipe or a device"):
        load_snapshot(str(tmp_path / "odd.pt"))


def test_a_head_that_is_not_the_embedding_is_refused(old_run, tmp_path):
    """Catches two models in one file: generating takes wte.weight for both, and a run goes on with lm_head.weight."""
    snapshot = load_snapshot(str(old_run / "gpt_snapshot.pt"))
    snapshot["model"]["lm_head.weight"] = snapshot["model"]["wte.weight"] + 1
    save_snapshot(snapshot, str(tmp_path / "odd.pt"))
    with pytest.raises(snapshot_module.DamagedSnapshotError, match=r"lm_head\.weight differs from wte\.weight"):
        load_model(str(tmp_path / "odd.pt"))


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "vocab_size", "block_size", "n_head"])
def test_nothing_is_allocated_for_absurd_sizes(old_run, tmp_path, key):
    """Catches a number in a file that takes all memory, or a loop over 10^15 layers."""
    snapshot = load_snapshot(str(old_run / "gpt_snapshot.pt"))
    snapshot["model_config"][key] = 10**15
    save_snapshot(snapshot, str(tmp_path / "odd.pt"))
    with bytes_at_most(100_000_000), pytest.raises(ValueError, match=r"odd\.pt holds no usable model") as refused:
        load_model(str(tmp_path / "odd.pt"), torch.device("cpu"))
    assert not isinstance(refused.value.__cause__, MemoryError)
    assert "alloc" not in str(refused.value).partition("usable model")[2]


def test_a_tensor_larger_than_its_data_is_not_unfolded(tmp_path):
    """Catches four bytes that become six gigabytes when their digest is taken."""
    odd = {"format_version": FORMAT_VERSION, "digest": "x", "w": torch.zeros(1).expand(10**9)}
    torch.save(odd, tmp_path / "odd.pt")
    with bytes_at_most(100_000_000), pytest.raises(snapshot_module.DamagedSnapshotError, match="larger than its data"):
        load_snapshot(str(tmp_path / "odd.pt"))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(x=5),
        lambda state: state.pop("wpe.weight"),
        lambda state: state.update({"ln_f.bias": 5}),
        lambda state: state["wpe.weight"].pop("step"),
        lambda state: state["wpe.weight"].update(exp_avg_sq=-state["wpe.weight"]["exp_avg_sq"] - 1),
        lambda state: state["h.0.attn.c_attn.weight"].update(momentum_buffer=torch.zeros(1, 1).expand(48, 16)),
        lambda state: state["h.0.attn.c_attn.weight"].update(momentum_buffer=torch.zeros(48, 16, dtype=torch.bool)),
        lambda state: state["h.0.attn.c_attn.weight"].update(momentum_buffer=torch.full((48, 16), math.inf)),
    ],
    ids=["extra", "missing", "number", "no step", "negative", "expanded", "type", "infinite"],
)
def test_odd_optimizer_state_is_damage(old_run, tmp_path, change):
    """Catches states that load, and end in a traceback or in nonsense at the first step."""
    snapshot = load_snapshot(str(old_run / "gpt_snapshot.pt"))
    change(snapshot["optimizer"])
    torch.save(snapshot, tmp_path / "gpt_snapshot.pt")  # without a digest
    shutil.copy(old_run / "gpt_snapshot.prev.pt", tmp_path)
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, ranks=ranks)
        trainer.resume()
    assert trainer.step == 15


SCALER = {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 0}
ODD_PARTS = {
    "best loss nan": lambda s: s.update(best_eval_loss=math.nan),
    "best_eval_loss is a int": lambda s: s.update(best_eval_loss=2),
    "best_step is a bool": lambda s: s.update(best_step=True),
    "step -1": lambda s: s.update(step=-1),
    "step 4294967296": lambda s: s.update(step=2**32),
    "step is a bool": lambda s: s.update(step=True),
    "n_head is a bool": lambda s: s["model_config"].update(n_head=True),
    "weights that share their memory": lambda s: s["model"].update({"ln_f.weight": s["model"]["ln_f.bias"]}),
    "wpe.weight has values that are not finite": lambda s: s["model"]["wpe.weight"].fill_(math.inf),
    "wpe.weight is torch.float64": lambda s: s["model"].update({"wpe.weight": torch.ones(16, 16).double()}),
    "wpe.weight is torch.float32 .15, 16.": lambda s: s["model"].update({"wpe.weight": torch.ones(15, 16)}),
    "wpe.weight is torch.float32 .16, 16.": lambda s: s["model"].update({"wpe.weight": torch.ones(16, 16).t()}),
    "wpe.weight has no data": lambda s: s["model"].update({"wpe.weight": torch.ones(16, 16, device="meta")}),
    "59 of them different": lambda s: s.update(vocabulary=s["vocabulary"][:-1] + s["vocabulary"][0]),
    "59 characters for 60 codes": lambda s: s.update(vocabulary=s["vocabulary"][:-1]),
    "scale is a bool": lambda s: s.update(scaler={**SCALER, "scale": True}),
    "_growth_tracker is a float": lambda s: s.update(scaler={**SCALER, "_growth_tracker": 1.0}),
    "directory is missing": lambda s: s.update(run={"launch": "x"}),
    "max_steps is a dict": lambda s: s["config"]["trainer_config"].update(max_steps={}),
}


@pytest.mark.parametrize("complaint", ODD_PARTS)
def test_odd_parts_are_damage(old_run, complaint):
    """Catches a best loss that no other is below, copies of one tensor, two codes for a character, True for a number.

    Without a digest, nothing but the contents can tell.
    """
    snapshot = load_snapshot(str(old_run / "gpt_snapshot.pt"))
    check_contents(snapshot | {"scaler": SCALER}, "fine.pt")
    ODD_PARTS[complaint](snapshot)
    with pytest.raises(snapshot_module.DamagedSnapshotError, match=rf"odd\.pt .*{complaint}"):
        check_contents(snapshot, "odd.pt")


def test_parts_that_hold_each_other_end(tmp_path, old_run):
    """Catches forty lists, each with the next one twice in it: a walk through them takes a day."""
    snapshot = load_snapshot(str(old_run / "gpt_snapshot.pt"))
    tower: list[Any] = []
    for _ in range(40):
        tower = [tower, tower]
    torch.save({**snapshot, "format_version": FORMAT_VERSION, "digest": "x", "more": tower}, tmp_path / "odd.pt")
    with pytest.raises(snapshot_module.DamagedSnapshotError, match="not a whole snapshot"):
        load_snapshot(str(tmp_path / "odd.pt"))


# ------------------------------------------------------------------------------------ what must not be saved


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    """Catches a run that replaces its good snapshots by infinities and exits with 0."""
    run_dir = tmp_path / "run"
    assert train(run_dir, "trainer_config.max_steps=10").returncode == 0
    before = {name: load_snapshot(str(run_dir / name))["step"] for name in SNAPSHOTS}
    broken = ["optimizer_config.muon_learning_rate=1e38", "optimizer_config.learning_rate=1e38"]
    run = train(run_dir, *broken, "trainer_config.max_steps=11", "trainer_config.grad_norm_clip=null")
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "step 11 has left weights or optimizer state that are not finite" in run.stderr.splitlines()[-1]
    assert "the last snapshot is of step 10: the next start goes on from there" in run.stderr.splitlines()[-1]
    assert {name: load_snapshot(str(run_dir / name))["step"] for name in SNAPSHOTS} == before
    fresh = train(tmp_path / "fresh", *broken, "trainer_config.save_every_steps=1")
    assert fresh.returncode == 1
    assert "there is no snapshot yet" in fresh.stderr.splitlines()[-1]
    assert not list((tmp_path / "fresh").glob("*.pt"))


SNAPSHOTS = ("gpt_snapshot.pt", "gpt_snapshot.prev.pt", "gpt_snapshot.best.pt")


@pytest.mark.parametrize("due", ["eval", "save"])
@pytest.mark.parametrize("part", ["weight", "exp_avg_sq"])
def test_nothing_is_evaluated_or_saved_with_broken_weights(tmp_path, monkeypatch, due, part):
    """Catches a NaN that comes between two looks at the loss, and is then sampled from, or taken for the best.

    And one in an average of the optimizer, which the next step would bring into the weights.
    """
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, ranks=ranks)
        trainer.resume()
        weight = trainer.raw_model.wte.weight
        average = trainer.optimizer.state[weight]["exp_avg_sq"] = torch.zeros_like(weight)
        with torch.no_grad():
            (weight if part == "weight" else average)[3, 3] = math.nan
        monkeypatch.setattr(trainer, "evaluate", lambda: pytest.fail("evaluated"))
        with pytest.raises(RunError, match="step 0 has left weights"):
            trainer._evaluate_and_keep_best() if due == "eval" else trainer._save()
    assert not list(tmp_path.glob("*.pt"))


# ------------------------------------------------------------------------------------ stores that don't answer


def test_a_store_that_never_answers_costs_a_save_and_not_the_run(tmp_path, monkeypatch):
    """Catches a save that holds all ranks for the 25 attempts of the store's client, and an error that says nothing."""
    import s3fs

    server = socket.create_server(("127.0.0.1", 0))  # accepts by its queue, and never reads
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(snapshot_module, "SECONDS_TO_ANSWER", 1.0)
    try:
        with world_of_one() as ranks:
            trainer = make_trainer(tmp_path, "trainer_config.snapshot_path=s3://bucket/gpt_snapshot.pt", ranks=ranks)
            trainer._save()
            assert "TimeoutError: no answer from the store within 1 s" in str(trainer.snapshots.errors)
            with pytest.raises(ValueError, match="no answer from the store"):
                trainer.resume()
    finally:
        server.close()
        s3fs.S3FileSystem.clear_instance_cache()


# ------------------------------------------------------------------------------------ memory


def test_resuming_needs_the_memory_of_two_snapshots_at_most(tmp_path):
    """Catches a file that is read as a whole before it is loaded, and a best snapshot held beside the latest."""
    script = """
import resource, sys
from pathlib import Path
from omegaconf import OmegaConf
from test_snapshot import s3_bucket, url  # noqa: F401 (fixtures)
from test_trainer import make_trainer, world_of_one
folder = Path(sys.argv[1])
sizes = ["gpt_config.n_embd=512", "gpt_config.n_layer=4", "trainer_config.batch_size=1"]
with world_of_one() as ranks:
    trainer = make_trainer(folder, *sizes, ranks=ranks)
    if sys.argv[2] == "save":
        trainer._train_step(trainer._batches())
        trainer.state.step = trainer.state.best_step = 1
        trainer._save(is_best=True)
        trainer._save()
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.resume()
        assert trainer.step == 1
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    environment = {"PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests'}"}
    for what in ("save", "resume"):
        process = run_program(sys.executable, "-c", script, tmp_path, what, env=environment)
        assert process.returncode == 0, process.stderr
    size = (tmp_path / "gpt_snapshot.pt").stat().st_size
    assert size > 100e6
    assert int(process.stdout) < 2.1 * size


def test_a_refused_start_leaves_the_log_alone(tmp_path):
    """Catches lines of a start that was refused in an old run's log, and a thousand errors where there is no log."""
    for name in ("gpt_snapshot.pt", "gpt_snapshot.prev.pt"):
        (tmp_path / name).write_bytes(b"damaged")  # the warnings about it are lines for the log
    (tmp_path / "main.log").write_text("old\n")
    in_place = train(tmp_path)
    elsewhere = train(tmp_path / "new", f"trainer_config.snapshot_path={tmp_path / 'gpt_snapshot.pt'}")
    assert (tmp_path / "main.log").read_text() == "old\n"
    assert not (tmp_path / "new").exists()
    for run in (in_place, elsewhere):
        assert run.returncode == 1
        assert run.stderr.splitlines()[-1].startswith("error: ")
        assert "no usable snapshot is left" in run.stderr
        assert "Traceback" not in run.stderr
