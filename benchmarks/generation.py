"""Question: how fast does text come out of a trained model, and what does the key/value cache bring?

Measured: tokens per second (all samples together) of 512 greedy tokens after a prompt of 16, in float32, in turns:

* cached: `GPT.generate`, the project's own loop.
* uncached: the whole context goes through the model for every token (the head sees the last position only). When the
  context is full, its last half stays, as in the cached loop, so that both must choose the same tokens: it is checked.
* Hugging Face: `GPT2LMHeadModel.generate` (cached), with a copy of the same weights; also checked for the same tokens.
  Only where the context holds all tokens: theirs can't go on beyond it.

Models: 4 layers, 4 heads, 128 wide, with the context of the default configuration (64) and with 640; 6 layers, 6 heads,
384 wide, with the context of recipes/baby_gpt.yaml (256) and with 640. Random weights: their values don't matter.

    python benchmarks/generation.py [--quick]

Unit: tokens per second of wall time.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import Figures, measure_in_turns, print_table
from torch import Tensor

from model import GPT, GPTConfig

V, PROMPT = 65, 16  # vocabulary of tiny-shakespeare, tokens in the prompt
SMALL: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 128}
LARGE: dict[str, Any] = {"n_layer": 6, "n_head": 6, "n_embd": 384}


@torch.no_grad()
def make_model(sizes: dict[str, Any], block_size: int) -> GPT:
    """A model with larger weights than at the start of training: clear winners among the tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=V, block_size=block_size, **sizes)).eval()
    for p in model.parameters():
        p.add_(0.1 * torch.randn_like(p))
    return model


def make_models(sizes: dict[str, Any], block_size: int) -> tuple[GPT, Any]:
    """Our model and Hugging Face's, with the same weights."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = make_model(sizes, block_size)
    config = GPT2Config(vocab_size=V, n_positions=block_size, bos_token_id=0, eos_token_id=None, **sizes)
    theirs = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        their_parameters = dict(theirs.named_parameters())
        for name, p in ours.named_parameters():
            # Their Conv1D holds the transpose of a Linear's matrix.
            is_transposed = p.ndim == 2 and name.startswith("h.")
            their_parameters[f"transformer.{name}"].copy_(p.T if is_transposed else p)
    return ours, theirs


@torch.no_grad()
def generate_uncached(model: GPT, idx: Tensor, max_new_tokens: int) -> Tensor:
    """Greedy continuation without a cache: (B, T) -> (B, T + max_new_tokens)."""
    context, out = idx, idx
    for _ in range(max_new_tokens):
        if context.size(1) > model.config.block_size:
            context = context[:, -(model.config.block_size // 2) :]
        logits = model.lm_head(model.hidden_states(context)[:, -1])  # (B, V)
        token = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
        context, out = torch.cat((context, token), dim=1), torch.cat((out, token), dim=1)
    return out


def timed(generate: Callable[[], Tensor], expected: Tensor) -> Figures:
    """Tokens per second of one generation, whose tokens must be the expected ones."""
    begin = time.perf_counter()
    out = generate()
    seconds = time.perf_counter() - begin
    B, T = expected.shape
    is_equal = torch.equal(out, expected)
    return {"tokens_per_second": B * (T - PROMPT) / seconds, "equal": float(is_equal)}


def compare(sizes: dict[str, Any], block_size: int, samples: int, tokens: int, rounds: int) -> list[object]:
    """One row of the table."""
    ours, theirs = make_models(sizes, block_size)
    idx = torch.randint(V, (samples, PROMPT), generator=torch.Generator().manual_seed(0))
    ways: dict[str, Callable[[], Tensor]] = {
        "cached": lambda: ours.generate(idx, tokens),
        "uncached": lambda: generate_uncached(ours, idx, tokens),
    }
    if PROMPT + tokens <= block_size:
        # The mask says that nothing is padding; with an end token of None all tokens are made.
        settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        ways["Hugging Face"] = lambda: theirs.generate(idx, attention_mask=torch.ones_like(idx), **settings)
    expected = ours.generate(idx, tokens)  # not timed: warms up
    contestants = {name: functools.partial(timed, way, expected) for name, way in ways.items()}
    medians = measure_in_turns(contestants, rounds)
    speed = {name: figures["tokens_per_second"] for name, figures in medians.items()}
    return [
        *(f"{sizes['n_layer']}/{sizes['n_head']}/{sizes['n_embd']}", block_size, samples),
        *(speed["cached"], speed["uncached"], speed.get("Hugging Face", "")),
        speed["cached"] / speed["uncached"],
        speed["cached"] / speed["Hugging Face"] if "Hugging Face" in speed else "",
        "yes" if all(figures["equal"] == 1.0 for figures in medians.values()) else "NO",
    ]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 tokens, the small model, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.rounds = 32, 1
    torch.set_num_threads(arguments.threads)

    cases = [(SMALL, 64), (SMALL, 640), (LARGE, 256), (LARGE, 640)][: 2 if arguments.quick else None]
    rows = [
        compare(sizes, block_size, samples, arguments.tokens, arguments.rounds)
        for sizes, block_size in cases
        for samples in (1, 8)
    ]
    print_table(
        [
            *("layers/heads/width", "context", "samples", "cached, tokens/s", "uncached, tokens/s"),
            *("Hugging Face, tokens/s", "cached : uncached", "cached : Hugging Face", "same tokens"),
        ],
        rows,
        f"{arguments.tokens} greedy tokens, {arguments.threads} threads, float32.",
    )


if __name__ == "__main__":
    main()
