"""Entry point: configuration -> ranks -> text -> model -> Trainer.

Start it as `python main.py`, or with `torchrun --standalone --nproc_per_node=N main.py` for several processes. Read
`run` first, it is the table of contents; then `build_trainer`. `generate.py` comes next. Only this module knows Hydra.
"""

from console import environment  # isort: skip, settles what torch reads when it is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from char_dataset import Text
from config import PROJECT, Config
from console.errors import one_line
from console.hints import EXPLAINED, explain, help_text, hint, long_number
from console.logs import open_log_file, set_up_logging
from console.reporter import Reporter
from console.sweep import Outcome, directory_name, note_on_rates, sweep_table
from data.corpus import find_text, read_text
from distributed import Ranks, choose_dtype, is_alone, is_rank_0, leave, leave_if_lost, process_group
from model import GPT
from saving.moving import lock, write_config
from saving.run_snapshots import RunError, RunSnapshots
from trainer import Trainer, run_eagerly

log = logging.getLogger(__name__)

ConfigStore.instance().store(name="base", node=Config)  # the schema: Hydra refuses a key or a type that is not in it
RECIPES = sorted(path.stem for path in (PROJECT / "recipes").glob("*.yaml"))
for name in RECIPES:  # `+recipe=NAME` lays recipes/NAME.yaml over the defaults
    node = OmegaConf.load(PROJECT / "recipes" / f"{name}.yaml")
    ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_")
# The default run directory and the default text lie in the project, wherever the command is typed.
OmegaConf.register_new_resolver("project", lambda path: str(PROJECT / path))
OmegaConf.register_new_resolver("help", help_text)
OmegaConf.register_new_resolver("name", lambda overrides: directory_name(overrides, swept()))

OUTCOMES: list[Outcome] = []  # of the runs so far: a sweep has several

# Before the first step; after that, all but RunError would be bugs.
USER_ERRORS = (ValueError, OSError, OmegaConfBaseException, RunError)


def run(cfg: DictConfig, run_dir: str) -> tuple[float, str]:
    """One run: its lowest evaluation loss, and what has ended it."""
    with ExitStack() as group:
        with told_in_one_line(run_dir, USER_ERRORS):
            config = read_config(cfg)
            c = config.trainer_config
            ranks = group.enter_context(process_group(c.timeout_minutes, c.device, c.strategy == "fsdp"))
            start_together(config, ranks, run_dir)
            path, warning = find_text(config.data_config.path, ranks)
            warn_on_main(warning, ranks)
            if c.plan:
                print_plan(config, path, ranks, run_dir)
                return math.nan, "plan"
            trainer = build_trainer(config, path, ranks, run_dir)
            trainer.resume()
            begin_files(trainer, run_dir)
        with closing(trainer), told_in_one_line(run_dir, (RunError,)):
            trainer.fit()
    warn_on_main(warning, ranks)
    exit_if_stopped(trainer)
    return trainer.state.best_eval_loss, trainer.reporter.end


def build_trainer(config: Config, path: str, ranks: Ranks, run_dir: str) -> Trainer:
    """Make the text, the model and what trains it.

    Args:
        config: what the user chose.
        path: path or URL of the text.
        ranks: this process's place among the ranks.
        run_dir: where everything goes.

    Raises:
        ValueError: something about the configuration or the text is wrong, and the message says what.
    """
    c = config.trainer_config
    c.sequences_per_forward(ranks.world_size)  # raises before a large text is read
    snapshots = RunSnapshots(run_dir, c, ranks)
    c.snapshot_path = snapshots.setting
    if c.init_from is None:
        text = Text.of(read_text(path), config.data_config)
    else:
        from saving.base import encode_for, load_base, start_from

        base = load_base(c.init_from, snapshots, ranks)  # the model to fine-tune; its vocabulary stays
        text = encode_for(base, path, config.data_config)
    if ranks.world_size > 1:
        from large.machines import check_alike

        check_alike({"text": text.fingerprint[:12]}, ranks)

    torch.manual_seed(c.seed)  # the same on every rank: they start as one model
    # "meta" has shapes and no memory: under fsdp each rank draws the same weights later, and keeps its share of them.
    with torch.device("meta" if c.strategy == "fsdp" else "cpu"):
        model = GPT(config.model_config(len(text.vocabulary)))
    if c.activation_checkpointing:
        from large.memory import recompute_in_backward

        recompute_in_backward(model)
    reporter = Reporter(run_dir, ranks.is_main, c.dry_run, c.profile)
    trainer = Trainer(config, text, model, ranks, reporter, snapshots)
    if c.init_from is not None:
        start_from(model, base)
    return trainer


