"""Parameter groups, the learning-rate schedule, and the optimizer.

`model.py` says what is learned, this module how it changes in a step. `trainer.py` comes next; `muon.py`, the optimizer
of the matrices by default, is for a second reading.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import AdamW, Optimizer

from distributed import copy_from_main
from muon import Group, MuonWithAdamW


@dataclass
class OptimizerConfig:
    """`optimizer_config` of `gpt2_train_cfg.yaml`, which explains each key."""

    learning_rate: float = 1e-2
    muon_learning_rate: float = 0.03
    name: str = "muon"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 20
    lr_decay: str = "linear"
    min_lr_ratio: float = 0.0
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        check_optimizer_config(self)
        self.betas = (self.betas[0], self.betas[1])  # YAML knows lists only


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Sort the trainable parameters into those that decay and those that don't.

    Weight decay pulls a matrix that multiplies activations towards a simpler function. Biases, norms and embeddings
    gain nothing from being small: they shift and scale, or are looked up. The head is tied to the embedding, so it
    counts as one.

    Returns:
        (matrices, all others), each parameter once: a parameter that two modules share is one parameter.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2 and id(p) not in embeddings]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in trainable if id(p) not in chosen]


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int, min_lr_ratio: float, decay: str) -> float:
    """What the learning rates are multiplied by at an optimizer step: linear warm-up, then one of three ways down.

    A pure function of the step: a restart, another number of ranks or of accumulation steps can't shift it.

    Args:
        step: the optimizer step, counted from 0.
        warmup_steps: steps over which the factor rises to 1; the first step already has 1 / warmup_steps of it. A
            warm-up that is longer than the run is cut off by its end.
        total_steps: the step at which the decay arrives at the bottom.
        min_lr_ratio: the bottom, as a fraction of the peak.
        decay: "cosine" (SGDR, arXiv:1608.03983); "linear", which ended 0.008 nats lower in runs of 1,100 steps; or
            "wsd" (warm-up, stable, decay: arXiv:2405.18392), a line over the last fifth of the run. Up to there, the
            factor doesn't depend on total_steps, and a run can still be prolonged as if it had always been longer.

    Returns:
        A factor from 0 to 1.
    """
    # 1. Warm-up: Adam's estimates of the gradient's scale are poor at first.
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    # 2. Past the end.
    if step >= total_steps:
        return min_lr_ratio
    # 3. In between: at 1 until the decay begins, then down to min_lr_ratio at total_steps.
    begin = max(warmup_steps, total_steps * 4 // 5) if decay == "wsd" else warmup_steps
    progress = max(0, step - begin) / (total_steps - begin)
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if decay == "cosine" else 1.0 - progress
    return min_lr_ratio + (1.0 - min_lr_ratio) * left


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every group's learning rate to its peak times the factor of `learning_rate_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def learning_rates(optimizer: Optimizer, key: str = "lr") -> dict[str, float]:
    """The learning rate of a step, or the peak ("initial_lr"), by the name of whose it is; of the topmost layer."""
    if isinstance(optimizer, MuonWithAdamW):
        return {"Muon": optimizer.parts["muon"].param_groups[-1][key], **learning_rates(optimizer.parts["adamw"], key)}
    return {"AdamW": optimizer.param_groups[-1][key]}


def create_optimizer(
    model: nn.Module, config: OptimizerConfig, dtype: torch.dtype = torch.float32, rank: int = 0, world_size: int = 1
) -> Optimizer:
    """Make the optimizer, with every trainable parameter of the model in exactly one group.

    Each group keeps its peak learning rate in "initial_lr"; `set_learning_rate` sets "lr" from it.

    Args:
        model: whose parameters are to be trained.
        config: which optimizer, and how strong.
        dtype: of the matrix products, Muon's among them; AdamW is always float32.
        rank, world_size: this process's place among those that train the model together.
    """
    matrices, others = split_parameters(model)
    matrix_rate = config.muon_learning_rate if config.name == "muon" else config.learning_rate
    decaying: list[Group] = [{"params": matrices, "lr": matrix_rate, "weight_decay": config.weight_decay}]
    undecayed: list[Group] = [{"params": others, "lr": config.learning_rate, "weight_decay": 0.0}]
    if config.layer_decay < 1.0:  # for fine-tuning: a learning rate for each layer
        decaying = divide_by_layer(decaying[0], model, config.layer_decay)
        undecayed = divide_by_layer(undecayed[0], model, config.layer_decay)
    optimizer: Optimizer
    if config.name == "muon":
        dtype = torch.float32 if dtype == torch.float16 else dtype  # float16 has too small a range for Muon's products
        optimizer = MuonWithAdamW(decaying, undecayed, config.betas, dtype, rank, world_size)
    else:
        # fused: one kernel updates all parameters, instead of some ten for each of them.
        optimizer = AdamW([*decaying, *undecayed], betas=config.betas, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


# ------------------------------------------------ armour: fine-tuning, changed configurations, wrong settings


def layer_scales(model: nn.Module, layer_decay: float) -> dict[nn.Parameter, float]:
    """What each parameter's learning rate is multiplied by: layer_decay for every layer that lies above its own.

    For fine-tuning: what the lower layers know of the language holds for the new text too, and small steps keep it
    (arXiv:1801.06146). The embeddings lie below the blocks, which are h.0, h.1, ...; the last norm lies above them.
    The head is tied to the embedding and changes as slowly.
    """
    n_layer = len(getattr(model, "h", ()))
    scales = {}  # by parameter
    for name, p in model.named_parameters():
        block = re.match(r"h\.(\d+)\.", name)
        above_others = n_layer + 1 if name.startswith(("wte.", "wpe.")) else 0
        scales[p] = layer_decay ** (n_layer - int(block[1]) if block else above_others)
    return scales


def divide_by_layer(group: Group, model: nn.Module, layer_decay: float) -> list[Group]:
    """A group's parameters in groups of their own for each learning rate, the highest last, empty perhaps."""
    scales = layer_scales(model, layer_decay)
    by_scale: dict[float, list[nn.Parameter]] = {1.0: []}  # the last group shows the full rate
    for p in group["params"]:
        by_scale.setdefault(scales[p], []).append(p)
    return [{**group, "params": by_scale[scale], "lr": group["lr"] * scale} for scale in sorted(by_scale)]


