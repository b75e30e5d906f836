"""A model as a directory that Hugging Face's transformers loads, and back; their own classes are the reference."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, SAMPLE_TEXT, run_program, train
from omegaconf import OmegaConf
from test_trainer import make_trainer, world_of_one

import export
from char_dataset import CharVocabulary
from hugging_face import names, writing
from hugging_face.card import loss_of
from hugging_face.reading import read_directory
from model import GPT, GPTConfig
from saving.base import read_base
from snapshot import Snapshot, load_snapshot, save_snapshot

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-export.txt")
safetensors_torch = pytest.importorskip("safetensors.torch")
transformers.utils.logging.disable_progress_bar()

DOWNLOADED = PROJECT / "data" / "input.txt"
# Latin with both forms of é, Greek, Cyrillic; then what tokenizers like to change: line ends, blanks, signs that stand
# for blanks elsewhere, an emoji of several characters, a byte-order mark, zero.
THREE_ALPHABETS = "Caf\u00e9 cafe\u0301, «ναί» ; Да, нет .\n\nΤέλος\tконец\n"
ODD = "  a  b \r\n\r\n , . ' n't <unk> [UNK] <|endoftext|> Ġ ▁ ## \u00a0\u2028\U0001f468\u200d\U0001f469\ufeff\x00 \n "
PROSE = (DOWNLOADED if DOWNLOADED.exists() else SAMPLE_TEXT).read_text(encoding="utf-8")
TEXTS = {"prose": PROSE, "alphabets": THREE_ALPHABETS, "odd": ODD}
SMALL = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 8}


def make_snapshot(characters: str = "\n abcdefg", **config: Any) -> Snapshot:
    """A model of random weights, biases and norms among them: what is exchanged or left out shows."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=len(characters), **{**SMALL, **config}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return {"model_config": vars(model.config), "vocabulary": characters, "model": model.state_dict()}


def write_export(folder: Path, snapshot: Snapshot, check: bool = False) -> Path:
    """Save a snapshot and export it, in this process; the directory."""
    save_snapshot(snapshot, str(folder / "model.pt"))
    target = folder / "exported"
    writing.export(str(folder / "model.pt"), str(target), check)
    return target


def load(folder: Path) -> tuple:
    """Model and tokenizer, as anyone loads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def ours(snapshot: Snapshot) -> GPT:
    model = GPT(GPTConfig(**snapshot["model_config"]))
    model.load_state_dict(snapshot["model"])
    return model.eval()


# --------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("bias", [True, False])
def test_logits_and_greedy_text_are_those_of_transformers(tmp_path, bias):
    """Catches a matrix that isn't transposed (square ones fit either way), norms exchanged, biases made up."""
    characters = "".join(sorted(set(PROSE)))
    default = {"block_size": 128, "n_layer": 4, "n_head": 4, "n_embd": 128}
    snapshot = make_snapshot(characters, **default, bias=bias)
    theirs, _ = load(write_export(tmp_path, snapshot))
    assert type(theirs) is transformers.GPT2LMHeadModel
    idx = torch.randint(len(characters), (3, 128), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, ours(snapshot)(idx)[0], rtol=0, atol=1e-4)
        greedy = theirs.generate(idx[:, :5], attention_mask=torch.ones(3, 5), do_sample=False, max_new_tokens=123)
        assert torch.equal(greedy, ours(snapshot).generate(idx[:, :5], 123))


def test_the_loss_over_the_evaluation_text_is_the_trainers(tmp_path):
    """Catches a model that is nearly the same: transformers' loss, window by window, and what the trainer reported."""
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, ranks=ranks)
        trainer.fit()
        trainer.reporter.close()
    target = tmp_path / "exported"
    writing.export(str(tmp_path / "gpt_snapshot.pt"), str(target))
    model, tokens = load(target)
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    text = text[: int(len(text) * 0.1)]
    codes = torch.tensor(tokens(text[int(len(text) * 0.9) :])["input_ids"])
    total = 0.0
    for start in range(0, len(codes) - 1, 16):
        window = codes[start : start + 17]
        with torch.no_grad():
            total += float(torch.nn.functional.cross_entropy(model(window[None, :-1]).logits[0], window[1:])) * (
                len(window) - 1
            )
    assert total / (len(codes) - 1) == pytest.approx(trainer.state.eval_loss, abs=1e-4)


