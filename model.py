"""The GPT: a decoder-only transformer with GPT-2's block structure, written bottom-up.

Read it after `char_dataset.py`, which makes its input. `sampling.py` comes next: it turns the logits that this one
returns into a token.

Modules have the names of GPT-2's weights: wte and wpe, the token and the position embedding; h, the blocks; c_attn,
c_fc and c_proj, the linear layers into attention, into the MLP, and out of each; ln_1, ln_2 and ln_f, the norms.

Legend of the shapes in the comments:

    B   sequences in the batch          C   n_embd, width of the residual stream
    T   tokens in each sequence         nh  n_head, attention heads
    S   keys that a query can see       hs  head size, C / nh
    V   vocab_size
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

from sampling import Sampling, choose_token


@dataclass(kw_only=True)
class GPTConfig:
    """All that is needed to build a GPT.

    `gpt_config` of `gpt2_train_cfg.yaml` has all of these keys but the first two, which follow from the text and from
    `data_config`.

    Raises:
        ValueError: a value is outside its range, or two don't fit together.
    """

    vocab_size: int  # V, how many different tokens there are
    block_size: int  # the longest sequence that the learned positions cover, in tokens
    n_layer: int  # blocks
    n_head: int  # nh, attention heads in each block
    n_embd: int  # C, width of the residual stream; a multiple of n_head
    embd_pdrop: float = 0.0  # dropout probability after the embeddings, from 0 to below 1
    resid_pdrop: float = 0.0  # the same at the end of each attention and MLP branch
    attn_pdrop: float = 0.0  # the same of attention weights
    bias: bool = True  # whether linear layers and norms have biases, as in GPT-2

    def __post_init__(self) -> None:
        check_sizes(self)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and what came before it (Vaswani et al. 2017, section 3.2).

    Exactly one projection in, to queries, keys and values side by side, and one out, as in GPT-2.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_pdrop = config.attn_pdrop
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """Mix each token's values with those of the tokens before it.

        Args:
            x: (B, T, C).
            cache: keys and values of earlier calls, (2, B, nh, block_size, hs), filled up to `start`; this call adds
                its own T. None while training: there are none, and none are kept.
            start: the position of x's first token. If it isn't 0, T must be 1.

        Returns:
            (B, T, C)
        """
        B, T, C = x.shape  # batch, tokens, width
        parts = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in parts)  # (B, nh, T, hs)
        if cache is not None:
            cache[0, :, :, start : start + T], cache[1, :, :, start : start + T] = k, v
            k, v = cache[:, :, :, : start + T]  # (B, nh, S, hs) each

        # softmax(q kᵀ / √hs) v with everything after the query's own position hidden, in the way that is fast on this
        # device. is_causal aligns its triangle with key 0, which is right only where queries and keys start together;
        # the single query that follows cached keys is the newest token, and sees them all.
        dropout_p = self.attn_pdrop if self.training else 0.0  # the function doesn't know about eval()
        y = fast_attention(q, k, v, dropout_p, is_causal=T > 1)  # (B, nh, T, hs)

        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers with a GELU between them; the hidden layer is four times as wide. Each token is on its own."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = fast_gelu(self.c_fc(x))  # (B, T, 4C)
        return self.resid_dropout(self.c_proj(x))


class Block(nn.Module):
    """One transformer block: attention moves information between tokens, the MLP works on each token alone.

    Both add their result to the residual stream x. Pre-norm (Radford et al. 2019): only what a branch reads is
    normalised, so the stream itself runs from the embedding to the head untouched.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """(B, T, C) -> (B, T, C); `cache` and `start` as in CausalSelfAttention."""
        x = x + self.attn(self.ln_1(x), cache, start)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """Token and position embeddings, n_layer blocks, and a head that shares the token embedding's matrix.

    With the same weights, the logits are those of OpenAI's GPT-2 (the tests compare with Hugging Face's).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied: one vector reads and predicts a token (arXiv:1608.05859)
        self.apply(self._init_weights)
        # Every block adds two branches to the stream, 2 * n_layer in all. Their output projections start smaller by
        # the root of that number, so that the stream's variance doesn't grow with depth (GPT-2 paper, section 2.3).
        for name, parameter in self.h.named_parameters():
            if name.endswith(("attn.c_proj.weight", "mlp.c_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Predict the token after each token.

        Args:
            idx: tokens, int64 (B, T), T at most block_size.
            targets: the tokens that really follow, int64 (B, T); -1 where there is nothing to predict.

        Returns:
            (logits (B, T, V), mean cross-entropy over the targets that aren't -1, in nats; None without targets).
        """
        logits = self.lm_head(self.hidden_states(idx))  # (B, T, V)
        if targets is None:
            return logits, None
        # (B * T, V) against (B * T,), in float32 whatever autocast made of the logits: 16 bits are too few for the sum.
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def hidden_states(self, idx: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """All but the head: int64 (B, T) -> (B, T, C).

        Args:
            idx: the tokens at positions start ... start + T - 1.
            cache: None while training; else what `new_cache` made, filled up to `start`. This call adds its own T.
            start: how many tokens are in the cache.

        Raises:
            ValueError: more than block_size tokens; several tokens on top of a filled cache.
        """
        T = idx.size(1)
        check_positions(start, T, self.config.block_size)
        x = self.drop(self.wte(idx) + self.wpe.weight[start : start + T])  # (B, T, C); positions are shared
        for layer, block in enumerate(self.h):
            x = block(x, None if cache is None else cache[layer], start)
        return self.ln_f(x)

    def num_parameters(self) -> int:
        """Trainable numbers; the matrix that embedding and head share counts once."""
        return sum(p.numel() for p in self.parameters())

    # ------------------------------------------------------------------------------------ writing text

    def new_cache(self, batch_size: int) -> Tensor:
        """Room for the keys and values of batch_size sequences: (n_layer, 2, B, nh, block_size, hs)."""
        c, weight = self.config, self.wte.weight
        return weight.new_empty(c.n_layer, 2, batch_size, c.n_head, c.block_size, c.n_embd // c.n_head)

    def stream(
        self, idx: Tensor, max_new_tokens: int, how: Sampling, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        """Like `generate`, but yields each new token, int64 (B, 1), as soon as it is chosen.

        Keys and values of earlier tokens are kept, so a token costs one pass over one position. Learned positions
        can't slide: when the context is full, its last half moves to the front and is computed again, once for every
        block_size / 2 tokens, so that the text can have any length.
        """
        if idx.size(1) == 0:
            raise ValueError("got an empty prompt; generation needs at least one token to start from")
        was_training, block_size = self.training, self.config.block_size
        cache = self.new_cache(idx.size(0))
        context, cached = idx, 0  # all tokens that count, (B, T), and how many of them are in the cache
        self.eval()
        try:
            for _ in range(max_new_tokens):
                if context.size(1) > block_size:
                    context, cached = context[:, -max(1, block_size // 2) :], 0
                with torch.inference_mode():
                    x = self.hidden_states(context[:, cached:], cache, cached)  # (B, T, C); T is 1 after the first
                    logits = self.lm_head(x[:, -1])  # (B, V)
                cached = context.size(1)
                token = choose_token(logits, how, generator)  # (B, 1)
                context = torch.cat((context, token), dim=1)
                yield token
        finally:
            self.train(was_training)

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        do_sample: bool = False,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue sequences, in evaluation mode, to any length.

        Args:
            idx: the prompts, int64 (B, T), T at least 1.
            max_new_tokens: how many tokens to add.
            temperature, do_sample, top_k, top_p: how each is chosen, see `sampling.Sampling`.
            generator: the source of randomness; None: torch's global one.

        Returns:
            int64 (B, T + max_new_tokens), the prompts included.

        Raises:
            ValueError: an empty prompt, or a sampling setting outside its range.
        """
        how = Sampling(temperature, do_sample, top_k, top_p)
        return torch.cat((idx, *self.stream(idx, max_new_tokens, how, generator)), dim=1)


@torch.no_grad()
def sum_losses(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    """Score texts, in evaluation mode.

    Args:
        model: the GPT; its mode is put back afterwards, also where it fails.
        batches: (x, y) as `char_dataset.evaluation_batches` makes them, each int64 (B, T).

    Returns:
        (sum of the losses of all targets that aren't -1, in nats; how many they are). To be added up over ranks before
        one is divided by the other: the mean of unequal parts' means is another number.
    """
    device, was_training = model.wte.weight.device, model.training
    means, counts = [], []
    model.eval()  # or dropout would make the loss too high, and another one every time
    try:
        for x, y in batches:
            _, loss = model(x.to(device), y.to(device))
            means.append(loss)
            counts.append(int((y != -1).sum()))
    finally:
        model.train(was_training)
    values = torch.stack(means).tolist() if means else []  # read once: that waits for the device
    # A batch without targets has no mean; it only fills up a rank's share.
    total = sum(mean * count for mean, count in zip(values, counts, strict=True) if count)
    return total, sum(counts)


# --------------------------------------------------------------- armour: fast kernels on CPUs, wrong sizes


def fast_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool) -> Tensor:
    """torch's fused attention; on CPUs in bfloat16, where torch's kernel is slow, written out or in float32.

    Written out, a training step of the default takes 0.87 of its time with the kernel in float32, with windows of 512
    tokens 0.59. It holds all (T, S) scores at once, so long windows go through the kernel.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.size(2) <= 512:
        scores = (q / math.sqrt(q.size(-1))) @ k.mT.to(q.dtype)  # (B, nh, T, S)
        if is_causal:
            scores += torch.full_like(scores[0, 0], -math.inf).triu(1)  # (T, S): hides what comes later
        weights = scores.softmax(dim=-1)
        return (F.dropout(weights, dropout_p) if dropout_p else weights) @ v.to(q.dtype)  # (B, nh, T, hs)
    if q.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), None, dropout_p, is_causal)
            return y.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal)


def fast_gelu(x: Tensor) -> Tensor:
    """GELU as in GPT-2, x Φ(x) with tanh in place of the normal distribution's Φ; on CPUs under autocast with Φ itself.

    Of torch's kernels for CPUs only that of Φ is fast: 0.8 against 2.2 ms, forward and backward, for a million numbers.
    The two differ by 0.0005 at most, and a trained model's evaluation loss by 0.00002.
    """
    is_exact = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return F.gelu(x, approximate="none" if is_exact else "tanh")


def check_positions(start: int, T: int, block_size: int) -> None:
    """Raise ValueError for more tokens than positions, and for several tokens on top of a filled cache."""
    if start + T > block_size:
        raise ValueError(f"got {start + T} tokens; the positions are learned up to block_size={block_size}")
    if start > 0 and T > 1:
        raise ValueError(f"got {T} tokens on top of {start} cached ones: fill an empty cache, or add one token")


def check_sizes(c: GPTConfig) -> None:
    """Raise ValueError if a value is outside its range, or two don't fit together."""
    for name in ("n_layer", "n_head", "n_embd"):
        if getattr(c, name) < 1:
            raise ValueError(f"gpt_config.{name}={getattr(c, name)}: must be at least 1")
    if c.n_embd % c.n_head:
        raise ValueError(
            f"gpt_config.n_embd={c.n_embd} is not divisible by n_head={c.n_head}: every head gets an equal share of "
            "the width"
        )
    for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop"):
        if not 0.0 <= getattr(c, name) < 1.0:
            raise ValueError(f"gpt_config.{name}={getattr(c, name)}: must be a probability from 0 to below 1")
