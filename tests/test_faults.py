"""Faults, done for real: signals, kills, full disks, damaged files, and runs that must end as if nothing had been."""

import http.server
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    HANGS,
    PROJECT,
    TINY_RUN,
    TORCHRUN,
    Started,
    free_port,
    read_losses,
    run_program,
    start_program,
    train,
)
from test_trainer import assert_same_end, make_trainer, world_of_one

from snapshot import load_newest, load_snapshot, prepare

# Long enough to be interrupted, and with everything on that makes an exact restart hard.
LONG_RUN = [
    *TINY_RUN,
    "data_config.truncate=1.0",
    "trainer_config.max_epochs=2",
    "trainer_config.max_steps=300",
    "trainer_config.micro_batch_size=3",
    "trainer_config.eval_every_steps=150",
    "trainer_config.save_every_steps=20",
    "gpt_config.embd_pdrop=0.1",
    "gpt_config.resid_pdrop=0.1",
    "gpt_config.attn_pdrop=0.1",
]
# Enough for two kills, into the second epoch (of some 95 steps).
KILLED_RUN = ["data_config.truncate=0.4", "trainer_config.max_steps=120", "trainer_config.eval_every_steps=60"]
# A run that never ends by itself, however late a test does something to it.
ENDLESS_RUN = ["trainer_config.max_steps=1000000", "trainer_config.max_epochs=1000000"]
TWO_RANKS, THREE_RANKS = ([*TORCHRUN, f"--nproc_per_node={n}", "--max-restarts=3"] for n in (2, 3))


def start(
    run_dir: Path,
    *overrides: str,
    launcher: list[str] = TWO_RANKS,
    fault: tuple[object, ...] = (),
    is_real: bool = False,
) -> Started:
    """Start the long run in a session of its own; its output goes to a file beside the run directory.

    A fault is what `sabotage.py` takes: its name, the step, the rank.
    """
    program = [PROJECT / "tests" / "sabotage.py", *fault] if fault else [PROJECT / "main.py"]
    return start_program(
        *launcher,
        *program,
        f"hydra.run.dir={run_dir}",
        *LONG_RUN,
        *overrides,
        out=Path(f"{run_dir}.out"),
        is_real=is_real,
    )


def output(run_dir: Path) -> str:
    return Path(f"{run_dir}.out").read_text()


def wait_for_step(run_dir: Path, step: int) -> None:
    """Wait until the run has reported a step."""
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline:
        log = run_dir / "main.log"
        if log.exists() and any(int(n) >= step for n in re.findall(r"step (\d+)/", log.read_text())):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} never came:\n{output(run_dir)}")


def workers(process: Started) -> list[int]:
    """The processes that a launcher has started, in order."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + HANGS
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)


def freeze(pid: int) -> None:
    """Stop a process where it is, until SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + HANGS
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "Tt":
        assert time.monotonic() < deadline, "never stops"
        time.sleep(0.01)