# ----------------------------------------------------------------------------------------- the tokenizer


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_comes_back(tmp_path, name):
    """Catches newlines that a pattern's dot leaves out, blanks put between characters or taken away, normal forms."""
    text = TEXTS[name]
    vocabulary = CharVocabulary.of(text)
    folder = write_export(tmp_path, make_snapshot(vocabulary.characters))
    for tokens in (
        load(folder)[1],
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")),
    ):
        codes = tokens(text)["input_ids"]
        assert codes == vocabulary.encode(text).tolist()
        assert tokens.decode(codes) == text
        assert tokens.decode(codes, skip_special_tokens=True) == text
        assert len(tokens) == len(vocabulary)
    parts = [text[:7], text[-7:], text[7:11]]
    assert tokens.batch_decode(tokens(parts)["input_ids"]) == parts


def test_unknown_characters_are_an_error(tmp_path):
    """Catches characters that are left out or replaced, and added tokens whose names can be typed."""
    _, tokens = load(write_export(tmp_path, make_snapshot("<>abcknu")))
    assert tokens("<unk>")["input_ids"] == ["<>abcknu".index(c) for c in "<unk>"]
    assert tokens.all_special_tokens == []
    with pytest.raises(Exception, match="Missing"):
        tokens("abcd")


def test_what_the_tokenizer_returns_can_be_given_to_generate(tmp_path):
    """Catches token_type_ids, whose embeddings GPT-2 adds, a text that goes beyond the positions, and GPT-2's 50256."""
    snapshot = make_snapshot()
    model, tokens = load(write_export(tmp_path, snapshot))
    prompt = tokens(["abc", "cab"], return_tensors="pt")
    assert set(prompt) == {"input_ids", "attention_mask"}
    assert tokens.model_max_length == 16
    with torch.no_grad():
        expected = ours(snapshot).generate(prompt["input_ids"], 13)
    assert torch.equal(model.generate(**prompt, do_sample=False, max_new_tokens=13), expected)
    assert torch.equal(model.generate(**prompt, do_sample=False), expected[:, : 3 + 8])  # half of the positions
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    assert model.generation_config.do_sample is True


def test_a_pipeline_writes_in_batches_and_without_a_warning(tmp_path, capfd):
    """Catches a warning about two lengths, a text beyond the positions, and a card whose advice for batches fails."""
    snapshot = make_snapshot()
    folder = write_export(tmp_path, snapshot)
    capfd.readouterr()
    pipe = transformers.pipeline("text-generation", model=str(folder))
    pipe("abc")
    assert len(pipe("abc", max_new_tokens=5, return_full_text=False)[0]["generated_text"]) == 5
    advice = re.search(r"`(tokenizer\.pad_token = .*?)`", (folder / "README.md").read_text(encoding="utf-8"))
    assert advice
    exec(advice[1], {"tokenizer": pipe.tokenizer})
    prompts = ["abc", "a", "\ng\n"]
    texts = [text["generated_text"] for (text,) in pipe(prompts, batch_size=2, max_new_tokens=9, do_sample=False)]
    vocabulary, model = CharVocabulary(snapshot["vocabulary"]), ours(snapshot)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == vocabulary.decode(model.generate(vocabulary.encode(prompt)[None], 9)[0])
    assert "warn" not in (said := capfd.readouterr().err.lower())
    assert "max_length" not in said


# ------------------------------------------------------------------------------------------ the directory


