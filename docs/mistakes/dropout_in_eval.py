"""Dropout that stays on while evaluating (TUTORIAL.md, chapter 3): the same batch, scored twice."""

from unittest.mock import patch

import torch
from _shared import batch_of, fit, is_quick, print_table, read_parts, small_model
from torch import Tensor
from torch.nn import functional as F

from model import GPT

DROPOUT = 0.2


def always_dropping(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool) -> Tensor:
    """THE MISTAKE: the function knows nothing of eval(), and drops whatever it is told to."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=is_causal)


@torch.no_grad()
def score_twice(model: GPT, batch: tuple[Tensor, Tensor]) -> list[float]:
    """The loss of one batch, computed two times over."""
    return [float(model(*batch)[1]) for _ in range(2)]


if __name__ == "__main__":
    quick = is_quick(__doc__)
    T = 32
    codes, evaluation, vocab_size = read_parts(T, quick)
    model = small_model(vocab_size, T, dropout=DROPOUT)
    fit(model, codes, steps=40 if quick else 300)
    batch = batch_of(evaluation, T, 64, seed=0)

    model.train()
    no_eval = score_twice(model, batch)
    model.eval()
    with patch("model.fast_attention", always_dropping):
        fixed = score_twice(model, batch)
    print_table(
        ["first time", "second time", "difference"],
        [
            (name, [f"{first:.4f}", f"{second:.4f}", abs(first - second)])
            for name, (first, second) in (
                ("wrong: no model.eval()", no_eval),
                ("wrong: eval(), but dropout_p fixed", fixed),
                ("right: eval(), dropout_p 0 in it", score_twice(model, batch)),
            )
        ],
    )
