"""The GPT: a decoder-only transformer with GPT-2's block structure, written bottom-up.

Second module of the reading order, after `char_dataset.py` (which makes its input) and before `optimizer.py` (which
changes its weights). It imports nothing of the project.

Legend of the shapes in the comments:

    B   sequences in the batch          C   n_embd, width of the residual stream
    T   tokens in each sequence         nh  n_head, attention heads
    S   keys that a query can see       hs  head size, C / nh
    V   vocab_size
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

# name: (n_layer, n_head, n_embd), as published with GPT, GPT-2 and Gopher; the three small ones are minGPT's.
MODEL_TYPES = {
    "openai-gpt": (12, 12, 768),  # 117 M parameters
    "gpt2": (12, 12, 768),  # 124 M
    "gpt2-medium": (24, 16, 1024),  # 350 M
    "gpt2-large": (36, 20, 1280),  # 774 M
    "gpt2-xl": (48, 25, 1600),  # 1558 M
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}


@dataclass(kw_only=True)
class ArchitectureConfig:
    """What a user chooses about the model. Units and meaning: `gpt2_train_cfg.yaml`.

    Raises:
        ValueError: both or neither of `model_type` and the three sizes are given, or they don't fit together.
    """

    model_type: str | None = None
    n_layer: int | None = None
    n_head: int | None = None
    n_embd: int | None = None
    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        sizes = {"n_layer": self.n_layer, "n_head": self.n_head, "n_embd": self.n_embd}
        if self.model_type is not None:
            if any(size is not None for size in sizes.values()):
                raise ValueError(
                    f"gpt_config: got both model_type={self.model_type} and {sizes}; "
                    "set either the name or the three sizes, and the other to null"
                )
            if self.model_type not in MODEL_TYPES:
                raise ValueError(f"gpt_config.model_type={self.model_type}: must be null or one of {[*MODEL_TYPES]}")
            # A name is short for three sizes. With these known it goes, so that GPTConfig(**vars(config)) is valid.
            self.n_layer, self.n_head, self.n_embd = MODEL_TYPES[self.model_type]
            self.model_type = None
        elif None in sizes.values():
            raise ValueError(f"gpt_config: got no model_type, and {sizes}; set either the name or all three sizes")
        for name in ("n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"gpt_config.{name}={getattr(self, name)}: must be at least 1")
        if self.n_embd % self.n_head:  # type: ignore[operator]
            raise ValueError(
                f"gpt_config.n_embd={self.n_embd} is not divisible by n_head={self.n_head}: every head gets an equal "
                "share of the width"
            )
        for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"gpt_config.{name}={getattr(self, name)}: a probability from 0 to below 1")


@dataclass(kw_only=True)
class GPTConfig(ArchitectureConfig):
    """All that is needed to build a GPT: what the user chose, and what the data dictates.

    Args:
        vocab_size: V, how many different tokens there are.
        block_size: the longest sequence that the learned positions cover, in tokens.
    """

    vocab_size: int
    block_size: int
    n_layer: int = None  # type: ignore[assignment]  # from here on they are known: see __post_init__
    n_head: int = None  # type: ignore[assignment]
    n_embd: int = None  # type: ignore[assignment]


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool) -> Tensor:
    """torch's fused attention; on CPUs in float32 even under autocast.

    The backward of torch's CPU attention is four to five times slower in bfloat16 than in float32 (7.1 against 1.7 ms
    for 12 sequences of 64 tokens, 4 heads of 32), which would eat up all that bfloat16 gains in the projections.
    """
    if q.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), dropout_p=dropout_p, is_causal=is_causal
            )
            return y.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal)


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
                its own T. None: there are none, and none are kept.
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

        # softmax(q kᵀ / √hs) v with everything after the query's own position hidden. is_causal aligns its triangle
        # with key 0, which is right only where queries and keys start together; the single query that follows cached
        # keys is the newest token, and sees them all.
        dropout_p = self.attn_pdrop if self.training else 0.0  # the function doesn't know about eval()
        y = scaled_dot_product_attention(q, k, v, dropout_p, is_causal=T > 1)  # (B, nh, T, hs)

        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again
        return self.resid_dropout(self.c_proj(y))


def gelu(x: Tensor) -> Tensor:
    """GELU as in GPT-2, x Φ(x) with tanh in place of the normal distribution's Φ; on CPUs under autocast with Φ itself.

    Of torch's kernels for CPUs only that of Φ is fast: 0.8 against 2.2 ms, forward and backward, for a million numbers.
    The two differ by 0.0005 at most; a trained model's evaluation loss, with the one or the other, by 0.00002.
    """
    is_exact = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return F.gelu(x, approximate="none" if is_exact else "tanh")


class MLP(nn.Module):
    """Two linear layers, four times as wide between, that work on each token alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = gelu(self.c_fc(x))  # (B, T, 4C)
        return self.resid_dropout(self.c_proj(x))


