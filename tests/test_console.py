"""What a run says, and where: reports, one line for an error, prompts, a console that is gone, Ctrl-C."""

import argparse
import ast
import contextlib
import logging
import math
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import HANGS, PROJECT, TINY_RUN, memory_of_this_process, read_losses, run_program
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_generate import PROMPT, load, run_generate, snapshot  # noqa: F401 (fixture)
from test_trainer import make_trainer, world_of_one

import main
from console import logs, reporter, sweep
from console.prompts import COMMANDS, HELP, obey, unescape
from console.reporter import Reporter, Stopwatch, lesson
from console.sweep import directory_name
from generate import until
from snapshot import load_snapshot

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")


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


@linux
def test_peak_memory_is_in_gigabytes():
    """Catches kilobytes taken for bytes: a run of a gigabyte would seem to need a megabyte."""
    peak = memory_of_this_process("VmHWM") / 1e9
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
    assert f"to see the curves: tensorboard --logdir {tmp_path}" in caplog.messages


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


def test_the_closing_words_say_what_the_losses_mean(tmp_path, caplog):
    """Catches the two losses swapped, and no word about a text that was learned by heart; or one where it wasn't."""
    words = "learned: 1.31 on the text it trained on, 1.54 on unseen text"
    assert lesson(1.31, 1.54, 1.31, 1.54, 1100, 1100) == [words]
    by_heart = lesson(0.52, 1.90, 1.30, 1.48, 400, 1100)
    assert by_heart[0] == "learned: 0.52 on the text it trained on, 1.90 on unseen text"
    assert by_heart[1] == "unseen text: lowest at step 400 of 1,100 (1.48, the best snapshot)"
    assert by_heart[2].startswith("after that it learned its text by heart; try ")
    # Up and down a little, less than a hundredth of a nat, and more.
    assert [len(lesson(1.29, loss, 1.30, 1.48, 400, 1100)) for loss in (1.485, 1.489, 1.491, 1.52)] == [1, 1, 3, 3]
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
        logging.getLogger("somebody").warning("written: a\x1b[2Jb\udcff\na line")  # the name of a directory
        assert capsys.readouterr().err.endswith("a\\x1b[2Jb\\udcff\na line\n")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_the_bar_fits_80_columns(tmp_path):
    """Catches a bar that is cut off or runs over into the next line in a terminal of the usual size."""
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
    assert max(map(len, bars)) <= 80
    (last,) = {bar for bar in bars if "24/24" in bar and "loss" in bar}  # it is whole: count, time, loss and rates
    assert re.fullmatch(r"step 24/24 \|.+\| 00:00 left, loss \d\.\d{3}, Muon 0.0075, AdamW 0.0025", last)


