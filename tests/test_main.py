"""The program as a user starts it: bad input, the offline fallback, running again, the configuration file."""

import dataclasses
import gzip
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import PROJECT, SAMPLE_TEXT, TINY_RUN, TINY_SIZES, contents, read_losses, run_program, run_ranks, train
from omegaconf import OmegaConf

from config import DEFAULT_SNAPSHOT, Config
from data import corpus
from distributed import Ranks, process_group
from snapshot import load_snapshot

CONFIGURATION = PROJECT / "gpt2_train_cfg.yaml"
GROUPS = {field.name: field for field in dataclasses.fields(Config)}


def no_network() -> dict[str, str]:
    """An environment in which every download fails at once: its proxy is a port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, closed), "no_proxy": "", "NO_PROXY": ""}


# ------------------------------------------------------------------------------------ bad input

BAD_INPUT = {
    # name: (overrides, what the one line must name); test_model.py and test_data.py have more, closer to where it shows
    "unknown key": (["trainer_config.max_epoch=3"], ["trainer_config.max_epoch", "gpt2_train_cfg.yaml"]),
    "unknown key, added": (["+trainer_config.max_epoch=3"], ["max_epoch"]),
    "unknown group": (["train_config.max_epochs=3"], ["train_config"]),
    "mistyped recipe": (["+receipe=adamw"], ["+receipe=adamw", "did you mean +recipe=adamw?", "nanogpt_cpu"]),
    "recipe without plus": (["recipe=adamw"], ["did you mean +recipe=adamw?", "adamw, baby_gpt, finetune"]),
    "unknown recipe": (["+recipe=adamv"], ["did you mean +recipe=adamw?"]),
    "several recipes": (["recipes=adamw"], ["did you mean +recipe=adamw?"]),
    "key without group": (["max_steps=21"], ["did you mean trainer_config.max_steps=21?", "gpt2_train_cfg.yaml"]),
    "key of another group": (["trainer_config.n_layer=3"], ["did you mean gpt_config.n_layer=3?"]),
    "mistyped key": (["trainer_config.max_step=21"], ["did you mean trainer_config.max_steps=21?"]),
    "mistyped key without a group": (["--max-step=21"], ["did you mean trainer_config.max_steps=21?"]),
    "behind a key of Hydra": (
        ["hydra.job.name=x", "trainer_config.max_stepz=21"],
        ["trainer_config.max_stepz=21: did you mean trainer_config.max_steps=21?"],
    ),
    "nothing like it": (["optimizer_config.lr=1"], ["optimizer_config has no such key", "learning_rate, muon_learn"]),
    "mistyped short key": (["data_config.pth=a b"], ["did you mean 'data_config.path=a b'?"]),
    "mistyped group": (["optimiser_config.name=adamw"], ["did you mean optimizer_config.name=adamw?"]),
    "blank for equals": (["max_steps", "21"], ["did you mean trainer_config.max_steps=21?"]),
    "as an option": (["--max-steps=21"], ["--max-steps=21", "did you mean trainer_config.max_steps=21?"]),
    "plus too many": (["+trainer_config.max_steps=21"], ["did you mean trainer_config.max_steps=21?"]),
    "seed too large": ([f"trainer_config.seed={2**64}"], [f"seed={2**64}", "2^64"]),
    "too many digits": ([f"trainer_config.max_steps={'9' * 5000}"], ["trainer_config.max_steps", "5000 digits", "20"]),
    "too many for a fraction": ([f"trainer_config.timeout_minutes={'9' * 400}"], ["timeout_minutes", "400 digits"]),
    "negative with too many": ([f"trainer_config.seed=-{'9' * 5000}"], ["trainer_config.seed", "5000 digits"]),
    "a long wait": (
        ["trainer_config.timeout_minutes=1e15"],
        ["timeout_minutes=1000000000000000.0", "at most 1,000,000"],
    ),
    "no recipe": (["+recipe=null"], ["+recipe=null", "did you mean +recipe=NAME?", "adamw, baby_gpt"]),
    "Hydra's own settings": (["hydra=null"], ["Config group override must be a string", "gpt2_train_cfg.yaml"]),
    "half of an option": (["--resolve"], ["--resolve", "--cfg"]),
    "wrong type": (["trainer_config.batch_size=many"], ["trainer_config.batch_size=many: must be a whole number"]),
    "no whole number": (["gpt_config.n_layer=6.5"], ["gpt_config.n_layer=6.5: must be a whole number or null"]),
    "wrong type of a list": (
        ["optimizer_config.betas=0.9"],
        ["betas=0.9: must be a list of numbers, as in ["],
    ),
    "wrong type in a list": (["optimizer_config.betas=[a,1]"], ["betas=[a,1]: must be a list of numbers"]),
    "neither true nor false": (["trainer_config.resume=maybe"], ["trainer_config.resume=maybe: must be true or false"]),
    "null where there must be something": (["optimizer_config.name=null"], ["name=null: must be text;"]),
    "a group as a key": (["gpt_config=3"], ["gpt_config=3: gpt_config is a group; its keys are n_layer, n_head"]),
    "blanks": (["gpt_config.n_layer", "=", "6"], ["leave out the blanks around =: gpt_config.n_layer=6"]),
    "a blank in front": (["gpt_config.n_layer", "=6"], ["leave out the blanks around =: gpt_config.n_layer=6"]),
    "a blank behind": (["gpt_config.n_layer=", "6"], ["leave out the blanks around =: gpt_config.n_layer=6"]),
    "an open bracket": (["optimizer_config.betas=[0.9"], ["betas=[0.9: can't be read; brackets come in pairs"]),
    "a comma too many": (["trainer_config.max_steps=9,"], ["max_steps=9,: can't be read", "\"KEY='VALUE'\""]),
    "several values": (["trainer_config.max_steps=8,9"], ["trainer_config.max_steps=8,9: several values need -m, as"]),
    "negative": (["trainer_config.max_epochs=-1"], ["trainer_config.max_epochs=-1", "above 0"]),
    "model type and sizes": (["gpt_config.model_type=gpt-nano"], ["model_type=gpt-nano", "'n_layer': 2", "null"]),
    "micro-batches": (["trainer_config.micro_batch_size=5"], ["batch_size=12", "1 rank x", "micro_batch_size=5"]),
    "micro-batch as a word": (["trainer_config.micro_batch_size=many"], ["micro_batch_size=many", "null, auto, or a"]),
    "half a micro-batch": (["trainer_config.micro_batch_size=2.5"], ["micro_batch_size", "2.5"]),
    "no micro-batch": (["trainer_config.micro_batch_size=0"], ["micro_batch_size=0", "above 0"]),
    "float16 without mixed precision": (["trainer_config.amp_dtype=float16"], ["amp_dtype=float16", "use_amp=false"]),
    "unknown dtype": (["trainer_config.amp_dtype=half"], ["amp_dtype=half", "float16"]),
    "unknown optimizer": (["optimizer_config.name=sgd"], ["name=sgd", "adamw", "muon"]),
    "missing corpus": (["data_config.path={folder}/nothing.txt"], ["{folder}/nothing.txt", "can't be read"]),
    "short corpus": (
        ["data_config.path={folder}/short.txt", "data_config.truncate=1"],
        # 20 characters, cut at 0.9; a window of 16 needs 17.
        ["{folder}/short.txt", "2 characters", "block_size=16", "17"],
    ),
    "corpus shorter than a step": (
        ["data_config.path={folder}/brief.txt", "data_config.truncate=1"],
        ["180 characters", "batch_size=12", "193"],
    ),
    "window too long for a step": (
        ["data_config.path={folder}/brief.txt", "data_config.truncate=1", "data_config.block_size=19"],
        ["180 characters", "229", "lower data_config.block_size or trainer_config.batch_size"],
    ),
    "nothing to fine-tune": (["trainer_config.init_from={folder}/none.pt"], ["none.pt", "there is no snapshot"]),
    "not UTF-8": (["data_config.path={folder}/latin1.txt"], ["{folder}/latin1.txt", "UTF-8", "0xe9", "offset 3"]),
    "damaged gzip": (["data_config.path={folder}/broken.txt.gz"], ["{folder}/broken.txt.gz", "can't be read"]),
}


@pytest.fixture(scope="module")
def bad_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "short.txt").write_text("To be, or not to be?")
    (folder / "brief.txt").write_text(SAMPLE_TEXT.read_text(encoding="utf-8")[:200])
    (folder / "latin1.txt").write_bytes("café au lait".encode("latin-1"))
    (folder / "broken.txt.gz").write_bytes(gzip.compress(b"some text " * 100)[:-20])
    return folder


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(bad_texts, tmp_path, name):
    """Catches tracebacks, exit code 0, messages without the value, and run directories of runs that never began."""
    overrides, parts = BAD_INPUT[name]
    process = train(tmp_path / "run", *(override.format(folder=bad_texts) for override in overrides))
    assert process.returncode == 1
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    for part in parts:
        assert part.format(folder=bad_texts) in line
    for word in ("ListConfig", "<EOF>", "merging override", "converted", "Optional", "Lexer", "Ambiguous", "viable"):
        assert word not in line  # of a library
    assert not (tmp_path / "run").exists()


def test_bad_input_under_torchrun(tmp_path):
    """Catches a batch that two ranks can't divide, messages that torchrun's report replaces, and two in one line."""
    process = train(tmp_path / "run", "trainer_config.batch_size=7", ranks=2, torchrun=True)
    assert process.returncode == 1
    own, _, report = process.stderr.partition("main.py FAILED")  # what torchrun itself says about exit codes
    assert report
    assert "error: trainer_config.batch_size=7 is not divisible by 2 ranks x micro_batch_size=3" in own
    assert all(line.count("error: ") <= 1 for line in own.splitlines())
    assert "main.py" not in own.partition("error: ")[2].partition("error: ")[0]  # no traceback through our code
    assert not (tmp_path / "run").exists()


def test_bad_input_leaves_an_earlier_run_alone(finished_run):
    """Catches files that are overwritten before the configuration has been checked."""
    run_dir, _, _ = finished_run
    before = contents(run_dir)
    for override in ("trainer_config.micro_batch_size=5", "gpt_config.n_embd=32"):
        process = train(run_dir, override)
        assert process.returncode == 1
        assert len(process.stderr.splitlines()) == 1
        now = contents(run_dir)
        assert {name: now[name] for name in before} == before
        assert {name for name in now if name not in before} == set()


def test_the_command_for_a_named_model_works_as_it_stands(tmp_path):
    """Catches advice ("set the other to null") that a newcomer can't type."""
    dry = [f"hydra.run.dir={tmp_path / 'my run'}", f"data_config.path={SAMPLE_TEXT}", "trainer_config.dry_run=true"]
    command = [sys.executable, "main.py", *dry, "gpt_config.model_type=gpt-nano", "gpt_config.n_head=3"]
    refused = run_program(*command)
    advice = re.search(r"to use the name, add (.*)", refused.stderr)
    assert advice
    assert shlex.split(advice[1]) == NULLS
    process = run_program(*command, *shlex.split(advice[1]))
    assert process.returncode == 0, process.stderr
    assert "3 layers, 3 heads, width 48" in process.stderr


