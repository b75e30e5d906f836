"""What a run tells people: the figures that it counts itself, and what fits on a screen."""

import contextlib
import logging
import math
import os
import re
import select
import shlex
import sys
from pathlib import Path

import pytest
import torch
from conftest import HANGS, PROJECT, TINY_RUN, read_losses, run_program
from test_trainer import make_trainer, world_of_one

from console import logs, reporter, sweep
from console.reporter import Reporter, Stopwatch, lesson
from report import Run, run_table
from snapshot import load_snapshot, save_snapshot


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(reporter.time, "perf_counter", lambda: now[0])
    return now


def test_training_seconds_are_those_of_training(clock):
    """Catches a speed that counts evaluations and snapshots as training, or takes a save in an evaluation off twice."""
    watch = Stopwatch()
    watch.restart(7)
    clock[0] += 10
    with watch.paused():  # an evaluation
        clock[0] += 4
        with watch.paused():  # the best snapshot, saved in it
            clock[0] += 1
    clock[0] += 2
    with watch.paused():
        clock[0] += 3
    assert watch.first_step == 7
    assert watch.seconds == 12
    watch.restart(8)
    assert watch.seconds == 0


def test_waiting_for_data_is_what_the_loader_takes(clock):
    """Catches the training step counted as waiting, and the last wait left out."""

    def loader():
        for batch in "ab":
            clock[0] += 3
            yield batch

    watch = Stopwatch()
    seen = []
    for batch in watch.waiting_for(loader()):
        clock[0] += 100  # a training step
        seen.append(batch)
    assert (seen, watch.data_seconds) == (["a", "b"], 6)


def test_peak_memory_is_in_gigabytes():
    """Catches kilobytes taken for bytes: a run of a gigabyte would seem to need a megabyte."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells it a second way")
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) * 1024 / 1e9
    assert reporter.peak_memory(torch.device("cpu")) == pytest.approx(peak, rel=0.05)


def test_a_profile_is_made_by_rank_0_alone(tmp_path):
    """Catches ranks that write their traces over each other's, and a dry run that writes one."""
    for is_main, dry_run, has_profiler in ((True, False, True), (False, False, False), (True, True, False)):
        made = Reporter(str(tmp_path), is_main, dry_run, profile=True)
        assert (made.profiler is not None) == has_profiler


@pytest.mark.parametrize(
    ("settings", "steps", "key"),
    [
        (["trainer_config.max_steps=5"], 5, "max_steps"),
        (["trainer_config.max_steps=null"], 24, "max_epochs"),
        (["trainer_config.patience=1", "trainer_config.eval_every_steps=2"], 4, "patience"),
    ],
    ids=["max_steps", "max_epochs", "patience"],
)
def test_the_last_line_names_the_key_that_ended_the_run(tmp_path, monkeypatch, caplog, settings, steps, key):
    """Catches advice that doesn't help: raising max_epochs where max_steps or patience has ended the run."""
    with world_of_one() as ranks, caplog.at_level(logging.INFO):
        trainer = make_trainer(tmp_path, *settings, ranks=ranks)
        monkeypatch.setattr(trainer, "evaluate", lambda: 2.0)
        trainer.fit()
    assert trainer.step == steps
    assert f"to go on, raise trainer_config.{key};" in caplog.messages[-1]


