"""A GPT in a hundred lines: it reads a text, learns to guess each next character, and then writes.

`python docs/first_gpt.py [TEXT [STEPS]]` takes about a minute on one core. It computes what it
should, with many shortcuts; TUTORIAL.md, chapter 0, lists them. Shapes: B windows in a batch, T
characters in a window, C numbers for each, nh heads of hs = C / nh, V different characters.
"""

import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH_SIZE, BLOCK_SIZE = 16, 64  # B, T
N_LAYER, N_HEAD, N_EMBD = 3, 4, 64  # blocks, nh, C
STEPS, LEARNING_RATE = 2000, 2e-3


def random_windows(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Cut windows anywhere: x, and y, which holds the character after each character of x."""
    starts = torch.randint(len(codes) - BLOCK_SIZE, (BATCH_SIZE, 1))  # (B, 1)
    windows = codes[starts + torch.arange(BLOCK_SIZE + 1)]  # (B, T + 1): the last x needs a y too
    return windows[:, :-1], windows[:, 1:]  # (B, T) each


class CausalSelfAttention(nn.Module):
    """Each character collects what it needs from itself and from the characters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(N_EMBD, 3 * N_EMBD)  # query, key and value of a character
        self.c_proj = nn.Linear(N_EMBD, N_EMBD)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, N_HEAD, C // N_HEAD)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        # softmax(q kᵀ / √hs) v. It is causal: later characters would give the answer away.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C): heads side by side


class Block(nn.Module):
    """Attention between the characters, then an MLP on each of them alone; both add to x."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(N_EMBD), CausalSelfAttention(), nn.LayerNorm(N_EMBD)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(N_EMBD, 4 * N_EMBD), "c_proj": nn.Linear(4 * N_EMBD, N_EMBD)})

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.attn(self.ln_1(x))  # in a sum, the gradient reaches x undiminished
        hidden = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")  # (B, T, 4C)
        return x + self.mlp["c_proj"](hidden)  # (B, T, C)


class GPT(nn.Module):
    """From characters and their positions, through the blocks, to a guess at each next character."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, N_EMBD), nn.Embedding(BLOCK_SIZE, N_EMBD)
        self.h = nn.Sequential(*[Block() for _ in range(N_LAYER)])
        self.ln_f, self.lm_head = nn.LayerNorm(N_EMBD), nn.Linear(N_EMBD, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # a character is read and guessed by the same numbers
        for matrix in [p for p in self.parameters() if p.ndim == 2]:
            nn.init.normal_(matrix, std=0.02)  # torch's own embeddings would begin at a loss of 40

    def forward(self, idx: Tensor) -> Tensor:
        """(B, T) -> (B, T, V): logits, whose softmax holds the probability of each next character."""
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]  # (B, T, C) + (T, C)
        return self.lm_head(self.ln_f(self.h(x)))  # (B, T, V)


def train(text: str, steps: int) -> tuple[GPT, str]:
    """Learn a text, and print the loss: the mean of -ln(probability of the character that came)."""
    characters = "".join(sorted(set(text)))  # a character's code is its place in this string
    codes = torch.tensor([characters.index(c) for c in text])  # (length of the text,)
    model = GPT(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, steps + 1):
        x, y = random_windows(codes)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # of (B * T, V) and (B * T,)
        optimizer.zero_grad()  # backward() adds to the gradients that it finds
        loss.backward()
        optimizer.step()
        if step == 1 or step % 100 == 0:
            print(f"step {step:4}: loss {loss:.4f}; guessing costs {math.log(len(characters)):.4f}")
    return model, characters


@torch.no_grad()  # nothing is learned here; eval() would change nothing, as there is no dropout
def sample(model: GPT, characters: str, length: int) -> str:
    """Write: draw a character by its probability, append it, and ask again."""
    idx = torch.zeros(1, 1, dtype=torch.long)  # (1, 1): code 0, in most texts the end of a line
    for _ in range(length):
        logits = model(idx[:, -BLOCK_SIZE:])[:, -1]  # (1, V), after the last character
        idx = torch.cat([idx, torch.multinomial(logits.softmax(dim=1), 1)], dim=1)  # (1, T + 1)
    return "".join(characters[code] for code in idx[0, 1:].tolist())


if __name__ == "__main__":
    data = Path(__file__).parent.parent / "data"
    default = data / "input.txt" if (data / "input.txt").exists() else data / "sample.txt"
    text = Path(sys.argv[1] if len(sys.argv) > 1 else default).read_text(encoding="utf-8")
    started = time.time()
    torch.set_num_threads(1)  # such small products gain little from more, and lose much beside other programs
    torch.manual_seed(1337)
    model, characters = train(text, int(sys.argv[2]) if len(sys.argv) > 2 else STEPS)
    print(f"{time.time() - started:.0f} seconds\n{sample(model, characters, 500)}")