NULLS = [f"gpt_config.{key}=null" for key in ("n_layer", "n_head", "n_embd")]


@pytest.mark.parametrize("run_dir", ["{folder}/file", "{folder}/file/run", "/proc/run"])
def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path, run_dir):
    """Catches a traceback of twenty lines through Hydra, which makes the directory."""
    (tmp_path / "file").write_text("here first")
    run_dir = run_dir.format(folder=tmp_path)
    process = train(Path(run_dir))
    assert (process.returncode, process.stdout) == (1, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: the run directory can't be made (")
    assert run_dir in line
    assert "hydra.run.dir=DIR" in line
    assert (tmp_path / "file").read_text() == "here first"


# ------------------------------------------------------------------------------------ sweeps


def test_a_sweep_goes_on_after_a_failing_run(tmp_path):
    """Catches a sweep that ends at its first failure, a NaN that ranks first, and exit code 0.

    One run fails before its process group is made, one in it, and one in the loop; the last one must find all tidy.
    """
    sweep = [f"hydra.sweep.dir={tmp_path}", *TINY_RUN, "trainer_config.max_steps=10"]
    failing = ["trainer_config.max_epochs=-1,1", "trainer_config.micro_batch_size=5,3"]
    process = run_program(
        sys.executable, "main.py", "-m", *sweep, *failing, "optimizer_config.learning_rate=1e38,1e-2,2e-2"
    )
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    begun = re.findall(r"^run (\d+): .*trainer_config.max_epochs=", process.stderr, flags=re.MULTILINE)
    assert begun == [str(number) for number in range(1, 13)]  # the same numbers as in the table
    assert "#1" not in process.stderr
    assert process.stderr.startswith("note: optimizer_config.learning_rate is AdamW's")
    assert process.stderr.count("note: ") == 1
    words = process.stderr[process.stderr.index("the runs of this sweep, best first:") :]
    assert max(map(len, words.splitlines()[:-1])) <= 80
    assert words.splitlines()[-1] == f"in {tmp_path}"
    # The rows, each in one line again.
    table = [re.sub(r"(?<=[,.])\s*\n\s*|\nin .*", "", row) for row in re.split(r"\n  (?=run )", words)[1:]]
    table = [re.sub(r"\s*\n\s*", " ", row) for row in table]
    assert len(table) == 12
    losses = [float(re.search(r"run \d+: evaluation loss ([\d.]+)  ", line)[1]) for line in table[:2]]
    assert losses == sorted(losses)
    assert sorted(line.split(":")[0].strip() for line in table[:2]) == ["run 11", "run 12"]
    assert [line.split(":")[0].strip() for line in table[2:]] == [f"run {number}" for number in range(1, 11)]
    assert re.match(r"run 10: failed .*\(step 2: the loss or its gradient is not finite", table[-1])
    assert all("(max_steps)" in line for line in table[:2])
    for line in table[:2]:
        run_dir = tmp_path / re.search(r"\d  (\S*) \(max_steps\)", line)[1]
        expected = OmegaConf.load(run_dir / "config.yaml").optimizer_config.learning_rate
        assert expected == (1e-2 if "run 11" in line else 2e-2)
        best = min(read_losses(run_dir, "eval/loss").values())
        assert read_losses(run_dir, "eval/best_loss") == {10: pytest.approx(best)}


def test_a_failing_run_ends_a_sweep_of_several_ranks(tmp_path):
    """Catches ranks that wait for ever for rank 0, which has failed alone and gone on to the next run."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "gpt_snapshot.pt").write_bytes(b"damaged")
    sweep = [f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=${hydra.job.num}", *TINY_RUN]
    process = run_ranks(2, "main.py", "-m", *sweep, "trainer_config.seed=1,2")
    assert process.returncode == 1
    assert "no usable snapshot is left" in process.stderr
    assert not (tmp_path / "1").exists()


def test_a_signal_ends_a_sweep(tmp_path):
    """Catches a Ctrl-C that stops one run of a sweep, and lets the next one begin."""
    script = (
        "import os, signal, sys; sys.path.insert(0, '.'); import main, trainer; step = trainer.Trainer._train_step\n"
        "def stop(self, batches):\n"
        "    if self.step == 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(self, batches)\n"
        "trainer.Trainer._train_step = stop; main.main()"
    )
    process = run_program(
        sys.executable, "-c", script, "-m", f"hydra.sweep.dir={tmp_path}", *TINY_RUN, "trainer_config.seed=1,2"
    )
    assert process.returncode == 130
    assert process.stderr.count("stopped by SIGINT after step 4") == 1


# ------------------------------------------------------------------------------------ where the text comes from


@pytest.fixture
def project_copy(tmp_path: Path) -> Path:
    """The project's files in another place, without a downloaded text."""
    copy = tmp_path / "project"
    (copy / "data").mkdir(parents=True)
    for path in (*PROJECT.glob("*.py"), CONFIGURATION):
        shutil.copy(path, copy)
    for room in ("recipes", *(path.parent.name for path in PROJECT.glob("*/__init__.py"))):
        shutil.copytree(PROJECT / room, copy / room, ignore=shutil.ignore_patterns("input.txt"), dirs_exist_ok=True)
    return copy


def train_copy(copy: Path, *overrides: object) -> subprocess.CompletedProcess[str]:
    """The tiny run on the default text, with the default run directory, in a copy of the project, offline."""
    return run_program(sys.executable, copy / "main.py", *TINY_SIZES, *overrides, cwd=copy.parent, env=no_network())


def test_without_a_network_it_trains_on_the_bundled_text(project_copy):
    """Catches a first command that fails offline, and one that trains on another text without saying so."""
    process = train_copy(project_copy)
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stderr.splitlines() if line and "downloading" not in line]
    for line in (lines[0], lines[-1]):
        assert "WARNING" in line
        assert "sample.txt" in line
        assert "127.0.0.1" in line  # the reason: which address refused
    # Of the copy, although it was started elsewhere, and where generate.py looks for it.
    run_dir = project_copy / Path(DEFAULT_SNAPSHOT).relative_to(PROJECT).parent
    assert load_snapshot(str(run_dir / "gpt_snapshot.pt"))["step"] == 20
    assert "step 20/20" in (run_dir / "main.log").read_text(encoding="utf-8")
    assert sorted(path.name for path in (project_copy / "data").glob("*.txt")) == ["sample.txt"]


