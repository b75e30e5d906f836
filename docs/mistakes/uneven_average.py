"""Averages of averages over groups of different sizes (TUTORIAL.md, chapter 9).

Ten windows as micro-batches of 4, 4 and 2, and an evaluation text shared by three ranks; the reference is everything
in one batch.
"""

import numpy as np
import torch
from _shared import batch_of, fit, is_quick, print_table, read_parts, small_model
from torch import Tensor

from char_dataset import evaluation_batches
from model import GPT, sum_losses

SIZES = [4, 4, 2]


def gradient(model: GPT, x: Tensor, y: Tensor, sizes: list[int], weights: list[float]) -> Tensor:
    """The accumulated gradient of micro-batches, each mean loss times its weight: (number of weights,)."""
    model.zero_grad()
    for x_part, y_part, weight in zip(x.split(sizes), y.split(sizes), weights, strict=True):
        (model(x_part, y_part)[1] * weight).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def rank_losses(model: GPT, codes: np.ndarray, ranks: int) -> list[tuple[float, int]]:
    """Each rank's (sum of losses, number of targets)."""
    T = model.config.block_size
    return [sum_losses(model, evaluation_batches(codes, T, 1, rank, ranks)) for rank in range(ranks)]


if __name__ == "__main__":
    quick = is_quick(__doc__)
    T = 32
    train, evaluation, vocab_size = read_parts(T, quick)
    model = small_model(vocab_size, T)
    fit(model, train, steps=60 if quick else 300)

    x, y = batch_of(train, T, sum(SIZES), seed=1)
    whole = gradient(model, x, y, [10], [1.0])
    wrong = gradient(model, x, y, SIZES, [1 / len(SIZES)] * 3)  # THE MISTAKE: the small group counts like the others
    right = gradient(model, x, y, SIZES, [size / sum(SIZES) for size in SIZES])

    part = evaluation[: 4 * T + T // 2]  # four and a half windows: shares of 2, 1 1/2 and 1
    shares = rank_losses(model, part, 3)
    ((total, count),) = rank_losses(model, part, 1)
    mean_of_means = sum(s / c for s, c in shares) / len(shares)  # THE MISTAKE
    sum_then_divide = sum(s for s, _ in shares) / sum(c for _, c in shares)
    print_table(
        ["relative error of the gradient", "error of the evaluation loss"],
        [
            (name, [f"{(g - whole).norm() / whole.norm():.1e}", f"{abs(loss - total / count):.1e}"])
            for name, g, loss in (
                ("wrong: mean of means", wrong, mean_of_means),
                ("right: sum, then divide", right, sum_then_divide),
            )
        ],
    )
