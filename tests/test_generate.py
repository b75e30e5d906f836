"""Snapshot -> text, as a user types it: what arrives on which stream, from where, and when."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PROJECT, run_program
from test_trainer import make_trainer, world_of_one

import generate
import model
from model import GPT, GPTConfig
from saving import finding
from snapshot import best_url, load_snapshot, previous_url, save_snapshot

PROMPT = "The "


def run_generate(snapshot: Path, *arguments: object, **kwargs) -> subprocess.CompletedProcess[str]:
    """generate.py in a process of its own; by default with 30 new characters."""
    command = (sys.executable, PROJECT / "generate.py", "--snapshot", snapshot, "--max-new-tokens", 30)
    return run_program(*command, *arguments, **kwargs)


@pytest.fixture(scope="module")
def snapshot(two_rank_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only file of a run of two ranks: corpus, configuration and run directory are elsewhere."""
    folder, process = two_rank_run
    assert process.returncode == 0, process.stderr
    alone = tmp_path_factory.mktemp("alone") / "copied.pt"
    shutil.copy(folder / "run" / "gpt_snapshot.pt", alone)
    return alone


def load(snapshot: Path) -> tuple[GPT, str]:
    """Model and vocabulary, built without generate.py."""
    state = load_snapshot(str(snapshot))
    model = GPT(GPTConfig(**state["model_config"]))
    model.load_state_dict(state["model"])
    return model.eval(), state["vocabulary"]


def test_a_loaded_models_head_is_its_embedding(snapshot):
    """Catches two matrices where there was one: twice counted, and trained apart."""
    loaded, _ = finding.load_model(str(snapshot))
    assert loaded.lm_head.weight is loaded.wte.weight


def test_a_snapshot_alone_is_enough(snapshot, tmp_path):
    """Catches a snapshot without vocabulary or model configuration, and files looked for in the working directory."""
    process = run_generate(snapshot, PROMPT, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    # The text alone: the prompt, 30 characters, a line's end.
    assert process.stdout.startswith(PROMPT)
    assert len(process.stdout) == len(PROMPT) + 30 + 1
    assert process.stdout.endswith("\n")
    assert process.stderr == ""
    assert not list(tmp_path.iterdir())


def test_temperature_0_is_greedy(snapshot):
    """Catches a division by zero, and token 0 forever: the text must be the likeliest one, found without a cache."""
    process = run_generate(snapshot, PROMPT, "--temperature", 0, "--max-new-tokens", 12)
    assert process.returncode == 0, process.stderr
    model, vocabulary = load(snapshot)
    expected = PROMPT
    for _ in range(12):  # 4 + 12 characters just fill the context of 16
        with torch.no_grad():
            logits, _ = model(torch.tensor([[vocabulary.index(c) for c in expected]]))
        expected += vocabulary[int(logits[0, -1].argmax())]
    assert process.stdout == expected + "\n"


def test_the_prompt_can_come_from_standard_input(snapshot):
    """Catches "-" taken for the text itself, and a prompt longer than the context that isn't continued."""
    prompt = "A prompt of several lines,\nlonger than the sixteen characters of the context\n"
    process = run_generate(snapshot, "-", stdin=prompt)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(prompt.removesuffix("\n"))
    assert len(process.stdout) == len(prompt) - 1 + 31  # the last newline is the shell's, as in echo "To be"


@pytest.mark.parametrize(("typed", "prompt"), [("To be\n", "To be"), ("To be\r\n", "To be"), ("To be\n\n", "To be\n")])
def test_one_newline_at_the_end_of_standard_input_is_dropped(snapshot, typed, prompt):
    """Catches echo's newline taken for a part of the prompt, and a blank line that was meant and is lost."""
    process = run_generate(snapshot, "-", "--max-new-tokens", 0, stdin=typed)
    assert (process.returncode, process.stdout) == (0, prompt + "\n")


def test_an_empty_prompt_starts_from_a_newline_and_says_so(snapshot):
    """Catches an error from an empty prompt, or a start that nobody is told about, or is told about in the text."""
    process = run_generate(snapshot)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout) == 1 + 30 + 1
    assert process.stdout.startswith("\n")
    assert process.stderr == "empty prompt: starting from '\\n'\n"


