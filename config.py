"""Armour: the schema of `gpt2_train_cfg.yaml`, that is, which keys there are and which values they may have.

A first reader can skip this file: the YAML file explains every key. The groups `data_config`, `gpt_config` and
`optimizer_config` are dataclasses of the modules that they belong to; `trainer_config` is here, with what follows from
its numbers, to keep it out of the training loop. `main.py` comes next.
"""

import math
from dataclasses import dataclass, field

import torch

from char_dataset import DataConfig
from model import ArchitectureConfig
from optimizer import OptimizerConfig

AMP_DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class TrainerConfig:
    """`trainer_config` of `gpt2_train_cfg.yaml`, which explains each key."""

    max_epochs: int = 10
    max_steps: int | None = 1100
    batch_size: int = 16
    micro_batch_size: int | None = None
    grad_norm_clip: float | None = 1.0
    seed: int = 1337
    eval_every_steps: int = 250
    save_every_steps: int = 250
    log_every_steps: int = 10
    sample_tokens: int = 500
    resume: bool = True
    snapshot_path: str | None = None
    init_from: str | None = None
    patience: int | None = None
    use_amp: bool = True
    amp_dtype: str = "auto"
    device: str = "auto"
    compile: bool = False
    data_loader_workers: int = 0
    deterministic: bool = False
    dry_run: bool = False
    profile: bool = False
    timeout_minutes: float = 10.0

    def __post_init__(self) -> None:
        check_trainer_config(self)

    def steps_in_all(self, steps_per_epoch: int) -> int:
        """The optimizer steps of the whole run: max_epochs, unless max_steps or a dry run ends it sooner."""
        limits = [self.max_epochs * steps_per_epoch, self.max_steps, 2 if self.dry_run else None]
        return min(limit for limit in limits if limit is not None)

    def sequences_per_forward(self, world_size: int) -> int:
        """The micro-batch of one rank, in windows: what was asked for, or all of the rank's share of a step.

        Raises:
            ValueError: batch_size is not a whole number of micro-batches on every rank.
        """
        micro = self.micro_batch_size or max(1, self.batch_size // world_size)
        if self.batch_size % (world_size * micro):
            raise ValueError(
                f"trainer_config.batch_size={self.batch_size} is not divisible by {world_size} ranks x "
                f"micro_batch_size={micro} = {world_size * micro}; every rank must get the same number of micro-batches"
            )
        return micro


@dataclass
class Config:
    """The four groups of `gpt2_train_cfg.yaml`."""

    data_config: DataConfig = field(default_factory=DataConfig)
    gpt_config: ArchitectureConfig = field(default_factory=lambda: ArchitectureConfig(n_layer=4, n_head=4, n_embd=128))
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer_config: TrainerConfig = field(default_factory=TrainerConfig)


def choose_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """The type that matrix products are computed in; the weights themselves stay float32.

    Raises:
        ValueError: the type that was asked for can't be had on this device.
    """
    # 1. No mixed precision.
    if not config.use_amp or config.amp_dtype == "float32":
        return torch.float32
    can_bfloat16 = _computes_in_bfloat16(device)
    # 2. The best that the hardware really computes in. bfloat16 has float32's range and needs no scaler; float16 is
    #    for older GPUs that only have that; elsewhere narrow types are emulated and only cost.
    if config.amp_dtype == "auto":
        if can_bfloat16:
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" else torch.float32
    # 3. What the user insists on, wherever torch can do it at all (slowly, perhaps: that is how CPUs test float16).
    if not torch.amp.is_autocast_available(device.type):
        raise ValueError(
            f"trainer_config.amp_dtype={config.amp_dtype} can't be had on device {device.type}, which has no mixed "
            "precision in this torch; use amp_dtype=auto"
        )
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[config.amp_dtype]


def _computes_in_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # older ones can't tell: float32
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return device.type == "xpu"


def check_trainer_config(c: TrainerConfig) -> None:
    """Raise ValueError where a value is outside its range, or two contradict each other."""
    positive = ["max_epochs", "max_steps", "batch_size", "micro_batch_size", "grad_norm_clip", "patience"]
    positive += ["log_every_steps", "eval_every_steps", "save_every_steps", "timeout_minutes"]
    for name in positive:
        value = getattr(c, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"trainer_config.{name}={value}: must be above 0")
    for name in ("data_loader_workers", "seed", "sample_tokens"):
        if getattr(c, name) < 0:
            raise ValueError(f"trainer_config.{name}={getattr(c, name)}: must be at least 0")
    if c.amp_dtype not in AMP_DTYPES:
        raise ValueError(f"trainer_config.amp_dtype={c.amp_dtype}: must be one of {', '.join(AMP_DTYPES)}")
    if c.device not in ("auto", "cpu"):
        raise ValueError(f"trainer_config.device={c.device}: must be auto (an accelerator if there is one) or cpu")
    if not c.use_amp and c.amp_dtype not in ("auto", "float32"):
        raise ValueError(
            f"trainer_config.use_amp=false trains in float32, and amp_dtype={c.amp_dtype} contradicts it; "
            "set one or the other"
        )
