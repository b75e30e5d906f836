"""A snapshot as a directory that Hugging Face's transformers loads.

It is made beside its place, loaded and compared with the model, and only then gets its name.
"""

import glob
import json
import os
import shutil
import uuid
from pathlib import Path

import torch
from torch import Tensor

from char_dataset import CharVocabulary
from hugging_face.card import card
from hugging_face.names import NO_TOKENS, package, to_hugging_face, tokenizer
from model import GPT
from saving.contents import check_contents
from saving.finding import find_snapshot, model_of
from snapshot import Snapshot, local_path

TOLERANCE = 1e-4  # between our logits and theirs: a hundred times the rounding of float32


def export(url: str | None, to: str, is_checked: bool = True) -> str:
    """Make the directory: whole, or not at all.

    Args:
        url: path or fsspec URL of the snapshot; None: as in `saving.finding.find_snapshot`.
        to: the directory to make.
        is_checked: load it with transformers, and compare.

    Returns:
        What was written, and what the check has found, in words.

    Raises:
        ValueError, OSError: an argument is wrong, a package is missing, the snapshot can't be used, or the check fails.
    """
    for name in ("safetensors.torch", *(("tokenizers", "transformers") if is_checked else ())):
        package(name)
    target = find_place(to)
    snapshot, url = find_snapshot(url)
    if "step" in snapshot:
        check_contents(snapshot, url)  # the card tells of the training, too
    temporary = f"{target}.{uuid.uuid4().hex}.tmp"
    try:
        os.makedirs(temporary)
        write(Path(temporary), snapshot, url)
        found = check(temporary, snapshot) if is_checked else ""
        size = sum(path.stat().st_size for path in Path(temporary).iterdir())
        if os.path.exists(target):
            os.rmdir(target)  # it is empty; only Linux would replace it
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return f"{target} ({size / 1e6:.1f} MB){found}"


def write(folder: Path, snapshot: Snapshot, url: str) -> None:
    """Write all files of the model into a directory."""
    config, tensors = to_hugging_face(snapshot)
    length = config["n_positions"]
    (folder / "model.safetensors").write_bytes(package("safetensors.torch").save(tensors, metadata={"format": "pt"}))
    contents = {
        "config.json": config,
        # As generate.py does it. Half of the positions are left for the prompt: there are none beyond. (A max_length
        # would end at the last one, and make transformers warn of every max_new_tokens.)
        "generation_config.json": {
            **{**NO_TOKENS, "do_sample": True, "temperature": 0.8},
            "max_new_tokens": max(1, length // 2),
        },
        "tokenizer.json": tokenizer(snapshot["vocabulary"]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": length,
            "padding_side": "left",  # where padding must be when texts are to be continued
            "clean_up_tokenization_spaces": False,  # it would take the blank before a full stop
            # Without token_type_ids: GPT-2 would add their embeddings to those of the characters.
            "model_input_names": ["input_ids", "attention_mask"],
        },
    }
    for name, values in contents.items():
        text = json.dumps(values, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    (folder / "README.md").write_text(card(snapshot, url), encoding="utf-8", newline="\n")


@torch.inference_mode()
def check(folder: str, snapshot: Snapshot) -> str:
    """Load a directory as anyone would, and compare tokens, logits and greedy text.

    Returns:
        What was compared, in words.

    Raises:
        ValueError: something differs.
    """
    transformers = package("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = model_of(snapshot)
    vocabulary, T = CharVocabulary(snapshot["vocabulary"]), ours.config.block_size

    text = vocabulary.characters + vocabulary.decode(torch.arange(T) * 7 % len(vocabulary))
    codes = tokens(text)["input_ids"]
    if codes != vocabulary.encode(text).tolist() or tokens.decode(codes) != text:
        raise ValueError("the check failed: the tokenizer changes a text")
    idx = torch.tensor([codes[-T:]])  # (1, T)
    difference = (ours(idx)[0] - theirs(idx).logits).abs().max().item()
    if not difference <= TOLERANCE:  # nor may it be no number
        raise ValueError(
            f"the check failed: logits differ by {difference:.2g}, and {TOLERANCE} is allowed; if that is the rounding "
            "of very large logits, leave the check out with --no-check"
        )
    prompt, new = vocabulary.encode(vocabulary.start)[None], min(T, 100)  # (1, 1)
    mine = ours.generate(prompt, new)  # (1, 1 + new)
    greedy = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new)
    if not is_same_choice(ours, mine[0], greedy[0]):
        raise ValueError("the check failed: the greedy texts differ")
    return f"; logits differ by {difference:.0e} at most, greedy text agrees"


def is_same_choice(model: GPT, text: Tensor, other: Tensor) -> bool:
    """Whether two greedy texts (T,) are equal, up to a place where rounding decides between two characters."""
    if text.shape != other.shape or torch.equal(text, other):
        return text.shape == other.shape
    place = int((text != other).nonzero()[0])
    logits = model(text[None, :place])[0][0, -1]  # (V,)
    return bool(logits[text[place]] - logits[other[place]] <= 2 * TOLERANCE)


# ------------------------------------------------------------------------- armour: occupied places, wrong arguments


def find_place(to: str) -> str:
    """The directory to make; what a killed export to the same place has left is removed.

    Raises:
        ValueError: it is in a store, or something is there.
    """
    try:
        target = local_path(to)
    except ImportError:  # of a store whose package is missing
        target = None
    if target is None:
        raise ValueError(f"--to={to}: must be a directory on this machine's disks")
    for leftover in glob.glob(f"{glob.escape(target)}.{'[0-9a-f]' * 32}.tmp"):
        shutil.rmtree(leftover)
    if os.path.lexists(target) and (os.path.islink(target) or not os.path.isdir(target) or os.listdir(target)):
        raise ValueError(f"--to={target}: something is there already; name another directory, or remove this one first")
    return target
