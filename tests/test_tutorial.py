"""The documents say what is there: excerpts, links, names, keys, commands, and the direction of the figures."""

import ast
import itertools
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from conftest import HANGS, PROJECT, SAMPLE_TEXT, TINY_SIZES
from hydra.errors import HydraException
from omegaconf import OmegaConf
from warm import Warm

import export
import generate
import look
import main  # noqa: F401 (registers the schema and the recipes with Hydra)
from config import Config

DOCUMENTS = {
    name: (PROJECT / name).read_text(encoding="utf-8")
    for name in (
        *("README.md", "TUTORIAL.md", "CONTRIBUTING.md", "CHANGELOG.md"),
        *sorted(path.relative_to(PROJECT).as_posix() for path in (PROJECT / "docs").glob("*.md")),
    )
}
MISTAKES = sorted(path.stem for path in (PROJECT / "docs" / "mistakes").glob("[!_]*.py"))
GROUPS = ("data_config", "gpt_config", "optimizer_config", "trainer_config")

# Named by the documents, but made by a run or brought by the reader.
MADE_LATER = {"data/input.txt", "my_text.txt", "config.yaml", "main.log", "runs/"}


def without_code(text: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def without_solutions(text: str) -> str:
    """A document without what is folded away, line for line: the solutions change the code, and don't quote it."""
    return re.sub(r"^<details>.*?^</details>$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def chapters() -> dict[int, str]:
    """TUTORIAL.md's numbered chapters, without solutions."""
    parts = re.split(r"^## ", without_solutions(DOCUMENTS["TUTORIAL.md"]), flags=re.MULTILINE)[1:]
    return {int(part.split(".")[0]): part for part in parts if re.match(r"\d+\. ", part)}


def excerpts() -> list[tuple[int, str, str]]:
    """All of TUTORIAL.md's excerpts: (line in it, file, code)."""
    text = without_solutions(DOCUMENTS["TUTORIAL.md"])
    matches = re.finditer(r"From `([\w/.]+)`:\n\n```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text[: match.start(2)].count("\n") + 1, match[1], match[2]) for match in matches]


def pieces(code: str) -> list[list[str]]:
    """The lines between an excerpt's lines of dots, without blank lines around them."""
    parts = re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE)
    return [part.strip("\n").splitlines() for part in parts if part.strip()]


def scopes(source: str, file: str) -> list[str]:
    """For each line of a file, the innermost function or class that it belongs to, "GPT.forward" for example."""
    names = [""] * source.count("\n")
    if file.endswith(".js"):  # functions that stand at the margin, and end with a brace there
        for match in re.finditer(r"^function (\w+)\(.*?^}$", source, flags=re.MULTILINE | re.DOTALL):
            first = source[: match.start()].count("\n")
            names[first : first + match[0].count("\n") + 1] = [match[1]] * (match[0].count("\n") + 1)
        return names

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                for number in range(first, (child.end_lineno or first) + 1):
                    names[number - 1] = name
            visit(child, name)

    visit(ast.parse(source), "")
    return names


def slug(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def commands(document: str) -> list[str]:
    """The commands in a document's fenced blocks, one by one, without comments."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENTS[document], flags=re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if language in ("", "bash", "sh", "console")]
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"&&|\|", line)]
    return [part for part in parts if re.match(r"(python3?|torchrun|pytest|tensorboard|pip) ", part)]


COMMANDS = [(document, command) for document in DOCUMENTS for command in commands(document)]


# ------------------------------------------------------------------------------------ excerpts and names


@pytest.mark.parametrize(
    ("line", "file", "code"), [pytest.param(*e, id=f"line-{e[0]}-{Path(e[1]).stem}") for e in excerpts()]
)
def test_excerpts_are_verbatim(line: int, file: str, code: str) -> None:
    """Catches code in the tutorial that is no longer the project's, or that stands under another function's name.

    An excerpt begins with a `def`, a `class` or a decorator. Its pieces are in the file, each in one go, in this order,
    and in the function or class that the excerpt shows them in. What is left out, the end included, has its dots.
    """
    source = (PROJECT / file).read_text(encoding="utf-8")
    lines, scope_of = source.splitlines(), scopes(source, file)
    keywords = "def|class" if file.endswith(".py") else "function"
    assert re.match(rf" *({keywords}|@)", code), f"TUTORIAL.md:{line}: an excerpt must begin with {keywords} or @"
    shown: list[tuple[int, str]] = []  # (indentation, name) of the class and of the function in it that is being quoted
    end = 0  # lines of the file up to the end of the last piece
    for piece in pieces(code):
        missing = [text for text in piece if text not in lines]
        starts = [i for i in range(end, len(lines)) if lines[i : i + len(piece)] == piece]
        assert starts, f"TUTORIAL.md:{line}: {file} has no such piece, {piece[0]!r}, there; unknown lines: {missing}"
        left_out = any(text.strip() for text in lines[end : starts[0]])
        assert left_out or not shown, f"TUTORIAL.md:{line}: the dots before {piece[0]!r} stand for nothing"
        for number, text in enumerate(piece, start=starts[0]):
            if match := re.match(rf"( *)(?:{keywords}) (\w+)", text):
                shown = [(indent, name) for indent, name in shown if indent < len(match[1])]
                shown.append((len(match[1]), match[2]))
            if text.strip() and not text.lstrip().startswith("@"):
                scope = ".".join(name for _, name in shown)
                assert scope_of[number] == scope, f"TUTORIAL.md:{line}: {text!r} is not in {scope} of {file}"
        end = starts[0] + len(piece)
    scope = ".".join(name for _, name in shown)
    is_whole = not any(name == scope or name.startswith(f"{scope}.") for name in scope_of[end:])
    has_dots = code.rstrip().endswith("...")
    assert is_whole != has_dots, f"TUTORIAL.md:{line}: the excerpt of {scope} must say with dots that it is cut off"


def test_every_block_of_code_is_an_excerpt() -> None:
    """Catches code that the test above doesn't see, and chapters with more than 40 lines of it."""
    text = without_solutions(DOCUMENTS["TUTORIAL.md"])
    assert text.count("```python") + text.count("```js") == len(excerpts())
    assert list(chapters()) == list(range(13))
    for number, chapter in chapters().items():
        blocks = re.findall(r"^```(?:python|js)\n(.*?)^```$", chapter, flags=re.MULTILINE | re.DOTALL)
        longest = {0: 60, 1: 110}.get(number, 40)  # these two show the whole before its parts
        assert 1 <= sum(block.count("\n") for block in blocks) <= longest, chapter.splitlines()[0]
        parts = ["**The classic mistake**", "**Exercise.**", "**Read on:**", "\npytest tests/", "docs/mistakes/"]
        if number == 12:  # reads the model once more: nothing new to get wrong, and no function to write
            parts = ["\npython look.py\n", "\npytest tests/", "**Read on:**"]
        for part in parts if number >= 2 else ["\npython "]:
            assert part in chapter, f"{part} is missing in chapter {chapter.splitlines()[0]}"


def test_chapters_are_called_by_their_numbers() -> None:
    """Catches a number from before the chapters were renumbered."""
    for name, number, anchor in re.findall(r"\[([Cc]hapter )?(\d+)[^\]]*\]\(#(\d+)-", DOCUMENTS["TUTORIAL.md"]):
        assert number == anchor, f"{name}{number} leads to {anchor}"
    for mistake in MISTAKES:
        docstring = ast.get_docstring(ast.parse((PROJECT / f"docs/mistakes/{mistake}.py").read_text(encoding="utf-8")))
        (number,) = re.findall(r"TUTORIAL\.md, chapter (\d+)", docstring or "")
        assert f"python docs/mistakes/{mistake}.py\n" in chapters()[int(number)], mistake


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_file_names_exist(document: str) -> None:
    """Catches links and names of files that were renamed or never written. Links start from the document's folder."""
    text, folder = without_code(DOCUMENTS[document]), (PROJECT / document).parent
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = folder / path if path else PROJECT / document
        if not file.exists():
            missing.append(target)
        elif anchor:
            titles = re.findall(r"^#+ (.*)$", without_code(file.read_text(encoding="utf-8")), flags=re.MULTILINE)
            if anchor not in map(slug, titles):
                missing.append(target)
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|md|yaml|yml|toml|txt|png|svg|gif)|/))`", text):
        if name not in MADE_LATER and not (PROJECT / name).exists() and not (folder / name).exists():
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_exist(document: str) -> None:
    """Catches tests that were renamed: in commands with -k, every word must be part of a test's name in that file."""
    for command in commands(document):
        if not command.startswith("pytest "):
            continue
        arguments = shlex.split(command)
        file = next(PROJECT / argument for argument in arguments if argument.startswith("tests/"))
        names = re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        words = re.findall(r"\w+", arguments[arguments.index("-k") + 1]) if "-k" in arguments else []
        for word in set(words) - {"or", "and", "not"}:
            assert any(word in name for name in names), f"{document}: {command}: no test is called {word}"
    for name in re.findall(r"`(test_\w+)`", DOCUMENTS[document]):
        assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in (PROJECT / "tests").glob("*.py"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_configuration_keys_exist(document: str) -> None:
    """Catches keys that the configuration doesn't have."""
    configuration = OmegaConf.load(PROJECT / "gpt2_train_cfg.yaml")
    keys = set(re.findall(rf"\b({'|'.join(GROUPS)})\.(\w+)", DOCUMENTS[document]))
    assert keys or document not in ("README.md", "TUTORIAL.md", "docs/configuration.md")
    assert [f"{group}.{key}" for group, key in keys if key not in configuration[group]] == []


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=[command[:60] for _, command in COMMANDS])
def test_commands_are_valid(document: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches files that don't exist, and settings that the program would refuse. Nothing is trained."""
    arguments = shlex.split(command)
    script = next((argument for argument in arguments if argument.endswith(".py")), None)
    for file in [script, *(a for a in arguments if re.fullmatch(r"(requirements|tests/).*", a))]:
        assert file is None or (PROJECT / file).exists(), f"{document}: {command}: there is no {file}"
    if script is None:
        return
    arguments = arguments[arguments.index(script) + 1 :]
    if script == "generate.py":
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        generate.parse_arguments()  # leaves where it knows an option not
    if script == "look.py":
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        look.parse_arguments()
    if script == "export.py":
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        export.parse_arguments()
    if script == "main.py":
        overrides = [argument for argument in arguments if "=" in argument]
        sweeps = [[o] for o in overrides]
        if {"-m", "--multirun"} & set(arguments):
            sweeps = [[f"{o.split('=')[0]}={value}" for value in o.split("=")[1].split(",")] for o in overrides]
        for choice in itertools.product(*sweeps):
            check_configuration(list(choice))


@pytest.mark.skipif(sys.platform != "linux", reason="its processes are forks")
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """Catches a command that doesn't do what the README shows. Each runs as it is written, in their order.

    Only the numbers are smaller, in a copy of the project: its configuration file is that of a run of seconds.
    """
    copy = tmp_path / "project"
    shutil.copytree(PROJECT, copy, ignore=shutil.ignore_patterns(".*", "runs", "input.txt", "tests", "*venv*"))
    for name in ("data/input.txt", "my_text.txt"):
        shutil.copy(SAMPLE_TEXT, copy / name)
    configuration = OmegaConf.load(copy / "gpt2_train_cfg.yaml")
    OmegaConf.save(OmegaConf.merge(configuration, OmegaConf.from_dotlist(TINY_SIZES)), copy / "gpt2_train_cfg.yaml")
    for recipe in (copy / "recipes").glob("*.yaml"):  # of their sizes, none; what else they set stays
        values: Any = OmegaConf.load(recipe)
        for group in ("data_config", "gpt_config"):
            values.pop(group, None)
        short = {"trainer_config": {"batch_size": 12, "max_steps": 3, "compile": False}}
        OmegaConf.save(OmegaConf.merge(values, short), recipe)
    lines = [
        line
        for block in re.findall(r"^```\n(.*?)^```$", DOCUMENTS["README.md"], flags=re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if re.search(r"\b(main|generate|look|report|export)\.py\b", line) and not re.search("HOST|per_node=gpu", line)
    ]
    assert len(lines) >= 10
    server = Warm(copy)
    for line in lines:
        run = server.run_in_shell(line.removeprefix("pip install -r requirements.txt && "), copy, HANGS)
        assert run.returncode == 0, f"{line}\n{run.stderr}"
        assert ("finished" in run.stderr) == ("main.py" in line)
        assert bool(run.stdout) == ("generate.py" in line or "report.py" in line)
    server.close()


def check_configuration(overrides: list[str]) -> None:
    """Fail where the program would refuse a configuration."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(PROJECT)):
        try:
            values = OmegaConf.to_container(hydra.compose("gpt2_train_cfg", overrides), resolve=True)
            OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
        except (HydraException, ValueError) as error:
            pytest.fail(f"{overrides}: {error}")


# ------------------------------------------------------------------------------------ the mistakes


def run_quick(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> dict[str, list[float]]:
    """Run a script of docs/mistakes in this process: its table, label -> figures (words are left out)."""
    path = PROJECT / "docs" / "mistakes" / f"{name}.py"
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), "--quick"])
    runpy.run_path(str(path), run_name="__main__")
    table = {}
    for line in capsys.readouterr().out.splitlines():
        label, *cells = re.split(r"\s{2,}", line.strip())
        if label.startswith(("wrong", "right", "what", "the whole")):
            assert label in DOCUMENTS["TUTORIAL.md"], f"the tutorial's table has no row {label!r}"
            table[label] = [float(cell) for cell in cells if re.fullmatch(r"nan|-?[\d.]+(e[+-]\d+)?", cell)]
    return table


def rows(table: dict[str, list[float]], word: str) -> list[list[float]]:
    """The figures of the rows whose label begins with a word."""
    return [figures for label, figures in table.items() if label.startswith(word)]


def test_all_mistakes_are_tested() -> None:
    """Catches a script without a test of its claim, or that no chapter mentions."""
    source = Path(__file__).read_text(encoding="utf-8")
    for name in MISTAKES:
        assert f'run_quick("{name}"' in source
        assert f"python docs/mistakes/{name}.py\n" in DOCUMENTS["TUTORIAL.md"]


def test_overlapping_split(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("overlapping_split", monkeypatch, capsys)
    (wrong,), (right,) = rows(table, "wrong"), rows(table, "right")
    assert wrong[0] < 0.6 * right[0]  # the same model
    assert wrong[1] > 95
    assert wrong[2] > 75
    assert right[1:] == [0, 0]


def test_float_mask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("float_mask", monkeypatch, capsys)
    (wrong,), (right,) = rows(table, "wrong"), rows(table, "right")
    assert wrong[0] < 1.0 < right[0]  # below what English allows a model of this size
    assert wrong[2] > right[2] > 1.0


def test_dropout_in_eval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("dropout_in_eval", monkeypatch, capsys)
    ((first, second, difference),) = rows(table, "right")
    assert (first, difference) == (second, 0)
    for wrong_first, _, wrong_difference in rows(table, "wrong"):
        assert wrong_first > first
        assert wrong_difference > 0


def test_residual_init(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("residual_init", monkeypatch, capsys)
    (wrong,), (right,) = rows(table, "wrong"), rows(table, "right")
    assert wrong[0] == pytest.approx(4 * right[0], rel=0.02)
    assert wrong[1] == pytest.approx(4 * right[1], rel=0.1)
    assert wrong[2] == right[2]
    assert wrong[3] > 2 * right[3]


def test_wrong_groups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("wrong_groups", monkeypatch, capsys)
    (everything, forgotten), (right,) = rows(table, "wrong"), rows(table, "right")
    assert everything[0] < 0.995 < right[0]
    assert forgotten[0] == 1.0
    assert forgotten[1] < 0.95 * right[1]  # what that costs shows after hundreds of steps only


def test_clip_before_unscale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("clip_before_unscale", monkeypatch, capsys)
    (wrong,), (right,) = rows(table, "wrong"), rows(table, "right")
    assert wrong[0] == pytest.approx(1 / 65536, rel=1e-3)
    assert right[0] == pytest.approx(1.0, rel=1e-3)
    assert wrong[1] < 0.5 < right[1]
    assert wrong[2] > right[2]


def test_padded_sampler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("padded_sampler", monkeypatch, capsys)
    (wrong,), (right,) = rows(table, "wrong"), rows(table, "right")
    assert (wrong[0], right[0]) == (12, 10)
    assert right[3] < 1e-5 < 1e-3 < wrong[3]


def test_uneven_average(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("uneven_average", monkeypatch, capsys)
    (wrong,), (right,) = rows(table, "wrong"), rows(table, "right")
    assert all(error > 1e-3 for error in wrong)  # also not true of nan, which min() lets pass
    assert all(error < 1e-5 for error in right)


def test_flipped_bit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("flipped_bit", monkeypatch, capsys)
    (wrong,), (right,) = rows(table, "wrong"), rows(table, "right")
    assert wrong[0] != wrong[1]  # another model, and no error
    assert len(right) == 1  # refused: there is no second figure


def test_resumed_hyperparameters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("resumed_hyperparameters", monkeypatch, capsys)
    (wanted,), (wrong,), (right,) = rows(table, "what"), rows(table, "wrong"), rows(table, "right")
    assert right == wanted
    assert wrong[0] != wanted[0]
    assert wrong[1] != wanted[1]


def test_uncached_generation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("uncached_generation", monkeypatch, capsys)
    assert rows(table, "right")[0][0] > 1.3 * rows(table, "wrong")[0][0]  # three times on a machine that is not busy


def test_decode_mask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    table = run_quick("decode_mask", monkeypatch, capsys)
    (wrong,), (right,), (whole,) = rows(table, "wrong"), rows(table, "right"), rows(table, "the whole")
    assert right[0] == pytest.approx(whole[0], abs=2e-3)  # printed with four digits
    assert wrong[0] > right[0] + 0.3
