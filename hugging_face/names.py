"""This GPT as Hugging Face's GPT-2: the same weights, under their names and in their shapes."""

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model import GPT, GPTConfig
from snapshot import Snapshot

# What a GPT2Config may choose, and this model has in one form only. A key that is left out has this value there, too.
FIXED = {
    "activation_function": "gelu_new",  # GELU with tanh
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,  # width inside of the MLP: 4 * n_embd
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
SIZES = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {"n_positions": "block_size"}
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # left out, they would be GPT-2's 50256
PREFIX = "transformer."


def to_hugging_face(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(The contents of config.json, the tensors of model.safetensors by name) for a snapshot's model.

    Their GPT-2 always has biases. Where ours has none, zeros are added, which change nothing.
    """
    c = GPTConfig(**snapshot["model_config"])
    tensors = {}
    for name, like in parameters(c).items():
        weight = snapshot["model"][name] if name in snapshot["model"] else torch.zeros(like.shape)
        tensors[PREFIX + name] = (weight.T if is_transposed(name, like) else weight).contiguous()
    config = {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"},
        **{theirs: getattr(c, ours) for theirs, ours in SIZES.items()},
        **{name: getattr(c, name) for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")},
        **{**FIXED, **NO_TOKENS, "bias": c.bias},  # "bias" tells the way back which zeros were added
    }
    return config, tensors


def parameters(c: GPTConfig) -> dict[str, Tensor]:
    """The parameters of a model of some size with biases, by our names, without memory: for their shapes."""
    with torch.device("meta"):
        return dict(GPT(replace(c, bias=True)).named_parameters())  # what is tied comes once, as wte.weight


def is_transposed(name: str, weight: Tensor) -> bool:
    """Whether they hold a matrix the other way round: their Conv1D computes x W, our Linear x Wᵀ."""
    return name.startswith("h.") and weight.ndim == 2


def tokenizer(characters: str) -> dict[str, Any]:
    """The contents of tokenizer.json: each character is a token, and its code is its index in `characters`.

    `WordLevel` has no token for what is unknown. It raises an error there: nothing is replaced and nothing left out.
    """
    every_character = {"Regex": r"[\s\S]"}  # a dot takes no newlines
    codes = {character: code for code, character in enumerate(characters)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": every_character, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},  # without it, decoding would put a blank between any two tokens
        "model": {"type": "WordLevel", "vocab": codes, "unk_token": "<unk>"},
    }


def package(name: str) -> Any:
    """Import one of Hugging Face's packages. Raises ValueError, which says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"this needs {name} ({error}): pip install -r requirements-export.txt") from error
