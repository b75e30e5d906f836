"""The tutorial's exercises: a chapter's own pytest line fails for the emptied function and passes for the solution."""

import ast
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import PROJECT, run_program

CHAPTERS = range(2, 12)  # those with an exercise; 0, 1 and 12 have none
TUTORIAL = (PROJECT / "TUTORIAL.md").read_text(encoding="utf-8")
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


def chapters() -> dict[int, str]:
    """The text of each chapter, by number."""
    parts = re.split(r"^## (\d+)\. ", TUTORIAL, flags=re.MULTILINE)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


EXERCISES = [
    Exercise(number, **match.groupdict()) for number, text in chapters().items() for match in EXERCISE.finditer(text)
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
    for number, text in chapters().items():
        for part in ("**Exercise.**", "<summary>Solution</summary>"):
            assert text.count(part) == (1 if number in CHAPTERS else 0), f"chapter {number}: {part}"
    tests = (test_the_untouched_exercise_fails, test_the_solution_passes)
    cases = [case for test in tests for mark in vars(test)["pytestmark"] for case in mark.args[1:2] and mark.args[1]]
    assert len(cases) == 2 * len(CHAPTERS) == 20