def test_a_long_run_fits_80_columns_too():
    """Catches a bar whose end is cut off once steps have seven digits, and a wide one that lacks the speed."""
    from tqdm import tqdm

    rates = {"Muon": 0.00012345, "AdamW": 0.000012345}
    for columns, end in ((80, "AdamW 1.2e-05"), (120, "AdamW 1.2e-05, 12.3M tokens/s")):
        postfix = reporter.bar_words(10.1234, rates, 12_345_678, columns)
        for total, seconds in ((9_999, 3_600.0), (99_999, 359_000.0), (1_000_000, 359_000.0)):
            for step in (total // 2, total):
                meter = {"n": step, "total": total, "elapsed": seconds, "postfix": postfix, "ncols": columns}
                bar = tqdm.format_meter(**meter, bar_format=reporter.BAR_FORMAT)
                assert len(bar) <= columns
                assert f"step {step}/{total} |" in bar
                assert bar.endswith(f" left, loss 10.12, Muon 0.00012, {end}")


def test_both_learning_rates_are_named(tmp_path, caplog):
    """Catches AdamW's learning rate shown as the only one, in a run whose matrices follow Muon's."""
    settings = ["trainer_config.max_steps=2", "optimizer_config.warmup_steps=4"]
    for name, peaks, first in (
        ("muon", "peak learning rates: Muon 0.03 (matrices of the blocks), AdamW 0.01 (the rest)",
         "learning rate Muon 0.0075, AdamW 0.0025"),
        ("adamw", "peak learning rate: AdamW 0.01", "learning rate AdamW 0.0025"),
    ):  # fmt: skip
        caplog.clear()
        with world_of_one() as ranks, caplog.at_level(logging.DEBUG):
            make_trainer(tmp_path / name, *settings, f"optimizer_config.name={name}", ranks=ranks).fit()
        assert peaks in caplog.messages
        (line,) = [message for message in caplog.messages if message.startswith("step 1/2: ")]
        assert re.fullmatch(rf"step 1/2: loss \d\.\d{{4}}, {first}, \d+ tokens/s", line)
    assert read_losses(tmp_path / "muon", "train/muon_learning_rate")[1] == pytest.approx(0.0075)


def test_a_prolonged_run_says_that_its_rate_jumps_up(tmp_path, caplog):
    """Catches a learning rate that goes from nothing to half its peak without a word, and one that only goes on."""
    jump = "the learning rate jumps up, from 0.05 to 0.56 of its peak"
    settings = {
        # The last of 20 steps had 1/20, and of 45 steps the 21st has 25/45.
        "linear": (["optimizer_config.lr_decay=linear"], 45, True),
        "as before": (["optimizer_config.lr_decay=linear"], 20, False),
        "not yet down": (["optimizer_config.lr_decay=wsd"], 45, False),
        "warming up": (["optimizer_config.warmup_steps=50"], 45, False),
    }
    for name, (chosen, steps, is_told) in settings.items():
        caplog.clear()
        chosen = ["optimizer_config.warmup_steps=0", "trainer_config.max_epochs=9", *chosen]
        with world_of_one() as ranks, caplog.at_level(logging.INFO):
            first = make_trainer(tmp_path / name, *chosen, "trainer_config.max_steps=20", ranks=ranks)
            if name == "not yet down":
                first.state.total_steps = 15  # as a signal would end it
            first.fit()
            make_trainer(tmp_path / name, *chosen, f"trainer_config.max_steps={steps}", ranks=ranks).resume()
        assert any(message.startswith(jump) for message in caplog.messages) == is_told, name
        assert any("jumps up" in message for message in caplog.messages) == is_told, name


@pytest.mark.parametrize(
    ("typed", "name", "is_told"),
    [
        (["optimizer_config.learning_rate=1e-3,1e-2"], "muon", True),
        (["optimizer_config.learning_rate=1e-3,1e-2", "optimizer_config.name=adamw,muon"], "adamw", True),
        (["optimizer_config.learning_rate=1e-3,1e-2"], "adamw", False),
        (["optimizer_config.learning_rate=1e-3,1e-2", "optimizer_config.muon_learning_rate=.01,.02"], "muon", False),
        (["optimizer_config.learning_rate=range(1,3)"], "muon", True),  # no comma is needed
        (["optimizer_config.learning_rate=1e-3", "trainer_config.seed=1,2"], "muon", False),
        (["+optimizer_config.learning_rate=[1e-3,1e-2]"], "muon", False),  # a list is one value
    ],
)
def test_a_sweep_over_adamws_rate_says_that_it_is_adamws(monkeypatch, typed, name, is_told):
    """Catches a sweep over a learning rate that most of the weights don't have, read as if they had it."""
    monkeypatch.setattr(sys, "argv", ["main.py", "-m", *typed])
    note = sweep.note_on_rates(main.swept(), name)
    assert bool(note) == is_told
    assert not is_told or "optimizer_config.muon_learning_rate" in note


def test_the_table_of_a_sweep():
    """Catches NaN in front of numbers, failures in front of anything, and runs with equal losses out of their order."""
    losses = [math.nan, 2.0, math.inf, 1.0, 2.0]
    runs = [sweep.Outcome(number, f"/runs/{number}", loss=loss) for number, loss in enumerate(losses, 1)]
    runs.append(sweep.Outcome(6, "/runs/6", loss=0.5, failure="out of memory"))
    runs[3].end = "max_steps"
    lines = sweep.sweep_table(runs).strip().splitlines()[1:]
    assert [int(line.split(":")[0].split()[1]) for line in lines[:-1]] == [4, 2, 5, 1, 3, 6]
    assert lines[0] == "  run 4: evaluation loss 1.0000  4 (max_steps)"
    assert lines[-2] == "  run 6: failed                  6 (out of memory)"
    assert lines[-1] == "in /runs"


def test_tables_fit_80_columns():
    """Catches rows that a terminal breaks anywhere, what all runs share in each of them, and signs that it obeys."""
    rates = ["0.001", "0.002"]
    runs = [
        sweep.Outcome(
            *(number, f"/runs/optimizer_config.learning_rate={rate},data_config.path=somewhere.txt"),
            settings=[f"optimizer_config.learning_rate={rate}", "data_config.path=somewhere.txt"],
            failure="the loss is not finite " * 9,
        )
        for number, rate in enumerate(rates, 1)
    ]
    table = sweep.sweep_table(runs)
    assert max(map(len, table.splitlines())) <= 80
    together = re.sub(r"\s+", "", table)
    for rate in rates:
        assert together.count(f"learning_rate={rate},") == 1  # in the name, and not again
    numbered = [sweep.Outcome(n, f"/runs/\x1b[2J{n}", settings=runs[n - 1].settings, loss=1.0) for n in (1, 2)]
    table = sweep.sweep_table(numbered)
    assert "\x1b" not in table
    assert "data_config.path" not in table
    assert r"  run 2: evaluation loss 1.0000  \x1b[2J2 optimizer_config.learning_rate=0.002" in table.splitlines()


def test_the_bar_shows_the_time_that_is_left():
    """Catches the time that has passed, or the time of all steps, under the name of the time that is left."""
    from tqdm import tqdm

    bar = tqdm.format_meter(2500, 10_000, 60.0, ncols=80, bar_format=reporter.BAR_FORMAT)
    assert bar.split("| ")[-1] == "03:00 left"


@settings(max_examples=300, deadline=None)
@example("p=a/b", "p=a_b")
@example("é" * 150 + "a", "é" * 150 + "b")
@given(st.text(min_size=1, max_size=400), st.text(min_size=1, max_size=400))
def test_two_lists_of_overrides_never_share_a_directory(one, other):
    """Catches names that are cut, or whose slashes are replaced, until two of them are equal: two runs in one place.

    And a digest where a name was.
    """
    assert directory_name("a.b=1,c=x") == "a.b=1,c=x"
    assert re.fullmatch(r"c=\[1,2\]-\w{8}", directory_name("a.b=1,c=[1,2],d=3", ["c"]))  # what tells it from the others
    for text in (one, other):
        name = directory_name(text)
        assert len(name.encode("utf-8", "surrogatepass")) <= 230  # below 255, with room for what is made from it
        assert "/" not in name
        if len(text) < 50:
            assert name.startswith(re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", text))  # readable
    assert (directory_name(one) == directory_name(other)) == (one == other)


# ------------------------------------------------------------------------------------ one prompt after the other


def test_standard_output_carries_the_texts_alone(snapshot):  # noqa: F811
    """Catches answers to settings among the texts, one bad line that ends it all, and settings that do nothing."""
    lines = [
        *(PROMPT, "/temperature 0", PROMPT, PROMPT, "/temperature -1", "/temprature 1", "/length 3", PROMPT + "~"),
        *(PROMPT, "/length 30", "/temperature 1", "/seed 5", PROMPT, PROMPT, "/help", ""),
    ]
    process = run_generate(snapshot, "--interactive", stdin="\n".join(lines) + "\n")
    assert process.returncode == 0, process.stderr
    greedy = run_generate(snapshot, PROMPT, "--temperature", 0).stdout
    drawn = run_generate(snapshot, PROMPT, "--temperature", 1, "--seed", 5).stdout
    texts = process.stdout[len(PROMPT) + 31 :]  # the first one is drawn at random
    assert texts.startswith(greedy * 2 + greedy[: len(PROMPT) + 3] + "\n" + drawn * 2 + "\n")
    errors = [line for line in process.stderr.splitlines() if "error:" in line]
    assert [re.match(r"error: (temperature=-1.0|/temprature|unknown characters '~')", line)[1] for line in errors]
    assert all(name in process.stderr for name in COMMANDS)


def test_an_invalid_byte_costs_its_line_alone(snapshot, tmp_path):  # noqa: F811
    """Catches a byte that isn't UTF-8, and takes with it all lines that were read in one piece with it."""
    (tmp_path / "typed").write_bytes(f"/temperature 0\n{PROMPT}\n{PROMPT}".encode() + b"\xff\n" + PROMPT.encode())
    command = [sys.executable, PROJECT / "generate.py", "--snapshot", snapshot, "--interactive", "--max-new-tokens=30"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as in most languages' settings
    with open(tmp_path / "typed", "rb") as typed:
        process = subprocess.run(
            command, stdin=typed, capture_output=True, text=True, env=env, cwd=PROJECT, check=False
        )
    assert process.returncode == 0
    assert process.stdout == run_generate(snapshot, PROMPT, "--temperature", 0).stdout * 2
    assert process.stderr.count("error: unknown characters") == 1


def test_on_a_terminal_it_is_what_starts(snapshot):  # noqa: F811
    """Catches Ctrl-C that ends the program instead of the text, and a terminal that is given a text unasked."""
    here, there = pty.openpty()
    command = [sys.executable, PROJECT / "generate.py", "--snapshot", snapshot, "--max-new-tokens", "1000000000"]
    process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, start_new_session=True, cwd=PROJECT)
    os.close(there)
    unread = ""

    def read_until(words: str) -> None:
        """Read up to some words. What has come with them, already, is for the next call."""
        nonlocal unread
        deadline = time.monotonic() + HANGS
        while words not in unread:
            assert time.monotonic() < deadline, unread
            if select.select([here], [], [], 1.0)[0]:
                unread += os.read(here, 65536).decode(errors="replace")
        unread = unread.partition(words)[2]

    try:
        read_until("> ")
        os.write(here, f"{PROMPT}\n".encode())
        read_until("\n")  # the line that was typed
        read_until(PROMPT)
        process.send_signal(2)  # what the terminal does at Ctrl-C
        read_until("> ")
        os.write(here, b"/length 5\n")
        read_until("length is 5 now")
        read_until("> ")  # typed earlier, Ctrl-D would be lost: the prompt takes the terminal over
        os.write(here, b"\x04")  # Ctrl-D
        assert process.wait(HANGS) == 0
    finally:
        process.kill()
        os.close(here)


@pytest.mark.parametrize(
    ("line", "setting", "value"),
    [
        *(("/temperature 0.5", "temperature", 0.5), ("/top-k 3", "top_k", 3), ("/top-k 0", "top_k", None)),
        *(("/top-p 0.9", "top_p", 0.9), ("/length 7", "max_new_tokens", 7), ("/seed 3", "seed", 3)),
        *((r"/stop \n\n", "stop", "\n\n"), ("/stop", "stop", "")),
    ],
)
def test_settings(line, setting, value):
    """Catches a setting that sets another one, or none."""
    arguments = argparse.Namespace(temperature=1.0, top_k=None, top_p=None, max_new_tokens=1, seed=None, stop="x")
    before = dict(vars(arguments))
    obey(line, arguments)
    assert vars(arguments) == {**before, setting: value}


@pytest.mark.parametrize(
    "line", ["/top-p 2", "/top-k -1", "/length -1", "/seed -1", "/temperature hot", "/x 1", "/settings 1", "/quit 1"]
)
def test_bad_settings_change_nothing(line):
    """Catches half a change, and a message that doesn't name what was typed."""
    arguments = argparse.Namespace(temperature=1.0, top_k=None, top_p=None, max_new_tokens=1, seed=None, stop="")
    before = dict(vars(arguments))
    with pytest.raises(ValueError, match=r"top_p=2.0|" + re.escape(line.split()[0])):
        obey(line, arguments)
    assert vars(arguments) == before


def test_settings_are_shown():
    """Catches a setting that can only be seen by setting it."""
    arguments = argparse.Namespace(temperature=0.8, top_k=None, top_p=0.9, max_new_tokens=7, seed=None, stop="\n")
    before = dict(vars(arguments))
    assert obey("/temperature", arguments) == "temperature is 0.8"
    assert obey("/top-k ", arguments) == "top-k is none"
    assert obey("/length", arguments) == "length is 7"
    assert obey("/settings", arguments).splitlines() == [
        *("temperature is 0.8", "top-k is none", "top-p is 0.9", "length is 7", "seed is none", r"stop is '\n'"),
    ]
    assert vars(arguments) == before


def test_help_fits_80_columns():
    """Catches lines that a terminal of the usual size breaks anywhere."""
    assert max(map(len, HELP.splitlines())) <= 80
    assert all(name in HELP for name in (*COMMANDS, "/settings", "/quit"))


@pytest.mark.parametrize("word", ["quit", "/quit"])
def test_it_can_be_quit_by_a_word(snapshot, word):  # noqa: F811
    """Catches a user who can't get out, and a text that begins with that word."""
    process = run_generate(snapshot, "--interactive", "--max-new-tokens", 3, stdin=f"{PROMPT}\n{word}\n{PROMPT}\n")
    assert (process.returncode, len(process.stdout)) == (0, len(PROMPT) + 3 + 1), process.stderr


def test_prompts_have_one_text_each(snapshot):  # noqa: F811
    """Catches --num-samples that does nothing."""
    process = run_generate(snapshot, "--interactive", "--num-samples", 3, stdin=f"{PROMPT}\n")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("error: --num-samples=3: ")
    assert len(process.stderr.splitlines()) == 1


def test_a_seed_can_be_taken_back():
    """Catches a seed that makes every later text the same, until the program is started anew."""
    arguments = argparse.Namespace(temperature=1.0, top_k=None, top_p=None, max_new_tokens=1, seed=None, stop="")
    assert [obey(line, arguments) for line in ("/seed 3", "/seed none")] == ["seed is 3 now", "seed is none now"]
    assert arguments.seed is None


def test_a_newline_can_be_typed():
    """Catches a backslash that can't be meant as one."""
    assert unescape(r"a\nb\\n\t") == "a\nb\\n\t"


@pytest.mark.parametrize("stop", ["ab", "aab", "aaa", "b", "abab", ""])
def test_a_text_ends_before_its_stop(stop):
    """Catches characters that waited and are lost, and a stop that begins within a beginning of itself."""
    for number in range(3**7):
        text = "".join("abc"[number // 3**i % 3] for i in range(7))
        expected = text if not stop or stop not in text else text[: text.index(stop)]
        assert "".join(until(stop, text)) == expected


def test_stop_counts_for_every_sample(snapshot):  # noqa: F811
    """Catches a string that ends one text and not several, and one in the prompt that ends a text before it begins."""
    settings = ("e ", "--seed", 3, "--temperature", 1.5, "--max-new-tokens", 200)
    whole = run_generate(snapshot, *settings, "--num-samples", 3).stdout.split("\n\n---\n\n")
    cut = run_generate(snapshot, *settings, "--num-samples", 3, "--stop", "e").stdout.split("\n\n---\n\n")
    assert [text.rstrip("\n") for text in cut] == ["e " + text[2:].split("e")[0].rstrip("\n") for text in whole]
    one = run_generate(snapshot, *settings, "--stop", "e").stdout
    assert one.startswith("e ")
    assert "e" not in one[2:]


def test_the_score_is_the_loss_of_an_evaluation(snapshot):  # noqa: F811
    """Catches a score of the first character, of the last window's padding, or in other units than it says."""
    model, characters = load(snapshot)
    text = (PROJECT / "data" / "sample.txt").read_text(encoding="utf-8")[100:271]
    process = run_generate(snapshot, "--score", text)
    assert process.returncode == 0, process.stderr
    total = 0.0
    codes = [characters.index(c) for c in text]
    for start in range(0, len(codes) - 1, 16):
        window = codes[start : start + 17]
        logits = model(torch.tensor([window[:-1]]))[0][0].double().log_softmax(-1)
        total -= sum(row[target].item() for row, target in zip(logits, window[1:], strict=True))
    nats, bits = (float(number) for number in re.findall(r"\d\.\d+", process.stdout))
    assert nats == pytest.approx(total / 170, abs=1e-4)
    assert bits == pytest.approx(nats / 0.693147, abs=2e-4)
    assert "over 170 characters" in process.stdout
    short = run_generate(snapshot, "--score", "T")
    assert short.returncode == 1
    assert short.stderr.startswith("error: --score: got 1 characters")


# ------------------------------------------------------------------------------------ before torch is loaded


PROGRAMS = ["main.py", "generate.py", "look.py", "export.py", "report.py"]


@pytest.mark.parametrize("name", ["console/environment.py", *PROGRAMS])
def test_an_old_python_can_read_the_first_files(name):
    """Catches a SyntaxError in place of the line that says which Python is needed."""
    ast.parse((PROJECT / name).read_text(encoding="utf-8"), feature_version=(3, 7))


@pytest.mark.parametrize(("version", "name"), [((3, 9), "main"), ((3, 15), "main"), ((3, 15), "generate")])
def test_another_python_is_one_line(version, name):
    """Catches a traceback from the depths of some package where Python is too old or too new."""
    script = f"import sys; sys.version_info = {(*version, 0, 'final', 0)}; import {name}"
    process = run_program(sys.executable, "-c", script, is_real=True)
    assert process.returncode == 1
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: this is Python {version[0]}.{version[1]}, and the project needs 3.10 to 3.14")


def test_the_environment_is_settled_before_torch_is_loaded():
    """Catches an import that somebody has sorted: OpenMP reads its settings when torch loads it, and never again."""
    for name in PROGRAMS:
        body = ast.parse((PROJECT / name).read_text(encoding="utf-8")).body
        first = next(node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
        assert ast.unparse(first) == "from console import environment"
    loaded = run_program(
        sys.executable, "-c", "from console import environment; import sys; print('torch' in sys.modules)", is_real=True
    )
    assert loaded.stdout == "False\n"


SETTLED = """
import builtins, ctypes, io, os, sys, types
real, calls = open, []
builtins.open = lambda path, *how: io.StringIO(sys.argv[1]) if path == "/proc/loadavg" else real(path, *how)
os.sched_getaffinity = lambda process: range(4)
from console import environment
mallopt = ctypes.CDLL(None).mallopt
ctypes.CDLL = lambda name: types.SimpleNamespace(mallopt=lambda *how: calls.append((*how, mallopt(*how))))
environment.guard()
print(os.environ.get("GOMP_SPINCOUNT"), calls)
"""


@linux
@pytest.mark.parametrize(
    ("given", "load", "settled"),
    [
        ({}, "0 0 0 2/99 1", "20000 [(-3, 33554432, 1), (-1, 1073741824, 1)]"),  # 1: glibc takes it
        ({}, "0 0 0 3/99 1", "3000 [(-3, 33554432, 1), (-1, 1073741824, 1)]"),  # other programs want the cores
        ({}, "", "20000 [(-3, 33554432, 1), (-1, 1073741824, 1)]"),
        ({"GOMP_SPINCOUNT": "7", "MALLOC_ARENA_MAX": "1"}, "", "7 []"),
        ({"OMP_WAIT_POLICY": "active", "GLIBC_TUNABLES": "glibc.malloc.check=0"}, "", "None []"),
    ],
)
def test_the_users_own_settings_of_openmp_and_memory_win(given, load, settled):
    """Catches a setting that overrides what the user, or the administrator of a cluster, has chosen."""
    ours = ("GOMP_", "OMP_WAIT", "MALLOC_", "GLIBC_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    command = [sys.executable, "-c", SETTLED, load]
    process = subprocess.run(command, env={**clean, **given}, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == settled


# ------------------------------------------------------------------------------------ Ctrl-C


def interrupt(command: list[str], moment: Callable[[int], bool]) -> tuple[int, str]:
    """Start a command in a process group of its own, send SIGINT to all of it at a moment; (exit code, its words)."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + HANGS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a child that has just ended
            if moment(process.pid):
                break
        time.sleep(0.005)
    else:
        process.kill()
        raise AssertionError(f"the moment never came: {process.communicate()[0]}")
    os.killpg(process.pid, signal.SIGINT)
    words = process.communicate(timeout=HANGS)[0]
    return process.returncode, words


def has_loaded(library: str) -> Callable[[int], bool]:
    return lambda pid: library in Path(f"/proc/{pid}/maps").read_text()


def compiles(pid: int) -> bool:
    """Whether one of its threads has started the C++ compiler."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return any(b"++" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)


@linux
@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
@pytest.mark.parametrize("command", ["main.py", "generate.py", "look.py"])
def test_ctrl_c_while_torch_is_loaded(command, library, tmp_path):
    """Catches a traceback through torch's imports, or exit code 1, from a Ctrl-C in the first second."""
    argument = f"hydra.run.dir={tmp_path / 'run'}" if command == "main.py" else "--snapshot=nothing.pt"
    assert interrupt([command, argument], has_loaded(library)) == (130, "stopped\n")
    assert not (tmp_path / "run").exists()


@linux
def test_ctrl_c_while_the_run_is_set_up(tmp_path):
    """Catches a traceback, or a directory that is left, from a Ctrl-C between Hydra and the first step."""
    run_dir = tmp_path / "some" / "run"
    code, words = interrupt(["main.py", f"hydra.run.dir={run_dir}", *TINY_RUN], lambda pid: run_dir.exists())
    assert code == 130
    assert words.endswith("stopped\n")
    assert "Traceback" not in words
    assert not (tmp_path / "some").exists() or any(run_dir.iterdir())


@linux
@pytest.mark.slow
def test_ctrl_c_while_the_model_is_compiled(tmp_path):
    """Catches 2,000 lines: the compiler gets the signal too, and torch tells all about its failure."""
    command = ["main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN, "trainer_config.compile=true"]
    code, words = interrupt(command, compiles)
    assert code == 130
    assert words.endswith("stopped\n")
    assert len(words.splitlines()) < 12


# ------------------------------------------------------------------------------------ a console that is gone


@pytest.mark.parametrize("console", ["2>/dev/full", "2>&- <&- >&-"])
def test_a_run_needs_no_console(console, tmp_path):
    """Catches a run that ends, or is reported as failed, because nobody can read what it says."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = [sys.executable, "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN]
    process = run_program("sh", "-c", f'exec "$@" {console}', "sh", *command)
    assert process.returncode == 0, (tmp_path / "run" / "main.log").read_text()
    assert load_snapshot(str(tmp_path / "run" / "gpt_snapshot.pt"))["step"] == 20
    assert "finished: 20 steps" in (tmp_path / "run" / "main.log").read_text()


@linux
def test_a_terminal_that_was_closed_costs_nothing(tmp_path):
    """Catches an "Input/output error" in the next line that a run would say, and a last step that isn't saved."""
    terminal, console = os.openpty()
    command = ["main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN, "trainer_config.max_steps=20"]
    process = subprocess.Popen(
        [sys.executable, *command], cwd=PROJECT, stdout=console, stderr=console, start_new_session=True
    )
    os.close(console)
    assert os.read(terminal, 1)  # it has begun to speak, so torch is loaded and the run is set up
    os.close(terminal)
    assert process.wait(HANGS) == 0
    assert load_snapshot(str(tmp_path / "run" / "gpt_snapshot.pt"))["step"] == 20


def test_generating_needs_no_standard_error(tmp_path):
    """Catches exit code 120 or a lost text, because a remark could not be made."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    run = run_program(sys.executable, "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN)
    assert run.returncode == 0, run.stderr
    command = [sys.executable, "generate.py", "--snapshot", tmp_path / "run" / "gpt_snapshot.pt", "--max-new-tokens=9"]
    for console in ("2>&-", "2>/dev/full"):
        process = run_program("sh", "-c", f'exec "$@" {console}', "sh", *command)  # no prompt: it says where it begins
        assert process.returncode == 0
        assert len(process.stdout) == 1 + 9 + 1


# ------------------------------------------------------------------------------------ Python 3.14

CHECK_OF_3_14 = """
import argparse, sys

def _check_help(self, action):
    if action.help and hasattr(self, "_get_formatter"):
        formatter = self._get_formatter()
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError) as exc:
            raise ValueError("badly formed help string") from exc

def add_argument(self, *args, _add=argparse._ActionsContainer.add_argument, **kwargs):
    action = _add(self, *args, **kwargs)
    self._check_help(action)
    return action

argparse._ActionsContainer._check_help = _check_help
argparse._ActionsContainer.add_argument = add_argument
sys.path.insert(0, ".")
"""


def test_python_3_14s_check_of_help_texts(tmp_path):
    """Catches "badly formed help string": in Python 3.14 argparse refuses a help text of Hydra's that is no string."""
    run_as_main = CHECK_OF_3_14 + "import main; main.main()"
    arguments = [f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN, "trainer_config.max_steps=2"]
    process = run_program(sys.executable, "-c", run_as_main, *arguments)
    assert process.returncode == 0, process.stderr
    shown = run_program(sys.executable, "-c", run_as_main, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "trainer_config" in shown.stdout
    # The check is there, and without our function Hydra doesn't pass it: when this fails, the function can go.
    without = CHECK_OF_3_14 + "import main; main.accept_hydras_help = lambda: None; main.main()"
    process = run_program(sys.executable, "-c", without, *arguments)
    assert process.returncode != 0
    assert "badly formed help string" in process.stderr


SLOW = pytest.mark.slow


@pytest.mark.parametrize("method", ["spawn", *(pytest.param(m, marks=SLOW) for m in ("fork", "forkserver"))])
def test_the_loaders_processes_under_every_start_method(method, tmp_path):
    """Catches what only forked workers can do, and a warning about a leaked semaphore at the end of the run.

    Python 3.14 starts processes by forkserver on Linux; macOS and Windows spawn them. The thread that fills a loader's
    queue, which holds two semaphores, ends late here, as it may on a busy machine.
    """
    script = (
        "import multiprocessing, multiprocessing.queues, runpy, sys, time\n"
        "def end_late(*args, feed=multiprocessing.queues.Queue._feed):\n"
        "    feed(*args); time.sleep(1)\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.queues.Queue._feed = staticmethod(end_late)\n"
        "    multiprocessing.set_start_method(sys.argv[1]); sys.argv = sys.argv[2:]; sys.path.insert(0, '.')\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-c", script, method, "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN]
    process = run_program(*command, "trainer_config.data_loader_workers=1", is_real=True)
    assert process.returncode == 0, process.stderr
    for word in ("leaked", "Traceback", "Warning"):
        assert word not in process.stderr
    plain = run_program(sys.executable, "main.py", f"hydra.run.dir={tmp_path / 'plain'}", *TINY_RUN)
    assert plain.returncode == 0, plain.stderr
    weights, expected = (load_snapshot(str(tmp_path / name / "gpt_snapshot.pt"))["model"] for name in ("run", "plain"))
    assert all((weights[name] == expected[name]).all() for name in expected)
