"""This GPT as a directory of Hugging Face's GPT-2, and back: the same weights, under their names and ours.

Read it before `export.py`, which writes such a directory. With `trainer_config.init_from`, a run starts from one.
Nothing here loads Hugging Face's packages before it needs them, and none of them runs code of a directory.
"""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import GPT, GPTConfig
from snapshot import Snapshot, first_line, local_path

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
        **{**FIXED, **NO_TOKENS, "bias": c.bias},  # "bias" tells `read_directory` which zeros were added
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
    every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}  # . ends lines
    codes = {character: code for code, character in enumerate(characters)}
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": []},
        **{"normalizer": None, "pre_tokenizer": every, "post_processor": None},
        "decoder": {"type": "Fuse"},  # without it, decoding would put a blank between any two tokens
        "model": {"type": "WordLevel", "vocab": codes, "unk_token": "<unk>"},
    }


def read_directory(url: str) -> Snapshot:
    """The model in a directory of a Hugging Face GPT-2: what a snapshot says of one.

    Args:
        url: a local directory with config.json, model.safetensors and tokenizer.json (or a plain vocab.json).

    Returns:
        {"model_config", "vocabulary", "model"}. Characters are sorted, and the embedding's rows with them; weights in
        16 bits become float32. Dropout isn't taken over.

    Raises:
        ValueError: something in it doesn't fit, or can't be read; the message names it.
    """
    folder = Path(local_path(url) or "")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        check_config(config)
        characters = read_characters(folder)
        if len(characters) != config["vocab_size"]:
            raise ValueError(f"the tokenizer has {len(characters)} tokens, and config.json {config['vocab_size']}")
        c = GPTConfig(**{ours: config[theirs] for theirs, ours in SIZES.items()})
        weights = read_weights(find_weights(folder), c)
        if config.get("bias") is False and not any(weights[name].any() for name in weights if "bias" in name):
            c, weights = replace(c, bias=False), {name: w for name, w in weights.items() if "bias" not in name}
        weights["wte.weight"] = weights["wte.weight"][sorted(range(len(characters)), key=characters.__getitem__)]
        weights["lm_head.weight"] = weights["wte.weight"]
    except Exception as error:  # odd contents raise almost anything
        reason = error if isinstance(error, ValueError | OSError) else first_line(error)
        raise ValueError(f"{url} can't be taken over: {reason}") from error
    return {"model_config": vars(c), "vocabulary": "".join(sorted(characters)), "model": weights}


def read_weights(path: Path, c: GPTConfig) -> dict[str, Tensor]:
    """The weights in a file of theirs, by our names, in float32.

    Every name, shape and type is compared before a tensor is read.
    """
    with package("safetensors").safe_open(str(path), framework="pt") as file:
        keys = {key.removeprefix(PREFIX): key for key in file.keys()}  # noqa: SIM118 - it is no dictionary
        keys = {name: key for name, key in keys.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
        if c.n_layer > len(keys):
            raise ValueError(f"config.json has n_layer={c.n_layer}, and {path.name} {len(keys)} tensors")
        expected = parameters(c)
        if odd := sorted((keys.keys() - {"lm_head.weight"}) ^ expected.keys()):
            raise ValueError(f"{path.name} has weights too many or too few: {', '.join(odd[:3])}")
        for name, key in keys.items():
            like = expected[name if name in expected else "wte.weight"]
            shape = [*(like.T if is_transposed(name, like) else like).shape]
            there = file.get_slice(key)
            if there.get_shape() != shape or there.get_dtype() not in ("F32", "F16", "BF16"):
                found = f"{there.get_dtype()} {there.get_shape()}"
                raise ValueError(f"{path.name}: {key} is {found}, not F32, F16 or BF16 {shape}")
        weights = {name: file.get_tensor(key).to(torch.float32, copy=True) for name, key in keys.items()}
    head = weights.pop("lm_head.weight", weights["wte.weight"])
    if not torch.equal(head, weights["wte.weight"]):
        raise ValueError("lm_head.weight isn't wte.weight: here they are one matrix")
    return {name: (w.T if is_transposed(name, w) else w).contiguous() for name, w in weights.items()}


# ------------------------------------------------------------------- armour: other models, other tokens, other packages


def is_directory(url: str) -> bool:
    """Whether a URL is a local directory with files of Hugging Face's."""
    folder = Path(local_path(url) or "")
    return any((folder / name).exists() for name in ("config.json", "model.safetensors", "pytorch_model.bin"))


def package(name: str) -> Any:
    """Import one of Hugging Face's packages. Raises ValueError, which says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"this needs {name} ({error}): pip install -r requirements-export.txt") from error


def check_config(config: dict[str, Any]) -> None:
    """Raise ValueError, which names all keys, where config.json isn't that of a model as it is here."""
    if config.get("model_type") != "gpt2":
        raise ValueError(f"config.json has model_type={config.get('model_type')!r}; it must be 'gpt2'")
    for name in SIZES:
        if type(config.get(name)) is not int:
            raise ValueError(f"config.json has {name}={config.get(name)!r}; it must be a whole number")
    given = {**FIXED, **config}
    if given["n_inner"] == 4 * config["n_embd"]:
        given["n_inner"] = None
    odd = [f"{name}={given[name]!r} (here {value!r})" for name, value in FIXED.items() if given[name] != value]
    if odd:
        raise ValueError(f"config.json has {', '.join(odd)}")


def find_weights(folder: Path) -> Path:
    """The one file of weights. Raises ValueError where there are several, or only a pickle."""
    path = folder / "model.safetensors"
    if path.exists():
        return path
    if (folder / "model.safetensors.index.json").exists():
        raise ValueError("model.safetensors.index.json: weights in several files aren't read; save them as one")
    if (folder / "pytorch_model.bin").exists():
        raise ValueError("pytorch_model.bin is a pickle, which can run any code; save the model as model.safetensors")
    raise ValueError("there is no model.safetensors")


def read_characters(folder: Path) -> list[str]:
    """The tokens by their codes. Raises ValueError unless each is one character that stands for itself."""
    path, merges = folder / "tokenizer.json", folder / "merges.txt"
    if path.exists():
        steps = json.loads(path.read_text(encoding="utf-8"))
        tokens = {**steps["model"]["vocab"], **{t["content"]: t["id"] for t in steps.get("added_tokens", [])}}
    else:
        steps = {"pre_tokenizer": {"type": "ByteLevel"}} if merges.exists() else {}
        tokens = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    characters = sorted(tokens, key=tokens.__getitem__)
    if odd := [token for token in characters if len(token) != 1 or "\ud800" <= token <= "\udfff"]:
        listed = ", ".join(map(repr, odd[:3]))
        raise ValueError(f"its vocabulary has {len(odd):,} tokens that aren't one character: {listed}")
    if [tokens[character] for character in characters] != [*range(len(characters))]:
        raise ValueError("the codes of its tokens are not 0, 1, 2, ...")
    allowed = {"normalizer": "", "pre_tokenizer": "Split", "post_processor": "", "decoder": "Fuse"}
    for step, name in allowed.items():  # with ByteLevel, "Ġ" is a blank
        if steps.get(step) and steps[step]["type"] != name:
            raise ValueError(f"tokenizer.json has the {step} {steps[step]['type']}, which changes the text")
    return characters