@hydra.main(version_base="1.3", config_path=str(PROJECT), config_name="gpt2_train_cfg")
@record  # inside Hydra's wrapper: the other way round, torchrun would not learn of a failure's traceback
def train(cfg: DictConfig) -> None:
    """Train as the configuration says; in a sweep, a run that fails lets the next one begin."""
    hydra_config = HydraConfig.get()
    settings = list(hydra_config.overrides.task)
    outcome = Outcome(len(OUTCOMES) + 1, hydra_config.runtime.output_dir, settings)
    OUTCOMES.append(outcome)
    if is_sweep() and is_rank_0():
        note = note_on_rates(swept(), cfg.optimizer_config.name) if outcome.number == 1 else ""
        sys.stderr.write(f"{note}\nrun {outcome.number}: {' '.join(settings)}\n")
    try:
        outcome.loss, outcome.end = run(cfg, outcome.run_dir)
    except BaseException as error:
        is_failure = is_sweep() and outcome.note(error)
        # A run that a signal has stopped ends a sweep. So does one that fails on several ranks: if one of them alone
        # has failed, the others still wait for it.
        if not is_failure or not is_alone():
            raise
    if cfg.trainer_config.compile:  # or what was compiled for each run would count against torch's limit
        torch.compiler.reset()


def main() -> None:
    """`train`, with Hydra's own complaints (an unknown key, a wrong type) in one line as well."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # hand errors on to us, and tracebacks of bugs uncut to the user
    accept_hydras_help()
    code: Any = 0
    try:
        # Hydra would answer --max_steps with a page of usage.
        options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
        complaint = hint(options, RECIPES) or long_number(sys.argv[1:])
        if complaint:
            sys.exit(f"error: {complaint}")
        train()
    except SystemExit as request:
        code = request.code
    except (HydraException, OmegaConfBaseException) as error:
        code = f"error: {explain(error, sys.argv[1:], RECIPES)}"
    except (OSError, ValueError) as error:
        if OUTCOMES:  # in a run it would be a bug
            raise
        if isinstance(error, OSError):
            code = f"error: the run directory can't be made ({error}); name another with hydra.run.dir=DIR"
        else:  # Hydra's, about the command
            code = f"error: {hint(sys.argv[1:], RECIPES) or f'{error}; {EXPLAINED}'}"
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")  # in one piece: print writes two, and another rank's line could come between
        code = 1
    if len(OUTCOMES) > 1 and is_rank_0():
        sys.stderr.write(sweep_table(OUTCOMES))
    leave(code or int(any(outcome.failure for outcome in OUTCOMES)))


# ------------------------------------------------------------------------------- armour: what may go wrong around a run


@contextmanager
def told_in_one_line(run_dir: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Around a part of a run: what the user can mend ends it with exit code 1 and one line.

    Args:
        run_dir: a directory that was made for this run goes again, if nothing came into it.
        errors: what is no bug in this part.
    """
    try:
        yield
    except errors as error:
        environment.remove_directories(run_dir)
        if isinstance(error, RunError) and not is_rank_0():
            sys.exit(1)  # rank 0 speaks for all
        sys.exit(f"error: {explain(error, sys.argv[1:], RECIPES)}")
    except SystemExit:  # of the ranks that leave it to rank 0 to say what is wrong
        environment.remove_directories(run_dir)
        raise
    except RuntimeError as error:
        from large.memory import is_out_of_memory, out_of_memory

        if is_out_of_memory(error):
            sys.exit(f"error: {out_of_memory(error)}")
        leave_if_lost(error)
        raise


def read_config(cfg: DictConfig) -> Config:
    """The configuration with its types and ranges checked."""
    check_sweep(cfg)
    # Into the schema once more: a key added with "+" has got past Hydra.
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
    assert isinstance(config, Config)
    return config


