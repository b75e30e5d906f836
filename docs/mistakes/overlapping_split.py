"""Windows drawn first and split at random afterwards overlap (TUTORIAL.md, chapter 2).

One model, trained on the windows of such a split, is scored twice: on that split's test windows, and on text of which
it has seen no character.
"""

import numpy as np
import torch
from _shared import is_quick, print_table, read_parts, small_model
from torch import Tensor
from torch.utils.data import Dataset, Subset, random_split

from char_dataset import CharDataset
from model import GPT
from optimizer import OptimizerConfig, create_optimizer, learning_rate_factor, set_learning_rate


def fit_on(model: GPT, windows: Dataset, starts: np.ndarray, steps: int) -> None:
    """Train on windows with these starts only."""
    random = np.random.default_rng(0)
    optimizer = create_optimizer(model, OptimizerConfig(name="muon", learning_rate=8e-3, muon_learning_rate=0.03))
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate_factor(step, 20, steps, 0.0, "cosine"))
        _, loss = model(*windows.__getitems__(random.choice(starts, size=24).tolist()))  # type: ignore[attr-defined]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def score(model: GPT, batch: tuple[Tensor, Tensor]) -> float:
    """Mean loss in nats per character."""
    return float(model.eval()(*batch)[1])


def random_parts(windows: CharDataset, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """THE MISTAKE: all windows, one for each character, split at random: (training starts, test starts)."""
    count = len(windows)
    parts: list[Subset] = random_split(
        windows, [count - count // 10, count // 10], generator=torch.Generator().manual_seed(seed)
    )
    return np.array(parts[0].indices), np.array(parts[1].indices)


if __name__ == "__main__":
    quick = is_quick(__doc__)
    T, steps, length = (24, 200, 3000) if quick else (32, 600, 20000)
    train, evaluation, vocab_size = read_parts(T, quick)
    windows = CharDataset(train[:length], T)
    unseen = CharDataset(evaluation, T)
    train_starts, test_starts = random_parts(windows, seed=0)

    model = small_model(vocab_size, T, n_embd=96)
    fit_on(model, windows, train_starts, steps)
    chosen = np.random.default_rng(1).integers(len(unseen), size=len(test_starts))
    shifted = np.isin(test_starts - 1, train_starts) | np.isin(test_starts + 1, train_starts)
    other_rank, _ = random_parts(windows, seed=1)  # a rank that draws for itself
    print_table(
        ["loss", "% with a training window shifted by 1", "% in another rank's training set"],
        [
            (
                "wrong: random_split of windows",
                [
                    score(model, windows.__getitems__(test_starts.tolist())),
                    100 * shifted.mean(),
                    100 * np.isin(test_starts, other_rank).mean(),
                ],
            ),
            ("right: the text is cut first", [score(model, unseen.__getitems__(chosen.tolist())), 0.0, 0.0]),
        ],
    )