def test_a_samples_lines_stay_lines(tmp_path, caplog):
    """Catches lines that TensorBoard, which reads Markdown, runs together; and signs that a terminal obeys."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    speaker = Reporter(str(tmp_path), is_main=True)
    speaker.header([], {}, 0, 1)
    with caplog.at_level(logging.INFO):
        speaker.evaluation(1, 2.0, 1.9, "To be\nor not to be")
        speaker.evaluation(2, 2.0, 1.9, "\x1b[2J\r\x0b")
    speaker.close()
    assert [message for message in caplog.messages if message.startswith("    ")] == [
        '    "To be / or not to be"',
        r'    "\x1b[2J\r\x0b"',
    ]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    sample, _ = events.Tensors("samples/text_summary")
    assert sample.tensor_proto.string_val[0].decode() == "    To be\n    or not to be"


def test_one_sees_it_learn_to_spell(tmp_path, caplog):
    """Catches samples that only TensorBoard has, and a sample whose lines can't be told from the program's own."""
    with world_of_one() as ranks, caplog.at_level(logging.INFO):
        make_trainer(tmp_path, "trainer_config.sample_tokens=500", ranks=ranks).fit()
    lines = [message for message in caplog.messages if message.startswith("    ")]
    assert len(lines) == 2  # evaluations
    for line in lines:
        assert len(line.replace(" / ", "\n")) <= 4 + 64 + 2
        assert "\n" not in line


def test_the_closing_words_say_what_the_losses_mean(tmp_path, caplog):
    """Catches the two losses swapped, and no word about a text that was learned by heart; or one where it wasn't."""
    words = "learned: 1.31 on the text it trained on, 1.54 on unseen text"
    assert lesson(1.31, 1.54, 1.31, 1.54, 1100, 1100) == [words]
    by_heart = lesson(0.52, 1.90, 1.30, 1.48, 400, 1100)
    assert by_heart[0] == "learned: 0.52 on the text it trained on, 1.90 on unseen text"
    assert by_heart[1] == "unseen text: lowest at step 400 of 1,100 (1.48, the best snapshot)"
    assert by_heart[2].startswith("after that it learned its text by heart; try ")
    assert len(lesson(1.29, 1.485, 1.30, 1.48, 400, 1100)) == 1  # up and down a little
    assert len(lesson(0.20, 2.40, 0.19, 2.00, 400, 1100)) == 1  # worse on both: that is another fault
    assert len(lesson(0.52, 1.90, math.nan, 1.48, 400, 1100)) == 1  # a restart doesn't know how it was then
    with world_of_one() as ranks, caplog.at_level(logging.INFO):
        make_trainer(tmp_path, ranks=ranks).fit()
    train_loss, loss = read_losses(tmp_path, "eval/train_loss")[20], read_losses(tmp_path, "eval/loss")[20]
    assert f"learned: {train_loss:.2f} on the text it trained on, {loss:.2f} on unseen text" in caplog.messages


