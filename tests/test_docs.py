"""What the documents say and set: excerpts, links, commands, mistakes, exercises, the first file."""

import ast
import importlib.util
import itertools
import math
import os
import re
import runpy
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from conftest import PROJECT, SAMPLE_TEXT, TINY_SIZES, run_program
from hydra.errors import HydraException
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F

import export
import generate
import look
import main  # noqa: F401 (registers the schema and the recipes with Hydra)
from char_dataset import CharVocabulary
from config import Config
from model import GPT, GPTConfig

DOCUMENTS = {
    name: (PROJECT / name).read_text(encoding="utf-8")
    for name in (
        *("README.md", "TUTORIAL.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md"),
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


def chapters(text: str | None = None) -> dict[int, str]:
    """TUTORIAL.md's numbered chapters, without solutions; or those of a text."""
    parts = re.split(r"^## (\d+)\. ", text or without_solutions(DOCUMENTS["TUTORIAL.md"]), flags=re.MULTILINE)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


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
    """Catches code that the test above doesn't see, and chapters without one of their parts."""
    text = without_solutions(DOCUMENTS["TUTORIAL.md"])
    assert text.count("```python") + text.count("```js") == len(excerpts())
    assert list(chapters()) == list(range(13))
    for number, chapter in chapters().items():
        assert re.search(r"^```(?:python|js)\n", chapter, flags=re.MULTILINE), chapter.splitlines()[0]
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


@pytest.mark.slow
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
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for line in lines:
        run = run_program("bash", "-c", line.partition("requirements.txt && ")[2] or line, cwd=copy, env={"PATH": path})
        assert run.returncode == 0, f"{line}\n{run.stderr}"
        assert ("finished" in run.stderr) == ("main.py" in line)
        assert bool(run.stdout) == ("generate.py" in line or "report.py" in line)


def check_configuration(overrides: list[str]) -> None:
    """Fail where the program would refuse a configuration."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(PROJECT)):
        try:
            values = OmegaConf.to_container(hydra.compose("gpt2_train_cfg", overrides), resolve=True)
            OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
        except (HydraException, ValueError) as error:
            pytest.fail(f"{overrides}: {error}")


# ------------------------------------------------------------------------------------ the mistakes


Table = Callable[[str], dict[str, list[list[float]]]]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Table:
    """Run a script of docs/mistakes in this process: the figures of its rows, by their label's first word."""

    def run(name: str) -> dict[str, list[list[float]]]:
        path = PROJECT / "docs" / "mistakes" / f"{name}.py"
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.setattr(sys, "argv", [str(path), "--quick"])
        runpy.run_path(str(path), run_name="__main__")
        rows: dict[str, list[list[float]]] = {}
        for line in capsys.readouterr().out.splitlines():
            label, *cells = re.split(r"\s{2,}", line.strip())
            if match := re.match("wrong|right|what|the whole", label):
                assert label in DOCUMENTS["TUTORIAL.md"], f"the tutorial's table has no row {label!r}"
                assert not {"nan", "inf", "-inf"} & set(cells), line  # min() lets them pass, and most comparisons
                figures = [float(cell) for cell in cells if re.fullmatch(r"-?[\d.]+(e[+-]\d+)?", cell)]
                rows.setdefault(match[0], []).append(figures)
        return rows

    return run


def test_all_mistakes_are_tested() -> None:
    """Catches a script without a test of its claim, or that no chapter mentions."""
    source = Path(__file__).read_text(encoding="utf-8")
    for name in MISTAKES:
        assert f'table("{name}")' in source
        assert f"python docs/mistakes/{name}.py\n" in DOCUMENTS["TUTORIAL.md"]


def test_overlapping_split(table: Table) -> None:
    rows = table("overlapping_split")
    (wrong,), (right,) = rows["wrong"], rows["right"]
    assert wrong[0] < 0.6 * right[0]  # the same model
    assert wrong[1] > 95
    assert wrong[2] > 75
    assert right[1:] == [0, 0]


def test_float_mask(table: Table) -> None:
    rows = table("float_mask")
    (wrong,), (right,) = rows["wrong"], rows["right"]
    assert wrong[0] < 1.0 < right[0]  # below what English allows a model of this size
    assert wrong[2] > right[2] > 1.0


def test_dropout_in_eval(table: Table) -> None:
    rows = table("dropout_in_eval")
    ((first, second, difference),) = rows["right"]
    assert (first, difference) == (second, 0)
    for wrong_first, _, wrong_difference in rows["wrong"]:
        assert wrong_first > first
        assert wrong_difference > 0


def test_residual_init(table: Table) -> None:
    rows = table("residual_init")
    (wrong,), (right,) = rows["wrong"], rows["right"]
    assert wrong[0] == pytest.approx(4 * right[0], rel=0.02)
    assert wrong[1] == pytest.approx(4 * right[1], rel=0.1)
    assert wrong[2] == right[2]
    assert wrong[3] > 2 * right[3]


def test_wrong_groups(table: Table) -> None:
    rows = table("wrong_groups")
    (everything, forgotten), (right,) = rows["wrong"], rows["right"]
    assert everything[0] < 0.995 < right[0]
    assert forgotten[0] == 1.0
    assert forgotten[1] < 0.95 * right[1]  # what that costs shows after hundreds of steps only


def test_clip_before_unscale(table: Table) -> None:
    rows = table("clip_before_unscale")
    (wrong,), (right,) = rows["wrong"], rows["right"]
    assert wrong[0] == pytest.approx(1 / 65536, rel=1e-3)
    assert right[0] == pytest.approx(1.0, rel=1e-3)
    assert wrong[1] < 0.5 < right[1]
    assert wrong[2] > right[2]


def test_padded_sampler(table: Table) -> None:
    rows = table("padded_sampler")
    (wrong,), (right,) = rows["wrong"], rows["right"]
    assert (wrong[0], right[0]) == (12, 10)
    assert right[3] < 1e-5 < 1e-3 < wrong[3]


def test_uneven_average(table: Table) -> None:
    rows = table("uneven_average")
    (wrong,), (right,) = rows["wrong"], rows["right"]
    assert max(right) < 1e-5 < 1e-3 < min(wrong)


def test_flipped_bit(table: Table) -> None:
    rows = table("flipped_bit")
    (wrong,), (right,) = rows["wrong"], rows["right"]
    assert wrong[0] != wrong[1]  # another model, and no error
    assert len(right) == 1  # refused: there is no second figure


def test_resumed_hyperparameters(table: Table) -> None:
    rows = table("resumed_hyperparameters")
    (wanted,), (wrong,), (right,) = rows["what"], rows["wrong"], rows["right"]
    assert right == wanted
    assert wrong[0] != wanted[0]
    assert wrong[1] != wanted[1]


def test_uncached_generation(table: Table) -> None:
    rows = table("uncached_generation")
    (wrong,), (right,) = rows["wrong"], rows["right"]
    assert (wrong[1], right[1]) == (64, 1)  # positions for a token, on average of 1 to 127


def test_decode_mask(table: Table) -> None:
    rows = table("decode_mask")
    (wrong,), (right,), (whole,) = rows["wrong"], rows["right"], rows["the whole"]
    assert right[0] == pytest.approx(whole[0], abs=2e-3)  # printed with four digits
    assert wrong[0] > right[0] + 0.3


# ------------------------------------------------------------------------------------ the exercises

CHAPTERS = range(2, 12)  # those with an exercise; 0, 1 and 12 have none
EXERCISE = re.compile(
    r"^\*\*Exercise\.\*\* Empty\s+the\s+body\s+of\s+`(?P<name>[\w.]+)`\s+in\s+`(?P<file>\w+\.py)`.*?"
    r"^```\n(?P<command>pytest [^\n]*)\n```$\n\n"
    r"^<details>\n<summary>Solution</summary>\n\nIn `(?P=file)`:\n\n```python\n(?P<solution>.*?)^```$.*?^</details>$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass
class Exercise:
    """One exercise of the tutorial."""

    chapter: int
    name: str  # of the function to write, "function" or "Class.method"
    file: str  # where it is
    command: str  # the pytest line that tells whether it is right
    solution: str  # source of the function; a method stands in its class


EXERCISES = [
    Exercise(number, **match.groupdict())
    for number, text in chapters(DOCUMENTS["TUTORIAL.md"]).items()
    for match in EXERCISE.finditer(text)
]


# ------------------------------------------------------------------------------------ functions in source files


def find(source: str, name: str) -> tuple[ast.FunctionDef, int, int]:
    """A function or method in a file: (its definition, its first line with decorators, its last line), from 1."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, function = name.split(".")
    for class_name in classes:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
    (found,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    assert found.end_lineno is not None
    return found, min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)]), found.end_lineno


def lines_of(source: str, name: str) -> list[str]:
    """The lines of a function or method."""
    _, first, last = find(source, name)
    return source.splitlines(keepends=True)[first - 1 : last]


def emptied(source: str, name: str) -> list[str]:
    """The same lines without a body: decorators, signature and docstring stay."""
    function, first, _ = find(source, name)
    begin = function.body[0]
    kept = begin.lineno - 1 if ast.get_docstring(function) is None else begin.end_lineno
    return [*source.splitlines(keepends=True)[first - 1 : kept], " " * begin.col_offset + "raise NotImplementedError\n"]


def put(source: str, name: str, new: list[str]) -> str:
    """The source of a file with other lines in place of a function or method."""
    _, first, last = find(source, name)
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: first - 1], *new, *lines[last:]])


# ------------------------------------------------------------------------------------ the exercises


Answer = Callable[[Exercise, list[str]], tuple[int, str]]


@pytest.fixture
def answer(tmp_path: Path) -> Answer:
    """Put lines in a function's place in a copy of the project, and run the exercise's command: (code, output)."""

    def run(exercise: Exercise, lines: list[str]) -> tuple[int, str]:
        copy = tmp_path / "project"
        # Other processes write byte code while this one reads; in the copy, each makes its own.
        ignored = shutil.ignore_patterns(".*", "runs", "input.txt", "*venv*", "docs", "benchmarks", "__pycache__")
        shutil.copytree(PROJECT, copy, ignore=ignored)
        path = copy / exercise.file
        path.write_text(put(path.read_text(encoding="utf-8"), exercise.name, lines), encoding="utf-8")
        program, *arguments = shlex.split(exercise.command)
        options = ("-n0", "-x", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'temporary'}")
        # Of all plugins only the one that knows -n0: to import the others takes another second or two.
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist"}
        command = [sys.executable, "-m", program, *arguments, *options]
        result = run_program(*command, cwd=copy, env=environment, is_real=True)  # a warm one has the project's modules
        return result.returncode, result.stdout + result.stderr

    return run


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: f"chapter{e.chapter}")
def test_the_untouched_exercise_fails(exercise: Exercise, answer: Answer) -> None:
    """Catches a command whose tests don't call the function: they would pass whatever the reader writes."""
    source = (PROJECT / exercise.file).read_text(encoding="utf-8")
    code, output = answer(exercise, emptied(source, exercise.name))
    assert code == 1, output  # tests failed; another code means that there were none, or that they couldn't be read
    assert re.search(r"^E +NotImplementedError$", output, flags=re.MULTILINE), output


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: f"chapter{e.chapter}")
def test_the_solution_passes(exercise: Exercise, answer: Answer) -> None:
    """Catches a solution that is wrong, or that fits an older version of the project."""
    code, output = answer(exercise, lines_of(exercise.solution, exercise.name))
    assert code == 0, output
    assert re.search(r"^[1-9]\d* passed", output, flags=re.MULTILINE), output


def test_every_chapter_has_one_exercise_with_one_solution() -> None:
    """Catches an exercise in another form, which the tests above would not see, and parameters that are none."""
    assert [exercise.chapter for exercise in EXERCISES] == list(CHAPTERS)
    assert len({exercise.name for exercise in EXERCISES}) == len(CHAPTERS)
    for number, text in chapters(DOCUMENTS["TUTORIAL.md"]).items():
        for part in ("**Exercise.**", "<summary>Solution</summary>"):
            assert text.count(part) == (1 if number in CHAPTERS else 0), f"chapter {number}: {part}"
    tests = (test_the_untouched_exercise_fails, test_the_solution_passes)
    cases = [case for test in tests for mark in vars(test)["pytestmark"] for case in mark.args[1:2] and mark.args[1]]
    assert len(cases) == 2 * len(CHAPTERS) == 20


# ------------------------------------------------------------------------------------ docs/first_gpt.py

FIRST_GPT = PROJECT / "docs" / "first_gpt.py"
SOURCE = FIRST_GPT.read_text(encoding="utf-8")
SMALL = {"BATCH_SIZE": 16, "BLOCK_SIZE": 24, "N_LAYER": 2, "N_HEAD": 2, "N_EMBD": 32}


@pytest.fixture
def first_gpt() -> Any:
    """The file as a module of its own for each test, with small sizes."""
    spec = importlib.util.spec_from_file_location("first_gpt", FIRST_GPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, size in SMALL.items():
        assert hasattr(module, name)
        setattr(module, name, size)
    return module


def perturbed(first_gpt: Any, vocab_size: int) -> Any:
    """A model whose every number is drawn, biases and norms too, and so large that no part of it has no effect."""
    model = first_gpt.GPT(vocab_size)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            center = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            p.copy_(center + 0.25 * torch.randn(p.shape, generator=random))
    return model


def project_model(model: Any, vocab_size: int) -> GPT:
    """The project's GPT with a copy of the model's weights."""
    config = GPTConfig(
        vocab_size=vocab_size,
        block_size=SMALL["BLOCK_SIZE"],
        n_layer=SMALL["N_LAYER"],
        n_head=SMALL["N_HEAD"],
        n_embd=SMALL["N_EMBD"],
        bias=True,
    )
    reference = GPT(config).eval()
    reference.load_state_dict(model.state_dict())  # strict: the same names, and no others
    return reference


def tokens(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


def printed_losses(output: str) -> dict[int, float]:
    """The losses that the training loop printed, by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+): loss (\d+\.\d{4});", output, re.M)}


# ------------------------------------------------------------------------------------------ the program


def test_the_script_runs_from_text_to_text() -> None:
    """Catches a script that no longer starts, fresh weights that are confident before any step, and a lost sample."""
    result = run_program(sys.executable, FIRST_GPT, SAMPLE_TEXT, 3)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    losses, _, text = re.split(r"^(\d+) seconds\n", result.stdout, flags=re.MULTILINE)
    alphabet = set(SAMPLE_TEXT.read_text(encoding="utf-8"))
    # 64 products of numbers near 1 and weights of 0.02 make logits that vary by 0.16: 0.16² / 2 = 0.013 above ln V.
    assert printed_losses(losses) == {1: pytest.approx(math.log(len(alphabet)), abs=0.1)}
    assert f"guessing costs {math.log(len(alphabet)):.4f}" in losses
    assert len(text) == 501  # with print's newline
    assert set(text) <= alphabet


def test_the_default_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a default that ignores the corpus once it is there, or that is sought in the working directory."""
    copy = tmp_path / "docs" / "first_gpt.py"
    copy.parent.mkdir()
    copy.write_text(re.sub(r"STEPS, LEARNING_RATE = \d+,", "STEPS, LEARNING_RATE = 1,", SOURCE), encoding="utf-8")
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setattr(sys, "argv", [str(copy)])

    for name, characters in (("sample.txt", "abc"), ("input.txt", "abcde")):
        (data / name).write_text(characters * 50, encoding="utf-8")
        runpy.run_path(str(copy), run_name="__main__")
        assert f"guessing costs {math.log(len(characters)):.4f}" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ the model


def test_logits_equal_those_of_the_projects_model(first_gpt: Any) -> None:
    """Catches every difference in the model: a name, queries and keys swapped, a norm in another place, another GELU.

    In float64 the order of a sum changes the last of 16 digits, and logits are of order 1 to 10. The two GELUs, the
    smallest difference that anyone would make by accident, differ by 5e-4.
    """
    V = 11
    model = perturbed(first_gpt, V).double()
    reference = project_model(model, V).double()
    for T in (1, 7, SMALL["BLOCK_SIZE"]):
        idx = tokens(V, 3, T)
        torch.testing.assert_close(model(idx), reference(idx)[0], rtol=0, atol=1e-9)
    assert model.lm_head.weight is model.wte.weight


def test_the_loops_loss_equals_that_of_the_projects_model(
    first_gpt: Any, sample_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a sum in place of a mean, targets that are not shifted, other codes, and a loss after the update.

    Four decimals are printed, so half of the last one is rounding; a wrong target costs at least a hundredth.
    """
    vocabulary = CharVocabulary.of(sample_text)
    model = perturbed(first_gpt, len(vocabulary))
    reference = project_model(model, len(vocabulary))
    first_gpt.GPT = lambda vocab_size: model
    torch.manual_seed(0)
    starts = torch.randint(len(sample_text) - SMALL["BLOCK_SIZE"], (SMALL["BATCH_SIZE"], 1))
    windows = [sample_text[start : start + SMALL["BLOCK_SIZE"] + 1] for start in starts.flatten().tolist()]
    codes = torch.stack([vocabulary.encode(window) for window in windows])  # (B, T + 1)
    with torch.no_grad():
        expected = reference(codes[:, :-1], codes[:, 1:])[1]

    torch.manual_seed(0)  # so that the loop draws the same windows
    _, characters = first_gpt.train(sample_text, 1)
    assert characters == vocabulary.characters
    assert printed_losses(capsys.readouterr().out) == {1: pytest.approx(float(expected), abs=6e-5)}


def test_the_loss_and_its_gradients_equal_those_of_the_projects_model(first_gpt: Any) -> None:
    """Catches what leaves the logits alone and spoils learning: a detached tensor, a head that is tied by copying.

    Float32 keeps 7 digits of a loss near 3, and of gradients below 1.
    """
    V = 11
    model = perturbed(first_gpt, V)
    reference = project_model(model, V)
    windows = tokens(V, 4, SMALL["BLOCK_SIZE"] + 1)
    x, y = windows[:, :-1], windows[:, 1:]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    expected = reference(x, y)[1]
    assert expected is not None
    torch.testing.assert_close(loss, expected, rtol=0, atol=2e-6)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected_gradients = {name: p.grad for name, p in reference.named_parameters()}
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------ data, loop, sample


def test_windows_reach_both_ends_of_the_text(first_gpt: Any) -> None:
    """Catches targets that are their inputs, a window past the end, and a last character that is never a target."""
    T = SMALL["BLOCK_SIZE"]
    codes = torch.arange(T + 3)  # room for the starts 0, 1 and 2
    torch.manual_seed(0)
    batches = [first_gpt.random_windows(codes) for _ in range(20)]
    for x, y in batches:
        assert x.shape == y.shape == (SMALL["BATCH_SIZE"], T)
        assert torch.equal(x, x[:, :1] + torch.arange(T))
        assert torch.equal(y, x + 1)
    assert {start for x, _ in batches for start in x[:, 0].tolist()} == {0, 1, 2}  # 320 draws: none is missed by chance


def test_the_loss_falls_below_what_frequencies_allow(
    first_gpt: Any, sample_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a loop that doesn't learn (no step, no gradient, targets out of place) or learns no context.

    A model that only counts characters can't get below the entropy of their frequencies, 3.26 nats here.
    """
    torch.manual_seed(0)
    first_gpt.train(sample_text, 200)
    losses = printed_losses(capsys.readouterr().out)
    assert list(losses) == [1, 100, 200]
    counts = Counter(sample_text)
    entropy = -sum(n / len(sample_text) * math.log(n / len(sample_text)) for n in counts.values())
    assert losses[1] > losses[100] > losses[200]
    assert losses[200] < entropy - 0.3  # 384 characters make the loss vary by 0.1


def test_sampling_draws_from_the_last_position_of_a_full_window(first_gpt: Any) -> None:
    """Catches the wrong position, too much context, a dropped character, greedy choice, and a graph that grows."""
    characters = "abcdefg"
    lengths = []

    def successor(idx: Tensor) -> Tensor:
        lengths.append(idx.size(1))
        assert not torch.is_grad_enabled()
        return 1e4 * F.one_hot((idx + 1) % len(characters), len(characters)).float()  # (1, T, V), and no doubt

    length = SMALL["BLOCK_SIZE"] + 10
    assert first_gpt.sample(successor, characters, length) == (characters * length)[1 : length + 1]
    assert lengths == [min(n, SMALL["BLOCK_SIZE"]) for n in range(1, length + 1)]

    torch.manual_seed(0)
    uniform = first_gpt.sample(lambda idx: torch.zeros(1, idx.size(1), len(characters)), characters, 200)
    assert set(uniform) == set(characters)  # one is missing in 1 of 10¹² such samples


# ------------------------------------------------------------------------------------------ the promise


def test_it_is_one_short_file_that_hides_nothing() -> None:
    """Catches growth beyond a hundred lines or so, an import that hides a part, and classes other than modules."""
    assert len(SOURCE.splitlines()) <= 115
    tree = ast.parse(SOURCE)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.ClassDef):
            assert [ast.unparse(base) for base in node.bases] == ["nn.Module"]
    assert imported - sys.stdlib_module_names == {"torch"}
