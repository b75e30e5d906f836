"""The page of look.py, in a real browser: its figures against torch's, its safety, and what it does when it is used."""

import base64
import dataclasses
import itertools
import json
import math
import re
import shutil
import socketserver
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PROJECT, SAMPLE_TEXT, run_program, train
from torch.utils.tensorboard import SummaryWriter

import look
import sampling
from char_dataset import CharVocabulary, DataConfig, Text, split_codes
from model import GPT, GPTConfig
from page import making
from page.data import compute, last_name, run_of
from sampling import Sampling
from snapshot import Snapshot, save_snapshot

CHROMIUM = shutil.which("chromium")
try:
    from playwright.sync_api import Browser, Page, sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]
if sync_playwright is None or CHROMIUM is None:
    pytest.skip(
        "no browser: pip install -r requirements-dev.txt, and on Debian apt-get install chromium",
        allow_module_level=True,
    )

# A process of its own for nothing but the page: none of Chromium's own connections, and no sandbox, for root.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ARGUMENTS += ["--disable-sync", "--disable-quic", "--no-first-run"]
SETTLED = "body[data-ready]"
VOCABULARY = CharVocabulary.of(SAMPLE_TEXT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser, whose pages are closed after each test."""
    yield chromium
    for context in chromium.contexts:
        context.close()


class Visit:
    """A page that was opened, and what it complained about or asked for."""

    def __init__(self, browser: Browser, file: Path, wait: str = SETTLED, **options: Any):
        self.page: Page = browser.new_context(**options).new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector(wait, state="attached")

    def __call__(self, expression: str, argument: Any = None) -> Any:
        """The value of a JavaScript expression, or of a function of the argument."""
        return self.page.evaluate(expression, argument)

    def text(self, selector: str) -> str:
        """What a reader sees there."""
        return self.page.inner_text(selector)


def make_model(seed: int = 1, vocabulary: CharVocabulary = VOCABULARY, **sizes: Any) -> GPT:
    """A small model whose weights are large enough that it has opinions."""
    torch.manual_seed(seed)
    defaults = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(vocab_size=len(vocabulary), **{**defaults, **sizes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
            parameter.copy_(parameter.half())  # the page carries them as they are
    return model


def save(model: GPT, path: Path, vocabulary: CharVocabulary = VOCABULARY, **more: Any) -> Path:
    """A snapshot of a model."""
    config = dataclasses.asdict(model.config)
    save_snapshot(
        {"model_config": config, "vocabulary": vocabulary.characters, "model": model.state_dict(), **more}, str(path)
    )
    return path


def make_page(snapshot: Path, *arguments: str) -> Path:
    """Write a page beside a snapshot, in this process."""
    out = snapshot.with_suffix(".html")
    command = [*arguments, "--snapshot", str(snapshot), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["look.py", *command])
        look.main()
    return out


def error_of(*arguments: str) -> str:
    """The one line with which look.py refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["look.py", *arguments])
        with pytest.raises(SystemExit) as leaving:
            look.main()
    assert str(leaving.value.code).startswith("error: ")
    assert "\n" not in str(leaving.value.code)
    return str(leaving.value.code)


TEXT = "MIRA: The well is deep, and the water cold.\n"


@pytest.fixture(scope="module")
def model() -> GPT:
    return make_model()


