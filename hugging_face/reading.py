"""A directory of a Hugging Face GPT-2 -> what a snapshot holds of a model, for `trainer_config.init_from`.

`names.py` knows the names. It loads the package `safetensors` only where there is such a
directory. Files of others are data here, whatever they say: none of their code runs.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from console.errors import described
from hugging_face.names import FIXED, PREFIX, SIZES, is_transposed, package, parameters
from model import GPTConfig
from snapshot import Snapshot, check_is_file, local_path


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
    folder = Path(local_path(url) or url)
    try:
        config = read_json(folder / "config.json")
        check_config(config)
        characters = read_characters(folder)
        if len(characters) != config["vocab_size"]:
            raise ValueError(f"the tokenizer has {len(characters)} tokens, but config.json {config['vocab_size']}")
        c = GPTConfig(**{ours: config[theirs] for theirs, ours in SIZES.items()})
        weights = read_weights(find_weights(folder), c)
        if config.get("bias") is False and not any(weights[name].any() for name in weights if "bias" in name):
            c, weights = replace(c, bias=False), {name: w for name, w in weights.items() if "bias" not in name}
        weights["wte.weight"] = weights["wte.weight"][sorted(range(len(characters)), key=characters.__getitem__)]
        weights["lm_head.weight"] = weights["wte.weight"]
    except Exception as error:  # odd contents raise almost anything
        reason = error if isinstance(error, ValueError | OSError) else described(error)
        raise ValueError(f"trainer_config.init_from={url} can't be taken over: {reason}") from error
    return {"model_config": vars(c), "vocabulary": "".join(sorted(characters)), "model": weights}


def read_weights(path: Path, c: GPTConfig) -> dict[str, Tensor]:
    """The weights in a file of theirs, by our names, in float32.

    Every name, shape and type is compared before a tensor is read.
    """
    check_is_file(str(path))
    with package("safetensors").safe_open(str(path), framework="pt") as file:
        keys = {key.removeprefix(PREFIX): key for key in file.keys()}  # noqa: SIM118 - it is no dictionary
        keys = {name: key for name, key in keys.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
        if c.n_layer > len(keys):
            raise ValueError(f"config.json has n_layer={c.n_layer}, but {path.name} {len(keys)} tensors")
        expected = parameters(c)
        if odd := sorted((keys.keys() - {"lm_head.weight"}) ^ expected.keys()):
            raise ValueError(f"{path.name} has missing or unknown weights: {', '.join(odd[:3])}")
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
        raise ValueError("lm_head.weight differs from wte.weight; in this model they are one matrix")
    return {name: (w.T if is_transposed(name, w) else w).contiguous() for name, w in weights.items()}


# ----------------------------------------------------------------------------------- armour: other models, other tokens


def is_directory(path: str) -> bool:
    """Whether a path or URL is that of a directory on this machine with files of Hugging Face's."""
    try:
        folder = Path(local_path(path) or "")
    except (ImportError, ValueError):  # of a store whose package is missing: reading it will say so
        return False
    names = ("config.json", "model.safetensors", "pytorch_model.bin")
    return folder != Path() and any((folder / name).exists() for name in names)


def read_json(path: Path) -> Any:
    """The contents of a JSON file. Raises ValueError, which names the file, if it isn't JSON."""
    check_is_file(str(path))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON ({described(error)})") from error


def check_config(config: dict[str, Any]) -> None:
    """Raise ValueError, which names all keys, if config.json isn't that of a model as it is here."""
    if not isinstance(config, dict):
        raise ValueError("config.json is not a dictionary")
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
    """The one file of weights. Raises ValueError if there are several, or only a pickle."""
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
        steps = read_json(path)
        tokens, added = steps["model"]["vocab"], steps.get("added_tokens", [])
    elif not (folder / "vocab.json").exists():
        raise ValueError("there is no tokenizer.json")
    else:
        steps = {"pre_tokenizer": {"type": "ByteLevel"}} if merges.exists() else {}
        tokens, added = read_json(folder / "vocab.json"), []
    if not isinstance(tokens, dict):
        raise ValueError(f"its vocabulary is a {type(tokens).__name__}; it must be a dictionary of tokens and codes")
    tokens |= {token["content"]: token["id"] for token in added}
    characters = sorted(tokens, key=tokens.__getitem__)
    if odd := [token for token in characters if len(token) != 1 or "\ud800" <= token <= "\udfff"]:
        listed = ", ".join(map(repr, odd[:3]))
        raise ValueError(f"its vocabulary has {len(odd):,} tokens that aren't one character: {listed}")
    if [tokens[character] for character in characters] != [*range(len(characters))]:
        raise ValueError("the codes of its tokens are not 0, 1, 2, ...")
    # With ByteLevel, "Ġ" is a blank. (A post_processor may stay: it only adds tokens, and those are in the vocabulary.)
    for step, name in {"normalizer": "", "pre_tokenizer": "Split", "decoder": "Fuse"}.items():
        if steps.get(step) and steps[step]["type"] != name:
            raise ValueError(f"tokenizer.json has the {step} {steps[step]['type']}, which changes the text")
    return characters
