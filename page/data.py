"""What a page shows besides the weights.

This finds the text that a page shows if none is given, and computes what a page shows of a model that is too
large for a browser.

Legend: T characters of the text, V in the vocabulary, C width, nh heads, hs C / nh, S keys that a query sees.
"""

import base64
import math
import re
from typing import Any

import torch
from torch import Tensor

from char_dataset import CharVocabulary, DataConfig, Text, split_codes
from config import PROJECT
from data.corpus import BUNDLED_TEXT, read_text
from model import GPT
from snapshot import Snapshot

LONGEST_PASSAGE = 256  # characters


def to_base64(values: Tensor, dtype: torch.dtype) -> str:
    """Numbers row by row, little-endian."""
    array = values.to(dtype).contiguous().numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def last_name(place: str) -> str:
    """The last name of a path or URL: a page may be passed on, and names no directory, no account and no key."""
    if "://" in place:
        place = place.split("?")[0].split("@")[-1]
    return re.split(r"[/\\]", place.rstrip("/\\"))[-1]


def run_of(snapshot: Snapshot) -> str:
    """The name of the run that made a snapshot; empty where the snapshot doesn't say."""
    try:
        return last_name(snapshot["run"]["directory"])
    except (KeyError, TypeError, AttributeError):  # a snapshot of another make
        return ""


def passage(snapshot: Snapshot) -> tuple[str, str]:
    """(The beginning of the run's evaluation text, from its first whole line on; the name of its file).

    Raises:
        ValueError: the text is not there any more, or is another one.
    """
    reason = "the snapshot doesn't say where it is"
    try:
        config = DataConfig(**snapshot["config"]["data_config"])
        # As main.py looks for it: the default is in the project, or the bundled text stands in for it.
        is_default = config.path == DataConfig.path
        for path in [str(PROJECT / config.path), str(BUNDLED_TEXT)] if is_default else [config.path]:
            try:
                vocabulary = CharVocabulary(snapshot["vocabulary"])
                text = Text(vocabulary, *split_codes(vocabulary.encode_array(read_text(path)), config))
            except ValueError as error:  # it can't be read, or has other characters
                reason = str(error)
                continue
            reason = f"{path} has changed since"
            if text.fingerprint == snapshot["corpus"]:
                T = min(LONGEST_PASSAGE, config.block_size)
                begin = vocabulary.decode(torch.from_numpy(text.eval_codes[: 2 * T].astype(int)))
                rest = begin[begin.find("\n", 0, T) + 1 :].lstrip("\n")
                return rest[:T] or begin[:T], last_name(path)
    except (KeyError, TypeError):  # a snapshot of another make
        pass
    raise ValueError(f"no passage of the run's evaluation text ({reason}); give a text: python look.py TEXT")


@torch.no_grad()
def compute(model: GPT, idx: Tensor) -> dict[str, Any]:
    """What the page shows of a model that is too large for it: (T,) -> likeliest characters and attention.

    Returns:
        tokens, probabilities: of the (up to) five likeliest next characters, (T, n_layer + 1, 5): for each character,
        by the stream before the first block and after each one.
        following: the probability of the character that really comes next, (T - 1, n_layer + 1).
        attention: weights in float16, in base64: for each character t its rows (n_layer, nh, t + 1).
    """
    T, c = len(idx), model.config
    x = model.wte(idx[None]) + model.wpe.weight[:T]  # (1, T, C)
    streams, maps = [x], []
    block: Any  # a Block; to torch's annotations, any module
    for block in model.h:
        q, k, _ = block.attn.c_attn(block.ln_1(x)).view(T, 3, c.n_head, -1).permute(1, 2, 0, 3)  # (nh, T, hs) each
        scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))  # (nh, T, T)
        maps.append(scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(dim=-1))
        x = block(x)
        streams.append(x)
    p = model.lm_head(model.ln_f(torch.cat(streams))).softmax(dim=-1).transpose(0, 1)  # (T, n_layer + 1, V)
    top = p.topk(min(5, c.vocab_size))
    following = p[torch.arange(T - 1), :, idx[1:]]  # (T - 1, n_layer + 1)
    rows = torch.stack(maps, dim=1)  # (nh, layer, T, T)
    flat = torch.cat([rows[:, :, t, : t + 1].transpose(0, 1).flatten() for t in range(T)])
    return {
        "tokens": top.indices.tolist(),
        "probabilities": top.values.tolist(),
        "following": following.tolist(),
        "attention": to_base64(flat, torch.float16),
    }
