"""The schema of `gpt2_train_cfg.yaml`: which keys there are, of which types, and which values they may have.

Read it last of the files to read; the YAML file explains every key. `data_config`, `gpt_config` and `optimizer_config`
are dataclasses of the modules that they belong to, `trainer_config` is here. `main.py` puts all of it to use.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

from char_dataset import DataConfig
from model import GPTConfig
from optimizer import OptimizerConfig

PROJECT = Path(__file__).resolve().parent  # the default text and the default run directory lie in it
DEFAULT_SNAPSHOT = str(PROJECT / "runs" / "shakespeare" / "gpt_snapshot.pt")

AMP_DTYPES = ("auto", "bfloat16", "float16", "float32")
STRATEGIES = ("ddp", "fsdp")
SIZES = ("n_layer", "n_head", "n_embd")

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

# `gpt_config`: what a GPTConfig has, but for what follows from the text, and with a name that can stand for the sizes.
# A field that is added to GPTConfig is a key of the configuration at once. Written out, it would be
#
#     class ArchitectureConfig:
#         n_layer: int | None = None
#         n_head: int | None = None
#         n_embd: int | None = None
#         model_type: str | None = None
#         embd_pdrop: float = 0.0
#         ... and so on, as in GPTConfig
ArchitectureConfig = make_dataclass(
    "ArchitectureConfig",
    [
        *((size, int | None, None) for size in SIZES),
        ("model_type", str | None, None),
        *(
            (key.name, key.type, key.default)
            for key in fields(GPTConfig)
            if key.name not in ("vocab_size", "block_size", *SIZES)
        ),
    ],
    kw_only=True,
    namespace={"__post_init__": lambda c: check_architecture(c)},
)


@dataclass
class TrainerConfig:
    """`trainer_config` of `gpt2_train_cfg.yaml`, which explains each key."""

    max_epochs: int = 10
    max_steps: int | None = 1100
    batch_size: int = 16
    micro_batch_size: int | str | None = None
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
    activation_checkpointing: bool = False
    compile: bool = False
    data_loader_workers: int = 0
    deterministic: bool = False
    dry_run: bool = False
    plan: bool = False
    profile: bool = False
    strategy: str = "ddp"
    timeout_minutes: float = 10.0

    def __post_init__(self) -> None:
        check_trainer_config(self)

    def steps_in_all(self, steps_per_epoch: int) -> int:
        """The optimizer steps of the whole run: max_epochs, unless max_steps or a dry run ends it sooner."""
        limits = [self.max_epochs * steps_per_epoch, self.max_steps, 2 if self.dry_run else None]
        return min(limit for limit in limits if limit is not None)

    def sequences_per_forward(self, world_size: int) -> int:
        """The micro-batch of one rank, in windows: what was asked for, or (also with "auto") its whole share of a step.

        Raises:
            ValueError: batch_size is not a whole number of micro-batches on every rank.
        """
        asked = self.micro_batch_size
        micro = asked if isinstance(asked, int) else max(1, self.batch_size // world_size)
        if self.batch_size % (world_size * micro):
            raise ValueError(
                f"trainer_config.batch_size={self.batch_size} is not divisible by {ranks_in_words(world_size)} x "
                f"micro_batch_size={micro} = {world_size * micro}; every rank must get the same number of micro-batches"
            )
        return micro


@dataclass
class Config:
    """The four groups of `gpt2_train_cfg.yaml`."""

    data_config: DataConfig = field(default_factory=DataConfig)
    gpt_config: ArchitectureConfig = field(  # type: ignore[valid-type]
        default_factory=lambda: ArchitectureConfig(n_layer=4, n_head=4, n_embd=128)
    )
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer_config: TrainerConfig = field(default_factory=TrainerConfig)

    def model_config(self, vocab_size: int) -> GPTConfig:
        """What the model is built from, for a vocabulary of so many tokens."""
        return complete(self.gpt_config, vocab_size, self.data_config.block_size)

    def as_dict(self) -> dict[str, Any]:
        """All keys and values, in dictionaries, lists, numbers and strings: what a snapshot remembers."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


# ------------------------------------------------------------------------- armour: names of models, values out of range


def ranks_in_words(number: int) -> str:
    """1 rank, 2 ranks."""
    return f"{number} rank{'s' if number > 1 else ''}"


def check_architecture(c: Any) -> None:
    """Raise ValueError if the values don't fit together, whatever the text will be."""
    complete(c, vocab_size=1, block_size=1)


def complete(c: Any, vocab_size: int, block_size: int) -> GPTConfig:
    """An ArchitectureConfig with the sizes in place of the model's name, and with what follows from the text.

    Raises:
        ValueError: both or neither of the name and the three sizes are given, or a value is outside its range.
    """
    values = asdict(c)
    name, sizes = values.pop("model_type"), {size: values[size] for size in SIZES}
    if name is not None:
        if name not in MODEL_TYPES:
            raise ValueError(f"gpt_config.model_type={name}: must be null or one of {[*MODEL_TYPES]}")
        if any(size is not None for size in sizes.values()):
            nulls = " ".join(f"gpt_config.{size}=null" for size in SIZES)
            raise ValueError(
                f"gpt_config: got both model_type={name} and {sizes}; set either the name or the three sizes, and the "
                f"other to null; to use the name, add {nulls}"
            )
        values |= dict(zip(SIZES, MODEL_TYPES[name], strict=True))
    elif None in sizes.values():
        raise ValueError(f"gpt_config: got no model_type, and {sizes}; set either the name or all three sizes")
    return GPTConfig(**values, vocab_size=vocab_size, block_size=block_size)


def check_trainer_config(c: TrainerConfig) -> None:
    """Raise ValueError if a value is outside its range, or two contradict each other."""
    size = c.micro_batch_size
    if isinstance(size, str) and size != "auto":
        raise ValueError(f"trainer_config.micro_batch_size={size}: must be null, auto, or a whole number above 0")
    positive = ["max_epochs", "max_steps", "batch_size", "micro_batch_size", "grad_norm_clip", "patience"]
    positive += ["log_every_steps", "eval_every_steps", "save_every_steps", "timeout_minutes"]
    for name in positive:
        value = getattr(c, name)
        if value not in (None, "auto") and not 0 < value < math.inf:
            raise ValueError(f"trainer_config.{name}={value}: must be above 0")
    if c.timeout_minutes > 1e6:  # torch can't wait longer than some centuries
        raise ValueError(f"trainer_config.timeout_minutes={c.timeout_minutes}: must be at most 1,000,000, two years")
    for name in ("data_loader_workers", "seed", "sample_tokens"):
        if getattr(c, name) < 0:
            raise ValueError(f"trainer_config.{name}={getattr(c, name)}: must be at least 0")
    if c.seed >= 2**64:
        raise ValueError(f"trainer_config.seed={c.seed}: must be below 2^64 = {2**64}")
    if c.amp_dtype not in AMP_DTYPES:
        raise ValueError(f"trainer_config.amp_dtype={c.amp_dtype}: must be one of {', '.join(AMP_DTYPES)}")
    if c.strategy not in STRATEGIES:
        raise ValueError(f"trainer_config.strategy={c.strategy}: must be one of {', '.join(STRATEGIES)}")
    if c.device not in ("auto", "cpu"):
        raise ValueError(f"trainer_config.device={c.device}: must be auto (an accelerator if there is one) or cpu")
    if not c.use_amp and c.amp_dtype not in ("auto", "float32"):
        raise ValueError(
            f"trainer_config.use_amp=false trains in float32, and amp_dtype={c.amp_dtype} contradicts it; "
            "set one or the other"
        )
