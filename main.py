"""Entry point: configuration -> process group -> Trainer.

Read it after `config.py`; only this module knows Hydra. `generate.py` comes next. Start it as `python main.py`, or with
`torchrun --standalone --nproc_per_node=N main.py` for several processes.
"""

import environment  # isort: skip, before torch is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import contextlib
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import hydra
import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from char_dataset import CharVocabulary, DataConfig, split_codes
from config import Config, choose_dtype, directory_name, explain, suggestion
from corpus import BUNDLED_TEXT, download_corpus, read_text
from distributed import (
    Ranks,
    all_gather,
    broadcast_form,
    is_alone,
    is_rank_0,
    leave,
    leave_if_lost,
    process_group,
)
from machines import check_alike, versions, warn_of_separate_disks
from memory import is_out_of_memory, out_of_memory, recompute_in_backward
from model import GPT, GPTConfig
from report import Outcome, help_text, open_log_file, set_up_logging, sweep_table
from run_files import RunError, fingerprint, is_half_moved, load_base, load_own, lock, start_from
from snapshot import Snapshot
from snapshot_contents import check_contents
from trainer import Trainer

log = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parent

ConfigStore.instance().store(name="base", node=Config)  # the schema: Hydra refuses a key or a type that is not in it
RECIPES = sorted(path.stem for path in (PROJECT / "recipes").glob("*.yaml"))
for name in RECIPES:  # `+recipe=NAME` lays recipes/NAME.yaml over the defaults
    node = OmegaConf.load(PROJECT / "recipes" / f"{name}.yaml")
    ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_")
# The default run directory and the default text lie in the project, wherever the command is typed.
OmegaConf.register_new_resolver("project", lambda path: str(PROJECT / path))
OmegaConf.register_new_resolver("help", lambda: help_text(PROJECT))
OmegaConf.register_new_resolver("name", directory_name)

OUTCOMES: list[Outcome] = []  # of the runs so far: a sweep has several


def build_trainer(config: Config, path: str, ranks: Ranks, run_dir: str, full_config: Any) -> Trainer:
    """Make the text, the model and what trains it.

    Raises:
        ValueError: something about the configuration or the text is wrong, and the message says what.
    """
    settings = config.trainer_config
    settings.sequences_per_forward(ranks.world_size)  # raises before a large text is read
    snapshot_path = settings.snapshot_path or str(Path(run_dir) / "gpt_snapshot.pt")
    base: Snapshot | None = None  # the model to fine-tune, read by one rank for all
    if settings.init_from is not None:
        if ranks.is_main:
            own, launch = None, ranks.launch if ranks.is_restart else None
            if not (settings.dry_run or is_half_moved(run_dir)):
                own = load_own(snapshot_path, settings.resume, launch, check_contents)
            base = load_base(settings.init_from, own)
        base = broadcast_form(base)  # the weights follow in `start_from`

    vocabulary, train_codes, eval_codes = read_codes(config, path, base)
    check_alike({"text": fingerprint(train_codes, eval_codes, vocabulary.code_of_point)[:12]}, ranks)
    torch.manual_seed(settings.seed)  # the same on every rank: they start as one model
    sizes = vars(config.gpt_config)
    model = GPT(GPTConfig(**sizes, vocab_size=len(vocabulary), block_size=config.data_config.block_size))
    if base:
        start_from(model, base)
    if settings.activation_checkpointing:
        recompute_in_backward(model)
    return Trainer(
        *(settings, config.optimizer_config, model, vocabulary, train_codes, eval_codes),
        *(ranks, run_dir, snapshot_path, full_config),
    )


def read_codes(
    config: Config, path: str, base: Snapshot | None = None
) -> tuple[CharVocabulary, np.ndarray, np.ndarray]:
    """The vocabulary (that of a base model, if there is one), and both parts of the text in its codes."""
    text = read_text(path)
    vocabulary = CharVocabulary(base["vocabulary"]) if base else CharVocabulary.of(text)
    try:
        codes = vocabulary.encode_array(text)
    except ValueError as error:  # can't happen without a base
        raise ValueError(
            f"the model of trainer_config.init_from can't read {path}: {error}; replace these characters in the text"
        ) from error
    return vocabulary, *split_codes(codes, config.data_config)