@pytest.fixture(scope="module")
def page_file(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "".join(c for c in TEXT if c in VOCABULARY.characters)
    return make_page(save(model, tmp_path_factory.mktemp("look") / "tiny.pt"), text[:40])


@pytest.fixture
def visit(browser: Browser, page_file: Path) -> Iterator[Visit]:
    visit = Visit(browser, page_file)
    yield visit
    assert visit.complaints == []
    assert visit.requests == [page_file.as_uri()]


def tokens(length: int, seed: int) -> list[int]:
    """Random characters."""
    return torch.randint(len(VOCABULARY), (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# --------------------------------------------------------------------------------------- the page's figures and torch's


SIZES = [{}, {"bias": False, "n_head": 3, "n_embd": 15, "block_size": 9}, {"n_layer": 1}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_page_computes_what_torch_computes(browser: Browser, tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Catches a wrong GELU, norm, mask or position; odd sizes that are cut off; a lost bias; a window that slips."""
    model = make_model(**sizes)
    visit = Visit(browser, make_page(save(model, tmp_path / "model.pt"), "A"))
    B = model.config.block_size
    for length in (1, 2, B - 1, B, B + 1, 3 * B + 5):
        codes = tokens(length, seed=length)
        starts, logits = visit(
            """async (codes) => {
                const reading = new Reading(model);
                await reading.read(codes, () => true);
                const all = codes.map((_, i) => i + 1);
                return [all.map((i) => reading.window(i - 1).start), all.map((i) => [...reading.logits(i).at(-1)])];
            }""",
            codes,
        )
        for end, (start, found) in enumerate(zip(starts, logits, strict=True), start=1):
            assert min(end, B // 2) <= end - start <= B  # at least half a context, as when writing
            expected = model(torch.tensor([codes[start:end]]))[0][0, -1]
            torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)
        one_by_one = visit(
            """async ([codes, end]) => {
                const [whole, steps] = [new Reading(model), new Reading(model)];
                await whole.read(codes, () => true);
                await steps.read(codes.slice(0, 1), () => true);
                for (const code of codes.slice(1)) steps.push(code);
                return [whole, steps].map((reading) => [...reading.logits(end).at(-1)]);
            }""",
            [codes[:B], min(length, B)],
        )
        assert one_by_one[0] == one_by_one[1]  # to the bit, as the tutorial says
        assert length - starts[-1] == (length if length <= B else max(1, B // 2))  # what GPT.stream goes on from


def test_layers_and_attention_are_torchs(visit: Visit, model: GPT) -> None:
    """Catches heads mixed up, weights shown one row too late, and a lens with another layer's norm."""
    codes = tokens(16, seed=7)
    computed: Any = compute(model, torch.tensor(codes))
    guesses, maps = visit(
        """async (codes) => {
            await read(codes);
            const window = reading.window(0), rows = codes.map((_, row) => row);
            return [rows.slice(1).map((i) => reading.guesses(i)),
                    rows.flatMap((row) => [0, 1].flatMap((layer) => [...reading.attention(window, layer, row)]))];
        }""",
        codes,
    )
    for i, layers in enumerate(guesses):
        for name, expected in (("probabilities", computed["probabilities"][i]), ("came", computed["following"][i])):
            found = torch.tensor([guess[name] for guess in layers])
            torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(maps), unpacked(computed["attention"]), atol=1e-3, rtol=0)


def unpacked(attention: str) -> torch.Tensor:
    """The weights of all rows, one after the other."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(attention), dtype="<f2").astype("f4"))


def test_what_torch_computes_for_large_models_is_the_model(model: GPT) -> None:
    """Catches an attention that isn't the forward pass's: its means of the values must give the same stream."""
    codes = torch.tensor(tokens(12, seed=3))
    computed: Any = compute(model, codes)
    expected = model(codes[None])[0][0].softmax(dim=-1)
    assert [row[-1] for row in computed["tokens"]] == expected.topk(5).indices.tolist()
    x = model.wte(codes[None]) + model.wpe.weight[:12]
    block: Any = model.h[0]
    v = block.attn.c_attn(block.ln_1(x)).split(16, dim=2)[2].view(12, 2, 8)  # (T, nh, hs)
    weights = torch.zeros(2, 12, 12)
    packed = unpacked(computed["attention"])
    for row in range(12):
        at = 2 * 2 * (row * (row + 1) // 2)
        weights[:, row, : row + 1] = packed[at : at + 2 * (row + 1)].view(2, row + 1)
    y = torch.einsum("hts,shd->thd", weights, v).reshape(12, 16)
    torch.testing.assert_close(block.attn.c_proj(y), block.attn(block.ln_1(x))[0], atol=5e-3, rtol=0)


def test_greedy_text_is_that_of_generate(visit: Visit, model: GPT) -> None:
    """Catches a cache that drifts, positions that slide, and a full context that is cut elsewhere: 50 prompts."""
    for length in (1, 3, 15, 16, 17, 24, 40, 64, 8, 31):
        prompts = torch.tensor([tokens(length, seed=100 * length + k) for k in range(5)])
        top_k, top_p = 1 + length % 7, 0.05 + 0.01 * length
        expected = model.generate(prompts, 200)  # (5, length + 200)
        for prompt, whole in zip(prompts.tolist(), expected.tolist(), strict=True):
            text = visit(
                """async ([codes, settings]) => {
                    for (const [id, value] of Object.entries(settings)) $(id).value = value;
                    await read(codes);
                    for (let i = 0; i < 200; i++) step();
                    return reading.codes;
                }""",
                [prompt, {"temperature": 0, "top_k": top_k, "top_p": top_p, "seed": length}],
            )
            assert text == whole


def draw(logits: torch.Tensor, how: Sampling, times: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(What sampling.py draws, from which probabilities); greedily, without a draw."""
    caught, multinomial = [], torch.multinomial

    def catch(p: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        caught.append(p[0])
        return multinomial(p, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", catch)
        draws = sampling.choose_token(logits.expand(times, -1), how, torch.Generator().manual_seed(1))
    p = caught[0] if caught else torch.nn.functional.one_hot(draws[0, 0], len(logits)).float()
    return draws, p / p.sum()


SETTINGS = [(1.0, None, None), (0.5, None, None), (1.7, 7, None), (1.0, None, 0.6), (0.8, 5, 0.9), (1.0, 1, None)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_draws_follow_sampling_py(visit: Visit, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Catches rules in another order, a tie that top-k drops, top-p one character too long, and a biased draw."""
    logits = torch.randn(len(VOCABULARY), generator=torch.Generator().manual_seed(5)) * 2
    logits[3] = logits[8]  # a tie
    draws, expected = draw(logits, Sampling(temperature, True, top_k, top_p), 10_000)
    probabilities, counts = visit(
        """([logits, temperature, top_k, top_p]) => {
            const p = probabilities_of(Float32Array.from(logits), temperature, top_k, top_p), counts = p.map(() => 0);
            let [drawn, state] = [0, 1];
            for (let i = 0; i < 10000; i++) {
                [drawn, state] = mulberry32(state);
                counts[choose_token(p, drawn)]++;
            }
            return [[...p], [...counts]];
        }""",
        [logits.tolist(), temperature, top_k, top_p],
    )
    torch.testing.assert_close(torch.tensor(probabilities, dtype=torch.float32), expected, atol=1e-5, rtol=0)
    assert [p > 0 for p in probabilities] == (expected > 0).tolist()
    page, ours = torch.tensor(counts), torch.bincount(draws.flatten(), minlength=len(VOCABULARY))
    assert not page[expected == 0].any()
    for found in (page.double(), ours.double()):
        assert chi_square_probability(found, 10_000 * expected.double()) > 1e-3


def chi_square_probability(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How likely counts are at least this far from those expected; bins of fewer than 5 are one bin."""
    small = expected < 5
    found = torch.cat([found[~small], found[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    found, expected = found[expected > 0], expected[expected > 0]
    if len(found) == 1:
        return 1.0
    distance = ((found - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2).double(), distance / 2))


def test_top_p_ends_where_p_is_reached(visit: Visit) -> None:
    """Catches a character too many where the likelier ones have p to the bit."""
    for logits in ([0.0, 0.0], [0.0] * 4, [0.0] * 8):
        for top_p in (0.25, 0.5, 0.75, 0.501):
            _, expected = draw(torch.tensor(logits), Sampling(1.0, True, None, top_p), 1)
            found = visit("([logits, p]) => [...probabilities_of(logits, 1, null, p)]", [logits, top_p])
            # Which of several equal ones stay is the sort's choice.
            assert sorted(found) == pytest.approx(sorted(expected.tolist()), abs=1e-6)


def test_float16_is_decoded_to_the_bit(visit: Visit) -> None:
    """Catches subnormal numbers, signs and exponents decoded wrongly: all that are finite."""
    every = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.half).float()
    found = torch.tensor(visit("() => [...float_of_half]"))
    assert torch.equal(found[every.isfinite()], every[every.isfinite()])


# ------------------------------------------------------------------------ the page's words and colours, and torch's


LAST = 36  # a character whose guess comes from a later window of `page_file`, in whose text there are four of them


def by_torch(model: GPT, window: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """At the end of a window: torch's guess after each block, (L + 1, V), and the attention weights, (L, nh, T)."""
    streams, projected = list[torch.Tensor](), list[torch.Tensor]()
    hooks = [
        part.register_forward_pre_hook(lambda _, x: streams.append(x[0][0, -1])) for part in (*model.h, model.ln_f)
    ]
    block: Any
    for block in model.h:
        hooks.append(block.attn.c_attn.register_forward_hook(lambda _, x, y: projected.append(y[0])))
    with torch.no_grad():
        model(torch.tensor([window]))
        guesses = (model.ln_f(torch.stack(streams)) @ model.wte.weight.T).softmax(dim=-1)
    for hook in hooks:
        hook.remove()
    T, C, nh = len(window), model.config.n_embd, model.config.n_head
    q, k, _ = torch.stack(projected).view(-1, T, 3, nh, C // nh).unbind(dim=2)  # (L, T, nh, hs) each
    scores = torch.einsum("lhi,lthi->lht", q[:, -1], k) / (C // nh) ** 0.5
    return guesses, scores.softmax(dim=-1)


class Reference:
    """What torch computes for the text that a page shows, at each place from what the page's model saw there."""

    def __init__(self, visit: Visit, model: GPT):
        self.codes: list[int] = visit("() => reading.codes")
        self.starts: list[int] = visit("() => reading.codes.map((_, place) => reading.window(place).start)")
        ends = range(1, len(self.codes) + 1)
        found = [by_torch(model, self.codes[start:end]) for start, end in zip(self.starts, ends, strict=True)]
        # The first character isn't guessed. The last guess is that of the character to be written.
        self.guesses = [torch.empty(0), *(guesses for guesses, _ in found)]
        self.weights = [weights for _, weights in found]
        self.surprises = [0.0, *(-math.log2(self.came(index)) for index in range(1, len(self.codes)))]

    def came(self, index: int, block: int = -1) -> float:
        """The probability of the character that came."""
        return float(self.guesses[index][block, self.codes[index]])


# As the page shows the characters of the sample text.
SIGNS = [{" ": "·", "\n": "↵"}.get(character, character) for character in VOCABULARY.characters]


def agree(words: str, value: float) -> None:
    """A number in words is the value, rounded as it is written there."""
    if words.startswith("over "):
        assert float(words.removeprefix("over ").removesuffix(" %")) < 100 * value < 100
        return
    if words.endswith(" %"):
        words, value = words.removesuffix(" %"), 100 * value
    number = Decimal(words.replace(",", ""))
    assert abs(float(number) - value) <= 0.51 * 10.0 ** int(number.as_tuple().exponent), f"{words} for {value}"


NUMBER = r"(\d[\d,]*(?:\.\d+)?(?:e-\d+)?)"
SHARE = r"((?:over )?\d[\d.]*(?:e-\d+)? %)"


def find(pattern: str, words: str) -> tuple[str, ...]:
    """The groups of a pattern that is somewhere in the words; N and P stand for a number and for a share in percent."""
    found = re.search(pattern.replace("<N>", NUMBER).replace("<P>", SHARE), words)
    assert found, f"{pattern}: {words}"
    return found.groups()


def rows_of(visit: Visit, selector: str) -> list[list[str]]:
    """The cells of a table's body."""
    cells = "(at) => [...document.querySelectorAll(at)].map((row) => [...row.cells].map((cell) => cell.textContent))"
    return visit(cells, f"{selector} tbody tr")


def test_the_words_about_surprise_are_torchs(visit: Visit, model: GPT) -> None:
    """Catches a mean that counts the character that is given, bits for nats, another block's guess, a bar too long."""
    torchs = Reference(visit, model)
    n, V = len(torchs.codes) - 1, len(VOCABULARY)
    most = max(range(n + 1), key=torchs.surprises.__getitem__)
    assert visit("() => chosen.index") == most  # the most surprising one comes first
    count, bits, nats = find(r"Mean of <N> characters: <N> bits \(<N> nats\)", visit.text("#mean"))
    assert int(count) == n == 39
    agree(bits, sum(torchs.surprises) / n)
    agree(nats, sum(torchs.surprises) / n * math.log(2))
    evenly = find(r"evenly among the <N> characters costs <N> bits \(<N> nats\)", visit.text("#mean"))
    for words, value in zip(evenly, (V, math.log2(V), math.log(V)), strict=True):
        agree(words, value)
    assert "sees at most 16 characters. Further on, it sees 8 to 16." in visit.text("#mean")
    assert f"guessing evenly:\n{math.log2(V):.1f}\n(1 bit = {math.log(2):.2f} nats)" in visit.text("#legend")

    visit.page.locator("#surprise details summary").click()
    visit.page.locator("#surprise-table tbody tr").first.wait_for()
    table = rows_of(visit, "#surprise-table")
    assert table[0] == ["1", SIGNS[torchs.codes[0]], "given", "", "", ""]
    assert len(table) == n + 1
    for index in range(1, n + 1):
        surprise, came, guess = torchs.surprises[index], torchs.came(index), torchs.guesses[index][-1]
        sign, likeliest = SIGNS[torchs.codes[index]], SIGNS[int(guess.argmax())]
        place, symbol, bits, nats, probability, first = table[index]
        assert (place, symbol, first.split("  ")[0]) == (str(index + 1), sign, likeliest)
        values = [(bits, surprise), (nats, surprise * math.log(2)), (probability, came)]
        visit(f"() => choose({index}, true)")
        words = visit.text("#chosen")
        assert words.startswith(f"Character {index + 1} of 40, pinned: after “")
        assert f"{''.join(SIGNS[code] for code in torchs.codes[max(0, index - 12) : index])}” came “{sign}”" in words
        told = find(r"gave it <P>: <N> bits of surprise, or <N> nats", words)
        values += zip(told, (came, surprise, surprise * math.log(2)), strict=True)
        symbols, shares, widths = bars_of(visit, "#guess")
        order = guess.topk(5).indices.tolist()
        order += [torchs.codes[index]] * (torchs.codes[index] not in order)
        assert symbols == [SIGNS[code] for code in order]
        assert [share.endswith(" ◀ came") for share in shares] == [code == torchs.codes[index] for code in order]
        values += [
            (share.removesuffix(" ◀ came"), float(guess[code])) for share, code in zip(shares, order, strict=True)
        ]
        for number, value in [*values, (first.split("  ")[1], float(guess.max()))]:
            agree(number, value)
        assert widths == pytest.approx([100 * float(guess[code]) for code in order], abs=1e-2)


def bars_of(visit: Visit, selector: str) -> tuple[list[str], list[str], list[float]]:
    """(Symbols, words, widths in percent) of bars."""
    return visit(
        """(at) => [".symbol", ".track + span", ".bar"].map((part) =>
            [...document.querySelectorAll(`${at} ${part}`)].map((e) => (
                part === ".bar" ? parseFloat(e.style.width) : e.textContent)))""",
        selector,
    )


def test_the_top_says_what_is_shown(browser: Browser, tmp_path: Path) -> None:
    """Catches the figures of another model, the names of directories, and a text that isn't the one that is shown."""
    model = make_model(n_layer=1)
    text_file = tmp_path / "of-alice" / "notes.txt"
    text_file.parent.mkdir()
    shutil.copy(SAMPLE_TEXT, text_file)
    run = {"directory": str(tmp_path / "of-bob" / "second try"), "launch": "1"}
    snapshot = evaluated(model, tmp_path / "of-carol" / "gpt.best.pt", text_file, run=run, step=1234)
    file = make_page(snapshot)
    visit = Visit(browser, file)
    places = ("run", "snapshot", "source")
    from_file = "the beginning of the evaluation text, from notes.txt"
    assert [visit.text(f"#{place}") for place in places] == ["second try", "gpt.best.pt", from_file]
    page = file.read_text(encoding="utf-8")
    assert not [name for name in ("of-alice", "of-bob", "of-carol", str(tmp_path)) if name in page]
    size = sum(parameter.numel() for parameter in model.parameters())
    assert visit.text("#model") == (
        f"It is a GPT with {size:,} parameters in 1 block of 2 heads. It knows {len(VOCABULARY)} characters, and sees "
        "up to 16 at a time. It was trained for 1,234 steps."
    )
    length, error = find("the first <N> characters .* by at most <N> \\(0.0001 is allowed", visit.text("#check"))
    assert int(length) == 16
    assert float(error) < 1e-4
    for words in (", then 1 character", ", then 2 characters"):
        visit.page.click("#step")
        assert visit.text("#source") == f"{from_file}{words} by the model"
    visit.page.click("#back")
    visit.page.click("#back")
    assert visit.text("#source") == from_file
    for prompt, words in (("MIRA", "typed into this page"), (visit("() => data.text"), from_file)):
        visit.page.fill("#prompt", prompt)
        visit.page.click("#read")
        visit.page.wait_for_function("(length) => is_read && reading.codes.length === length", arg=len(prompt))
        assert visit.text("#source") == words
    bare = Visit(browser, make_page(save(model, tmp_path / "bare.pt"), "MIRA"))
    assert [bare.text(f"#{place}") for place in places] == ["not known", "bare.pt", "given to look.py"]


def test_names_have_no_place_in_them() -> None:
    """Catches an account, a key or a directory that goes along with a page."""
    for place, name in (
        ("/home/alice/runs/mine/gpt.pt", "gpt.pt"),
        ("runs/mine/", "mine"),
        (r"C:\Users\alice\text.txt", "text.txt"),
        ("s3://bucket/alice/gpt.best.pt", "gpt.best.pt"),
        ("https://alice:secret@host/text.txt?signature=secret", "text.txt"),
        ("https://alice:secret@host", "host"),
        ("zip://inner.txt::/home/alice/text.zip", "text.zip"),
        ("what?.txt", "what?.txt"),
        ("a@b.txt", "a@b.txt"),
    ):
        assert last_name(place) == name
    odd: list[Snapshot] = [{}, {"run": 5}, {"run": {}}, {"run": {"directory": 5}}, {"run": {"directory": [1]}}]
    assert [run_of(snapshot) for snapshot in odd] == [""] * 5


def test_a_number_is_what_it_says(visit: Visit) -> None:
    """Catches 99.9 % that is shown as 100 %, a hundred that is shown as 1.0e+2, and digits that are cut off."""
    shares = [0, 1e-9, 0.00012, 0.00099, 0.0234, 0.09999, 0.1, 0.456, 0.989, 0.99, 0.9912, 0.9949, 0.9952, 0.999]
    shares += [1 - 10.0**-k for k in range(1, 16)]
    for share, words in zip(shares, visit("(shares) => shares.map(percent)", shares), strict=True):
        assert words.endswith(" %")
        assert not words.startswith("100")
        agree(words, share)
    assert visit("() => percent(1)") == "100 %"
    assert visit("() => [0.99901, 0.9994, 0.9999].map(percent)") == ["over 99.9 %"] * 3
    factors = [0.00123, 0.5, 1, 9.97, 99.4, 99.6, 100, 250.4, 1234.5]
    for value, words in zip(factors, visit("(factors) => factors.map(factor)", factors), strict=True):
        assert re.fullmatch(r"[\d.]+", words)
        agree(words, value)


@pytest.mark.parametrize("index", [7, LAST])
def test_the_words_about_attention_are_torchs(visit: Visit, model: GPT, index: int) -> None:
    """Catches “times uniform” by a number of characters too few, a weight under another's name, a wrong mean."""
    torchs = Reference(visit, model)
    place, start = index - 1, torchs.starts[index - 1]
    visit.page.locator("#attention details summary").click()
    visit(f"() => choose({index}, true)")
    S = place - start + 1
    for layer, head in itertools.product(range(2), range(2)):
        visit.page.locator("#maps button").nth(2 * layer + head).click()
        weights = torchs.weights[place][layer, head].tolist()
        signs = [SIGNS[torchs.codes[i]] for i in range(start, index + 1)]
        assert f"“{signs[-1]}” (framed), it stood on “{signs[-2]}”" in visit.text("#looking")
        assert f"head {head + 1} of block {layer + 1} looked at" in visit.text("#looking")
        titles = visit("() => [...document.querySelectorAll('#looked span')].map((span) => span.title)")
        assert [i for i, title in enumerate(titles) if title] == list(range(start, index))
        heaviest = max(range(S), key=weights.__getitem__)
        visit.page.locator("#attention-table tbody tr").first.wait_for()
        table = rows_of(visit, "#attention-table")
        assert [row[:2] for row in table] == [[str(start + s + 1), signs[s]] for s in range(S)]
        assert visit.text("#cell") == f"At {titles[start + heaviest]}."
        for s, weight in enumerate(weights):
            sign, at, share, times = find("“(.)”, character <N>: weight <N>, <N> times uniform", titles[start + s])
            assert (sign, at) == (signs[s], str(start + s + 1))
            for words, value in zip((share, times, *table[s][2:]), (weight, weight * S) * 2, strict=True):
                agree(words, value)
    (marked,) = visit("() => [...new Set([...document.querySelectorAll('.marker')].map((e) => e.style.top))]")
    R = visit("() => $('large').width")
    assert float(marked.removesuffix("%")) == pytest.approx(100 * (S - 0.5) / R)


def rows_on_the_maps(visit: Visit, torchs: Reference) -> tuple[int, list[int]]:
    """(Where the window begins whose maps are shown, the places whose rows are on them)."""
    start = torchs.starts[visit("() => chosen.index") - 1]
    return start, [place for place, begin in enumerate(torchs.starts) if begin == start]


@pytest.mark.parametrize("index", [7, LAST])
def test_what_is_said_of_all_heads_is_torchs(visit: Visit, model: GPT, index: int) -> None:
    """Catches a mean over rows that aren't shown, the share of another character, and the greatest of another head."""
    torchs = Reference(visit, model)
    visit(f"() => choose({index}, true)")
    start, places = rows_on_the_maps(visit, torchs)
    places = [place for place in places if place > start]  # on the first one there is nothing else to look at
    firsts = torch.stack([torchs.weights[place][..., 0] for place in places]).mean(dim=0)  # (L, nh)
    for button, expected in enumerate(firsts.flatten().tolist()):
        words = visit("(i) => map_buttons[i].words.textContent", button)
        *where, share = find("block <N>, head <N>; first: <P>", words)
        assert where == [str(button // 2 + 1), str(button % 2 + 1)]
        agree(share, expected)
    words = visit.text("#sums")
    (even,) = find("counted alike, it would be <P>", words)
    agree(even, sum(1 / (place - start + 1) for place in places) / len(places))
    share, head, block = find("greatest share is <P>, of head <N> in block <N>", words)
    agree(share, float(firsts.max()))
    assert 2 * (int(block) - 1) + int(head) - 1 == int(firsts.argmax())
    sums = visit(
        """(places) => places.flatMap((place) => [0, 1].flatMap((layer) => {
            const window = reading.window(place), S = place - window.start + 1;
            const weights = [...reading.attention(window, layer, S - 1)];
            return [weights.slice(0, S), weights.slice(S)].map((row) => row.reduce((a, b) => a + b, 0));
        }))""",
        rows_on_the_maps(visit, torchs)[1],
    )
    (error,) = find("the largest error is <N>", words)
    assert float(error) == pytest.approx(float(f"{max(abs(total - 1) for total in sums):.0e}"))


def test_the_words_about_layers_are_torchs(visit: Visit, model: GPT) -> None:
    """Catches agreement with the first guess in place of the last, a share of too many, and rows in another order."""
    torchs = Reference(visit, model)
    likeliest = torch.stack(torchs.guesses[1:-1]).argmax(dim=-1)  # (characters, L + 1)
    shares = (likeliest == likeliest[:, -1:]).double().mean(dim=0).tolist()
    assert len(set(shares)) == 3  # or a mistake might not show
    found = find(
        "final one already: before block 1 <P>, after block 1 <P>, after block 2 <P>.", visit.text("#agreement")
    )
    for words, share in zip(found, shares, strict=True):
        agree(words, share)
    for index in (1, 7, LAST):
        visit(f"() => choose({index}, true)")
        header = visit("() => [...document.querySelectorAll('#lens thead th')].map((cell) => cell.textContent)")
        came = SIGNS[torchs.codes[index]]
        assert header == ["the stream", "likeliest", "2.", "3.", "4.", "5.", f"what came: {came}"]
        names = ["before block 1", "after block 1", "after block 2: its guess"]
        for block, (name, *cells, last) in enumerate(rows_of(visit, "#lens")):
            assert name == names[block]
            top = torchs.guesses[index][block].topk(5)
            assert [cell.split("  ")[0] for cell in cells] == [SIGNS[code] for code in top.indices.tolist()]
            for words, p in zip(cells, top.values.tolist(), strict=True):
                agree(words.split("  ")[1], p)
            agree(last, torchs.came(index, block))


SCHEMES: dict[Any, dict[str, tuple[int, int, int]]] = {
    "light": {"paper": (255, 255, 255), "shade": (8, 48, 107), "more": (213, 94, 0), "less": (0, 114, 178)},
    "dark": {"paper": (30, 35, 43), "shade": (158, 202, 255), "more": (255, 140, 50), "less": (60, 150, 215)},
}


def mixed(scheme: str, name: str, share: float) -> list[float]:
    """A colour between the paper's and a named one."""
    colors, share = SCHEMES[scheme], min(1.0, max(0.0, share))
    return [a + (b - a) * share for a, b in zip(colors["paper"], colors[name], strict=True)]


def diverging(scheme: str, times: float) -> list[float]:
    """Orange for more than uniform, blue for less, full at a factor of 16."""
    return mixed(scheme, "more" if times > 1 else "less", abs(math.log2(times)) / 4)


def backgrounds(visit: Visit, selector: str) -> list[list[int]]:
    """The colours behind words; nothing for what has none."""
    return visit(
        """(at) => [...document.querySelectorAll(at)].map((e) =>
            (e.style.backgroundColor.match(/\\d+/g) ?? []).map(Number))""",
        selector,
    )


def same_colors(found: list[list[int]], expected: list[list[float]], rounding: float = 1.0) -> None:
    """Colours agree, up to their rounding."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=rounding)


def test_colours_are_those_of_torchs_numbers(visit: Visit, model: GPT) -> None:
    """Catches a scale that saturates elsewhere, orange and blue exchanged, a legend of another scale, stale colours."""
    torchs = Reference(visit, model)
    note = "document.body.dataset.scheme = dark.matches ? 'dark' : 'light'"
    visit(f"() => {{ {note}; dark.addEventListener('change', () => ({note})); }}")  # after the page's own listener
    for scheme in ("light", "dark", "light"):
        visit.page.emulate_media(color_scheme=scheme)
        visit.page.wait_for_selector(f"body[data-scheme={scheme}]", state="attached")
        evenly = math.log2(len(VOCABULARY))
        same_colors(
            backgrounds(visit, "#legend .key"), [mixed(scheme, "shade", b / 8) for b in (0, 2, 4, 6, 8, evenly)]
        )
        assert visit.text("#legend").startswith("bits:\n0\n2\n4\n6\n8 and more\nguessing evenly:")
        same_colors(backgrounds(visit, "#times .key"), [diverging(scheme, 4.0**k) for k in (-2, -1, 0, 1, 2)])
        assert visit.text("#times") == "times uniform:\n1/16 and less\n1/4\n1\n4\n16 and more"
        spans = backgrounds(visit, "#text span")
        assert spans[0] == []  # the one that is given
        same_colors(spans[1:], [mixed(scheme, "shade", bits / 8) for bits in torchs.surprises[1:]])
        for index in (7, LAST) if scheme == "light" else (LAST, 7):  # the map that is there is drawn again, too
            visit(f"() => {{ choose({index}, true); map_buttons[2].button.click(); }}")
            guesses = torchs.guesses[index]
            ps = torch.cat((guesses.topk(5).values, guesses[:, torchs.codes[index], None]), dim=1).flatten().tolist()
            same_colors(backgrounds(visit, "#lens td"), [mixed(scheme, "shade", p) for p in ps])
            weights = torchs.weights[index - 1][1, 0]
            looked = backgrounds(visit, "#looked span")
            start, places = rows_on_the_maps(visit, torchs)
            assert [i for i, color in enumerate(looked) if color] == list(range(start, index))
            same_colors(looked[start:index], [mixed(scheme, "shade", w) for w in (weights / weights.max()).tolist()])
            compare_map(visit, torchs, scheme, start, places)


PIXELS = """() => {
    const { width, height } = CANVAS, copy = Object.assign(make("canvas"), { width, height });
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(CANVAS, 0, 0);
    return [...context.getImageData(0, 0, width, height).data];
}"""


def compare_map(visit: Visit, torchs: Reference, scheme: str, start: int, places: list[int]) -> None:
    """The enlarged map, and the small one that it is made of, show these rows of block 2, head 1, and nothing else."""
    R = visit("() => $('large').width")
    assert places[-1] - start + 1 == R
    for canvas in ("$('large')", "map_buttons[2].canvas"):
        pixels = torch.tensor(visit(PIXELS.replace("CANVAS", canvas)))
        pixels = pixels.view(R, R, 4)
        for row in range(R):
            S = row + 1 if start + row in places else 0
            assert (pixels[row, :, 3] > 0).tolist() == [column < S for column in range(R)]
            times = (torchs.weights[start + row][1, 0] * S).tolist() if S else []
            # 256 steps between the ends: half a step is 1/256 of up to 255, and each is rounded.
            same_colors(pixels[row, :S, :3].tolist(), [diverging(scheme, t) for t in times], rounding=2.0)


LIVE = [(1.0, None, None), (0.4, None, 0.85), (1.5, 9, None), (0.8, 4, 0.5), (0.0, None, None), (1.0, 5, None)]
LIVE += [(temperature, 3, None) for temperature in (0.3, 0.65, 0.9, 1.25, 1.9)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), LIVE)
def test_the_words_about_the_draw_are_torchs(
    visit: Visit, model: GPT, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Catches a bar that shows another distribution, what is cut shown as drawn, and a wheel in another order."""
    guess = Reference(visit, model).guesses[-1][-1]  # of the character to be written
    logits = guess.log()
    _, p = draw(logits, Sampling(temperature, True, top_k, top_p), 1)
    _, uncut = draw(logits, Sampling(temperature, True), 1)
    values = {"temperature": temperature, "top_k": top_k or len(VOCABULARY), "top_p": top_p or 1}
    set_to = "([id, value]) => { $(id).value = value; $(id).dispatchEvent(new Event('input')); }"
    for name, value in values.items():
        visit(set_to, [name, value])
    told = [visit.text(f"#{name}-value") for name in values]
    greedy = "0: always the likeliest"
    assert told == [
        f"{temperature:g}" if temperature else greedy, str(top_k or f"{len(VOCABULARY)}: all"), str(top_p or "1: all")
    ]  # fmt: skip
    drawn, token = visit("() => { const { drawn, token } = next_draw(); return [drawn, token]; }")
    order = p.argsort(descending=True)
    assert token == int(order[(p[order].cumsum(dim=0) <= drawn).sum()])
    symbols, words, widths = bars_of(visit, "#candidates")
    five = guess.topk(5).indices.tolist()
    assert symbols == [*(SIGNS[code] for code in five), "others"]
    rows = [[float(q[code]) for q in (p, uncut, guess)] for code in five]
    rows.append([float(q.sum() - q[five].sum()) for q in (p, uncut, guess)])
    outlines = visit(
        "() => [...document.querySelectorAll('#candidates .before')].map((e) => parseFloat(e.style.width))"
    )
    hatched = visit("() => [...document.querySelectorAll('#candidates .bar')].map((e) => e.classList.contains('cut'))")
    for i, (share, whole, plain) in enumerate(rows):
        is_cut = share < 1e-6
        assert hatched[i] == is_cut
        assert words[i].endswith(" ◀ next") == (token == five[i] if i < 5 else token not in five)
        number = words[i].removesuffix(" ◀ next")
        agree(number, share) if number != "cut" else None
        assert (number == "cut") == (is_cut and whole > 1e-6)
        assert widths[i] == pytest.approx(100 * (whole if is_cut else share), abs=1e-2)
        assert outlines[i] == pytest.approx(100 * plain, abs=1e-2)
    choices, kept = find("choice among <N> equally likely .* <N> of 60 characters can be drawn", visit.text("#choices"))
    agree(choices, float(torch.special.entr(p).sum().exp()))
    assert int(kept) == int((p > 0).sum())
    wheel = visit(
        """() => [...$("wheel").querySelectorAll(".symbol")].map((e) =>
            [e.textContent, parseFloat(e.style.left), parseFloat(e.style.width), e.classList.contains("drawn")])"""
    )
    shown = [code for code in order.tolist() if p[code] > 0.002 or code == token]
    left = dict(zip(order.tolist(), (p[order].cumsum(dim=0) - p[order]).tolist(), strict=True))
    for (symbol, at, width, is_drawn), code in zip(wheel, shown, strict=True):
        assert symbol == (SIGNS[code] if p[code] > 0.03 else "")
        assert [at, width] == pytest.approx([100 * left[code], 100 * float(p[code])], abs=1e-2)
        assert is_drawn == (code == token)
    same_colors(
        backgrounds(visit, "#wheel .symbol"), [mixed("light", "shade", 0.15 + 0.85 * float(p[code])) for code in shown]
    )
    label = visit("() => [$('wheel').getAttribute('aria-label'), $('wheel').querySelector('.arrow').style.left]")
    assert label[0] == f"The next random number is {drawn:.4f}. It falls on “{SIGNS[token]}”."
    assert float(label[1].removesuffix("%")) == pytest.approx(100 * drawn)


# -------------------------------------------------------------------------------------------------- safety and honesty

HOSTILE = '</script><img src=x onerror="window.hacked=1"><!--<script>\'&amp;\\u003c{{data}}'
HOSTILE += "\u2028\u2029\x00\x7f\u202eé\u0301𝔘\U0001f600\t"


def test_no_text_becomes_markup(browser: Browser, tmp_path: Path) -> None:
    """Catches a text or a vocabulary that closes its element, starts a script, or fills a placeholder of the frame."""
    vocabulary = CharVocabulary.of(HOSTILE)
    snapshot = save(make_model(vocabulary=vocabulary), tmp_path / "hostile.pt", vocabulary)
    visit = Visit(browser, make_page(snapshot, HOSTILE))
    assert visit("() => [data.text, data.vocabulary]") == [HOSTILE, vocabulary.characters]
    assert visit("() => [window.hacked, document.images.length, document.scripts.length]") == [None, 0, 5]
    assert visit("() => texts.surprise.spans.length") == len(HOSTILE)
    visit.page.click("summary >> nth=0")
    visit.page.fill("#prompt", "<b>&</b>")
    visit.page.click("#read")
    assert "“/”" not in visit.text("#error")  # known
    assert "“b”" in visit.text("#error")  # unknown, and told
    assert visit("() => reading.codes.length") == len(HOSTILE)  # and not read
    assert visit("() => document.querySelector('#surprise-table b, #error b')") is None
    assert visit.complaints == []
    assert len(visit.requests) == 1


def test_the_policy_forbids_everything_else(browser: Browser, page_file: Path) -> None:
    """Catches a policy that the browser doesn't see, or that lets a script, a style or a request through."""
    assert page_file.read_text(encoding="utf-8").index("Content-Security-Policy") < 200  # before all that it forbids
    asked = []
    handler: Any = lambda *request: asked.append(request)  # noqa: E731
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        visit = Visit(browser, page_file)
        done = visit(FORBIDDEN, f"http://127.0.0.1:{server.server_address[1]}/")
        server.shutdown()
    assert done == [None, 0, ["eval", "fetch", "image"]]
    assert asked == []


FORBIDDEN = """async (url) => {
    const script = document.createElement("script"), refused = [];
    script.textContent = "window.ran = 1";
    document.head.append(script);
    document.body.insertAdjacentHTML("beforeend", '<i style="color: red" onclick="window.ran = 1">x</i>');
    document.body.lastChild.click();
    const style = document.body.lastChild.style.length;
    const compile = () => { try { new Function("window.ran = 1")(); } catch { refused.push("eval"); } };
    await new Promise((resolve) => setTimeout(() => resolve(compile()))); // Playwright's own calls may compile
    try { await fetch(url); } catch { refused.push("fetch"); }
    const image = document.createElement("img");
    await new Promise((resolve) => {
        image.onerror = () => resolve(refused.push("image"));
        image.onload = resolve;
        image.src = url + "a.png";
    });
    return [window.ran, style, refused];
}"""


def test_a_page_that_was_altered_says_so(browser: Browser, page_file: Path, tmp_path: Path) -> None:
    """Catches a check that always passes: one flipped weight, and weights that are no numbers."""
    page = page_file.read_text(encoding="utf-8")
    (packed,) = re.findall(r'"ln_f.weight": "([^"]+)"', page)
    for values in (b"\x00\x48", b"\x00\x7e"):  # 8.0, and not a number
        other = base64.b64encode(values + base64.b64decode(packed)[2:]).decode()
        altered = tmp_path / "altered.html"
        altered.write_text(page.replace(packed, other), encoding="utf-8")
        visit = Visit(browser, altered)
        assert visit.text("#check").startswith("✗ Don't trust this page")
    visit = Visit(browser, page_file)
    assert visit.text("#check").startswith("✓ Checked")


def evaluated(model: GPT, path: Path, text_file: Path, **more: Any) -> Path:
    """A snapshot that knows its text."""
    config = DataConfig(path=str(text_file), block_size=model.config.block_size)
    parts = split_codes(VOCABULARY.encode_array(text_file.read_text(encoding="utf-8")), config)
    corpus = Text(VOCABULARY, *parts).fingerprint
    return save(model, path, config={"data_config": dataclasses.asdict(config)}, corpus=corpus, **more)


def test_without_a_text_it_shows_unseen_text_and_no_more(model: GPT, tmp_path: Path) -> None:
    """Catches a passage of the training text, and a page that carries more of the text than it shows."""
    text_file = Path(shutil.copy(SAMPLE_TEXT, tmp_path / "text.txt"))
    text = text_file.read_text(encoding="utf-8")
    page = make_page(evaluated(model, tmp_path / "run.pt", text_file)).read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    values = json.loads(data)
    assert len(values["text"]) == 16
    assert values["text"] in text[int(len(text) * 0.9) :]
    outside = page.replace(data, "")
    strings = [value for key, value in values.items() if isinstance(value, str) and key not in ("text", "vocabulary")]
    assert not any(line in part for line in text.splitlines() if len(line) > 20 for part in [outside, *strings])


def test_a_text_that_is_gone_or_changed_is_told(model: GPT, tmp_path: Path) -> None:
    """Catches a passage of another text that is shown as the run's own, and a traceback where there is none."""
    text_file = Path(shutil.copy(SAMPLE_TEXT, tmp_path / "text.txt"))
    snapshot = evaluated(model, tmp_path / "run.pt", text_file)
    text_file.write_text(text_file.read_text(encoding="utf-8") + "a", encoding="utf-8")
    assert "has changed since); give a text" in error_of("--snapshot", str(snapshot))
    text_file.unlink()
    assert "can't be read" in error_of("--snapshot", str(snapshot))
    assert "doesn't say" in error_of("--snapshot", str(save(model, tmp_path / "bare.pt")))


def test_what_the_user_can_mend_is_one_line(tmp_path: Path) -> None:
    """Catches tracebacks, and weights that float16 would make infinite."""
    model = make_model()
    snapshot = str(save(model, tmp_path / "tiny.pt"))
    assert "unknown characters" in error_of("ROMEO ☃", "--snapshot", snapshot)
    assert "there is no snapshot" in error_of("A", "--snapshot", str(tmp_path / "none.pt"))
    assert "error: " in error_of("A", "--snapshot", snapshot, "--out", str(tmp_path / "no" / "folder.html"))
    with torch.no_grad():
        model.ln_f.weight[0] = 1e6
    large = str(save(model, tmp_path / "large.pt"))
    assert "--float32" in error_of("A", "--snapshot", large, "--out", str(tmp_path / "page.html"))
    assert make_page(Path(large), "A", "--float32").exists()


def test_exact_weights_are_exact(browser: Browser, tmp_path: Path) -> None:
    """Catches --float32 that rounds, and bytes in another order."""
    model = make_model()
    with torch.no_grad():
        model.wpe.weight.mul_(1 / 3)  # no longer numbers of 16 bits
    visit = Visit(browser, make_page(save(model, tmp_path / "exact.pt"), "A", "--float32"))
    assert visit("() => [...model.part.wpe.weight]") == model.wpe.weight.flatten().tolist()
    assert visit.text("#check").startswith("✓ Checked")


# ------------------------------------------------------------------------------------------------ what a reader does


def test_pointer_and_keys_choose_one_character_for_all_parts(visit: Visit) -> None:
    """Catches parts that show different characters, keys that do nothing, and a pin that can't be released."""
    spans = visit.page.locator("#text span")
    spans.nth(5).hover()
    assert visit.text("#chosen").startswith("Character 6 of 40: ")
    bits = visit("() => bits(reading.came(5))")
    assert f"{bits:.2f} bits" in visit.text("#chosen")
    shown = [visit(f"() => document.querySelector('#{name} .chosen').index") for name in ("text", "looked", "written")]
    assert shown == [5, 5, 5]
    assert visit("() => document.querySelector('#looked .stand').index") == 4
    assert visit.page.locator("#lens tbody tr").count() == 3  # before the first block, and after each of the two

    spans.nth(9).click()
    assert "Character 10 of 40, pinned" in visit.text("#chosen")
    spans.nth(12).hover()
    assert "Character 10 of 40, pinned" in visit.text("#chosen")
    visit.page.keyboard.press("Escape")
    spans.nth(13).hover()
    assert visit.text("#chosen").startswith("Character 14 of 40: ")
    spans.nth(9).click()
    spans.nth(9).click()
    assert visit.text("#chosen").startswith("Character 10 of 40: ")

    visit.page.mouse.move(0, 0)
    visit.page.focus("#looked")
    for key, expected in (("ArrowRight", 11), ("ArrowLeft", 10), ("Home", 1), ("ArrowLeft", 1), ("End", 40)):
        visit.page.keyboard.press(key)
        assert visit.text("#chosen").startswith(f"Character {expected} of 40: ")
    assert "is given" in visit("() => (choose(0, false), $('chosen').textContent)")
    visit.page.keyboard.press("Enter")
    assert "pinned" in visit.text("#chosen")


def test_a_map_is_enlarged_and_drawn_on_the_text(visit: Visit) -> None:
    """Catches a click that enlarges another head, rows that don't add up, and a map that sees the future."""
    visit.page.locator("#text span").nth(12).click()
    visit.page.locator("#maps button").nth(3).click()
    assert visit.text("#head-title") == "Enlarged: block 2, head 2"
    assert "head 2 of block 2 looked at" in visit.text("#looking")
    weights = visit("() => [...reading.attention(reading.window(11), 1, 11)].slice(12)")
    assert sum(weights) == pytest.approx(1, abs=1e-5)
    heaviest = max(range(12), key=weights.__getitem__)
    assert f"character {heaviest + 1}: weight {weights[heaviest]:.3g}"[:20] in visit.text("#cell")
    visit.page.locator("#looked span").nth(2).hover()
    assert f"character 3: weight {weights[2]:.3g}"[:20] in visit.text("#cell")
    visit.page.locator("#looked span").nth(20).hover()
    assert "nobody sees what comes later" in visit.text("#cell")
    R = visit("() => $('large').width")
    pixels = visit("(R) => [...$('large').getContext('2d').getImageData(0, 0, R, R).data]", R)
    assert [alpha > 0 for alpha in pixels[3::4]] == [column <= row for row in range(R) for column in range(R)]
    visit.page.locator("#attention details summary").click()
    visit.page.locator("#attention-table tbody tr").first.wait_for()  # the browser says that it was opened a bit later
    assert visit.page.locator("#attention-table tbody tr").count() == 12


@pytest.mark.parametrize("has_touch", [False, True])
def test_the_enlarged_map_stays_under_the_pointer(browser: Browser, page_file: Path, has_touch: bool) -> None:
    """Catches a map that becomes another window's under the pointer, rows of two windows, and a tap that is ignored."""
    visit = Visit(browser, page_file, has_touch=has_touch)
    visit(f"() => choose({LAST}, false)")
    start, R = visit("() => [here().window.start, $('large').width]")
    assert (start, R) == (23, 16)
    first = start + 16 // 2 - 1  # the places before are in the window before as well, and count there
    visit.page.locator("#large").scroll_into_view_if_needed()
    box = visit.page.locator("#large").bounding_box()
    assert box
    for row in (15, 9, 3, 0, 3, 8, 6, 7, 2, 14):
        x, y = box["x"] + (row + 0.5) / R * box["width"], box["y"] + (row + 0.5) / R * box["height"]
        if has_touch:
            visit.page.keyboard.press("Escape")
            visit.page.touchscreen.tap(x, y)
        else:
            visit.page.mouse.move(x, y)
        index = min(max(first, start + row) + 1, 39)  # of the rows that aren't there, the first that is
        assert visit.text("#chosen").startswith(f"Character {index + 1} of 40{', pinned' * has_touch}: ")
        assert visit("() => [here().window.start, $('large').width]") == [start, R]
        marked = visit("() => document.querySelector('.large .marker').style.top")
        assert float(marked.removesuffix("%")) == pytest.approx(100 * (index - 1 - start + 0.5) / R)
        if not has_touch:
            at = "later" if row > index - 1 - start else f"character {start + row + 1}: weight"
            assert at in visit.text("#cell")
    assert "The top of the map is empty" in visit.text("#sums")
    visit(f"() => choose({first + 1}, false)")
    visit.page.focus("#large")
    visit.page.keyboard.press("Enter")
    assert f"Character {first + 2} of 40, pinned" in visit.text("#chosen")
    visit.page.keyboard.press("ArrowUp")  # a key may turn over to the map before
    assert visit("() => [chosen.index, here().window.start]") == [first, 14]
    assert visit.complaints == []


def test_steps_back_and_forth(visit: Visit) -> None:
    """Catches a random number that is used twice, a cache that keeps what was taken back, also beyond the context."""
    visit.page.fill("#prompt", "MIRA")
    visit.page.click("#read")
    visit.page.locator("#written span").nth(3).wait_for()
    press = "([id, times]) => { for (let i = 0; i < times; i++) $(id).click(); }"
    visit.page.click("#step")
    visit(press, ["step", 29])
    text = visit("() => reading.codes")
    assert len(text) == 34
    visit.page.click("#back")
    visit(press, ["back", 29])
    assert visit.page.locator("#back").is_disabled()
    for _ in range(30):
        announced = visit("() => next_draw().token")
        visit(press, ["step", 1])
        assert visit("() => reading.codes.at(-1)") == announced
    assert visit("() => reading.codes") == text
    assert visit.page.locator("#text span").count() == visit.page.locator("#written .new").count() + 4 == 34
    visit(press, ["back", 30])
    visit.page.fill("#seed", "2")
    visit(press, ["step", 30])
    assert visit("() => reading.codes") != text


def test_writing_is_the_draws_and_can_be_stopped(visit: Visit) -> None:
    """Catches a text that is not what step after step gives, and a button that doesn't stop."""
    visit.page.click("#write")
    visit.page.wait_for_selector("#step:not([disabled])")
    written = visit("() => reading.codes")
    assert len(written) == 540
    again = visit(
        """async (prompt) => {
            await read(prompt);
            for (let i = 0; i < 500; i++) step();
            return reading.codes;
        }""",
        written[:40],
    )
    assert again == written
    stopped = visit(
        """async (prompt) => {
            await read(prompt);
            const done = write();
            await write();
            await done;
            return reading.codes.length;
        }""",
        written[:40],
    )
    assert 40 < stopped < 540
    assert "characters per second" in visit.text("#speed")


def test_controls_move_the_bars_in_place(visit: Visit) -> None:
    """Catches bars that change places, a cut that isn't shown, and an entropy in the wrong unit."""
    symbols = "() => [...document.querySelectorAll('#candidates .symbol')].map((e) => e.textContent)"
    before = visit(symbols)
    set_to = "([id, value]) => { $(id).value = value; $(id).dispatchEvent(new Event('input')); }"
    for value in (0.2, 2, 1):
        visit(set_to, ["temperature", value])
        assert visit(symbols) == before
    p = torch.tensor(visit("() => [...reading.logits(reading.codes.length).at(-1)]")).softmax(dim=0)
    choices = float((-(p * p.log()).sum()).exp())
    assert f"a choice among {choices:.{1 if choices < 10 else 0}f} equally likely" in visit.text("#choices")
    visit(set_to, ["top_k", 2])
    cut = visit("() => [...document.querySelectorAll('#candidates .bar')].map((e) => e.classList.contains('cut'))")
    assert cut == [False, False, True, True, True, True]
    assert "2 of" in visit.text("#choices")
    visit(set_to, ["temperature", 0])
    assert "1.0 equally likely" in visit.text("#choices")
    widths = visit("() => [...document.querySelectorAll('#wheel .drawn')].map((e) => e.style.width)")
    assert widths == ["100%"]


def test_what_is_cut_is_nothing(visit: Visit) -> None:
    """Catches 1e-14 % for the other characters where top-k has cut all of them: 1 minus the sum of the five."""
    shown = visit(
        """() => [2, 3, 4, 5].flatMap((top_k) => Array.from({ length: 40 }, (_, i) => {
            Object.assign($("top_k"), { value: top_k });
            Object.assign($("temperature"), { value: (i + 1) / 20 }).dispatchEvent(new Event("input"));
            return $("candidates").querySelector(".bars").lastChild.textContent.replace(" ◀ next", "");
        }))"""
    )
    assert shown.count("cut") == len(shown) - shown.count("0 %")  # a low temperature leaves nothing to be cut
    assert shown.count("cut") > 120


def test_nothing_goes_on_from_a_text_that_is_being_read(visit: Visit) -> None:
    """Catches a key, a slider or a button that meets half a text: errors, or characters in the middle of it."""
    codes = tokens(60, seed=4)
    disabled = visit(
        """async (codes) => {
            const done = read(codes);
            document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
            $("temperature").dispatchEvent(new Event("input"));
            const disabled = ["write", "step", "back"].map((id) => $(id).disabled);
            for (const id of ["write", "step", "back"]) $(id).click();
            await done;
            return disabled;
        }""",
        codes,
    )
    assert disabled == [True, True, True]
    assert visit("() => reading.codes") == codes
    assert visit("() => ['write', 'step', 'back'].map((id) => $(id).disabled)") == [False, False, True]


COLORS = """(i) => {
    const canvas = picture_of(document.querySelectorAll(".picture")[i]), copy = make("canvas");
    const { width, height } = Object.assign(copy, { width: canvas.width, height: canvas.height });
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    return new Set(new Uint32Array(context.getImageData(0, 0, width, height).data.buffer)).size;
}"""


def test_pictures_can_be_saved(visit: Visit, tmp_path: Path) -> None:
    """Catches buttons that save nothing: each of them gives a PNG with something on it."""
    buttons = visit.page.locator(".save:visible")
    assert buttons.count() == 7  # there is no curve
    for i in range(7):
        with visit.page.expect_download() as download:
            buttons.nth(i).click()
        content = Path(download.value.path()).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 1000
        assert visit(COLORS, i) > 10  # words alone have so many, by their smooth edges
        assert download.value.suggested_filename.endswith(".png")


def test_phones_and_dark_pages_can_be_read(browser: Browser, page_file: Path) -> None:
    """Catches a page wider than a telephone, and colours below WCAG's contrast (4.5 for text, 3 for controls)."""
    for scheme in ("light", "dark"):
        visit = Visit(browser, page_file, viewport={"width": 390, "height": 800}, color_scheme=scheme)
        assert visit("() => document.documentElement.scrollWidth") == 390
        ratios = visit(CONTRASTS)
        assert min(ratios[0]) >= 4.5
        assert min(ratios[1]) >= 3
        assert min(ratios[2]) >= 4.5


CONTRASTS = """() => { // of texts, of controls, and of what is painted, with what they stand on
    const light = (rgb) => rgb.map((v) => (v <= 10 ? v / 3294 : ((v / 255 + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim().match(/\\w\\w/g).map((hex) => parseInt(hex, 16));
    const on_paper = (name) => Math.min(...["--paper", "--panel"].map((paper) => contrast(color(name), color(paper))));
    const span = make("span", document.body), numbers = (text) => text.match(/\\d+/g).map(Number), painted = [];
    for (let i = 0; i <= 40; i++) {
        for (const rgb of [shade(i / 40), diverging(2 ** ((i - 20) / 5))]) {
            paint(span, rgb);
            painted.push(contrast(rgb, numbers(getComputedStyle(span).color)));
        }
    }
    const texts = ["--ink", "--quiet", "--accent", "--more", "--less"].map(on_paper);
    return [texts, ["--line", "--bar"].map(on_paper), painted];
}"""


def test_keys_reach_everything_soon(browser: Browser, page_file: Path) -> None:
    """Catches 40 stops on the way to a part, and a place that scrolls and that keys can't reach on a telephone."""
    visit = Visit(browser, page_file, viewport={"width": 390, "height": 800})
    press, focused = visit.page.keyboard.press, "document.activeElement"
    for number, part in enumerate(("surprise", "attention", "layers", "live", "learned"), start=1):
        for address in ("about:blank", page_file.as_uri()):  # so that each begins at the top
            visit.page.goto(address)
        visit.page.wait_for_selector(SETTLED, state="attached")
        for _ in range(number):
            press("Tab")
        assert visit(f"() => {focused}.textContent.startsWith('{number}. ')")
        press("Enter")
        if part != "learned":  # without a curve, nothing there takes the focus
            press("Tab")
            assert visit(f"() => {focused}.closest('section').id") == part
    visit.page.focus(".skip")
    assert visit("() => document.querySelector('.skip').getBoundingClientRect().left") > 0
    press("Enter")
    assert visit(f"() => {focused}.id") == "large"
    assert visit("() => document.querySelector('.skip').getBoundingClientRect().right") < 0
    visit("() => document.querySelectorAll('details').forEach((details) => (details.open = true))")
    visit.page.locator("#attention-table tr >> nth=3").wait_for()
    unreachable = visit(
        """() => [...document.querySelectorAll("body *")].filter((e) => {
            const { overflowX, overflowY } = getComputedStyle(e), rolls = (way) => ["auto", "scroll"].includes(way);
            const is_wide = rolls(overflowX) && e.scrollWidth > e.clientWidth;
            const is_high = rolls(overflowY) && e.scrollHeight > e.clientHeight;
            return (is_wide || is_high) && e.tabIndex < 0 && !e.querySelector("button");
        }).map((e) => e.id)"""
    )
    assert unreachable == []
    unnamed = "() => [...document.querySelectorAll('[tabindex]')].filter((e) => !e.ariaLabel).map((e) => e.id)"
    assert visit(unnamed) == []


def test_a_finger_chooses_and_releases(browser: Browser, page_file: Path) -> None:
    """Catches a page that only a mouse can use."""
    visit = Visit(browser, page_file, viewport={"width": 390, "height": 800}, has_touch=True)
    visit.page.locator("#text span").nth(6).tap()
    assert "Character 7 of 40, pinned" in visit.text("#chosen")
    visit.page.locator("#text span").nth(6).tap()
    assert "Character 7 of 40: " in visit.text("#chosen")


# ------------------------------------------------------------------------------------ large models, curves, the frame


WORDS = "() => map_buttons.map((map) => map.words.textContent)"


def test_a_large_model_is_computed_beforehand(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a page with more weights than a browser can take, and figures other than the small page's."""
    snapshot = save(make_model(), tmp_path / "model.pt")
    text = VOCABULARY.decode(torch.tensor(tokens(16, seed=2)))
    small = Visit(browser, make_page(snapshot, text))
    monkeypatch.setattr(making, "LIVE_PARAMETERS", 1000)
    assert "at most 16" in error_of(text + text, "--snapshot", str(snapshot))
    file = make_page(snapshot, text)
    large = Visit(browser, file)
    assert large("() => data.weights") is None
    assert "too large" in large.text("#check")
    assert "at most 10 million" in large.text("#live")
    assert large.text("#source") == "given to look.py"
    for index in (1, 8, 15):
        for visit in (small, large):
            visit(f"() => choose({index}, true)")
            visit("() => map_buttons[2].button.click()")
        for place in ("#chosen", "#guess", "#lens", "#looking", "#agreement"):
            assert small.text(place) == large.text(place)
        weights = [visit("() => [...weights_of(1, 0)]") for visit in (small, large)]
        assert weights[0] == pytest.approx(weights[1], abs=1e-3)
        words, pixels = (
            [visit(of) for visit in (small, large)] for of in (WORDS, PIXELS.replace("CANVAS", "$('large')"))
        )
        assert words[0] == words[1]
        assert pixels[0] == pytest.approx(pixels[1], abs=4)  # weights of 16 bits
    assert large.complaints == small.complaints == []


def test_a_real_run_from_the_command_to_the_curve(browser: Browser, tmp_path: Path) -> None:
    """Catches events that aren't found, samples under the wrong step, and a slider that does nothing."""
    run = train(tmp_path / "run")
    assert run.returncode == 0, run.stderr
    out = tmp_path / "page.html"
    snapshot = tmp_path / "run" / "gpt_snapshot.pt"
    command = run_program(sys.executable, PROJECT / "look.py", "--snapshot", snapshot, "--out", out, cwd=tmp_path)
    assert command.returncode == 0, command.stderr
    assert (command.stdout, command.stderr[:8]) == ("", "written:")
    visit = Visit(browser, out)
    assert visit("() => data.learned.evaluation.map(([step]) => step)") == [10, 20]
    assert [step for step, _ in visit("() => data.learned.samples")] == [10, 20]
    assert "at step 20: loss" in visit.text("#moment-value")
    last = visit.text("#sample")
    visit.page.focus("#moment")
    visit.page.keyboard.press("ArrowLeft")
    assert "at step 10: loss" in visit.text("#moment-value")
    assert visit.text("#sample") != last
    loss = visit("() => data.learned.evaluation[0][1]")
    assert f"step 10: evaluation loss {loss:.4f}" in run.stderr
    visit.page.locator("#learned summary").click()
    assert visit.page.locator("#losses tbody tr").count() == 2
    assert visit.complaints == []


CALLS = """() => {
    const calls = [], prototype = CanvasRenderingContext2D.prototype;
    for (const name of ["fillText", "lineTo", "arc", "stroke"]) {
        const real = prototype[name];
        prototype[name] = function (...values) {
            calls.push([name, ...values]);
            return real.apply(this, values);
        };
    }
    draw_learned();
    return calls;
}"""


def test_the_curve_is_that_of_the_events(browser: Browser, tmp_path: Path) -> None:
    """Catches bits for nats, a loss at another step, a curve beside its axes, and a loss that was no number."""
    snapshot = save(make_model(), tmp_path / "gpt.pt", step=250)
    training = [(step, 4.0 * 0.99**step) for step in range(0, 400, 7)]
    evaluation = [(100, 2.5), (200, 1.75), (300, 1.5), (400, 1.625)]
    with SummaryWriter(str(tmp_path)) as writer:
        for tag, losses in (
            ("train/loss", [*training, (399, math.nan)]),
            ("eval/loss", [*evaluation, (401, math.inf)]),
        ):
            for step, loss in losses:
                writer.add_scalar(tag, loss, step)
        for step, _ in evaluation:
            writer.add_text("samples", f"    written at {step}", step)
    visit = Visit(browser, make_page(snapshot, "MIRA"))
    assert visit.text("#sample") == "written at 200"  # the last one that the snapshot's weights can have written
    for i, (step, loss) in enumerate(evaluation):
        visit("(i) => { $('moment').value = i; $('moment').dispatchEvent(new Event('input')); }", i)
        at, nats, bits = find("^at step <N>: loss <N> nats, or <N> bits$", visit.text("#moment-value"))
        assert (int(at), visit.text("#sample")) == (step, f"written at {step}")
        agree(nats, loss)
        agree(bits, loss / math.log(2))
    rows = rows_of(visit, "#losses")
    assert [int(row[0]) for row in rows] == [step for step, _ in evaluation]
    for (_, nats, bits), (_, loss) in zip(rows, evaluation, strict=True):
        agree(nats, loss)
        agree(bits, loss / math.log(2))
    label = visit("() => $('curve').getAttribute('aria-label')")
    assert label == "Losses over 400 steps. The last evaluation loss is 1.625 nats."

    calls = visit(CALLS)  # in pixels; the numbers beside the axes say what they mean
    words = {str(text): (x, y) for name, text, x, y, *_ in (call for call in calls if call[0] == "fillText")}
    (left, _), (right, _) = words["100"], words["400"]
    (_, high), (_, low) = words["4"], words["1"]

    def meaning(x: float, y: float) -> tuple[float, float]:
        """(Step, loss) at a pixel; a number stands 4 pixels below its place."""
        return 100 + 300 * (x - left) / (right - left), 1 + 3 * (y + 4 - low) / (high - low)

    lines, line = [], list[Any]()
    for name, *values in calls:
        if name == "lineTo":
            line.append(meaning(*values))
        if name == "stroke":
            lines.append(line)
            line = []
    _, guess, *curves = lines
    assert guess == [pytest.approx((step, math.log(len(VOCABULARY))), abs=1e-3) for step in (0, 400)]
    for curve, expected in zip(curves, (training, evaluation), strict=True):
        assert curve == [pytest.approx(point, abs=1e-3) for point in expected]
    dots = [(*meaning(x, y), radius) for name, x, y, radius, *_ in (call for call in calls if call[0] == "arc")]
    assert dots == [pytest.approx((*point, 8 if point[0] == 400 else 4), abs=1e-3) for point in evaluation]


def test_the_units_in_the_text_are_right() -> None:
    """Catches nats and bits exchanged where the page explains them."""
    frame = " ".join((PROJECT / "page" / "frame.html").read_text(encoding="utf-8").split())
    assert f"1 nat is {1 / math.log(2):.2f} bits" in frame
    assert "−log<sub>2</sub> of the probability" in frame
    assert [-math.log2(p) for p in (1 / 2, 1 / 4)] == [1, 2]
    assert "1 bit if that was a half, 2 bits if it was a quarter" in frame


def test_each_part_says_where_it_is_in_the_code() -> None:
    """Catches a file, a function or a chapter that was renamed."""
    frame = (PROJECT / "page" / "frame.html").read_text(encoding="utf-8")
    places = re.findall(r'<p class="place">(.*?)</p>', frame, flags=re.DOTALL)
    assert len(places) == frame.count("<section") == 5
    for place in places:
        names = re.findall(r"<code>(.*?)</code>", place)
        files = [name for name in names if name.endswith((".py", ".js"))]
        sources = "".join((PROJECT / name).read_text(encoding="utf-8") for name in files)
        for name in set(names) - set(files):
            for part in name.split("."):
                assert re.search(rf"^ *(class|def) {part}\b", sources, flags=re.MULTILINE), name
        (chapters,) = re.findall(r"TUTORIAL,\s+chapters?\s+([\d and]+)", place)
        tutorial = (PROJECT / "TUTORIAL.md").read_text(encoding="utf-8")
        assert all(f"\n## {chapter}. " in tutorial for chapter in re.findall(r"\d+", chapters))