class Block(nn.Module):
    """One transformer block: attention moves information between tokens, the MLP digests it; both add to the stream.

    Pre-norm (Radford et al. 2019): what is normalised is the branch's input, so the residual stream itself runs from
    the embedding to the head untouched.
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


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError where a sampling parameter is outside its range."""
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be 0 (greedy) or a positive number")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")


def choose_token(
    logits: Tensor,
    temperature: float,
    do_sample: bool,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token for each row of logits (B, V): int64 (B, 1)."""
    if not do_sample or temperature < 1e-30:  # such a temperature is 0, and float32 could not divide by it
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.amax(dim=-1, keepdim=True)).float() / temperature  # the largest is 0: no overflow
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1), the smallest logit that stays
        logits = logits.masked_fill(logits < kth, -math.inf)
    probabilities = logits.softmax(dim=-1)
    if top_p is not None:
        # Nucleus sampling (1904.09751): a token stays while the likelier ones together haven't reached top_p.
        ordered, order = probabilities.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0.0
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


class GPT(nn.Module):
    """Token and position embeddings, n_layer blocks, and a head that shares the token embedding's matrix.

    With the same numbers in both, the logits are those of OpenAI's GPT-2 (the tests compare with Hugging Face's).
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
        self.lm_head.weight = self.wte.weight  # tied: a token is read and predicted by the same vector (1608.05859)
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

    def num_parameters(self) -> int:
        """Trainable numbers; the matrix that embedding and head share counts once."""
        return sum(p.numel() for p in self.parameters())

    def hidden_states(self, idx: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """All but the head.

        Args:
            idx: int64 (B, T), the tokens at positions start ... start + T - 1.
            cache: what `new_cache` made, filled up to `start`; this call fills it up to start + T.
            start: how many tokens are in the cache.

        Returns:
            (B, T, C), ready for `lm_head`.

        Raises:
            ValueError: more than block_size tokens; several tokens on top of a filled cache.
        """
        T = idx.size(1)
        if start + T > self.config.block_size:
            raise ValueError(
                f"got {start + T} tokens; the positions are learned up to block_size={self.config.block_size}"
            )
        if start > 0 and T > 1:
            raise ValueError(f"got {T} tokens on top of {start} cached ones: fill an empty cache, or add one token")
        # (B, T, C); the same positions for every sequence
        x = self.drop(self.wte(idx) + self.wpe.weight[start : start + T])
        for layer, block in enumerate(self.h):
            x = block(x, None if cache is None else cache[layer], start)
        return self.ln_f(x)

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
        # (B * T, V) against (B * T,), in float32 whatever autocast made of the logits: the sum over V needs the digits.
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def new_cache(self, batch_size: int) -> Tensor:
        """Room for the keys and values of batch_size sequences: (n_layer, 2, B, nh, block_size, hs)."""
        c, weight = self.config, self.wte.weight
        return weight.new_empty(c.n_layer, 2, batch_size, c.n_head, c.block_size, c.n_embd // c.n_head)

    def stream(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        do_sample: bool = False,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Like `generate`, but yields each new token, int64 (B, 1), as soon as it is chosen.

        Keys and values of earlier tokens are kept, so a token costs one pass over one position. Learned positions
        can't slide: when the context is full, its last half moves to the front and is computed again, once for every
        block_size / 2 tokens, so that the text can have any length.
        """
        check_sampling(temperature, top_k, top_p)
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
                    x = self.hidden_states(context[:, cached:], cache, cached)  # (B, T, C); T is 1 but for the first
                    logits = self.lm_head(x[:, -1])  # (B, V)
                cached = context.size(1)
                token = choose_token(logits, temperature, do_sample, top_k, top_p, generator)  # (B, 1)
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
            temperature: divides the logits; below 1 is bolder, above 1 is wilder, 0 always takes the likeliest.
            do_sample: draw from the distribution; False takes the likeliest token, whatever the other three say.
            top_k: draw from the k likeliest tokens only; None, or more than V: from all.
            top_p: draw from the fewest tokens that together have this probability, in (0, 1]; None: from all.
            generator: the source of randomness; None: torch's global one.

        Returns:
            int64 (B, T + max_new_tokens), the prompts included.

        Raises:
            ValueError: an empty prompt, or a sampling parameter outside its range.
        """
        new = self.stream(idx, max_new_tokens, temperature, do_sample, top_k, top_p, generator)
        return torch.cat((idx, *new), dim=1)