def test_the_model_card_says_what_is_known_and_no_places(tmp_path):
    """Catches a header that the Hub can't read, losses and a digest that are not the run's, paths of this machine."""
    place = f"trainer_config.snapshot_path={tmp_path / 'run' / 'gpt_snapshot.pt'}"  # a path that mustn't get out
    run = train(tmp_path / "run", place)
    assert run.returncode == 0, run.stderr
    snapshot = tmp_path / "run" / "gpt_snapshot.pt"
    process = run_program(
        sys.executable, PROJECT / "export.py", "--snapshot", snapshot, "--to", "new/model", cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    assert re.fullmatch(r"written: \S+model \(0.0 MB\); logits differ by \S+ at most, .*\n", process.stderr)
    state = load_snapshot(str(snapshot))
    written = (tmp_path / "new" / "model" / "README.md").read_text(encoding="utf-8")
    _, header, body = written.split("---\n", 2)
    assert OmegaConf.create(header)["library_name"] == "transformers"
    assert "license" not in OmegaConf.create(header)
    assert state["corpus"] in body
    evaluation = re.search(r"step 20: evaluation loss ([\d.]+)", run.stderr)
    assert evaluation is not None
    assert f"| evaluation loss of these weights, nats per character | {evaluation[1]} |" in body
    assert float(evaluation[1]) < state["best_eval_loss"]  # of step 10: the latest is saved before it is evaluated
    settings = json.loads(body.split("```json\n")[1].split("```")[0])
    assert settings["gpt_config"] == state["config"]["gpt_config"]
    for path in (tmp_path / "new" / "model").iterdir():
        content = path.read_bytes()
        for place in (tmp_path, PROJECT, Path.home()):
            assert str(place).encode() not in content or str(place) == "/"
    size = sum(weight.numel() for name, weight in state["model"].items() if name != "lm_head.weight")
    assert f"| parameters | {size:,} (2 layers, 2 heads, width 16) |" in body
    code = body.split("```python\n")[1].split("```")[0]  # as one who has downloaded it pastes it
    pasted = run_program(sys.executable, "-c", code, cwd=tmp_path / "new" / "model", env={"HF_HUB_OFFLINE": "1"})
    assert pasted.returncode == 0, pasted.stderr
    assert pasted.stdout.strip()
    # No place that the run began from, and no loss of a later step: curves go on where the snapshot is an older one.
    state["config"]["trainer_config"]["init_from"] = "/home/me/base.pt"
    began = writing.card(state, str(snapshot))
    assert "/home/me" not in began
    assert "| began with the weights of another model | yes |" in began
    older = load_snapshot(str(tmp_path / "run" / "gpt_snapshot.prev.pt"))
    assert "evaluation loss" not in writing.card(older, str(snapshot))  # step 15 was not evaluated
    # Beside a copy, curves may be those of another run.
    shutil.copy(snapshot, tmp_path / "copy.pt")
    shutil.copy(next((tmp_path / "run").glob("events*")), tmp_path)
    assert "can't be converted to GGUF" in written
    copied = writing.card(load_snapshot(str(tmp_path / "copy.pt")), str(tmp_path / "copy.pt"))
    assert "evaluation loss" not in copied  # of step 10 is the loss that it knows, and these are the weights of step 20


def test_the_card_finds_one_loss_among_many(tmp_path):
    """Catches a curve that is thinned out for a picture: the very step that is asked for may be gone."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 702):
            writer.add_scalar("eval/loss", step / 8, step)
    snapshot = {"run": {"directory": str(tmp_path)}, "best_step": 1, "best_eval_loss": 0.0}
    losses = [loss_of({**snapshot, "step": step}, str(tmp_path / "gpt_snapshot.pt")) for step in (2, 350, 700)]
    assert losses == [2 / 8, 350 / 8, 700 / 8]


@pytest.mark.parametrize(
    ("altered", "word"),
    [
        ("is_transposed", "logits"),  # of square matrices nobody else would notice
        ("norms", "logits"),
        ("newlines", "tokenizer"),
        ("blanks", "tokenizer"),
        ("greedy", "greedy"),
        ("nan", "logits differ by nan"),
    ],
)
def test_the_check_sees_a_wrong_export_and_leaves_nothing(tmp_path, monkeypatch, altered, word):
    """Catches a check that only looks whether the files load, and a directory that failed it."""
    if altered == "is_transposed":
        right = names.is_transposed
        wrong = lambda name, w: right(name, w) and "attn.c_proj" not in name  # noqa: E731
        monkeypatch.setattr(names, "is_transposed", wrong)
    elif altered == "norms":
        right = writing.to_hugging_face

        def exchanged(snapshot: Snapshot) -> tuple:
            config, tensors = right(snapshot)
            one, other = "transformer.h.1.ln_1.weight", "transformer.h.1.ln_2.weight"
            tensors[one], tensors[other] = tensors[other], tensors[one]
            return config, tensors

        monkeypatch.setattr(writing, "to_hugging_face", exchanged)
    elif altered == "nan":  # as half a file of weights might be; NaN is neither above a limit nor below it
        right = transformers.GPT2LMHeadModel.forward

        def broken(model: Any, *inputs: Any, **how: Any) -> Any:
            output = right(model, *inputs, **how)
            output.logits[0, 1, 2] = float("nan")
            return output

        monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", broken)
    elif altered == "greedy":
        right = transformers.GPT2LMHeadModel.generate
        wrong = lambda model, idx, **how: torch.cat([idx, 8 - right(model, idx, **how)[:, 1:]], dim=1)  # noqa: E731
        monkeypatch.setattr(transformers.GPT2LMHeadModel, "generate", wrong)
    else:
        right = writing.tokenizer
        wrong = {
            "newlines": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}}},
            "blanks": {"decoder": None},
        }
        change = wrong[altered]
        if altered == "newlines":
            change["pre_tokenizer"] |= {"behavior": "Removed", "invert": True}
        monkeypatch.setattr(writing, "tokenizer", lambda characters: {**right(characters), **change})
    with pytest.raises(ValueError, match=f"the check failed: .*{word}"):
        write_export(tmp_path, make_snapshot(), check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_dropout_is_exported(tmp_path):
    """Catches the library's own dropout of 0.1 in a model that is trained on, and two that are exchanged."""
    chosen = {"embd_pdrop": 0.1, "resid_pdrop": 0.2, "attn_pdrop": 0.3}
    config = load(write_export(tmp_path, make_snapshot(**chosen)))[0].config
    assert {name: getattr(config, name) for name in chosen} == chosen


def test_a_directory_can_be_named_as_a_snapshot_can(tmp_path, monkeypatch):
    """Catches a directory that only a plain path leads to; no shell expands the ~ behind init_from=."""
    target = write_export(tmp_path, make_snapshot())
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (str(target), target.as_uri(), "~/exported"):
        assert read_base(url, None)["vocabulary"] == "\n abcdefg"


def test_a_store_is_no_place_for_a_directory():
    """Catches a traceback where a store's package isn't installed."""
    for to in ("gs://bucket/exported", "memory://exported"):
        with pytest.raises(ValueError, match="must be a directory on this machine"):
            writing.find_place(to)


def test_rounding_decides_no_check():
    """Catches a right export that is refused for a tie, and a wrong character that passes for one."""
    model = ours(make_snapshot())
    with torch.no_grad():
        model.wte.weight[4] = model.wte.weight[5]  # two characters that are always equally likely
        text = torch.tensor([1, 4, 6, 7])
        assert writing.is_same_choice(model, text, torch.tensor([1, 5, 3, 3]))
        logits = model(text[None, :2])[0][0, -1]
        best, worst = int(logits.argmax()), int(logits.argmin())
        assert not writing.is_same_choice(model, torch.tensor([1, 4, best]), torch.tensor([1, 4, worst]))
        assert not writing.is_same_choice(model, text, text[:3])


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    """Catches a directory that has its name before it is whole, and others that are cleared away with it."""
    left = tmp_path / f"exported.{'0' * 32}.tmp"
    left.mkdir()
    (left / "config.json").write_text("{", encoding="utf-8")
    others = [tmp_path / "exported.tmp", tmp_path / f"other.{'0' * 32}.tmp"]
    for other in others:
        other.mkdir()

    def full(*_: object) -> str:
        assert not (tmp_path / "exported").exists()  # all weights are written by now
        raise OSError("no space left")

    monkeypatch.setattr(writing, "card", full)
    with pytest.raises(OSError, match="no space"):
        write_export(tmp_path, make_snapshot())
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", *(other.name for other in others)}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopped_or_killed_it_leaves_no_directory(tmp_path, number, code):
    """Catches a directory that has its name before it was checked, and one that Ctrl-C or the next export leaves."""
    save_snapshot(make_snapshot(), str(tmp_path / "model.pt"))
    script = (
        "import os, sys; from console import environment; environment.guard(); import export\n"
        "from hugging_face import writing\n"
        "number = int(sys.argv.pop())\n"
        "def check(folder, snapshot):  # all is written when this is called\n"
        "    assert os.path.exists(folder + '/README.md'); os.kill(os.getpid(), number)\n"
        "writing.check = check; export.main()"
    )
    arguments = ["--snapshot", tmp_path / "model.pt", "--to", tmp_path / "new"]
    run = run_program(sys.executable, "-c", script, *arguments, int(number))
    assert (run.returncode, run.stderr) == (code, "stopped\n" if code > 0 else "")
    left = {path.name for path in tmp_path.iterdir()} - {"model.pt"}
    assert len(left) == (0 if code > 0 else 1)
    assert "new" not in left
    again = run_program(sys.executable, PROJECT / "export.py", *arguments)
    assert again.returncode == 0, again.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "new"}