@hydra.main(version_base="1.3", config_path=str(PROJECT), config_name="gpt2_train_cfg")
@record  # inside Hydra's wrapper: the other way round, torchrun would not learn of a failure's traceback
def train(cfg: DictConfig) -> None:
    """Train as the configuration says; in a sweep, a run that fails lets the next one begin."""
    outcome = Outcome(number=len(OUTCOMES) + 1, run_dir=HydraConfig.get().runtime.output_dir)
    OUTCOMES.append(outcome)
    is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    if is_sweep and is_rank_0():
        sys.stderr.write(f"\nrun {outcome.number}: {' '.join(HydraConfig.get().overrides.task)}\n")
    try:
        outcome.loss = run(cfg, outcome.run_dir)
    except BaseException as error:
        is_failure = is_sweep and outcome.note(error)
        # A run that a signal has stopped ends a sweep. So does one that fails on several ranks: if one of them alone
        # has failed, the others still wait for it.
        if not is_failure or not is_alone():
            raise
    if cfg.trainer_config.compile:  # or what was compiled for each run would count against torch's limit
        torch.compiler.reset()


def run(cfg: DictConfig, run_dir: str) -> float:
    """One run: its lowest evaluation loss."""
    group = contextlib.ExitStack()
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
        check_sweep(cfg)
        # Into the schema once more: a key added with "+" has got past Hydra.
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
        c = config.trainer_config
        ranks = group.enter_context(process_group(c.timeout_minutes, c.device, c.strategy == "fsdp"))
        kind = f"{choose_dtype(c, ranks.device)} on {ranks.device.type}"
        check_alike({**versions(PROJECT, values), "precision": kind}, ranks)
        writes = ranks.is_main and not (c.dry_run or c.plan)
        if writes:
            lock(run_dir)
        prefix = "" if ranks.is_main else f"[rank {ranks.rank}] "
        set_up_logging(ranks.is_main, prefix, Path(run_dir) / "main.log" if writes else None)
        be_deterministic(c.deterministic)
        path, warning = find_text(config.data_config.path, ranks)
        if warning and ranks.is_main:
            log.warning(warning)
        if c.plan:
            with group:
                return print_plan(config, path, ranks, run_dir)
        trainer = build_trainer(config, path, ranks, run_dir, values)
        trainer.resume()
        open_log_file()
        if not c.dry_run:
            warn_of_separate_disks(trainer.snapshot_path, ranks)
        if writes:
            OmegaConf.save(cfg, Path(run_dir) / "config.yaml", resolve=True)
    except (ValueError, OSError, OmegaConfBaseException) as error:  # what a user can mend; in `fit` it would be a bug
        environment.remove_directories(run_dir)  # Hydra has made them; nothing came into them
        fail(error)
    except SystemExit:  # of the ranks that leave it to rank 0 to say what is wrong
        environment.remove_directories(run_dir)
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            fail(out_of_memory(error, ranks.device))
        leave_if_lost(error)
        raise
    with group:
        fit(trainer)
    if warning and ranks.is_main:
        log.warning(warning)
    stop_signal = trainer.state.stop_signal
    if HydraConfig.get().mode is RunMode.MULTIRUN:  # it may have come after the last step, and is meant for the sweep
        stop_signal = stop_signal or trainer.stop_request.signal
    if stop_signal:  # as the signal's own effect would have been: a scheduler must not think it is done
        sys.exit(128 + stop_signal)
    return trainer.state.best_eval_loss