def test_a_text_at_the_default_place_is_used_as_it_is(project_copy):
    """Catches a download over the user's own file, or a checksum demanded of it."""
    own = project_copy / "data" / "input.txt"
    own.write_text("".join(f"Line {i} of quite another text.\n" for i in range(2000)), encoding="utf-8")
    content, changed = own.read_bytes(), own.stat().st_mtime_ns
    process = train_copy(project_copy)
    assert process.returncode == 0, process.stderr
    assert "WARNING" not in process.stderr
    assert "download" not in process.stderr
    assert (own.read_bytes(), own.stat().st_mtime_ns) == (content, changed)
    vocabulary = load_snapshot(str(project_copy / "runs" / "shakespeare" / "gpt_snapshot.pt"))["vocabulary"]
    assert vocabulary == "".join(sorted(set(content.decode())))


def test_a_missing_text_of_the_users_own_is_never_replaced(project_copy):
    """Catches the bundled text, or a download, in place of a path with a typing error in it."""
    process = train_copy(project_copy, "data_config.path=data/my_text.txt")
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert "data/my_text.txt" in line
    assert sorted(path.name for path in (project_copy / "data").glob("*.txt")) == ["sample.txt"]


@pytest.mark.parametrize(("local_rank", "downloads"), [(0, 1), (1, 0)])
def test_local_rank_0_downloads_for_its_node(tmp_path, monkeypatch, local_rank, downloads):
    """Catches a download by global rank 0 alone, which leaves other nodes without a text, and one by every rank."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(corpus, "PROJECT", tmp_path)
    targets: list[Path] = []
    monkeypatch.setattr(corpus, "download_corpus", targets.append)
    with process_group(1.0):
        # Rank 3 of 4, on the second node: as local rank 0 it is the one who fetches there.
        path, why_bundled = corpus.find_text("data/input.txt", Ranks(3, local_rank, 4, torch.device("cpu")))
    assert targets == [tmp_path / "data" / "input.txt"] * downloads
    assert (path, why_bundled) == (str(tmp_path / "data" / "input.txt"), "")


def test_the_others_wait_for_the_rank_that_downloads(tmp_path):
    """Catches ranks that look for a text before it is there, and end with "can't be read" on the very first start."""
    script = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from data import corpus
        from distributed import leave, process_group

        corpus.PROJECT = Path({str(tmp_path)!r})
        is_looking = corpus.PROJECT / "rank 1 is looking"

        def download_slowly(path):
            while not is_looking.exists():
                time.sleep(0.01)
            time.sleep(1.0)
            path.parent.mkdir()
            path.write_text("at last")

        corpus.download_corpus = download_slowly
        with process_group(5.0, "cpu") as ranks:
            if ranks.rank == 1:
                is_looking.touch()
            path, warning = corpus.find_text("data/input.txt", ranks)
            assert (Path(path).read_text(), warning) == ("at last", "")
        leave(0)
        """
    )
    process = run_ranks(2, "-c", script)
    assert process.returncode == 0, process.stderr