def test_an_occupied_place_is_refused(tmp_path):
    """Catches files that are overwritten or mixed with others, and a store taken for a directory."""
    snapshot, empty = make_snapshot(), tmp_path / "exported"
    empty.mkdir()
    folder = write_export(tmp_path, snapshot)  # an empty one is no obstacle
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(before) == [
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert len({oct(path.stat().st_mode) for path in folder.iterdir()}) == 1  # safetensors' own would be ours alone
    with pytest.raises(ValueError, match="something is there already"):
        write_export(tmp_path, snapshot)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match="this machine's disks"):
        writing.export(str(tmp_path / "model.pt"), "memory://x", False)


@pytest.mark.parametrize("name", ["safetensors", "tokenizers", "transformers"])
def test_without_a_package_one_line_says_what_to_install(tmp_path, monkeypatch, name):
    """Catches a traceback, and a package that is missed only when all has been written."""
    for module in {name, *(m for m in sys.modules if m.split(".")[0] == name)}:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["export.py", "--to", str(tmp_path / "deep" / "new"), "--snapshot", "none.pt"])
    with pytest.raises(SystemExit, match=f"^error: .*{name}.*pip install -r requirements-export.txt$"):
        export.main()
    assert not list(tmp_path.iterdir())


def test_without_transformers_a_directory_can_be_written_and_read(tmp_path, monkeypatch):
    """Catches a new package that training needs, or one that writing without a check needs."""
    for name in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    snapshot = make_snapshot()
    base = read_base(str(write_export(tmp_path, snapshot)), None)
    assert base["vocabulary"] == snapshot["vocabulary"]
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"safetensors.*pip install -r requirements-export.txt"):
        read_base(str(tmp_path / "exported"), None)


