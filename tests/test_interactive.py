"""One prompt after the other: what is typed, what comes back, and on which stream."""

import argparse
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
import torch
from conftest import HANGS, PROJECT
from test_generate import PROMPT, load, run_generate, snapshot  # noqa: F401 (fixture)

from console.prompts import COMMANDS, obey, unescape
from generate import until


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
    "line", ["/top-p 2", "/top-k -1", "/length -1", "/seed -1", "/temperature hot", "/seed", "/x 1"]
)
def test_bad_settings_change_nothing(line):
    """Catches half a change, and a message that doesn't name what was typed."""
    arguments = argparse.Namespace(temperature=1.0, top_k=None, top_p=None, max_new_tokens=1, seed=None, stop="")
    before = dict(vars(arguments))
    with pytest.raises(ValueError, match=r"top_p=2.0|" + re.escape(line.split()[0])):
        obey(line, arguments)
    assert vars(arguments) == before


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
