"""docs/first_gpt.py, the reader's first file: it runs, it learns, and it computes what model.GPT computes.

It may take shortcuts, but it must not be wrong: who copies it copies its bugs. The reference is the project's model.
"""

import ast
import importlib.util
import math
import re
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, SAMPLE_TEXT, run_program
from torch import Tensor
from torch.nn import functional as F

from char_dataset import CharVocabulary
from model import GPT, GPTConfig

FIRST_GPT = PROJECT / "docs" / "first_gpt.py"
SOURCE = FIRST_GPT.read_text(encoding="utf-8")
SMALL = {"BATCH_SIZE": 16, "BLOCK_SIZE": 24, "N_LAYER": 2, "N_HEAD": 2, "N_EMBD": 32}


@pytest.fixture
def first_gpt() -> Any:
    """The file as a module of its own for each test, with small sizes."""
    spec = importlib.util.spec_from_file_location("first_gpt", FIRST_GPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, size in SMALL.items():
        assert hasattr(module, name)
        setattr(module, name, size)
    return module


def perturbed(first_gpt: Any, vocab_size: int) -> Any:
    """A model whose every number is drawn, biases and norms too, and so large that no part of it has no effect."""
    model = first_gpt.GPT(vocab_size)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            center = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            p.copy_(center + 0.25 * torch.randn(p.shape, generator=random))
    return model


def project_model(model: Any, vocab_size: int) -> GPT:
    """The project's GPT with a copy of the model's weights."""
    config = GPTConfig(
        vocab_size=vocab_size,
        block_size=SMALL["BLOCK_SIZE"],
        n_layer=SMALL["N_LAYER"],
        n_head=SMALL["N_HEAD"],
        n_embd=SMALL["N_EMBD"],
        bias=True,
    )
    reference = GPT(config).eval()
    reference.load_state_dict(model.state_dict())  # strict: the same names, and no others
    return reference


def tokens(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


def printed_losses(output: str) -> dict[int, float]:
    """The losses that the training loop printed, by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+): loss (\d+\.\d{4});", output, re.M)}


# ------------------------------------------------------------------------------------------ the program


def test_the_script_runs_from_text_to_text() -> None:
    """Catches a script that no longer starts, fresh weights that are confident before any step, and a lost sample."""
    result = run_program(sys.executable, FIRST_GPT, SAMPLE_TEXT, 3)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    losses, _, text = re.split(r"^(\d+) seconds\n", result.stdout, flags=re.MULTILINE)
    alphabet = set(SAMPLE_TEXT.read_text(encoding="utf-8"))
    # 64 products of numbers near 1 and weights of 0.02 make logits that vary by 0.16: 0.16² / 2 = 0.013 above ln V.
    assert printed_losses(losses) == {1: pytest.approx(math.log(len(alphabet)), abs=0.1)}
    assert f"guessing costs {math.log(len(alphabet)):.4f}" in losses
    assert len(text) == 501  # with print's newline
    assert set(text) <= alphabet


def test_the_default_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a default that ignores the corpus once it is there, or that is sought in the working directory."""
    copy = tmp_path / "docs" / "first_gpt.py"
    copy.parent.mkdir()
    copy.write_text(re.sub(r"STEPS, LEARNING_RATE = \d+,", "STEPS, LEARNING_RATE = 1,", SOURCE), encoding="utf-8")
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setattr(sys, "argv", [str(copy)])

    for name, characters in (("sample.txt", "abc"), ("input.txt", "abcde")):
        (data / name).write_text(characters * 50, encoding="utf-8")
        runpy.run_path(str(copy), run_name="__main__")
        assert f"guessing costs {math.log(len(characters)):.4f}" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ the model


def test_logits_equal_those_of_the_projects_model(first_gpt: Any) -> None:
    """Catches every difference in the model: a name, queries and keys swapped, a norm in another place, another GELU.

    In float64 the order of a sum changes the last of 16 digits, and logits are of order 1 to 10. The two GELUs, the
    smallest difference that anyone would make by accident, differ by 5e-4.
    """
    V = 11
    model = perturbed(first_gpt, V).double()
    reference = project_model(model, V).double()
    for T in (1, 7, SMALL["BLOCK_SIZE"]):
        idx = tokens(V, 3, T)
        torch.testing.assert_close(model(idx), reference(idx)[0], rtol=0, atol=1e-9)
    assert model.lm_head.weight is model.wte.weight


def test_the_loops_loss_equals_that_of_the_projects_model(
    first_gpt: Any, sample_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a sum in place of a mean, targets that are not shifted, other codes, and a loss after the update.

    Four decimals are printed, so half of the last one is rounding; a wrong target costs at least a hundredth.
    """
    vocabulary = CharVocabulary.of(sample_text)
    model = perturbed(first_gpt, len(vocabulary))
    reference = project_model(model, len(vocabulary))
    first_gpt.GPT = lambda vocab_size: model
    torch.manual_seed(0)
    starts = torch.randint(len(sample_text) - SMALL["BLOCK_SIZE"], (SMALL["BATCH_SIZE"], 1))
    windows = [sample_text[start : start + SMALL["BLOCK_SIZE"] + 1] for start in starts.flatten().tolist()]
    codes = torch.stack([vocabulary.encode(window) for window in windows])  # (B, T + 1)
    with torch.no_grad():
        expected = reference(codes[:, :-1], codes[:, 1:])[1]

    torch.manual_seed(0)  # so that the loop draws the same windows
    _, characters = first_gpt.train(sample_text, 1)
    assert characters == vocabulary.characters
    assert printed_losses(capsys.readouterr().out) == {1: pytest.approx(float(expected), abs=6e-5)}


def test_the_loss_and_its_gradients_equal_those_of_the_projects_model(first_gpt: Any) -> None:
    """Catches what leaves the logits alone and spoils learning: a detached tensor, a head that is tied by copying.

    Float32 keeps 7 digits of a loss near 3, and of gradients below 1.
    """
    V = 11
    model = perturbed(first_gpt, V)
    reference = project_model(model, V)
    windows = tokens(V, 4, SMALL["BLOCK_SIZE"] + 1)
    x, y = windows[:, :-1], windows[:, 1:]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    expected = reference(x, y)[1]
    assert expected is not None
    torch.testing.assert_close(loss, expected, rtol=0, atol=2e-6)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected_gradients = {name: p.grad for name, p in reference.named_parameters()}
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


def test_no_logits_change_before_a_changed_character(first_gpt: Any) -> None:
    """Catches a mask that leaks, which makes the loss better and the samples worse; and attention that sees nothing.

    To the bit: a hidden key has the weight exp(-inf), exactly 0.
    """
    V, T = 11, SMALL["BLOCK_SIZE"]
    model = perturbed(first_gpt, V)
    idx = tokens(V, 2, T)
    with torch.no_grad():
        logits = model(idx)
        for t in range(T):
            changed = idx.clone()
            changed[:, t] = (changed[:, t] + 1) % V
            differs = (model(changed) != logits).any(dim=-1).any(dim=0)  # (T,)
            assert differs.tolist() == [False] * t + [True] * (T - t)


# ------------------------------------------------------------------------------------------ data, loop, sample


def test_windows_reach_both_ends_of_the_text(first_gpt: Any) -> None:
    """Catches targets that are their inputs, a window past the end, and a last character that is never a target."""
    T = SMALL["BLOCK_SIZE"]
    codes = torch.arange(T + 3)  # room for the starts 0, 1 and 2
    torch.manual_seed(0)
    batches = [first_gpt.random_windows(codes) for _ in range(20)]
    for x, y in batches:
        assert x.shape == y.shape == (SMALL["BATCH_SIZE"], T)
        assert torch.equal(x, x[:, :1] + torch.arange(T))
        assert torch.equal(y, x + 1)
    assert {start for x, _ in batches for start in x[:, 0].tolist()} == {0, 1, 2}  # 320 draws: none is missed by chance


def test_the_loss_falls_below_what_frequencies_allow(
    first_gpt: Any, sample_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a loop that doesn't learn (no step, no gradient, targets out of place) or learns no context.

    A model that only counts characters can't get below the entropy of their frequencies, 3.26 nats here.
    """
    torch.manual_seed(0)
    first_gpt.train(sample_text, 200)
    losses = printed_losses(capsys.readouterr().out)
    assert list(losses) == [1, 100, 200]
    counts = Counter(sample_text)
    entropy = -sum(n / len(sample_text) * math.log(n / len(sample_text)) for n in counts.values())
    assert losses[1] > losses[100] > losses[200]
    assert losses[200] < entropy - 0.3  # 384 characters make the loss vary by 0.1


def test_sampling_draws_from_the_last_position_of_a_full_window(first_gpt: Any) -> None:
    """Catches the wrong position, too much context, a dropped character, greedy choice, and a graph that grows."""
    characters = "abcdefg"
    lengths = []

    def successor(idx: Tensor) -> Tensor:
        lengths.append(idx.size(1))
        assert not torch.is_grad_enabled()
        return 1e4 * F.one_hot((idx + 1) % len(characters), len(characters)).float()  # (1, T, V), and no doubt

    length = SMALL["BLOCK_SIZE"] + 10
    assert first_gpt.sample(successor, characters, length) == (characters * length)[1 : length + 1]
    assert lengths == [min(n, SMALL["BLOCK_SIZE"]) for n in range(1, length + 1)]

    torch.manual_seed(0)
    uniform = first_gpt.sample(lambda idx: torch.zeros(1, idx.size(1), len(characters)), characters, 200)
    assert set(uniform) == set(characters)  # one is missing in 1 of 10¹² such samples


# ------------------------------------------------------------------------------------------ the promise


def test_it_is_one_short_file_that_hides_nothing() -> None:
    """Catches growth beyond a hundred lines or so, an import that hides a part, and classes other than modules."""
    assert len(SOURCE.splitlines()) <= 115
    tree = ast.parse(SOURCE)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.ClassDef):
            assert [ast.unparse(base) for base in node.bases] == ["nn.Module"]
    assert imported - sys.stdlib_module_names == {"torch"}
