"""How the page is put together: weights, vocabulary and a text go into the parts that lie in this folder.

`gpt.js` is the model once more, in JavaScript. Legend: T characters of the text, V characters in the vocabulary.
"""

import base64
import hashlib
import json
import re
from typing import Any

import torch
from torch import Tensor

from char_dataset import CharVocabulary
from config import PROJECT
from console.curves import learned
from page.data import LONGEST_PASSAGE, compute, last_name, passage, run_of, to_base64
from saving.finding import model_of
from snapshot import Snapshot

PAGE = PROJECT / "page"
SCRIPTS = ("gpt.js", "reading.js", "tools.js", "views.js")  # in the order in which they need each other
LIVE_PARAMETERS = 10_000_000  # up to here the browser computes; a larger model's figures are computed when it is made
CHECKED = 32  # characters whose logits the page compares with torch's


def make_page(snapshot: Snapshot, url: str, text: str = "", exact: bool = False) -> str:
    """The HTML of the page.

    Args:
        snapshot: the model.
        url: where it was; curves and samples lie beside it. The page has its last name, and the run's.
        text: what the model reads first; empty: a passage of the run's evaluation text.
        exact: carry the weights in float32; else in float16.

    Raises:
        ValueError, OSError: an argument is wrong, or the snapshot or its text can't be used.
    """
    vocabulary = CharVocabulary(snapshot["vocabulary"])
    weights = {name: rounded(name, weight, exact) for name, weight in snapshot["model"].items()}
    model = model_of({**snapshot, "model": weights})  # torch checks the page with the weights that the page carries
    is_live = model.num_parameters() <= LIVE_PARAMETERS
    text, file = (text, None) if text else passage(snapshot)
    longest = min(LONGEST_PASSAGE, model.config.block_size)
    if not is_live and len(text) > longest:
        raise ValueError(f"got {len(text)} characters; the page of a model of this size shows at most {longest}")
    idx = vocabulary.encode(text)  # (T,)
    checked = idx[: min(CHECKED, model.config.block_size)]
    with torch.inference_mode():
        logits = model(checked[None])[0][0]  # (T, V)
        computed = None if is_live else compute(model, idx)
    kinds = {"dtype": "float32" if exact else "float16"}
    data = {
        **{"config": snapshot["model_config"], "parameters": model.num_parameters(), **kinds},
        **{"vocabulary": vocabulary.characters, "text": text, "file": file},
        "weights": pack(weights, exact) if is_live else None,
        "check": {"length": len(checked), "logits": to_base64(logits, torch.float32)},
        **{"computed": computed, "learned": learned(url)},
        **{"run": run_of(snapshot), "snapshot": last_name(url)},
        "step": snapshot.get("step"),
    }
    return assemble(data)


def rounded(name: str, weight: Tensor, exact: bool) -> Tensor:
    """A weight as the page carries it, in float32."""
    if exact:
        return weight
    half = weight.half()
    if not half.isfinite().all():
        raise ValueError(f"{name} has values outside float16's range; store the weights exactly with --float32")
    return half.float()


def pack(weights: dict[str, Tensor], exact: bool) -> dict[str, str]:
    """The weights by name, in base64; lm_head.weight is wte.weight, and goes once."""
    dtype = torch.float32 if exact else torch.float16
    return {name: to_base64(weight, dtype) for name, weight in weights.items() if name != "lm_head.weight"}


def assemble(data: dict[str, Any]) -> str:
    """Put the page together. Its policy allows the scripts and the style that are in it, and no request at all."""
    parts = {name: (PAGE / name).read_text(encoding="utf-8") for name in (*SCRIPTS, "style.css")}
    digests = {name: base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for name, part in parts.items()}
    scripts = " ".join(f"'sha256-{digests[name]}'" for name in SCRIPTS)
    parts["policy"] = (
        f"default-src 'none'; script-src {scripts}; style-src 'sha256-{digests['style.css']}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # JSON in ASCII without a "<" can't end its element, whatever is in the text or in the vocabulary.
    parts["data"] = json.dumps(data).replace("<", "\\u003c")
    frame = (PAGE / "frame.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([\w.]+)\}\}", lambda match: parts[match[1]], frame)