def optimizer_state(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What an optimizer remembers of each parameter, by the parameter's name; nothing before the first step.

    Learning rates, betas and decay are no part of it: those of the present configuration hold, also in a run that goes
    on. (torch's own `state_dict` has them, and `load_state_dict` brings the old ones back: a changed configuration
    silently does nothing. It also numbers the parameters, and the numbers change with the groups.)
    """
    return {name: dict(optimizer.state[p]) for name, p in parameters.items() if optimizer.state.get(p)}


def load_optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """The inverse of `optimizer_state`, on all ranks together: rank 0's state counts, the others need its form only."""
    for name, values in state.items():
        p = parameters[name]
        for key, value in values.items():
            own = torch.zeros((), device=p.device) if key == "step" else torch.zeros_like(p, requires_grad=False)
            copy_from_main(value, own)
            optimizer.state[p][key] = own


def check_optimizer_state(optimizer: Optimizer, parameters: Mapping[str, Tensor], state: dict[str, Any]) -> None:
    """Raise ValueError if a saved state hasn't this optimizer's form."""
    if state.keys() not in (set(), parameters.keys()):  # nothing at all: no step was taken yet
        raise ValueError(f"optimizer state of {len(state)} parameters, not of these {len(parameters)}")
    muon = optimizer.parts["muon"].param_groups if isinstance(optimizer, MuonWithAdamW) else []
    averaged_once = {id(p) for group in muon for p in group["params"]}
    for name, values in state.items():
        p = parameters[name]
        keys = {"momentum_buffer"} if id(p) in averaged_once else {"step", "exp_avg", "exp_avg_sq"}
        if values.keys() != keys:
            raise ValueError(f"optimizer state {[*values]} of {name}, not {sorted(keys)}")
        for key, value in values.items():
            shape = () if key == "step" else p.shape
            has_form = isinstance(value, Tensor) and value.shape == shape and value.dtype == torch.float32
            if not has_form or not value.is_contiguous() or not value.isfinite().all():
                raise ValueError(f"optimizer state {key} of {name} is not finite float32 of shape {tuple(shape)}")
            if key == "exp_avg_sq" and (value < 0).any():
                raise ValueError(f"optimizer state {key} of {name} is an average of squares, but negative")


def check_optimizer_config(c: OptimizerConfig) -> None:
    """Raise ValueError if a value is outside its range."""
    allowed = {
        "learning_rate": (0.0 < c.learning_rate < math.inf, "a positive number"),
        "muon_learning_rate": (0.0 < c.muon_learning_rate < math.inf, "a positive number"),
        "name": (c.name in ("adamw", "muon"), "adamw or muon"),
        "weight_decay": (0.0 <= c.weight_decay < math.inf, "at least 0"),
        "betas": (len(c.betas) == 2 and all(0.0 <= beta < 1.0 for beta in c.betas), "two numbers from 0 to below 1"),
        "warmup_steps": (c.warmup_steps >= 0, "at least 0 optimizer steps"),
        "lr_decay": (c.lr_decay in ("cosine", "linear", "wsd"), "cosine, linear or wsd"),
        "min_lr_ratio": (0.0 <= c.min_lr_ratio <= 1.0, "from 0 to 1"),
        "layer_decay": (0.0 < c.layer_decay <= 1.0, "above 0 and at most 1"),
    }
    for name, (is_allowed, words) in allowed.items():
        if not is_allowed:
            raise ValueError(f"optimizer_config.{name}={getattr(c, name)}: must be {words}")