def test_every_character_is_sent_off_before_the_next_is_made(snapshot, monkeypatch):
    """Catches a flush that is left out, or comes once for many characters, on a machine of any speed."""
    sent, done = [], []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            sent.append(len(self.getvalue()))

    choose = model.choose_token
    monkeypatch.setattr(model, "choose_token", lambda *a: done.append(max(sent, default=0)) or choose(*a))
    monkeypatch.setattr(
        sys, "argv", ["generate.py", PROMPT, "--snapshot", str(snapshot), "--max-new-tokens", "20", "--seed", "1"]
    )
    monkeypatch.setattr(sys, "stdout", Terminal())
    generate.main()
    assert done[1:] == [len(PROMPT) + n for n in range(1, 20)]  # when the next one is chosen, all before it are out


BAD_ARGUMENTS = {
    # arguments: what the one line must name; of sampling one, test_model.py has all of its limits
    ("--temperature", "nan"): ["temperature=nan", "positive"],
    ("--device", "toaster"): ["--device=toaster", "cpu"],
    ("--seed", str(2**70)): [f"--seed={2**70}", "at least 0 and below 2^64"],
    ("--num-samples", "0"): ["--num-samples=0", "at least 1"],
    ("--max-new-tokens", "-1"): ["--max-new-tokens=-1", "at least 0"],
    ("--snapshot", "nowhere/gpt_snapshot.pt"): ["nowhere/gpt_snapshot.pt", "python main.py"],
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=" ".join)
def test_bad_arguments_are_refused_in_one_line(snapshot, monkeypatch, capsys, arguments):
    """Catches tracebacks, sampling with nonsense, and messages that name neither what was got nor what is allowed."""
    monkeypatch.setattr(sys, "argv", ["generate.py", PROMPT, "--snapshot", str(snapshot), *arguments])
    with pytest.raises(SystemExit) as stop:
        generate.main()
    # Python prints a string that a program exits with on standard error, and returns 1.
    assert isinstance(stop.value.code, str)
    assert "\n" not in stop.value.code
    for part in BAD_ARGUMENTS[arguments]:
        assert part in stop.value.code
    assert capsys.readouterr().out == ""


def test_unknown_characters_are_named_with_the_vocabulary(snapshot):
    """Catches a KeyError: the user must see which characters are meant, and which there are."""
    process = run_generate(snapshot, "Où est 李?")
    assert process.returncode == 1
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    _, vocabulary = load(snapshot)
    assert line.startswith("error: unknown characters 'ù李'")
    assert repr(vocabulary) in line


def generated(monkeypatch, capsys, snapshot: Path, *arguments: object) -> str:
    """What generate.py writes to standard output, called in this process."""
    monkeypatch.setattr(sys, "argv", ["generate.py", PROMPT, "--snapshot", str(snapshot), *map(str, arguments)])
    generate.main()
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_seed_makes_the_text_repeatable(snapshot, monkeypatch, capsys):
    """Catches a seed that is ignored, and a default that writes the same text every time."""
    texts = [generated(monkeypatch, capsys, snapshot, "--seed", seed, "--max-new-tokens", 40) for seed in (1, 1, 2)] + [
        generated(monkeypatch, capsys, snapshot, "--max-new-tokens", 40) for _ in range(2)
    ]
    assert texts[0] == texts[1]
    # Two texts of 40 characters, drawn from some 60 nearly even ones, don't meet by chance.
    assert len(set(texts)) == 4


def test_several_samples(snapshot, monkeypatch, capsys):
    """Catches copies of one sample, samples without their prompt, and a seed that the path for several ignores."""
    arguments = ("--num-samples", 3, "--max-new-tokens", 40, "--seed", 5)
    out = generated(monkeypatch, capsys, snapshot, *arguments)
    assert generated(monkeypatch, capsys, snapshot, *arguments) == out
    samples = out.removesuffix("\n").split("\n\n---\n\n")
    assert [len(sample) for sample in samples] == [len(PROMPT) + 40] * 3
    assert all(sample.startswith(PROMPT) for sample in samples)
    assert len(set(samples)) == 3


