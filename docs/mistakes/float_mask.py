"""A float mask handed to nn.MultiheadAttention is added to the scores: nothing is hidden (TUTORIAL.md, chapter 3).

The model reads its own targets from the input, except at the last position, the only one that generation uses.
"""

import torch
from _shared import batch_of, fit, is_quick, print_table, read_parts, small_model
from torch import Tensor, nn
from torch.nn import functional as F

from model import GPT


class FloatMaskAttention(nn.Module):
    """THE MISTAKE: ones and zeros are added to the scores; the past is favoured by a factor e, no more."""

    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(n_embd, n_head, batch_first=True)

    def forward(self, x: Tensor, cache: None = None, start: int = 0) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        T = x.size(1)
        mask = torch.tril(torch.ones(T, T))  # float32, not bool
        y: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return y


def with_float_mask(model: GPT) -> GPT:
    """Replace the attention of every block."""
    for block in model.h:
        block.attn = FloatMaskAttention(model.config.n_embd, model.config.n_head)
    return model


def loss_by_position(quick: bool) -> dict[str, Tensor]:
    """Train both models and score unseen windows: the mean loss at each position, (T,), in nats."""
    T, steps = (24, 180) if quick else (64, 450)
    train, evaluation, vocab_size = read_parts(T, quick)
    x, y = batch_of(evaluation, T, 200, seed=0)  # (B, T) each
    losses = {}
    for name, prepare in (("wrong: float tril mask", with_float_mask), ("right: is_causal", lambda model: model)):
        torch.manual_seed(0)
        model = prepare(small_model(vocab_size, T))
        fit(model, train, steps)
        with torch.no_grad():
            logits, _ = model(x)  # (B, T, V)
        losses[name] = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(dim=0)
    return losses


if __name__ == "__main__":
    losses = loss_by_position(is_quick(__doc__))
    print_table(
        ["all positions", "first half", "last position"],
        [
            (name, [loss.mean().item(), loss[: len(loss) // 2].mean().item(), loss[-1].item()])
            for name, loss in losses.items()
        ],
    )
