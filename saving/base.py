"""Fine-tuning: the model of another run, from which this one starts (`trainer_config.init_from`)."""

import logging

import torch

from char_dataset import CharVocabulary, DataConfig, Text, split_codes
from data.corpus import read_text
from distributed import Ranks, broadcast_form, load_weights
from hugging_face.reading import is_directory, read_directory
from saving.contents import check_contents, check_model, differences
from saving.run_snapshots import RunSnapshots
from snapshot import Snapshot, load_snapshot, store_of

log = logging.getLogger(__name__)


def load_base(url: str, snapshots: RunSnapshots, ranks: Ranks) -> Snapshot:
    """The model to fine-tune and its vocabulary, read by rank 0 for all; the weights follow in `start_from`."""
    base = read_base(url, snapshots.newest(check_contents)) if ranks.is_main else None
    return dict(broadcast_form(base))


def read_base(url: str, own: Snapshot | None) -> Snapshot:
    """The model to fine-tune and its vocabulary: {"model_config", "vocabulary", "model"}.

    Args:
        url: the snapshot of another run, or the directory of a Hugging Face GPT-2, trainer_config.init_from.
        own: the snapshot that this run goes on from. It has them too: the one that it began with may be gone by then.

    Raises:
        ValueError, OSError: there is no usable snapshot, or the run that goes on did not begin with this one.
    """
    if own is None:
        try:
            base = read_directory(url) if is_directory(url) else load_snapshot(url)
        except FileNotFoundError as error:
            raise ValueError(
                f"trainer_config.init_from={url}: there is no snapshot; train that model first, or name another"
            ) from error
        check_model(base, url)
    else:
        base, began = own, own["config"].get("trainer_config", {}).get("init_from")
        if began is None or not store_of(began) == store_of(url):
            raise ValueError(
                f"trainer_config.init_from={url}: the run in this run directory began with {began or 'a new model'} "
                f"and is at step {own['step']}; begin another one with hydra.run.dir=runs/NAME, or in its place with "
                "trainer_config.resume=false, which moves it aside"
            )
        log.info("this run began with %s and goes on from its own snapshot; to start over: resume=false", began)
    return {key: base[key] for key in ("model_config", "vocabulary", "model")}


def encode_for(base: Snapshot, path: str, config: DataConfig) -> Text:
    """The text to fine-tune on, in the codes of the base model's vocabulary.

    Raises:
        ValueError: the text has characters that the model doesn't know, or is too short.
    """
    vocabulary, text = CharVocabulary(base["vocabulary"]), read_text(path)
    try:
        codes = vocabulary.encode_array(text)
    except ValueError as error:
        raise ValueError(
            f"the model of trainer_config.init_from can't read {path}: {error}; replace these characters in the text"
        ) from error
    return Text(vocabulary, *split_codes(codes, config))


def start_from(model: torch.nn.Module, base: Snapshot) -> None:
    """Give a new model, on all ranks, the weights of another run's, which rank 0 has.

    Its optimizer, its step and its data order start afresh.

    Raises:
        ValueError: the sizes differ. Dropout may differ: it is no part of the weights.
    """
    differing = differences(base["model_config"], vars(model.config))
    sizes = [f"{key} is {there} there and {here} here" for key, there, here in differing if not key.endswith("pdrop")]
    if sizes:
        raise ValueError(
            f"the model of trainer_config.init_from has another shape: {', '.join(sizes)}; set gpt_config and "
            "data_config.block_size as they are there"
        )
    load_weights(dict(model.named_parameters()), base["model"])
