"""Armour: the schema of `gpt2_train_cfg.yaml`, that is, which keys there are and which values they may have.

A first reader can skip this file: the YAML file explains every key. The groups `data_config`, `gpt_config` and
`optimizer_config` are dataclasses of the modules that they belong to; `trainer_config` is here, with what follows from
its numbers, to keep it out of the training loop. `main.py` comes next.
"""

import difflib
import hashlib
import itertools
import math
import re
import shlex
from dataclasses import dataclass, field, fields

import torch

from char_dataset import DataConfig
from model import ArchitectureConfig
from optimizer import OptimizerConfig

AMP_DTYPES = ("auto", "bfloat16", "float16", "float32")
STRATEGIES = ("ddp", "fsdp")


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
    size = c.micro_batch_size
    if isinstance(size, str) and size != "auto":
        raise ValueError(f"trainer_config.micro_batch_size={size}: must be null, auto, or a whole number above 0")
    positive = ["max_epochs", "max_steps", "batch_size", "micro_batch_size", "grad_norm_clip", "patience"]
    positive += ["log_every_steps", "eval_every_steps", "save_every_steps", "timeout_minutes"]
    for name in positive:
        value = getattr(c, name)
        if value not in (None, "auto") and not 0 < value < math.inf:
            raise ValueError(f"trainer_config.{name}={value}: must be above 0")
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


# ---------------------------------------------------------------- armour: mistyped commands, names of run directories

SIZES = ("n_layer", "n_head", "n_embd")


def explain(error: BaseException, typed: list[str], recipes: list[str]) -> str:
    """What is wrong with a command, in one line, and what to type instead where that can be known.

    Args:
        error: the complaint: Hydra's, OmegaConf's or our own.
        typed: the command's arguments.
        recipes: the names that `+recipe=` may have.
    """
    if type(error).__module__.startswith(("hydra", "omegaconf")):  # long-winded: the first lines say it
        lines = [str(e).splitlines()[0].rstrip(".:") for e in (error, error.__cause__) if e is not None]
        if lines[0].startswith("Ambiguous value"):
            return f"{lines[0]}: several values need -m, as in python main.py -m {shlex.join(typed)}"
        if hasattr(error, "override") and "=" in error.override:  # Hydra's grammar stumbled over this argument
            return f"{error.override}: {lines[0]}; put a value with special characters in quotes: \"KEY='VALUE'\""
        problem = f"{', '.join(lines)}; gpt2_train_cfg.yaml explains all keys and their values"
        return suggestion(typed, recipes) or problem
    problem = " ".join(str(error).split())
    if "got both model_type=" in problem:  # says `model.resolve_sizes`
        kept = [argument for argument in typed if not argument.startswith(tuple(f"gpt_config.{n}=" for n in SIZES))]
        command = ["python", "main.py", *kept, *(f"gpt_config.{name}=null" for name in SIZES)]
        return f"{problem}; to have the name: {shlex.join(command)}"
    return problem


def suggestion(typed: list[str], recipes: list[str], closeness: float = 0.6) -> str:
    """What was probably meant by the first argument that names no key.

    Args:
        typed: the command's arguments.
        recipes: the names that `+recipe=` may have.
        closeness: how alike a key must be, from 0 to 1.

    Returns:
        One line; empty where all arguments name keys, or none is like what was typed.
    """
    for argument, following in itertools.zip_longest(typed, typed[1:], fillvalue=""):
        name, equals, value = argument.lstrip("-+~").partition("=")
        signs = argument[: argument.index(name)]
        if not name or signs == "-" or name.startswith("hydra."):
            continue
        is_recipe = bool(difflib.get_close_matches(name, ["recipe"], cutoff=max(closeness, 0.7)))
        value = equals + value
        if not equals:  # a blank in its place
            value = f"={following}" if following and "=" not in following else "=VALUE"
        if is_recipe:
            close = [difflib.get_close_matches(part, recipes, 1) for part in value[1:].split(",")]
            meant = f"+recipe={','.join(name for names in close for name in names) or 'NAME'}"
            listed = f" The recipes are {', '.join(recipes)};"
        else:
            key = closest_key(name.replace("-", "_"), closeness)
            meant, listed = f"{key}{value}" if key else argument, ""
        if meant != argument:
            return (
                f"{argument}: did you mean {shlex.quote(meant)}?{listed} gpt2_train_cfg.yaml explains all keys and "
                "their values"
            )
    return ""


def closest_key(name: str, closeness: float) -> str:
    """The key that is most like a name, with its group; empty where none is alike enough."""
    groups = vars(Config())
    keys = {f"{group}.{key.name}": key.name for group, values in groups.items() for key in fields(values)}
    keys |= {"hydra.run.dir": "run_dir"}
    if name in keys or name in groups:
        return name

    def likeness(key: str) -> float:
        whole = difflib.SequenceMatcher(None, name, key).ratio()
        last = difflib.SequenceMatcher(None, name.split(".")[-1], keys[key]).ratio()
        return max(whole, last - 0.1) if "." in name else last  # a key's group counts too, where one was typed

    best = max(keys, key=likeness)
    return best if likeness(best) >= closeness else ""


def directory_name(overrides: str) -> str:
    """The name of a sweep's run directory: its overrides, readable, and another for every other list of overrides.

    Where something had to be replaced or cut off, a digest of the whole makes the difference. 255 bytes is what most
    file systems allow; the rest is for names that are made from this one.
    """
    name = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", overrides)
    name = name.encode(errors="replace")[:200].decode(errors="ignore")
    digest = hashlib.sha256(overrides.encode(errors="surrogatepass")).hexdigest()[:8]
    return name if name == overrides else f"{name}-{digest}"
