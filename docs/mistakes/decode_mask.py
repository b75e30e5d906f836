"""is_causal=True with one query and many cached keys hides all but the first (TUTORIAL.md, chapter 5).

A trained model reads unseen text one token at a time, with cached keys and values, and predicts what follows.
"""

from unittest.mock import patch

import torch
from _shared import batch_of, fit, is_quick, print_table, read_parts, small_model
from torch import Tensor
from torch.nn import functional as F

from model import GPT


def always_causal(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool) -> Tensor:
    """THE MISTAKE: the triangle starts at key 0 and query 0, and the query is the newest token, not the oldest."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)


@torch.no_grad()
def decode(model: GPT, x: Tensor, y: Tensor) -> float:
    """Mean loss in nats where every token goes through the model alone."""
    cache = model.new_cache(len(x))
    hidden = [model.hidden_states(x[:, t : t + 1], cache, t) for t in range(x.size(1))]  # T times (B, 1, C)
    logits = model.lm_head(torch.cat(hidden, dim=1))  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


if __name__ == "__main__":
    quick = is_quick(__doc__)
    T = 32
    codes, evaluation, vocab_size = read_parts(T, quick)
    model = small_model(vocab_size, T)
    fit(model, codes, steps=150 if quick else 600)
    x, y = batch_of(evaluation, T, 100, seed=0)  # (B, T) each

    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 5, 8)  # one query and five keys, all alike
    weights = {
        causal: F.scaled_dot_product_attention(q, k, torch.eye(5)[None, None], is_causal=causal).flatten().tolist()
        for causal in (True, False)
    }
    with patch("model.fast_attention", always_causal):
        wrong = decode(model, x, y)
    with torch.no_grad():
        whole = float(model(x, y)[1])
    print_table(
        ["loss", "weights of one query on 5 equal keys"],
        [
            ("wrong: is_causal with a cache", [wrong, str([round(w, 2) for w in weights[True]])]),
            ("right: no mask for one query", [decode(model, x, y), str([round(w, 2) for w in weights[False]])]),
            ("the whole text at once, no cache", [whole, ""]),
        ],
    )
