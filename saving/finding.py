"""The snapshot of a trained model, for the programs that speak from one."""

import sys

import torch

from char_dataset import CharVocabulary
from config import DEFAULT_SNAPSHOT
from model import GPT, GPTConfig
from saving.contents import check_model
from snapshot import DamagedSnapshotError, Snapshot, best_url, load_snapshot, previous_url


def load_model(url: str | None = None, device: torch.device | str = "cpu") -> tuple[GPT, CharVocabulary]:
    """Build model and vocabulary from a snapshot alone; `url` and the errors as in `find_snapshot`."""
    snapshot, _ = find_snapshot(url)
    return model_of(snapshot).to(device), CharVocabulary(snapshot["vocabulary"])


def model_of(snapshot: Snapshot) -> GPT:
    """The model in a snapshot, in evaluation mode, on the CPU."""
    with torch.device("meta"):  # no memory, and no random numbers: the weights are there
        model = GPT(GPTConfig(**snapshot["model_config"]))
    model.load_state_dict(snapshot["model"], assign=True)
    model.lm_head.weight = model.wte.weight  # one matrix again
    return model.eval()


def find_snapshot(url: str | None) -> tuple[Snapshot, str]:
    """Read the snapshot of a model.

    Args:
        url: path or fsspec URL; None: the default run's best snapshot, else its latest, else the one before.

    Returns:
        (the snapshot, where it was).

    Raises:
        ValueError, OSError: there is no usable snapshot; the message says where it was looked for.
    """
    latest = DEFAULT_SNAPSHOT
    for candidate in [url] if url else [best_url(latest), latest, previous_url(latest)]:
        try:
            snapshot = load_snapshot(candidate)
            check_model(snapshot, candidate)
        except FileNotFoundError:
            continue
        except DamagedSnapshotError as error:
            if url:
                raise
            print(error, file=sys.stderr)
            continue
        return snapshot, candidate
    raise ValueError(
        f"there is no snapshot at {url or latest}; train one first with python main.py, or name another with --snapshot"
    )
