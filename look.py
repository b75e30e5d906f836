"""Snapshot -> a page that shows the model at work: `python look.py "ROMEO:"`, then open look.html in a browser.

Read it after `generate.py`. The page is one file that needs no server and no network: this module puts the weights, the
vocabulary and a text into the parts of `page/`, of which `gpt.js` is the model once more, in JavaScript.

Legend: T characters of the text, V characters in the vocabulary.
"""

import environment  # isort: skip, before torch is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import base64
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from char_dataset import CharVocabulary
from generate import find_snapshot
from model import GPT, GPTConfig
from page_data import LONGEST_PASSAGE, compute, learned, passage, to_base64

PAGE = Path(__file__).resolve().parent / "page"
SCRIPTS = ("gpt.js", "reading.js", "tools.js", "views.js")  # in the order in which they need each other
LIVE_PARAMETERS = 10_000_000  # up to here the browser computes; a larger model's figures are computed when it is made
CHECKED = 32  # characters whose logits the page compares with torch's


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write one HTML page that shows a trained model at work.")
    parser.add_argument("text", nargs="?", default="", help="what it shall read; default: a passage of evaluation text")
    parser.add_argument("--snapshot", help="path or fsspec URL; default: the best of runs/shakespeare, else its latest")
    parser.add_argument("--out", default="look.html", metavar="FILE", help="the page to write (look.html)")
    parser.add_argument("--float32", action="store_true", help="carry the weights exactly; the page is twice as large")
    return parser.parse_args()


def look(arguments: argparse.Namespace) -> str:
    """Make the page.

    Raises:
        ValueError, OSError: an argument is wrong, or the snapshot or its text can't be used.
    """
    snapshot, url = find_snapshot(arguments.snapshot)
    vocabulary = CharVocabulary(snapshot["vocabulary"])
    model = GPT(GPTConfig(**snapshot["model_config"])).eval()
    weights = {name: rounded(name, weight, arguments.float32) for name, weight in snapshot["model"].items()}
    model.load_state_dict(weights)  # torch checks the page with the weights that the page carries
    is_live = model.num_parameters() <= LIVE_PARAMETERS
    text = arguments.text or passage(snapshot, vocabulary)
    longest = min(LONGEST_PASSAGE, model.config.block_size)
    if not is_live and len(text) > longest:
        raise ValueError(f"got {len(text)} characters; the page of a model of this size shows at most {longest}")
    idx = vocabulary.encode(text)  # (T,)
    checked = idx[: min(CHECKED, model.config.block_size)]
    with torch.inference_mode():
        logits = model(checked[None])[0][0]  # (T, V)
        computed = None if is_live else compute(model, idx)
    kinds = {"dtype": "float32" if arguments.float32 else "float16"}
    data = {
        **{"config": snapshot["model_config"], "parameters": model.num_parameters(), **kinds},
        **{"vocabulary": vocabulary.characters, "text": text, "is_given": bool(arguments.text)},
        "weights": pack(weights, arguments.float32) if is_live else None,
        "check": {"length": len(checked), "logits": to_base64(logits, torch.float32)},
        **{"computed": computed, "learned": learned(url)},
        "step": snapshot.get("step"),
    }
    return assemble(data)


def rounded(name: str, weight: Tensor, exact: bool) -> Tensor:
    """A weight as the page carries it, in float32."""
    if exact:
        return weight
    half = weight.half()
    if not half.isfinite().all():
        raise ValueError(f"{name} has values that float16 doesn't reach; carry the weights exactly with --float32")
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


def main() -> None:
    """`look`, with one line and exit code 1 for what the user can mend."""
    try:
        arguments = parse_arguments()
        page = look(arguments)
        Path(arguments.out).write_text(page, encoding="utf-8", newline="\n")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    print(f"written: {arguments.out} ({len(page) / 1e6:.1f} MB); open it in a browser", file=sys.stderr)


if __name__ == "__main__":
    main()