def test_other_ranks_speak_up_only_when_something_is_wrong(capsys):
    """Catches every report of a run once for each rank."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        for is_main, wanted in ((True, 2), (False, 1)):
            logs.set_up_logging(is_main, "[rank 1] ", None)
            logging.getLogger("somebody").info("all is well")
            logging.getLogger("somebody").warning("something is wrong")
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == wanted
            assert lines[-1].endswith("[rank 1] something is wrong")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_the_bar_fits_80_columns(tmp_path):
    """Catches a bar that is cut off or runs over into the next line in a terminal of the usual size."""
    pty = pytest.importorskip("pty")
    command = [sys.executable, "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN, "trainer_config.max_steps=24"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(PROJECT)
        os.execvp("sh", ["sh", "-c", f"stty columns 80 rows 24; exec {shlex.join(command)}"])
    output = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while select.select([terminal], [], [], HANGS)[0]:
            output += os.read(terminal, 1 << 16)
    assert os.waitpid(pid, 0)[1] == 0, output.decode()
    bars = re.findall(r"step [^\r\n]*\|[^\r\n]*", output.decode())
    finished = [bar for bar in bars if "24/24" in bar and "tokens/s" in bar]
    assert finished  # the last bar is whole: count, time and speed
    assert max(map(len, bars)) <= 80


def test_a_long_run_fits_80_columns_too():
    """Catches a bar whose end is cut off once steps have seven digits and a fast machine makes millions of tokens."""
    from tqdm import tqdm

    for total, seconds in ((9_999, 3_600.0), (99_999, 359_000.0), (1_000_000, 359_000.0)):
        postfix = f"loss 10.123, {reporter.short_number(12_345_678)} tokens/s"
        for step in (total // 2, total):
            meter = {"n": step, "total": total, "elapsed": seconds, "postfix": postfix, "ncols": 80}
            bar = tqdm.format_meter(**meter, bar_format=reporter.bar_format(total))
            assert len(bar) <= 80
            assert bar.endswith("12.3M tokens/s")
            assert f"step {step}/{total} |" in bar


def test_the_table_of_a_sweep():
    """Catches NaN in front of numbers, failures in front of anything, and runs with equal losses out of their order."""
    losses = [math.nan, 2.0, math.inf, 1.0, 2.0]
    runs = [sweep.Outcome(number, f"/runs/{number}", loss) for number, loss in enumerate(losses, 1)]
    runs.append(sweep.Outcome(6, "/runs/6", 0.5, failure="out of memory"))
    lines = sweep.sweep_table(runs).strip().splitlines()[1:]
    assert [int(line.split(":")[0].split()[1]) for line in lines] == [4, 2, 5, 1, 3, 6]
    assert lines[0] == "  run 4: evaluation loss 1.0000  /runs/4"
    assert lines[-1] == "  run 6: failed: out of memory  /runs/6"


def test_the_table_of_all_runs(tmp_path):
    """Catches the latest loss for the lowest, another run's settings, half a speed, a table that one bad file ends."""
    settings = {
        "long": [],
        "deep/er": ["gpt_config.n_layer=3", "trainer_config.max_steps=6", "trainer_config.log_every_steps=4"],
    }
    with world_of_one() as ranks:
        trainers = {name: make_trainer(tmp_path / name, *chosen, ranks=ranks) for name, chosen in settings.items()}
        losses = iter([2.5, 2.8])
        vars(trainers["long"])["evaluate"] = lambda: next(losses)
        for trainer in trainers.values():
            trainer.fit()
    for name in ("cut off", "empty", "odd", "without config"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("{}")
    whole = (tmp_path / "long" / "gpt_snapshot.pt").read_bytes()
    (tmp_path / "cut off" / "gpt_snapshot.pt").write_bytes(whole[: len(whole) // 2])
    snapshot = load_snapshot(str(tmp_path / "long" / "gpt_snapshot.pt"))
    save_snapshot({**snapshot, "config": {"trainer_config": 3}}, str(tmp_path / "odd" / "gpt_snapshot.pt"))
    save_snapshot({**snapshot, "config": {}}, str(tmp_path / "without config" / "gpt_snapshot.pt"))
    process = run_program(sys.executable, "report.py", tmp_path)
    assert process.returncode == 0, process.stderr
    head, *lines = process.stdout.splitlines()
    assert head.split()[:5] == ["loss", "steps", "parameters", "seconds", "tokens/s"]
    rows = {line.split()[5]: line.split() for line in lines}
    assert list(rows) == sorted(rows, key=lambda name: float(rows[name][0]))
    assert rows["long"][0] == "2.5000"
    assert rows["deep/er"][0] == f"{read_losses(tmp_path / 'deep/er', 'eval/loss')[6]:.4f}"
    assert [rows["long"][1], rows["deep/er"][1]] == ["20", "6"]
    for name, trainer in trainers.items():
        assert int(rows[name][2].replace(",", "")) == sum(p.numel() for p in trainer.raw_model.parameters())
        speeds = read_losses(tmp_path / name, "train/tokens_per_second")
        steps = [at - before for before, at in zip([0, *speeds], speeds, strict=False)]
        seconds = sum(count * 12 * 16 / speed for count, speed in zip(steps, speeds.values(), strict=True))
        assert float(rows[name][4].replace(",", "")) == pytest.approx(trainer.step * 12 * 16 / seconds, abs=1)
    assert "gpt_config.n_layer=3" in rows["deep/er"]
    assert "gpt_config.n_layer=3" not in rows["long"]
    assert set(rows["deep/er"]) - set(rows["long"]) >= {
        "trainer_config.max_steps=6",
        "trainer_config.log_every_steps=4",
    }
    skipped = process.stderr.strip().splitlines()
    assert [line.split(": ")[0] for line in skipped] == [
        f"skipped {tmp_path / name}" for name in ("cut off", "empty", "odd", "without config")
    ]


def test_a_table_without_runs(tmp_path):
    """Catches a traceback, and an empty table that looks like an answer."""
    process = run_program(sys.executable, "report.py", tmp_path / "nowhere")
    assert (process.returncode, process.stdout) == (1, "")
    advice = "train one with python main.py, or name the folder that holds them"
    assert process.stderr == f"error: no runs in {tmp_path / 'nowhere'}; {advice}\n"


def test_runs_without_a_loss_or_curves_come_last():
    """Catches a run that has diverged at the top, and a division by no seconds at all."""
    runs = [
        Run("a", "text", math.nan, 3, 10, 1.0, 5.0, []),
        Run("b", "text", math.inf, 3, 10, 0.0, 0.0, []),
        Run("c", "text", 2.0, 3, 10, 1.0, 5.0, []),
    ]
    lines = run_table(runs).splitlines()[1:]
    assert lines[0].endswith("c")
    assert lines[2].split() == ["inf", "3", "10", "?", "?", "b"]


def test_losses_on_different_texts_are_not_ranked():
    """Catches a short play's loss among Shakespeare's: a run without a network looks like any other."""
    losses = [("a", "one", 1.5), ("b", "other", 1.2), ("c", "one", 1.6), ("d", "other", 2.0)]
    table = run_table([Run(name, text, loss, 3, 10, 1.0, 5.0, []) for name, text, loss in losses])
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["b", "d", "above:", "a", "c"]
