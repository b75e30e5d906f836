"""What the scripts of this folder share: a text, a small model, a short training, a table of wrong and right.

Each script puts one classic mistake beside what the project does instead, and prints what either does. With --quick
it takes seconds and runs on the bundled text; without, under a minute, on tiny-shakespeare where that is at hand.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))  # the scripts are started by their path, and the project's modules lie above them

from char_dataset import CharDataset, CharVocabulary, DataConfig, split_codes  # noqa: E402
from data.corpus import read_text  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from optimizer import OptimizerConfig, create_optimizer, learning_rate_factor, set_learning_rate  # noqa: E402


def is_quick(description: str | None) -> bool:
    """Read the command line: whether the form that takes seconds was asked for. Also makes the run repeatable."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a form that takes a few seconds")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return bool(parser.parse_args().quick)


@functools.cache
def read_parts(block_size: int, quick: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """The text, encoded and honestly split: (training codes, evaluation codes, V)."""
    path = PROJECT / "data" / "input.txt"
    if quick or not path.exists():
        path = PROJECT / "data" / "sample.txt"
    print(f"text: {path.relative_to(PROJECT)}")
    text = read_text(str(path))
    vocabulary = CharVocabulary.of(text)
    train, evaluation = split_codes(vocabulary.encode_array(text), DataConfig(block_size=block_size))
    return train, evaluation, len(vocabulary)


def small_model(vocab_size: int, block_size: int, n_layer: int = 2, n_embd: int = 64, dropout: float = 0.0) -> GPT:
    """A GPT of a few hundred thousand weights at most; heads are 16 or 32 wide."""
    return GPT(
        GPTConfig(
            vocab_size=vocab_size,
            block_size=block_size,
            n_layer=n_layer,
            n_head=max(2, n_embd // 32),
            n_embd=n_embd,
            embd_pdrop=dropout,
            resid_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def batch_of(codes: np.ndarray, block_size: int, batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of a text: (x, y), each int64 (B, T)."""
    dataset = CharDataset(codes, block_size)
    return dataset.__getitems__(np.random.default_rng(seed).integers(len(dataset), size=batch_size).tolist())


def fit(model: GPT, codes: np.ndarray, steps: int, batch_size: int = 16) -> None:
    """Train on random windows with the project's optimizer and schedule."""
    optimizer = create_optimizer(model, OptimizerConfig(name="muon", learning_rate=8e-3, muon_learning_rate=0.03))
    model.train()
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate_factor(step, 20, steps, 0.0, "cosine"))
        x, y = batch_of(codes, model.config.block_size, batch_size, seed=step)
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


def print_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float | str]]]) -> None:
    """Print rows of a label and its figures, each column under its name."""
    label_width = max(len(label) for label, _ in rows)
    cells = [[v if isinstance(v, str) else f"{v:.4g}" for v in values] for _, values in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(columns)]
    for label, row in [("", list(columns)), *zip((label for label, _ in rows), cells, strict=True)]:
        figures = "".join(f"  {cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        print(f"{label:<{label_width}}{figures}")