def start_together(config: Config, ranks: Ranks, run_dir: str) -> None:
    """See that all ranks start from the same, that no other run is at work here, and where the log goes."""
    c = config.trainer_config
    precision = choose_dtype(ranks.device, c.use_amp, c.amp_dtype)  # raises if it isn't available
    if ranks.world_size > 1:
        from large.machines import check_alike, versions

        check_alike({**versions(config.as_dict()), "precision": f"{precision} on {ranks.device.type}"}, ranks)
    writes = ranks.is_main and not (c.dry_run or c.plan)
    if writes:
        lock(run_dir)
    prefix = "" if ranks.is_main else f"[rank {ranks.rank}] "
    set_up_logging(ranks.is_main, prefix, Path(run_dir) / "main.log" if writes else None)
    if c.compile:  # torch's own place for it is emptied at a reboot
        kept = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "torchinductor"))
        log.info("compiling takes half a minute or more the first time; the compiled code is kept in %s", kept)
    if c.deterministic:  # some operations on GPUs add up in an order that varies: take others, or say there is none
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch would refuse matrix products on CUDA
    if c.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(c.deterministic)


def begin_files(trainer: Trainer, run_dir: str) -> None:
    """Open the log and write the configuration: only now it is clear whose run directory this is."""
    open_log_file()
    if trainer.config.dry_run:
        return
    if trainer.ranks.world_size > 1:
        from large.machines import warn_of_separate_disks

        warn_of_separate_disks(trainer.snapshots.url, trainer.ranks)
    if trainer.ranks.is_main:
        write_config(run_dir, trainer.full_config)


@contextmanager
def closing(trainer: Trainer) -> Iterator[None]:
    """Around training: however it ends, signals get their former effect, and curves and bar are closed."""
    try:
        yield
    except BaseException as error:
        trainer.reporter.note_end(trainer.step, one_line(error).removeprefix("error: "))
        raise
    finally:
        trainer.stop_request.stop_listening()
        trainer.reporter.close()
        if trainer.config.dry_run:
            environment.remove_directories(trainer.reporter.run_dir)


def exit_if_stopped(trainer: Trainer) -> None:
    """Exit as the signal's own effect would have: a scheduler must not think that a stopped run is done."""
    number = trainer.state.stop_signal
    if is_sweep():  # it may have come after the last step, and is meant for the sweep
        number = number or trainer.stop_request.signal
    if number:
        sys.exit(128 + number)


def is_sweep() -> bool:
    """Whether this run is one of several."""
    return HydraConfig.get().mode is RunMode.MULTIRUN


def swept() -> dict[str, str]:
    """Of each key that the command tries several values of, these, as they were typed."""
    typed = OverridesParser.create().parse_overrides([word for word in sys.argv[1:] if not word.startswith("-")])
    return {word.key_or_group: str(word.input_line).split("=", 1)[1] for word in typed if word.is_sweep_override()}


def check_sweep(cfg: DictConfig) -> None:
    """Raise ValueError if all runs of a sweep would save to one place."""
    url = cfg._get_node("trainer_config")._get_node("snapshot_path")._value()  # type: ignore[union-attr]
    if is_sweep() and url is not None and "${" not in url and "trainer_config.snapshot_path" not in swept():
        raise ValueError(
            f"trainer_config.snapshot_path={url}: all runs of a sweep would save there; leave it out, and each saves "
            "to its own run directory"
        )


def warn_on_main(warning: str, ranks: Ranks) -> None:
    """Log a warning once, if there is one."""
    if warning and ranks.is_main:
        log.warning(warning)


def print_plan(config: Config, path: str, ranks: Ranks, run_dir: str) -> None:
    """Print what the run would need, and keep nothing."""
    from large.plan import plan, time_evaluation, time_line, time_steps  # a second of imports that runs save

    text = Text.of(read_text(path), config.data_config)
    lines, is_timed = plan(config, len(text.vocabulary), text.train_codes, ranks)
    if lines:
        print("\n".join(lines), flush=True)
    if is_timed:
        trainer = build_trainer(config, path, ranks, run_dir)
        with closing(trainer):
            step = time_steps(trainer)
            with run_eagerly(config.trainer_config.compile):
                line = time_line(trainer, step, time_evaluation(trainer))
        exit_if_stopped(trainer)
        if ranks.is_main:
            print(line)
    environment.remove_directories(run_dir)


def accept_hydras_help() -> None:
    """Let argparse check only those help texts that are strings; one of Hydra's isn't, and Python 3.14 refuses it.

    This can go when requirements.txt names a Hydra without https://github.com/facebookresearch/hydra/issues/3121.
    """
    container: Any = argparse._ActionsContainer
    check = getattr(container, "_check_help", None)
    if check is not None:
        container._check_help = lambda self, action: isinstance(action.help, str) and check(self, action)


if __name__ == "__main__":
    main()
