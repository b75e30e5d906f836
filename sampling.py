"""Logits -> the next token: greedy, or drawn with a temperature, from the k likeliest, from the likeliest share p.

Read it after `model.py`, whose `GPT.stream` calls it for every token; `optimizer.py` comes next. It imports nothing of
the project.

Legend: B sequences in the batch, V tokens in the vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Raises:
        ValueError: a value is outside its range.
    """

    # Divides the logits: below 1, likely tokens become likelier still; above 1, all become more alike; 0 always takes
    # the likeliest.
    temperature: float = 1.0
    do_sample: bool = False  # draw from the distribution; False takes the likeliest, whatever the others say
    top_k: int | None = None  # draw from the k likeliest tokens only; None, or more than V: from all
    top_p: float | None = None  # draw from the fewest tokens that together have this probability, in (0, 1]; None: all

    def __post_init__(self) -> None:
        check_sampling(self)


def choose_token(logits: Tensor, how: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Choose one token for each row of logits.

    Args:
        logits: (B, V), the last position's.
        how: greedily, or how to draw.
        generator: the source of randomness; None: torch's global one.

    Returns:
        int64 (B, 1)
    """
    # 1. Greedy. A temperature this low is 0 as well, and float32 could not divide by it.
    if not how.do_sample or how.temperature < 1e-30:
        return logits.argmax(dim=-1, keepdim=True)
    # 2. Temperature. The largest logit becomes 0 first: softmax doesn't change, and nothing overflows.
    logits = (logits - logits.amax(dim=-1, keepdim=True)).float() / how.temperature
    # 3. Top-k: a probability of 0 for all that lie below the k-th largest logit.
    if how.top_k is not None:
        kth = logits.topk(min(how.top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    probabilities = logits.softmax(dim=-1)  # (B, V)
    # 4. Top-p (arXiv:1904.09751): a token stays while the likelier ones together haven't reached p.
    if how.top_p is not None:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(dim=-1) - ordered >= max(how.top_p, 1e-30)] = 0.0  # below that, p is 0 in float32
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)  # back at their own places
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


# ---------------------------------------------------------------------------------------------- armour: wrong settings


def check_sampling(how: Sampling) -> None:
    """Raise ValueError if a setting is outside its range."""
    if not 0.0 <= how.temperature < math.inf:
        raise ValueError(f"temperature={how.temperature}: must be 0 (greedy) or a positive number")
    if how.top_k is not None and how.top_k < 1:
        raise ValueError(f"top_k={how.top_k}: must be at least 1")
    if how.top_p is not None and not 0.0 < how.top_p <= 1.0:
        raise ValueError(f"top_p={how.top_p}: must be above 0 and at most 1")
