"""Logits -> the next token: greedy, or drawn with a temperature, from the k likeliest, from the likeliest share p.

Read it after `model.py`, whose `GPT.stream` calls it for every token; `optimizer.py` comes next. It imports nothing of
the project.

Legend: B sequences in the batch, V tokens in the vocabulary.
"""

import math

import torch
from torch import Tensor


def choose_token(
    logits: Tensor,
    temperature: float,
    do_sample: bool,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose one token for each row of logits.

    Args:
        logits: (B, V), the last position's.
        temperature: divides the logits; below 1, likely tokens become likelier still; above 1, all become more alike; 0
            always takes the likeliest.
        do_sample: draw from the distribution; False takes the likeliest token, whatever the other three say.
        top_k: draw from the k likeliest tokens only; None, or more than V: from all.
        top_p: draw from the fewest tokens that together have this probability, in (0, 1]; None: from all.
        generator: the source of randomness; None: torch's global one.

    Returns:
        int64 (B, 1)
    """
    # 1. Greedy. A temperature this low is 0 as well, and float32 could not divide by it.
    if not do_sample or temperature < 1e-30:
        return logits.argmax(dim=-1, keepdim=True)
    # 2. Temperature. The largest logit becomes 0 first: softmax doesn't change, and nothing overflows.
    logits = (logits - logits.amax(dim=-1, keepdim=True)).float() / temperature
    # 3. Top-k: a probability of 0 for all that lie below the k-th largest logit.
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    probabilities = logits.softmax(dim=-1)  # (B, V)
    # 4. Top-p (arXiv:1904.09751): a token stays while the likelier ones together haven't reached p.
    if top_p is not None:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(dim=-1) - ordered >= max(top_p, 1e-30)] = 0.0  # below that, p is 0 in float32
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)  # back at their own places
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


# ---------------------------------------------------------------------------------------------- armour: wrong settings


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError where a setting is outside its range."""
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be 0 (greedy) or a positive number")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")
