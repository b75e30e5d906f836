"""Parameter groups, optimizers and the learning-rate schedule.

`model.py` says what is learned, this module how it changes in a step. `trainer.py` comes next.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer

from distributed import copy_from_main, like, whole

Group = dict[str, Any]  # parameters that share a learning rate and a weight decay, as torch's optimizers take them


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
    scales = layer_scales(model, config.layer_decay)  # all 1, except for fine-tuning
    matrix_rate = config.muon_learning_rate if config.name == "muon" else config.learning_rate
    decaying = make_groups(matrices, scales, matrix_rate, config.weight_decay)
    undecayed = make_groups(others, scales, config.learning_rate, 0.0)
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


# ------------------------------------------------------------------------------------ Muon


def orthogonalize(matrices: Tensor, dtype: torch.dtype, ns_steps: int) -> Tensor:
    """Replace matrices (n, rows, columns) by nearly orthogonal ones with the same singular vectors.

    Newton-Schulz iteration: an odd polynomial of a matrix acts on its singular values alone, and this one drives them
    towards 1 without a decomposition. Four steps bring all that are above 1/200 of the matrix's norm between 0.7 and
    1.2. The coefficients are those of Jordan et al. (kellerjordan.github.io/posts/muon).

    Args:
        matrices: float32, any shape of matrix.
        dtype: to compute in; bfloat16 is exact enough for training, float32 for comparing runs.
        ns_steps: how often the polynomial is applied.
    """
    X = matrices.to(dtype)
    is_tall = X.size(1) > X.size(2)
    if is_tall:
        X = X.mT  # the products below are smaller this way round
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # all singular values at most 1
    a, b, c = 3.4445, -4.775, 2.0315
    for _ in range(ns_steps):
        A = X @ X.mT  # (n, rows, rows)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A²
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return (X.mT if is_tall else X).float()


class Muon(Optimizer):
    """Momentum, orthogonalized: Muon (Jordan et al. 2024) for all matrices of one shape at a time.

    A gradient's matrix is dominated by a few directions. Muon replaces the average of the gradients by the nearest
    orthogonal matrix, so that every direction in it is learned at the same speed. torch has a Muon too, which takes
    one matrix after the other, in bfloat16 always: up to 1.6 times the time on small models, and a rounding that makes
    runs on one rank and on two differ after a dozen steps even where all else is float32.

    Args:
        groups: matrices with their "lr" and "weight_decay".
        dtype: what to orthogonalize in.
        rank, world_size: this process's place among those that hold the same matrices and gradients.
    """

    def __init__(self, groups: list[Group], dtype: torch.dtype, rank: int = 0, world_size: int = 1):
        # With a momentum of 0.9 instead of the usual 0.95, a run of 1,000 steps ended 0.01 nats lower; a fifth
        # Newton-Schulz step, as the authors take, costs 3 ms more in each step on a CPU and gains nothing.
        super().__init__(groups, {"momentum": 0.9, "ns_steps": 4})
        self.dtype, self.rank, self.world_size = dtype, rank, world_size

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for matrices in by_shape.values():
                self._step_alike(group, matrices)

    def _step_alike(self, group: Group, matrices: list[Tensor]) -> None:
        """Update n matrices of one shape."""
        rows, columns = matrices[0].shape
        # A matrix of (3C, C) is three side by side: those of queries, keys and values have no directions in common that
        # should be orthogonal. With all three as one matrix, a run of 1,250 steps ended 0.02 nats higher.
        if rows == 3 * columns:
            rows = columns
        gradients = [p.grad for p in matrices if p.grad is not None]
        for p in matrices:
            if not self.state[p]:  # only before a matrix's first step
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        averages = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(averages, gradients, 1.0 - group["momentum"])
        # Nesterov: the gradient that the average would give if this step's gradient came once more.
        lookahead = torch._foreach_lerp(gradients, averages, group["momentum"])
        together = torch.stack(lookahead)
        pieces = whole(together).view(-1, rows, columns)  # n of them, or 3n
        updates = self._orthogonalize_together(pieces, group["ns_steps"]).reshape(len(matrices), -1, columns)  # n again
        updates = like(updates, together)
        torch._foreach_mul_(matrices, 1.0 - group["lr"] * group["weight_decay"])
        # An orthogonal update of a tall matrix has small entries, so it gets a larger step.
        scale = math.sqrt(max(1.0, rows / columns))
        torch._foreach_add_(matrices, updates.unbind(), alpha=-group["lr"] * scale)

    def _orthogonalize_together(self, pieces: Tensor, ns_steps: int) -> Tensor:
        """`orthogonalize` of (n, rows, columns) with n shared out among the ranks; every rank gets all of the result.

        All have the same pieces. A product of one piece doesn't depend on the others, so the bits don't depend on the
        number of ranks; and where the ranks' devices differ, they get equal updates all the same.
        """
        if self.world_size == 1:
            return orthogonalize(pieces, self.dtype, ns_steps)
        share = math.ceil(len(pieces) / self.world_size)
        padded = F.pad(pieces, (0, 0, 0, 0, 0, share * self.world_size - len(pieces)))  # zeros stay zeros
        updates = torch.empty_like(padded, dtype=self.dtype)  # sent as they were computed: no bit is lost
        mine = orthogonalize(padded.split(share)[self.rank], self.dtype, ns_steps).to(self.dtype)
        dist.all_gather(list(updates.split(share)), mine.contiguous())
        return updates[: len(pieces)].float()


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of the blocks and AdamW for everything else, as one optimizer.

    Muon has no meaning for vectors and embeddings. The two are one object because they must step together, and after a
    float16 overflow skip the step together.
    """

    def __init__(
        self,
        matrices: list[Group],
        others: list[Group],
        betas: tuple[float, float],
        dtype: torch.dtype,
        rank: int = 0,
        world_size: int = 1,
    ):
        # Each part adopts the very dictionaries that stand in self.param_groups: a new "lr" there reaches it.
        super().__init__([*matrices, *others], {})
        self.parts = {
            "muon": Muon(matrices, dtype, rank, world_size),
            "adamw": AdamW(others, betas=betas, fused=True),
        }
        for part in self.parts.values():
            part.state = self.state  # one dictionary, by parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both parts."""
        for part in self.parts.values():
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's optimizers do; the parts adopt the new groups and the new state."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for part in self.parts.values():
            part.param_groups, part.state = [next(groups) for _ in part.param_groups], self.state


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


def make_groups(
    parameters: list[nn.Parameter], scales: dict[nn.Parameter, float], learning_rate: float, weight_decay: float
) -> list[Group]:
    """One group for each learning rate, the highest last; without layer decay that is the only one."""
    by_scale: dict[float, list[nn.Parameter]] = {1.0: []}  # empty, perhaps: the last group shows the full rate
    for p in parameters:
        by_scale.setdefault(scales[p], []).append(p)
    return [
        {"params": by_scale[scale], "weight_decay": weight_decay, "lr": learning_rate * scale}
        for scale in sorted(by_scale)
    ]


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
    """Raise ValueError where a saved state hasn't this optimizer's form."""
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
                raise ValueError(f"optimizer state {key} of {name} is no finite float32 of shape {tuple(shape)}")
            if key == "exp_avg_sq" and (value < 0).any():
                raise ValueError(f"optimizer state {key} of {name} is an average of squares, and negative")


def check_optimizer_config(c: OptimizerConfig) -> None:
    """Raise ValueError where a value is outside its range."""
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
