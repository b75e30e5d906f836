"""The description of a model that goes with its files."""

import json
from pathlib import Path

from char_dataset import CharVocabulary
from console.curves import read_events, scalars
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
* Prompt and continuation together have at most {T} characters: there are no positions beyond. `max_new_tokens` is
  {new} unless you say otherwise.
* No token begins, ends or pads a text. For batches, set `tokenizer.pad_token = {start!r}`: any character will do, since
  the attention mask hides it. (Set in the files, it would be left out of every text.)
* It can't be converted to GGUF, the format of llama.cpp and Ollama: their converter knows no tokenizer of characters.
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
        new=max(1, snapshot["model_config"]["block_size"] // 2),
        start=CharVocabulary(snapshot["vocabulary"]).start,
        rows="\n".join(f"| {what} | {value} |" for what, value in facts(snapshot, url).items()),
        settings=json.dumps(settings, indent=2),
    )


def facts(snapshot: Snapshot, url: str) -> dict[str, str]:
    """What is known of a model and its training, in words; what isn't known is left out."""
    c = snapshot["model_config"]
    size = sum(weight.numel() for name, weight in snapshot["model"].items() if name != "lm_head.weight")
    known = {"parameters": f"{size:,} ({c['n_layer']} layers, {c['n_head']} heads, width {c['n_embd']})"}
    if "step" in snapshot:
        known["optimizer steps"] = f"{snapshot['step']:,}"
        loss = loss_of(snapshot, url)
        if loss is not None:
            known["evaluation loss of these weights, nats per character"] = f"{loss:.4f}"
        known["SHA-256 of the text's characters and of both parts in their codes"] = f"`{snapshot['corpus']}`"
        known["torch"] = snapshot["torch_version"]
        if snapshot["config"]["trainer_config"].get("init_from"):
            known["began with the weights of another model"] = "yes"
    return known


def loss_of(snapshot: Snapshot, url: str) -> float | None:
    """The evaluation loss of the very weights in a snapshot; None where it isn't known.

    A snapshot is written before its own step is evaluated, so the run's curve knows better, if it lies beside it.
    """
    is_in_its_run = is_in(url, snapshot["run"]["directory"])  # beside a copy could be another run's curves
    curve = scalars(read_events(Path(url).parent), "eval/loss") if is_in_its_run else []
    best = {snapshot["best_step"]: snapshot["best_eval_loss"]}
    return {**best, **dict(curve)}.get(snapshot["step"])
