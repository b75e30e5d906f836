"""Whether the contents of an undamaged snapshot fit together, by its own configuration.

A file can be complete to the last checksum and still unusable, because parts are missing, or of another type or size;
it counts as damaged, too.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from char_dataset import CharVocabulary
from console.errors import described
from model import GPT, GPTConfig
from optimizer import check_optimizer_state
from snapshot import DamagedSnapshotError, Snapshot


def check_model(snapshot: Snapshot, url: str) -> None:
    """Raise DamagedSnapshotError unless a snapshot holds a model: configuration, vocabulary and weights that agree.

    Nothing is allocated for it: what is expected is built without memory, where an absurd size is only a number.
    """
    try:
        _check_types(snapshot, {"model_config": dict, "vocabulary": str, "model": dict})
        weights, config = snapshot["model"], snapshot["model_config"]
        _check_types(config, dict.fromkeys(("vocab_size", "block_size", "n_layer", "n_head", "n_embd"), int))
        check_plain(config)
        if config["n_layer"] > len(weights):
            raise ValueError(f"{config['n_layer']} layers in {len(weights)} weights")
        with torch.device("meta"):
            model = GPT(GPTConfig(**config))
        expected = model.state_dict()
        if weights.keys() != expected.keys():
            raise ValueError(f"missing or unknown weights: {sorted(map(str, weights.keys() ^ expected.keys()))[:3]}")
        for name, weight in weights.items():
            check_tensor(weight, expected[name].shape, name)
        if not torch.equal(weights["lm_head.weight"], weights["wte.weight"]):
            raise ValueError("lm_head.weight differs from wte.weight; in this model they are one matrix")
        vocabulary = snapshot["vocabulary"]
        if len(CharVocabulary(vocabulary)) != config["vocab_size"]:
            raise ValueError(f"{len(vocabulary)} characters for {config['vocab_size']} codes")
        # Views of one small piece of memory would each become a large tensor of the model.
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in weights.values()}
        if sum(p.numel() * p.element_size() for p in model.parameters()) > sum(held.values()):
            raise ValueError("weights that share their memory")
    except Exception as error:  # odd contents raise almost anything
        raise DamagedSnapshotError(f"{url} holds no usable model ({described(error)})") from error


def check_tensor(value: Any, shape: torch.Size, name: str) -> None:
    """Raise ValueError unless a value is a float32 tensor of a shape, with data, and finite."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        raise ValueError(f"{name} has no data")
    if value.shape != shape or value.dtype != torch.float32 or not value.is_contiguous():
        raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}, not float32 {tuple(shape)}")
    if not value.norm().isfinite():  # nor is a norm that overflows
        raise ValueError(f"{name} has values that are not finite")


def check_contents(snapshot: Snapshot, url: str) -> None:
    """Raise DamagedSnapshotError unless a snapshot holds all that a run needs to go on, each of its type."""
    check_model(snapshot, url)
    try:
        _check_types(snapshot, dict.fromkeys(("optimizer", "scaler", "config", "run"), dict))
        _check_types(snapshot, dict.fromkeys(("optimizer_name", "corpus", "torch_version"), str))
        _check_types(snapshot, {"step": int, "best_step": int, "best_eval_loss": float})
        _check_types(snapshot["run"], {"directory": str, "launch": str})
        for group in snapshot["config"].values():
            check_plain(group)
        scale = {"scale": float, "growth_factor": float, "backoff_factor": float}
        if snapshot["scaler"]:  # empty where the run wasn't in float16
            _check_types(snapshot["scaler"], scale | {"growth_interval": int, "_growth_tracker": int})
        if not 0 <= snapshot["step"] < 2**32 or math.isnan(snapshot["best_eval_loss"]):
            raise ValueError(f"step {snapshot['step']}, best loss {snapshot['best_eval_loss']}")
    except Exception as error:  # odd contents raise almost anything
        raise DamagedSnapshotError(f"{url} can't be continued ({described(error)})") from error


def check_continuable(
    snapshot: Snapshot, url: str, identity: Snapshot, optimizer: Optimizer, parameters: dict[str, nn.Parameter]
) -> None:
    """Raise ValueError unless a run can go on from a snapshot, DamagedSnapshotError if nobody can.

    It must share the run's `identity`, and its optimizer's state must fit `optimizer` and its `parameters`, by name.
    """
    check_contents(snapshot, url)
    check_matches(snapshot, identity)
    try:
        check_optimizer_state(optimizer, parameters, snapshot["optimizer"])
    except Exception as error:  # odd contents raise almost anything
        raise DamagedSnapshotError(f"{url} can't be continued ({described(error)})") from error


def differences(there: Snapshot, here: Snapshot) -> list[tuple[str, Any, Any]]:
    """(Name, value there, value here) of all that differs, the entries of inner dictionaries one by one."""

    def flatten(values: Snapshot) -> Snapshot:
        flat: Snapshot = {}
        for name, value in values.items():
            flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        return flat

    old, new = flatten(there), flatten(here)
    return [(name, old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)]


def check_matches(snapshot: Snapshot, expected: Snapshot) -> None:
    """Raise ValueError, which says what differs, unless a snapshot has the entries that are expected of this run's."""
    differing = differences({name: snapshot.get(name) for name in expected}, expected)
    if differing:
        named = {"corpus": "the text differs", "vocabulary": "the text differs"}  # not its digest, nor its alphabet
        listed = [named.get(name, f"{name.split('.')[-1]} is {was} there, {now} here") for name, was, now in differing]
        raise ValueError(
            "the snapshot is of another run; give this one a directory of its own with hydra.run.dir=runs/NAME, or "
            f"start over with trainer_config.resume=false, which moves it aside ({'; '.join(dict.fromkeys(listed))})"
        )


def check_plain(values: Any) -> None:
    """Raise ValueError unless `values` is a dictionary of numbers, strings, None, and lists of them."""
    plain = (str, int, float, type(None))
    for name, value in values.items():
        if not isinstance(value, plain) and not (isinstance(value, list) and all(isinstance(v, plain) for v in value)):
            raise ValueError(f"{name} is a {type(value).__name__}")


def _check_types(values: Snapshot, types: dict[str, type]) -> None:
    for name, expected in types.items():
        value = values.get(name)
        if type(value) is bool or not isinstance(value, expected):  # to Python, True is an int
            raise ValueError(f"{name} is {'missing' if name not in values else f'a {type(value).__name__}'}")
