"""A GPT in a hundred lines: it reads a text, learns to guess each next character, and then writes.

Read it from top to bottom: data, model, loss, loop, sample. It needs nothing but torch, and about a minute on two cores:

    python docs/first_gpt.py [TEXT [STEPS]]

In the comments a shape is made of B windows in a batch, T characters in a window, C numbers for each character (the
width), nh heads, hs = C / nh numbers in a head, and V different characters in the text.

It is correct, and it takes many shortcuts. TUTORIAL.md, chapter 0, lists them, each with the chapter that mends it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH_SIZE, BLOCK_SIZE = 16, 64  # B, T
N_LAYER, N_HEAD, N_EMBD = 4, 4, 128  # blocks, nh, C
STEPS, LEARNING_RATE = 1000, 2e-3


def random_batch(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Cut windows anywhere in the text: x, and y, which holds the character after each character of x."""
    starts = torch.randint(len(codes) - BLOCK_SIZE, (BATCH_SIZE, 1))  # (B, 1)
    windows = codes[starts + torch.arange(BLOCK_SIZE + 1)]  # (B, T + 1), because the last x needs a next one too
    return windows[:, :-1], windows[:, 1:]  # (B, T) each


class CausalSelfAttention(nn.Module):
    """Each character collects what it needs from itself and the characters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(N_EMBD, 3 * N_EMBD)  # queries, keys and values side by side
        self.c_proj = nn.Linear(N_EMBD, N_EMBD)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        B, T, C = x.shape
        parts = self.c_attn(x).split(C, dim=2)  # q, k, v: (B, T, C) each
        q, k, v = (part.view(B, T, N_HEAD, C // N_HEAD).transpose(1, 2) for part in parts)  # (B, nh, T, hs) each
        # softmax(q kᵀ / √hs) v, where is_causal hides what comes later: a character must not see what it has to guess.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C), the heads side by side again


class MLP(nn.Module):
    """Each character works on what it has collected, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(N_EMBD, 4 * N_EMBD), nn.Linear(4 * N_EMBD, N_EMBD)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # (B, T, C) -> (B, T, 4C) -> (B, T, C)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(N_EMBD), CausalSelfAttention()
        self.ln_2, self.mlp = nn.LayerNorm(N_EMBD), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, N_EMBD), nn.Embedding(BLOCK_SIZE, N_EMBD)
        self.h = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.ln_f = nn.LayerNorm(N_EMBD)
        self.lm_head = nn.Linear(N_EMBD, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]  # (B, T, C) + (T, C)
        for block in self.h:
            x = block(x)  # (B, T, C)
        return self.lm_head(self.ln_f(x))  # (B, T, V)