def main() -> None:
    """`train`, with Hydra's own complaints (an unknown key, a wrong type) in one line as well."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # hand errors on to us, and tracebacks of bugs uncut to the user
    accept_hydras_help()
    code: Any = 0
    try:
        # Hydra would answer --max_steps with a page of usage.
        complaint = suggestion([a for a in sys.argv[1:] if a.startswith("--")], RECIPES, closeness=0.8)
        sys.exit(f"error: {complaint}") if complaint else train()
    except SystemExit as request:
        code = request.code
    except (HydraException, OmegaConfBaseException) as error:
        code = f"error: {explain(error, sys.argv[1:], RECIPES)}"
    except OSError as error:
        if OUTCOMES:  # in a run it would be a bug
            raise
        code = f"error: the run directory can't be made ({error}); name another with hydra.run.dir=DIR"
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")  # in one piece: print writes two, and another rank's line could come between
        code = 1
    if len(OUTCOMES) > 1 and is_rank_0():
        sys.stderr.write(sweep_table(OUTCOMES))
    leave(code or int(any(outcome.failure for outcome in OUTCOMES)))


# ----------------------------------------------------------------------- armour: no text, unlike machines, failing runs


def check_sweep(cfg: DictConfig) -> None:
    """Raise ValueError where all runs of a sweep would save to one place."""
    url = cfg._get_node("trainer_config")._get_node("snapshot_path")._value()  # type: ignore[union-attr]
    is_swept = any(word.startswith("trainer_config.snapshot_path=") and "," in word for word in sys.argv)
    if HydraConfig.get().mode == RunMode.MULTIRUN and url is not None and "${" not in url and not is_swept:
        raise ValueError(
            f"trainer_config.snapshot_path={url}: all runs of a sweep would save there; leave it out, and each saves "
            "to its own run directory"
        )


def be_deterministic(wish: bool) -> None:
    """Some operations on GPUs add up in an order that varies: let torch take others, or say that it has none."""
    if wish:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or it would refuse matrix products on CUDA
    if wish != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wish)


def find_text(path: str, ranks: Ranks) -> tuple[str, str]:
    """Where the text is. The default text is downloaded if it is missing; a text that the user gave is not replaced.

    Returns:
        (path or URL of the text to train on, a warning if that is the bundled one, so that nobody can miss it).
    """
    if path != DataConfig.path:
        return path, ""
    default = PROJECT / path
    failure = ""
    if ranks.local_rank == 0 and not default.exists():  # one rank of each node fetches
        try:
            download_corpus(default)
            log.info("downloaded tiny-shakespeare to %s", default)
        except OSError as error:
            failure = str(error)
    failures = [reason for reason in all_gather(failure) if reason]  # makes the others wait, and all nodes agree
    if not failures:
        return str(default), ""
    return str(BUNDLED_TEXT), (
        f"WARNING: no tiny-shakespeare ({failures[0]}). Training on the short text that comes with the project, "
        f"{BUNDLED_TEXT}: losses won't compare. Put a text at data/input.txt, or connect to the network, and start "
        "with trainer_config.resume=false."
    )


def print_plan(config: Config, path: str, ranks: Ranks, run_dir: str) -> float:
    """Print what the run would need, and train nothing; the result stands for the loss that there isn't."""
    from plan import plan  # a second of imports that runs save

    vocabulary, train_codes, _ = read_codes(config, path)
    for line in plan(config, len(vocabulary), train_codes, ranks):
        print(line)
    environment.remove_directories(run_dir)
    return math.nan


def fit(trainer: Trainer) -> None:
    """Train; what ends the run before its time is told in one line."""
    try:
        trainer.fit()
    except RunError as error:
        fail(error) if trainer.ranks.is_main else sys.exit(1)  # rank 0 speaks for all
    except RuntimeError as error:
        if is_out_of_memory(error):
            fail(out_of_memory(error, trainer.ranks.device))
        leave_if_lost(error)
        raise
    finally:
        trainer.stop_request.stop_listening()
        trainer.reporter.close()
        if trainer.config.dry_run:
            environment.remove_directories(trainer.reporter.run_dir)


def fail(error: Exception) -> NoReturn:
    """End with exit code 1 and one line that says what is wrong and what to do."""
    sys.exit(f"error: {explain(error, sys.argv[1:], RECIPES)}")


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
