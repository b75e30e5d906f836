"""Armour: the description of a model that `export.py` writes beside it. A first reader can skip this file."""

import json
import math

from char_dataset import CharVocabulary
from page_data import learned
from snapshot import Snapshot, is_in

PATHS = ("path", "snapshot_path", "init_from")  # keys whose values are places on this machine

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
- character-level
---

# A GPT of characters

The architecture is GPT-2's, and each token is one character.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # start this in the folder of this file, or put its path here
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer({start!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt)[0]))
```

* The text is drawn at random, at a temperature of 0.8: `generation_config.json`.
* The tokenizer knows {V} characters and raises an error at any other one ("WordLevel error: Missing [UNK] token"). It
  replaces nothing and leaves nothing out.
* Prompt and continuation together have at most {T} characters: there are no positions beyond.
* No token begins, ends or pads a text.
* The licenses of the text and of the weights are not known to the program that wrote this file.

## Training

| what | value |
| --- | --- |
{rows}

The configuration, without paths:

```json
{settings}
```
"""


def card(snapshot: Snapshot, url: str) -> str:
    """What a snapshot, and the curves beside it, say of a model. It names no place on this machine.

    Args:
        snapshot: of the model.
        url: where it was.
    """
    settings = {
        group: {key: value for key, value in values.items() if key not in PATHS}
        for group, values in snapshot.get("config", {}).items()
    }
    return CARD.format(
        V=snapshot["model_config"]["vocab_size"],
        T=snapshot["model_config"]["block_size"],
        start=CharVocabulary(snapshot["vocabulary"]).start,
        rows="\n".join(f"| {what} | {value} |" for what, value in facts(snapshot, url).items()),
        settings=json.dumps(settings, indent=2),
    )


def facts(snapshot: Snapshot, url: str) -> dict[str, str]:
    """What is known of a model's training, in words; what isn't known is left out."""
    step, best = snapshot.get("step", -1), snapshot.get("best_eval_loss", math.inf)
    size = sum(weight.numel() for name, weight in snapshot["model"].items() if name != "lm_head.weight")
    known = {"parameters": f"{size:,}"}
    if "corpus" in snapshot:
        known["SHA-256 of the text, of both parts in character codes"] = f"`{snapshot['corpus']}`"
    if snapshot.get("config", {}).get("trainer_config", {}).get("init_from"):
        known["began with the weights of another model"] = "yes"
    if step >= 0:
        known["optimizer steps"] = f"{step:,}"
    directory = snapshot.get("run", {}).get("directory")
    curves = learned(url) if directory and is_in(url, directory) else None  # beside a copy could be another run's
    for name in ("training", "evaluation"):
        points = [(at, loss) for at, loss in (curves or {}).get(name, []) if at <= step]
        if points:
            known[f"{name} loss, nats a character"] = "{1:.4f} at step {0:,}".format(*points[-1])
    if best < min((loss for _, loss in points), default=math.inf):  # the curve may know better
        at = f" at step {snapshot['best_step']:,}" if "best_step" in snapshot else ""
        known["lowest evaluation loss when this was saved"] = f"{best:.4f}{at}"
    if "torch_version" in snapshot:
        known["torch"] = snapshot["torch_version"]
    return known
