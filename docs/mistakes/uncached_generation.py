"""The whole context goes through the model again for every new token (TUTORIAL.md, chapter 5)."""

import time

import torch
from _shared import is_quick, print_table
from torch import Tensor

from model import GPT, GPTConfig


@torch.no_grad()
def generate_uncached(model: GPT, idx: Tensor, max_new_tokens: int) -> Tensor:
    """THE MISTAKE: T positions are computed for a token that needs one. (B, T) -> (B, T + max_new_tokens)"""
    for _ in range(max_new_tokens):
        logits, _ = model(idx[:, -model.config.block_size :])  # (B, T, V)
        idx = torch.cat((idx, logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    return idx


if __name__ == "__main__":
    quick = is_quick(__doc__)
    block_size = 128 if quick else 256
    n_head, n_embd = (2, 128) if quick else (6, 384)
    config = GPTConfig(vocab_size=65, block_size=block_size, n_layer=6, n_head=n_head, n_embd=n_embd, bias=False)
    model = GPT(config).eval()
    prompt = torch.zeros(1, 1, dtype=torch.int64)
    new = block_size - 1  # up to the full context: so far both must say the same
    positions: list[int] = []  # of each pass through the model
    model.drop.register_forward_hook(lambda module, _, out: positions.append(out.shape[1]))
    rows, texts = [], []
    for name, generate in (
        ("wrong: all positions again", lambda: generate_uncached(model, prompt, new)),
        ("right: cached keys and values", lambda: model.generate(prompt, new)),
    ):
        positions.clear()
        began = time.perf_counter()
        texts.append(generate())
        rows.append((name, [new / (time.perf_counter() - began), sum(positions) / new]))
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {new} tokens; same text: {torch.equal(*texts)}")
    print_table(["tokens/s", "positions computed per token"], rows)