def last_step(run_dir: Path) -> int:
    """The last step that the run has reported; it reports every one."""
    return int(re.findall(r"step (\d+)/", (run_dir / "main.log").read_text())[-1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def strategy(request) -> str:
    """The setting that chooses what each rank holds."""
    return f"trainer_config.strategy={request.param}"


@pytest.fixture(scope="module")
def undisturbed(strategy, tmp_path_factory) -> Path:
    """The killed run with two ranks, never interrupted."""
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    process = start(run_dir, *KILLED_RUN, strategy)
    assert process.wait(HANGS) == 0, output(run_dir)
    return run_dir


def test_a_killed_rank_costs_nothing(undisturbed, strategy, tmp_path):
    """A restart that repeats or skips a batch, a dropout mask or a piece of optimizer state ends elsewhere.

    And with resume=false in every attempt, each restart would throw away what the one before it has done.
    """
    run_dir = tmp_path / "run"
    steps = f"{random.randrange(25, 50)},{random.randrange(65, 110)}"
    fault = ("kill", steps, f"{random.randrange(2)},{random.randrange(2)}")
    process = start(run_dir, *KILLED_RUN, strategy, "trainer_config.resume=false", fault=fault)
    assert process.wait(HANGS) == 0, output(run_dir)
    assert output(run_dir).count("going on from") == 2
    assert "has lost another rank" in output(run_dir)  # the one that survived says so
    assert not list(run_dir.glob("*.old1"))
    assert_same_end(run_dir, undisturbed)


def test_a_stopped_run_goes_on_as_if_nothing_had_been(undisturbed, strategy, tmp_path):
    """A signal that only one rank gets, torn ranks apart; a stop that saves nothing loses up to save_every steps."""
    run_dir = tmp_path / "run"
    step = random.randrange(25, 110)
    once = [word for word in TWO_RANKS if "restarts" not in word]  # it would restart them: to it, a signal is a failure
    settings = [*KILLED_RUN, strategy]
    process = start(run_dir, *settings, launcher=once, fault=("term", step, 1))  # not the rank that writes
    assert process.wait(HANGS) != 0
    assert "stopped by SIGTERM" in output(run_dir)
    assert load_snapshot(str(run_dir / "gpt_snapshot.pt"))["step"] == step + 1  # the step that it came in was the last
    process = start(run_dir, *settings)
    assert process.wait(HANGS) == 0, output(run_dir)
    assert_same_end(run_dir, undisturbed)


def test_a_run_prolonged_before_it_comes_down_ends_like_one_that_was_always_longer(tmp_path):
    """Catches a constant part that depends on the run's end, and whatever else a larger max_steps changes."""
    run_dir, longer = tmp_path / "run", tmp_path / "longer"
    settings, alone = [*KILLED_RUN, "optimizer_config.lr_decay=wsd"], [sys.executable]
    # Of 100 steps, those before the 80th are at the peak rate. The signal comes after the evaluation at step 60.
    stop = ("term", random.randrange(62, 79), 0)
    process = start(run_dir, *settings, "trainer_config.max_steps=100", launcher=alone, fault=stop)
    assert process.wait(HANGS) == 128 + signal.SIGTERM, output(run_dir)
    for directory in (run_dir, longer):  # up to step 120
        assert start(directory, *settings, launcher=alone).wait(HANGS) == 0, output(directory)
    assert "changed setting: trainer_config.max_steps was 100, now 120" in output(run_dir)
    assert_same_end(run_dir, longer)
    rates = read_losses(longer, "train/learning_rate")
    assert rates[96] == rates[60] > rates[98] > rates[119]  # it has really been that schedule


@pytest.mark.slow
def test_three_ranks_killed_and_stopped_end_as_if_nothing_had_been(tmp_path):
    """A DDP that has just been made adds up three ranks' gradients in another order than one that has taken a step."""
    settings = [*KILLED_RUN, "trainer_config.micro_batch_size=2"]  # two of them on each rank in a step
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "run"
    assert start(undisturbed, *settings, launcher=THREE_RANKS).wait(HANGS) == 0, output(undisturbed)

    once = [word for word in THREE_RANKS if "restarts" not in word]  # to torchrun, a signal is a failure
    stop = ("term", random.randrange(25, 55), random.randrange(3))
    assert start(run_dir, *settings, launcher=once, fault=stop).wait(HANGS) != 0
    assert "stopped by SIGTERM" in output(run_dir)
    kill = ("kill", random.randrange(65, 110), random.randrange(3))
    assert start(run_dir, *settings, launcher=THREE_RANKS, fault=kill).wait(HANGS) == 0, output(run_dir)
    assert output(run_dir).count("going on from") == 2
    assert_same_end(run_dir, undisturbed)


def test_the_number_of_ranks_may_change(tmp_path):
    """An order of the data that depends on the ranks trains on other batches after 2 -> 1 -> 2."""
    run_dir = tmp_path / "run"
    no_dropout = [f"gpt_config.{name}=0" for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")]
    for ranks, steps in ((2, 10), (1, 20), (2, 30)):
        run = train(run_dir, *no_dropout, f"trainer_config.max_steps={steps}", *SHORT_SCHEDULE, ranks=ranks)
        assert run.returncode == 0, run.stderr
    reference = train(tmp_path / "one", *no_dropout, "trainer_config.max_steps=30", *SHORT_SCHEDULE)
    assert reference.returncode == 0, reference.stderr
    interrupted, whole = read_losses(run_dir), read_losses(tmp_path / "one")
    assert interrupted.keys() == whole.keys()
    # Only the order of float32 sums differs: 1e-7 a step, and thirty steps amplify it little.
    assert all(abs(interrupted[step] - whole[step]) < 1e-4 for step in whole)


# A schedule that doesn't depend on max_steps, so that a run can be stopped by it.
SHORT_SCHEDULE = ["optimizer_config.min_lr_ratio=1", "optimizer_config.warmup_steps=5"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_saves_and_leaves(name, tmp_path):
    """Exit code 0 after a stop makes a scheduler think that the job is done; 10 s is what schedulers wait.

    A step of the default model takes a fraction of a second: it is steps that are counted here.
    """
    run_dir = tmp_path / "run"
    process = start(run_dir, *ENDLESS_RUN, launcher=[sys.executable])
    wait_for_step(run_dir, 25)
    freeze(process.pid)
    asked_in = last_step(run_dir) + 1  # or in the next one, if this one is done and not reported yet
    process.send_signal(getattr(signal, name))
    process.send_signal(signal.SIGCONT)
    assert process.wait(HANGS) == 128 + getattr(signal, name)
    assert f"stopped by {name}" in output(run_dir).splitlines()[-1]
    saved = load_snapshot(str(run_dir / "gpt_snapshot.pt"))["step"]
    assert f"after step {saved} of 1000000" in output(run_dir)
    assert saved <= asked_in + 2  # a step has agreed to go on before the signal came: the next one is the last


def test_a_second_ctrl_c_leaves_at_once():
    """A program that can't be interrupted twice must be killed from another window."""
    script = textwrap.dedent(
        """
        import signal, types
        from console import signals

        now = [100.0]
        signals.time = types.SimpleNamespace(monotonic=lambda: now[0])  # a clock that no machine delays
        signals.StopRequest().listen()
        signal.raise_signal(signal.SIGINT)
        now[0] += 0.2
        signal.raise_signal(signal.SIGINT)  # the same Ctrl-C, once from the terminal and once from torchrun
        print("still here", flush=True)
        now[0] += 1.2
        signal.raise_signal(signal.SIGINT)
        print("too late", flush=True)
        """
    )
    run = run_program(sys.executable, "-c", script)
    assert (run.returncode, run.stdout) == (130, "still here\n"), run.stderr


def test_orphans_leave_without_a_snapshot(tmp_path):
    """Workers whose torchrun was killed train on in secret, and write over the snapshots of the next start."""
    run_dir = tmp_path / "run"
    process = start(run_dir, *ENDLESS_RUN, "trainer_config.save_every_steps=1000000", is_real=True)
    wait_for_step(run_dir, 20)
    orphans = workers(process)
    for orphan in orphans:
        freeze(orphan)
    seen = last_step(run_dir)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for orphan in orphans:
        os.kill(orphan, signal.SIGCONT)
    wait_until_gone(orphans)
    assert not (run_dir / "gpt_snapshot.pt").exists()
    assert "torchrun is gone" in output(run_dir)
    assert last_step(run_dir) <= seen + 3  # one done and not reported, one that had agreed to go on, one to notice


def test_orphans_leave_while_they_start(tmp_path):
    """Ranks whose torchrun is killed before they have met look for its store until their time is over, ten minutes."""
    process = start(tmp_path / "run", fault=("torchrun", 0, 1), is_real=True)
    assert process.wait(HANGS) == -signal.SIGKILL
    deadline = time.monotonic() + HANGS
    while output(tmp_path / "run").count("torchrun is gone") < 2:
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)


def test_killed_while_a_snapshot_is_written(tmp_path):
    """A snapshot that is written in place is lost together with its predecessor."""
    url = str(tmp_path / "gpt_snapshot.pt")
    writer = textwrap.dedent(
        f"""
        import torch
        from snapshot import save_snapshot
        n = 0
        while True:
            n += 1
            save_snapshot({{"step": n, "model": {{"w": torch.full((300_000,), float(n))}}}}, {url!r})
            print(n, flush=True)
        """
    )
    for attempt in range(5):
        said = tmp_path / f"{attempt}.out"
        process = start_program(sys.executable, "-c", writer, out=said)
        while not said.read_text():
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        last = int(said.read_text().split()[-1])
        snapshot = load_newest(url)
        assert snapshot is not None
        assert snapshot["step"] >= last
        assert torch.equal(snapshot["model"]["w"], torch.full((300_000,), float(snapshot["step"])))
        prepare(url)
        assert not list(tmp_path.glob("*.tmp"))


def test_a_full_disk_costs_a_snapshot_and_not_the_run(tmp_path):
    """A failed save that ends the run, or one that goes unnoticed, or that damages the snapshot before it."""
    run_dir = tmp_path / "run"
    assert train(run_dir, "trainer_config.max_steps=5").returncode == 0
    before = (run_dir / "gpt_snapshot.pt").read_bytes()
    limit = len(before) // 2  # no file may grow larger than this: the snapshot can't be written, all else can
    run = run_program(
        sys.executable,
        "-c",
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        "sys.path.insert(0, '.'); import main; main.main()",
        f"hydra.run.dir={run_dir}",
        *TINY_RUN,
        is_real=True,  # its words go to a pipe, and not to a file, which would be too short as well
    )
    assert run.returncode == 1
    assert run.stderr.count("could not be saved, training goes on") >= 3  # steps 10, 15 and 20
    assert "step 20/20" in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: the last snapshot could not be saved")
    assert (run_dir / "gpt_snapshot.pt").read_bytes() == before
    assert not list(run_dir.glob("*.tmp"))


def test_a_full_disk_costs_the_curves_and_not_the_run(tmp_path):
    """TensorBoard's writer raises too: a run that ends because its curves can't be drawn."""
    run = run_program(
        sys.executable,
        "-c",
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
        "sys.path.insert(0, '.'); import main; main.main()",
        f"hydra.run.dir={tmp_path / 'run'}",
        *TINY_RUN,
        "trainer_config.max_epochs=6",
        "trainer_config.max_steps=null",
        is_real=True,
    )
    assert run.returncode == 1
    assert "step 144/144" in run.stderr
    assert "no more curves" in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: the last snapshot could not be saved")


def test_what_rank_0_alone_finds_is_the_last_word(tmp_path):
    """Rank 1's lost connection, 50 lines of traceback, after the line that says what is wrong."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "gpt_snapshot.pt").write_bytes(b"no snapshot")
    run = train(tmp_path / "run", ranks=2)  # torchrun might end rank 1 before it has said a word
    assert run.returncode != 0
    assert "[rank1]: Traceback" not in run.stderr  # torchrun's own comes behind
    assert "no usable snapshot is left" in run.stderr
    assert "rank 1 has lost another rank" in run.stderr
    assert (tmp_path / "run" / "gpt_snapshot.pt").read_bytes() == b"no snapshot"


def test_a_killed_runs_worker_does_not_hold_its_lock(tmp_path):
    """A loader's worker outlives the run by seconds, with its files: the restart finds the directory taken."""
    script = textwrap.dedent(
        """
        import os, signal, sys
        from saving.moving import lock

        pids, pids_of_workers = os.pipe()
        run = os.fork()
        if run == 0:
            lock(sys.argv[1])
            if os.fork() == 0:
                os.write(pids_of_workers, str(os.getpid()).encode())
                while True:
                    signal.pause()
            while True:
                signal.pause()
        worker = int(os.read(pids, 20))
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        try:
            lock(sys.argv[1])
            os.kill(worker, 0)  # it is still there
        finally:
            os.kill(worker, signal.SIGKILL)
        """
    )
    run = run_program(sys.executable, "-c", script, tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_refused_run_leaves_the_directory_to_the_other(tmp_path):
    """The second run's clean-up takes away the empty directory that the first has just claimed."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, saving.moving as m; m.lock(sys.argv[1]); print(flush=True); input()",
         str(run_dir)],
        cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    assert "another run is at work" in train(run_dir).stderr
    assert run_dir.exists()
    holder.communicate(b"\n")


def test_only_our_own_leftovers_are_removed(tmp_path):
    """A clean-up by a wide pattern deletes the files of others."""
    (tmp_path / "model.notes.tmp").write_text("mine")
    leftovers = [tmp_path / f"{name}.{'0a' * 16}.tmp" for name in ("model.pt", "model.best.pt")]
    for leftover in leftovers:
        leftover.write_text("half a snapshot")
    prepare(str(tmp_path / "model.pt"))
    assert (tmp_path / "model.notes.tmp").exists()
    assert not any(leftover.exists() for leftover in leftovers)


@pytest.mark.parametrize("where", ["/dev/null/gpt_snapshot.pt", "/proc/gpt_snapshot.pt", "gs://bucket/snapshot.pt"])
def test_an_unwritable_target_is_found_before_training(where):
    """A mistyped path that shows after the first hour, at the first save."""
    with pytest.raises(ValueError, match="can't be written"):
        prepare(where)


def test_a_best_snapshot_does_not_make_up_for_the_last(tmp_path):
    """One memory for two files: the best one's success after the last one's failure, and exit code 0."""
    script = textwrap.dedent(
        """
        import sys
        import main
        from saving import run_snapshots
        save = run_snapshots.save_snapshot
        def refuse(state, url, keep_previous=True, is_first=False):
            if keep_previous:
                raise OSError("no room")
            save(state, url, keep_previous, is_first)
        run_snapshots.save_snapshot = refuse
        main.main()
        """
    )
    run = run_program(sys.executable, "-c", script, f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN)
    assert run.returncode == 1
    assert (tmp_path / "run" / "gpt_snapshot.best.pt").exists()
    assert run.stderr.splitlines()[-1].startswith("error: the last snapshot could not be saved")


def test_a_save_that_works_again_makes_up_for_one_that_failed(tmp_path, monkeypatch, caplog):
    """A failure that is remembered for ever: exit code 1 although the end is saved."""
    replace = os.replace
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, ranks=ranks)

        def fail_once(source: str, target: str) -> None:
            if trainer.step == 5:
                raise OSError("no room")
            replace(source, target)

        monkeypatch.setattr(os, "replace", fail_once)
        trainer.fit()  # raises RunError where the last save has failed
    assert sum("could not be saved" in message for message in caplog.messages) == 1
    assert load_snapshot(str(tmp_path / "gpt_snapshot.pt"))["step"] == 20


def test_forbidden_is_not_missing(monkeypatch):
    """A store that refuses, taken for an empty one, is a silent fresh start that overwrites the run."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(403)
            self.end_headers()

        do_HEAD = do_PUT = do_GET  # noqa: N815

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(OSError, match=r"(?i)forbidden|403|access"):
            load_newest("s3://bucket/gpt_snapshot.pt")
        with pytest.raises(ValueError, match="can't be written"):
            prepare("s3://bucket/gpt_snapshot.pt")
    finally:
        server.shutdown()
        s3fs.S3FileSystem.clear_instance_cache()


def sabotage(fault: str, step: int, rank: int, run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Two ranks, one of them with a fault."""
    return run_program(
        *(*TORCHRUN, "--nproc_per_node=2", PROJECT / "tests" / "sabotage.py", fault, step, rank),
        *(f"hydra.run.dir={run_dir}", *TINY_RUN, *overrides),
    )


def test_not_a_number_stops_all_ranks_before_the_weights_change(strategy, tmp_path):
    """One rank's NaN in the weights of all, and then in the snapshots."""
    run = sabotage("nan", 12, 1, tmp_path / "run", strategy)
    assert run.returncode != 0
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "step 13: the loss or its gradient is not finite, at learning rates" in errors[0]
    snapshot = load_snapshot(str(tmp_path / "run" / "gpt_snapshot.pt"))
    assert snapshot["step"] == 10
    assert all(math.isfinite(tensor.sum()) for tensor in snapshot["model"].values())


def test_one_rank_that_raises_ends_the_job(strategy, tmp_path):
    """The other rank waits half an hour for it, and then reports a time-out instead of the cause."""
    # At most half of the time-out: what ends before HANGS has not waited for it.
    run = sabotage("raise", 5, 1, tmp_path / "run", f"trainer_config.timeout_minutes={HANGS / 60 * 2}", strategy)
    assert run.returncode != 0
    summary = run.stderr[run.stderr.rindex("Root Cause") :]
    assert "the very root of the evil" in summary
    assert "rank 0 has lost another rank" in run.stderr
    assert "rank 1 has lost" not in run.stderr


def test_a_collective_that_hangs_ends(tmp_path):
    """Half an hour of nothing, the default, for every lost rank."""
    run = sabotage("hang", 5, 1, tmp_path / "run", "trainer_config.timeout_minutes=0.1")  # ends before HANGS
    assert run.returncode != 0
    assert re.search(r"rank 0 has lost another rank.* \(.*[Tt]imed out waiting", run.stderr)


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    """Two runs that take turns in overwriting one snapshot."""
    run_dir = tmp_path / "run"
    process = start(run_dir, *ENDLESS_RUN, launcher=[sys.executable])
    wait_for_step(run_dir, 1)
    second = train(run_dir)
    assert second.returncode == 1
    assert second.stderr.startswith("error: another run is at work in")
    assert len(second.stderr.splitlines()) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANGS) == 128 + signal.SIGTERM


def test_the_loaders_processes_don_t_take_the_run_with_them(tmp_path):
    """torchrun's SIGTERM reaches the loader's workers too; one that dies of it ends the run with a traceback."""
    run_dir = tmp_path / "run"
    process = start(run_dir, *ENDLESS_RUN, "trainer_config.data_loader_workers=1", launcher=[sys.executable])
    wait_for_step(run_dir, 25)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(HANGS) == 128 + signal.SIGTERM, output(run_dir)
    assert "Traceback" not in output(run_dir)

    process = start(run_dir, *ENDLESS_RUN, "trainer_config.data_loader_workers=1", launcher=[sys.executable])
    wait_for_step(run_dir, load_snapshot(str(run_dir / "gpt_snapshot.pt"))["step"] + 2)
    os.kill(workers(process)[-1], signal.SIGKILL)
    assert process.wait(HANGS) == 1
    assert load_newest(str(run_dir / "gpt_snapshot.pt")) is not None


def test_float16_goes_on_from_a_snapshot_without_a_scale(tmp_path):
    """A run begun in bfloat16 on one GPU and continued on another that has float16 only; or begun anew there."""
    assert train(tmp_path / "run", "trainer_config.max_steps=5").returncode == 0
    run = train(tmp_path / "run", "trainer_config.use_amp=true", "trainer_config.amp_dtype=float16")
    assert run.returncode == 0, run.stderr
    assert f"going on from {tmp_path / 'run' / 'gpt_snapshot.pt'} after step 5" in run.stderr


def test_two_nodes_restart_together(tmp_path):
    """Nodes that count their restarts differently meet in different stores, and wait for each other for ever."""
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max-restarts=3"),
        *("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=test"),
    ]
    run_dir = tmp_path / "run"
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        nodes = [start(run_dir, *KILLED_RUN, launcher=launcher, fault=("kill", 30, 1)) for _ in range(2)]
    finally:
        del os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    assert [node.wait(HANGS) for node in nodes] == [0, 0], output(run_dir)
    assert "going on from" in output(run_dir)
    assert load_snapshot(str(run_dir / "gpt_snapshot.pt"))["step"] == 120