# ------------------------------------------------------------------------------------------- the way back


@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back_every_bit_is_the_same(tmp_path, bias):
    """Catches a direction that doesn't undo the other, and a model without biases that comes back with zeros."""
    snapshot = make_snapshot(bias=bias, resid_pdrop=0.25)
    base = read_base(str(write_export(tmp_path, snapshot)), None)
    assert base["vocabulary"] == snapshot["vocabulary"]
    assert base["model_config"] == {**snapshot["model_config"], "resid_pdrop": 0.0}
    assert base["model"].keys() == snapshot["model"].keys()
    assert all(torch.equal(weight, snapshot["model"][name]) for name, weight in base["model"].items())


def test_biases_that_were_trained_elsewhere_are_kept(tmp_path):
    """Catches biases that are dropped because the model once had none."""
    folder = write_export(tmp_path, make_snapshot(bias=False))
    theirs, _ = load(folder)
    with torch.no_grad():
        theirs.transformer.h[0].mlp.c_fc.bias[3] = 0.5
    theirs.save_pretrained(folder)
    base = read_directory(str(folder))
    assert base["model_config"]["bias"] is True
    assert base["model"]["h.0.mlp.c_fc.bias"][3] == 0.5


def foreign(folder: Path, vocabulary: dict[str, int], **config: object) -> object:
    """A GPT-2 and a tokenizer of characters, made and saved by Hugging Face's packages alone; the model."""
    tokenizers = pytest.importorskip("tokenizers")
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    torch.manual_seed(0)
    sizes = {"vocab_size": len(vocabulary), "n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **config})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(folder)
    return model


@pytest.mark.parametrize("form", ["as saved", "16 bits", "without prefix, with masks", "vocab.json"])
def test_a_model_of_others_is_taken_over(tmp_path, form):
    """Catches a vocabulary in another order than the embedding, weights rounded once more, and OpenAI's own names."""
    vocabulary = {"b": 0, "a": 1, "\n": 2, "é": 3, " ": 4}
    theirs = foreign(tmp_path, vocabulary)
    file = tmp_path / "model.safetensors"
    weights = safetensors_torch.load_file(file)
    if form == "16 bits":
        theirs = theirs.half().float()
        weights = {name: w.half() for name, w in weights.items()}
    elif form == "without prefix, with masks":
        weights = {name.removeprefix("transformer."): w for name, w in weights.items()}
        weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(2)}
        weights["lm_head.weight"] = weights["wte.weight"].clone()
    elif form == "vocab.json":
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    safetensors_torch.save_file(weights, file)
    base = read_base(str(tmp_path), None)
    assert base["vocabulary"] == "\n abé"
    text = "a\nbé  bab\n\né"
    with torch.no_grad():
        wanted = theirs(torch.tensor([[vocabulary[c] for c in text]])).logits[0]
        found = ours(base)(CharVocabulary(base["vocabulary"]).encode(text)[None])[0][0]
    for character, code in vocabulary.items():
        torch.testing.assert_close(found[:, base["vocabulary"].index(character)], wanted[:, code], rtol=0, atol=1e-5)