def test_works_from_another_directory_with_relative_paths(tmp_path):
    """Catches paths that are resolved against the project instead of the place where the user typed them."""
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(SAMPLE_TEXT.read_bytes()))
    process = run_program(
        *(sys.executable, PROJECT / "main.py", *TINY_RUN, "data_config.path=text.txt.gz", "hydra.run.dir=here/run"),
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "here" / "run" / "gpt_snapshot.pt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "text.txt.gz"]


def test_vocabulary_is_of_the_whole_text_whatever_part_is_used(finished_run):
    """Catches a vocabulary of the truncated text: a snapshot from a quick experiment would fit nothing else."""
    run_dir, _, _ = finished_run
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    snapshot = load_snapshot(str(run_dir / "gpt_snapshot.pt"))
    assert snapshot["config"]["data_config"]["truncate"] == 0.1
    assert set(text[: len(text) // 10]) < set(text)
    assert snapshot["vocabulary"] == "".join(sorted(set(text)))


# ------------------------------------------------------------------------------------ run, and run again


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], str]:
    """One epoch of 24 steps: (run directory, its files, what was printed)."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    process = train(run_dir, "trainer_config.max_steps=null", "optimizer_config.betas=[0.8,0.9]")
    assert process.returncode == 0, process.stderr
    return run_dir, contents(run_dir), process.stderr


def test_files_of_a_run(finished_run):
    """Catches a promised file that isn't written, and files that nobody has explained."""
    _, files, _ = finished_run
    names = sorted(name for name in files if not name.startswith("events.out.tfevents."))
    assert names == ["config.yaml", "gpt_snapshot.best.pt", "gpt_snapshot.prev.pt", "gpt_snapshot.pt", "main.log"]


def test_resolved_configuration_is_written(finished_run):
    """Catches a config.yaml with the defaults only, or with references that nobody can resolve later."""
    run_dir, files, _ = finished_run
    saved = OmegaConf.create(files["config.yaml"].decode())
    assert saved.optimizer_config.betas == [0.8, 0.9]
    assert saved.gpt_config.n_embd == 16
    assert saved.data_config.path == str(SAMPLE_TEXT)
    assert saved.trainer_config.max_steps is None
    assert saved.trainer_config.seed == 1337  # a default
    assert "${" not in files["config.yaml"].decode()
    assert load_snapshot(str(run_dir / "gpt_snapshot.pt"))["config"] == OmegaConf.to_container(saved)


def test_running_again(finished_run, tmp_path):
    """Catches a finished run that trains on or says nothing; that can't be prolonged; or that is lost when repeated."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished_run[0], run_dir)
    snapshot = (run_dir / "gpt_snapshot.pt").read_bytes()
    settings = ["trainer_config.max_steps=null", "optimizer_config.betas=[0.8,0.9]"]

    again = train(run_dir, *settings)
    assert again.returncode == 0, again.stderr
    assert "finished" in again.stderr
    assert "max_epochs" in again.stderr
    assert "trainer_config.resume=false" in again.stderr
    assert "step 25" not in again.stderr
    assert (run_dir / "gpt_snapshot.pt").read_bytes() == snapshot

    longer = train(run_dir, *settings, "trainer_config.max_epochs=2")
    assert longer.returncode == 0, longer.stderr
    log = (run_dir / "main.log").read_text(encoding="utf-8")
    assert "step 24/48" not in log
    assert "step 25/48" in log
    assert "changed setting: trainer_config.max_epochs was 1, now 2" in longer.stderr
    assert load_snapshot(str(run_dir / "gpt_snapshot.pt"))["step"] == 48
    losses = read_losses(run_dir)
    assert min(losses) == 1
    assert max(losses) == 48

    old = contents(run_dir)
    over = train(run_dir, *settings, "trainer_config.resume=false")
    assert over.returncode == 0, over.stderr
    assert "step 1/24" in (run_dir / "main.log").read_text(encoding="utf-8").removeprefix(log)
    assert load_snapshot(str(run_dir / "gpt_snapshot.pt"))["step"] == 24
    kept = contents(run_dir).values()
    for name in ("gpt_snapshot.pt", "gpt_snapshot.prev.pt", "gpt_snapshot.best.pt"):
        assert old[name] in kept, name  # under another name
    assert max(read_losses(run_dir)) == 24


def test_the_printed_command_works_as_it_stands(tmp_path):
    """Catches a command that a shell takes apart at blanks and quotes, or that is right in one directory only."""
    (tmp_path / "it's here").mkdir()
    process = run_program(
        *(sys.executable, PROJECT / "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN),
        "trainer_config.snapshot_path='my $model.pt'",
        cwd=tmp_path / "it's here",
    )
    assert process.returncode == 0, process.stderr
    command = re.search(r"to write text: (.*)", process.stderr)
    assert command
    bin_dir = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    text = run_program("sh", "-c", f"{command[1]} --max-new-tokens 9", cwd=tmp_path / "it's here", env=bin_dir)
    assert text.returncode == 0, text.stderr
    assert len(text.stdout) == 1 + 9 + 1


# ------------------------------------------------------------------------------------ switches


def test_a_dry_run_writes_nothing(finished_run, tmp_path):
    """Catches a dry run that leaves files, goes on from a snapshot, replaces one, or says nothing of the end."""
    dry = ["trainer_config.dry_run=true"]
    run = train(tmp_path / "run", *dry)
    assert run.returncode == 0, run.stderr
    assert "step 2: evaluation loss" in run.stderr
    assert "nothing was written" in run.stderr
    assert not (tmp_path / "run").exists()
    assert "snapshots:" not in run.stderr
    assert "written:" not in run.stderr

    (tmp_path / "mine").mkdir()
    assert train(tmp_path / "mine" / "some" / "run", *dry).returncode == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]  # what it has made is gone, and what it has not is there
    assert list((tmp_path / "mine").iterdir()) == []

    before = contents(finished_run[0])
    run = train(finished_run[0], *dry, "gpt_config.n_embd=32")  # another model: the snapshot there would be refused
    assert run.returncode == 0, run.stderr
    assert contents(finished_run[0]) == before


def test_a_profile_names_the_operations_of_three_steps(tmp_path):
    """Catches a trace that is empty, that is of all steps (and as large as the run is long), or that is no JSON."""
    run = train(tmp_path / "run", "trainer_config.profile=true", "trainer_config.deterministic=true")
    assert run.returncode == 0, run.stderr
    assert "trace.json" in run.stderr
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert len(steps) == 3
    assert any(event["name"] == "aten::addmm" for event in events)


def test_deterministic_mode_is_torchs_own(tmp_path):
    """Catches a switch that switches nothing: an operation without a repeatable form must be refused."""
    script = (
        "import sys, torch, main, trainer; step = trainer.Trainer._train_step\n"
        "def look(self, batches):\n"
        "    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))\n"
        "    return step(self, batches)\n"
        "trainer.Trainer._train_step = look; main.main()"
    )
    for deterministic, code in ((False, 0), (True, 1)):
        run = run_program(
            *(sys.executable, "-c", script, f"hydra.run.dir={tmp_path / str(deterministic)}", *TINY_RUN),
            f"trainer_config.deterministic={deterministic}",
        )
        assert run.returncode == code, run.stderr
    assert "does not have a deterministic implementation" in run.stderr


# ------------------------------------------------------------------------------------ the configuration file


@pytest.mark.parametrize("group", GROUPS)
def test_configuration_file_and_dataclasses_have_the_same_keys(group):
    """Catches a key that the file doesn't show, and one in the file that nothing reads."""
    factory = GROUPS[group].default_factory
    assert not isinstance(factory, dataclasses._MISSING_TYPE)
    keys = [field.name for field in dataclasses.fields(factory())]
    assert list(OmegaConf.load(CONFIGURATION)[group]) == keys  # in the same order too


@pytest.mark.parametrize("group", GROUPS)
def test_configuration_file_and_dataclasses_have_the_same_defaults(group):
    """Catches two defaults for one key: a model built in Python would not be the one that the command trains."""
    in_code = OmegaConf.to_container(OmegaConf.structured(Config))[group]
    in_file = OmegaConf.to_container(OmegaConf.load(CONFIGURATION))[group]
    assert in_code == in_file


def test_every_key_has_a_comment():
    """Catches a key that the reader has to guess: each line of the four groups ends with what it means."""
    lines = CONFIGURATION.read_text(encoding="utf-8").splitlines()
    first = lines.index("data_config:")
    keys = [line for line in lines[first:] if re.match(r"  \w+:", line)]
    assert len(keys) >= sum(len(OmegaConf.load(CONFIGURATION)[group]) for group in GROUPS)
    for line in keys:
        if not line.startswith(("  run:", "  help:")):  # these have keys of their own
            assert re.search(r" # .{10,}", line), line


def test_defaults_of_the_file_are_valid():
    """Catches a default configuration that the schema itself refuses."""
    groups = {key: value for key, value in OmegaConf.load(CONFIGURATION).items() if key in GROUPS}
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), groups))
    assert isinstance(config, Config)
    assert config.data_config.path == "data/input.txt"