def test_top_k_and_top_p(snapshot, monkeypatch, capsys):
    """Catches an argument that doesn't reach the sampling: a limit of 1, or of nearly nothing, is greedy."""
    greedy = generated(monkeypatch, capsys, snapshot, "--temperature", 0)
    for limit in (("--top-k", 1), ("--top-p", 1e-300)):
        assert generated(monkeypatch, capsys, snapshot, *limit, "--temperature", 5) == greedy


def test_defaults_are_those_of_the_help(snapshot, monkeypatch, capsys):
    """Catches a default that isn't what --help says it is: a temperature of 0.8, one text, 500 characters."""
    wanted = generated(
        *(monkeypatch, capsys, snapshot, "--temperature", 0.8, "--num-samples", 1, "--max-new-tokens", 500),
        *("--seed", 3),
    )
    assert generated(monkeypatch, capsys, snapshot, "--seed", 3) == wanted


def test_no_new_characters_are_the_prompt_alone(snapshot, monkeypatch, capsys):
    """Catches an error at the edge of what the message allows."""
    assert generated(monkeypatch, capsys, snapshot, "--max-new-tokens", 0) == f"{PROMPT}\n"


def test_a_text_without_lines_starts_somewhere(snapshot, tmp_path, monkeypatch, capsys):
    """Catches a newline as the start of every text: a model of a text in one line doesn't know it."""
    state = load_snapshot(str(snapshot))
    state["vocabulary"] = state["vocabulary"].replace("\n", "\t")  # still the first in the order
    save_snapshot(state, str(tmp_path / "one_line.pt"))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--snapshot", str(tmp_path / "one_line.pt")])
    generate.main()
    assert capsys.readouterr().err == "empty prompt: starting from '\\t'\n"


def test_a_reader_who_has_seen_enough_is_no_error(snapshot):
    """Catches a traceback or "Broken pipe" at the end of `python generate.py | head`."""
    command = [sys.executable, PROJECT / "generate.py", PROMPT, "--snapshot", snapshot, "--max-new-tokens", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_a_damaged_best_snapshot_is_not_the_end(snapshot, tmp_path, monkeypatch, capsys):
    """Catches no text at all although the latest snapshot is whole, and a fall back that nobody is told about."""
    latest = str(tmp_path / "gpt_snapshot.pt")
    monkeypatch.setattr(finding, "DEFAULT_SNAPSHOT", latest)
    shutil.copy(snapshot, latest)
    Path(best_url(latest)).write_bytes(b"damaged")
    generate.load_model(None, torch.device("cpu"))
    assert best_url(latest) in capsys.readouterr().err


def test_default_is_the_best_snapshot_else_the_latest(snapshot, tmp_path, monkeypatch):
    """Catches generation from the last snapshot although an earlier one was better, and none when one is missing."""
    latest = str(tmp_path / "gpt_snapshot.pt")
    monkeypatch.setattr(finding, "DEFAULT_SNAPSHOT", latest)
    state = load_snapshot(str(snapshot))
    for number, url in enumerate((previous_url(latest), latest, best_url(latest))):  # worst choice first
        state["model"]["ln_f.weight"] = torch.full((16,), float(number))
        save_snapshot(state, url, keep_previous=False)
        model, _ = generate.load_model(None, torch.device("cpu"))
        assert model.ln_f.weight.tolist() == [number] * 16


def test_runs_of_several_ranks_save_clean_names(snapshot):
    """Catches names with "module." in front, which only a model wrapped in the same way could load."""
    state = load_snapshot(str(snapshot))
    assert list(state["model"]) == list(GPT(GPTConfig(**state["model_config"])).state_dict())


def test_compiled_runs_save_clean_names(tmp_path):
    """Catches names with "_orig_mod." in front."""
    # Wrapped as for compilation, but executed as it is: compiling for real takes half a minute.
    with torch.compiler.set_stance("force_eager"), world_of_one() as ranks:
        make_trainer(tmp_path, "trainer_config.compile=true", "trainer_config.max_steps=2", ranks=ranks).fit()
    for name in ("gpt_snapshot.pt", "gpt_snapshot.best.pt"):
        state = load_snapshot(str(tmp_path / name))
        assert list(state["model"]) == list(GPT(GPTConfig(**state["model_config"])).state_dict())