def edit(folder: Path, file: str, **changes: object) -> None:
    values = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps({**values, **changes}), encoding="utf-8")


def tensors(folder: Path, **changes: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    weights = {**safetensors_torch.load_file(file), **{name.replace("__", "."): w for name, w in changes.items()}}
    safetensors_torch.save_file({name: w for name, w in weights.items() if w.numel()}, file)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/null")


GONE = torch.empty(0)
WTE, FC = "transformer__wte__weight", "transformer__h__0__mlp__c_fc__weight"
REFUSED = {
    "another activation": (lambda d: edit(d, "config.json", activation_function="relu"), "activation_function='relu'"),
    "inner width": (lambda d: edit(d, "config.json", n_inner=7), "n_inner=7"),
    "scaling": (lambda d: edit(d, "config.json", scale_attn_weights=False), "scale_attn_weights=False"),
    "scaling by layer": (
        lambda d: edit(d, "config.json", scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx=True",
    ),
    "upcast": (lambda d: edit(d, "config.json", reorder_and_upcast_attn=True), "reorder_and_upcast_attn=True"),
    "cross-attention": (lambda d: edit(d, "config.json", add_cross_attention=True), "add_cross_attention=True"),
    "untied": (lambda d: edit(d, "config.json", tie_word_embeddings=False), "tie_word_embeddings=False"),
    "epsilon": (lambda d: edit(d, "config.json", layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06"),
    "another family": (lambda d: edit(d, "config.json", model_type="llama"), "model_type='llama'"),
    "no size": (lambda d: edit(d, "config.json", n_head="2"), "n_head='2'"),
    "odd heads": (lambda d: edit(d, "config.json", n_head=3), "n_embd=8 is not divisible by n_head=3"),
    "absurd depth": (lambda d: edit(d, "config.json", n_layer=10**12), "n_layer=1000000000000"),
    "absurd width": (lambda d: edit(d, "config.json", n_embd=2**40, n_head=1), "can't be taken over"),
    "absurd length": (lambda d: edit(d, "config.json", n_positions=2**40), r"wpe.weight is F32 \[16, 8\]"),
    "a device": (lambda d: device(d / "config.json"), r"over: config\.json is a pipe or a device"),
    "weights of a device": (lambda d: device(d / "model.safetensors"), r"over: model\.safetensors is a pipe"),
    "no dictionary": (lambda d: (d / "config.json").write_text("[]"), "can't be taken over"),
    "no JSON": (lambda d: (d / "config.json").write_bytes(b"\xff"), "config.json is not JSON"),
    "nested too deep": (lambda d: (d / "config.json").write_text("[" * 10**6), "config.json is not JSON"),
    "no configuration": (lambda d: (d / "config.json").unlink(), "config.json"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "there is no tokenizer.json"),
    "bytes in vocab.json": (
        lambda d: (
            (d / "tokenizer.json").unlink(),
            (d / "merges.txt").touch(),
            (d / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate("\nĠabcdefg")})),
        ),
        "the pre_tokenizer ByteLevel",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "there is no model.safetensors"),
    "a pickle": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "pytorch_model.bin is a pickle",
    ),
    "in several files": (
        lambda d: (d / "model.safetensors").rename(d / "model.safetensors.index.json"),
        "model.safetensors.index.json",
    ),
    "cut off": (lambda d: os.truncate(d / "model.safetensors", 4000), "can't be taken over"),
    "another shape": (lambda d: tensors(d, **{FC: torch.ones(32, 8)}), r"c_fc.weight is F32 \[32, 8\]"),
    "integers": (lambda d: tensors(d, **{FC: torch.ones(8, 32).int()}), "c_fc.weight is I32"),
    "a missing tensor": (lambda d: tensors(d, **{FC: GONE}), r"missing or unknown weights: h.0.mlp.c_fc.weight"),
    "another tensor": (
        lambda d: tensors(d, transformer__h__0__gate=torch.ones(1)),
        r"missing or unknown weights: h.0.gate",
    ),
    "another head": (lambda d: tensors(d, lm_head__weight=torch.ones(9, 8)), "lm_head.weight differs from wte.weight"),
    "not a number": (lambda d: tensors(d, **{FC: torch.full((8, 32), torch.nan)}), "not finite"),
    "byte pairs": (
        lambda d: edit(d, "tokenizer.json", model={"vocab": {"a": 0, "Ġthe": 1, "er": 2}}),
        "2 tokens that aren't one character: 'Ġthe', 'er'",
    ),
    "special tokens": (
        lambda d: edit(d, "tokenizer.json", added_tokens=[{"id": 9, "content": "<|endoftext|>"}]),
        r"<\|endoftext\|>",
    ),
    "half a character": (
        lambda d: edit(d, "tokenizer.json", model={"vocab": {"a": 0, "\ud800": 1}}),
        "aren't one character",
    ),
    "gaps": (lambda d: edit(d, "tokenizer.json", model={"vocab": {"a": 0, "b": 2}}), "codes of its tokens"),
    "fewer tokens": (
        lambda d: edit(d, "tokenizer.json", model={"vocab": {"a": 0, "b": 1}}),
        "tokenizer has 2 tokens, but config.json 9",
    ),
    "bytes": (
        lambda d: edit(d, "tokenizer.json", pre_tokenizer={"type": "ByteLevel"}),
        "the pre_tokenizer ByteLevel",
    ),
    "lower case": (lambda d: edit(d, "tokenizer.json", normalizer={"type": "Lowercase"}), "the normalizer Lowercase"),
    "unigrams": (lambda d: edit(d, "tokenizer.json", model={"vocab": [["a", 0.0]]}), "its vocabulary is a list"),
    "a list": (
        lambda d: ((d / "tokenizer.json").unlink(), (d / "vocab.json").write_text('["a", "b"]')),
        "its vocabulary is a list; it must be a dictionary",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path, reason):
    """Catches a model that is taken for another one, code that a pickle runs, and memory taken at a file's word."""
    folder = write_export(tmp_path, make_snapshot())
    change, named = REFUSED[reason]
    change(folder)
    with pytest.raises(ValueError, match=named) as caught:
        read_base(str(folder), None)
    assert str(folder) in str(caught.value)


def test_several_reasons_are_named_at_once(tmp_path):
    """Catches a user who mends one key after the other; 4 * n_embd is the same as none."""
    folder = write_export(tmp_path, make_snapshot())
    edit(folder, "config.json", n_inner=32)
    assert read_base(str(folder), None)
    edit(folder, "config.json", n_inner=33, activation_function="silu")
    with pytest.raises(ValueError, match=r"activation_function='silu'.*n_inner=33"):
        read_base(str(folder), None)


def test_a_run_starts_from_a_directory_and_goes_on_without_it(tmp_path):
    """Catches weights that don't arrive in the run, sizes not compared, and a directory that is read once too often."""
    assert train(tmp_path / "first").returncode == 0
    snapshot = tmp_path / "first" / "gpt_snapshot.pt"
    writing.export(str(snapshot), str(tmp_path / "model"), is_checked=False)
    start = f"trainer_config.init_from={tmp_path / 'model'}"
    other = train(tmp_path / "other", start, "gpt_config.n_layer=3", "data_config.block_size=8")
    assert other.returncode == 1
    assert "n_layer is 2 there and 3 here" in other.stderr
    assert "block_size is 16 there and 8 here" in other.stderr
    assert other.stderr.count("\n") == 1
    tuned = train(tmp_path / "tuned", start, "trainer_config.max_steps=3", "optimizer_config.warmup_steps=1")
    assert tuned.returncode == 0, tuned.stderr
    before = re.search(r"step 20: evaluation loss (\S+)", (tmp_path / "first" / "main.log").read_text())
    after = re.search(r"step 0: evaluation loss (\S+)", tuned.stderr)
    assert before is not None
    assert after is not None
    assert after[1] == before[1]
    shutil.rmtree(tmp_path / "model")
    again = train(tmp_path / "tuned", start, "trainer_config.max_steps=4", "optimizer_config.warmup_steps=1")
    assert again.returncode == 0, again.stderr
    gone = train(tmp_path / "new", start)
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)
    assert "there is no snapshot" in gone.stderr


def test_a_run_directory_is_no_model(tmp_path):
    """Catches the old answer for a run's directory, which names the file to give, lost to a new one."""
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ValueError, match="is a directory; name a file in it"):
        read_base(str(tmp_path), None)
