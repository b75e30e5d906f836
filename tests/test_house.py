"""The shape of the project: who may import whom, and who alone knows the libraries that others shouldn't have to."""

import ast
import os
import re
from pathlib import Path

import pytest
from conftest import PROJECT

ROOMS = sorted(path.parent.name for path in PROJECT.glob("*/__init__.py"))
FILES = sorted(path for place in (".", *ROOMS) for path in (PROJECT / place).glob("*.py"))
TREES = {str(path.relative_to(PROJECT)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# What each file of the root, and each folder, takes from others. What isn't here has no place yet. The files to read
# stand in their order; a folder may take from the files, and from another folder what is written here.
TAKES = {
    "char_dataset": "",
    "model": "sampling",
    "sampling": "",
    "optimizer": "distributed muon",
    "muon": "distributed",  # for tensors of which each rank has a part
    "trainer": "char_dataset config console distributed large model optimizer saving snapshot",
    "distributed": "console large",
    "snapshot": "console",
    "config": "char_dataset model optimizer",
    # folders
    "data": "char_dataset config console distributed snapshot",
    "console": "char_dataset config sampling",
    "saving": "char_dataset config console data distributed hugging_face model optimizer snapshot",
    "large": "char_dataset config console distributed model optimizer snapshot",
    "hugging_face": "char_dataset console model saving snapshot",
    "page": "char_dataset config console data model saving snapshot",
    # commands, which nobody takes from
    "main": "char_dataset config console data distributed large model saving trainer",
    "generate": "char_dataset console model sampling saving",
    "look": "console page saving",
    "export": "console hugging_face",
    "report": "config console model saving snapshot",
}


def room_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    """The top-level names of all modules that a piece of code imports, wherever in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_every_file_has_its_place():
    """Catches a file or a folder that nobody has given a place."""
    assert {room_of(file) for file in TREES} == set(TAKES)


@pytest.mark.parametrize("room", TAKES)
def test_imports_run_one_way(room):
    """Catches a circle, a command that others build on, and a room that one can't read without all the others."""
    taken = set().union(*(imports(tree) & set(TAKES) for file, tree in TREES.items() if room_of(file) == room))
    assert taken - {room} == set(TAKES[room].split())


def test_no_two_modules_need_each_other():
    """Catches a circle inside of a folder, or through one: whichever is loaded first would find the other half made."""
    needs = {}
    for file, tree in TREES.items():
        module = file.removesuffix(".py").replace(os.sep, ".")
        taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        needs[module] = {
            name for node in taken for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names))
        }
    reached = {module: needs[module] & set(needs) for module in needs}
    for _ in needs:
        reached = {module: names.union(*(reached[name] for name in names)) for module, names in reached.items()}
    assert [module for module, names in reached.items() if module in names] == []


def test_a_folder_itself_imports_nothing():
    """Catches an __init__.py that loads torch: the environment must be settled before, from one of these folders."""
    for room in ROOMS:
        assert imports(TREES[f"{room}{os.sep}__init__.py"]) == set()


def test_what_only_large_runs_need_is_imported_where_they_branch():
    """Catches a second of imports that every run pays for what few do."""
    for file, tree in TREES.items():
        if os.sep not in file:
            at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            assert "large" not in imports(ast.Module(at_once, [])), file


LIBRARIES = {  # library: the only files that know it
    "hydra": {"main.py"},
    "omegaconf": {"main.py"},
    "fsspec": {f"data{os.sep}corpus.py", "snapshot.py"},  # the one reads texts, the other writes
    "tqdm": {f"console{os.sep}logs.py"},
    "safetensors": set(),  # by `hugging_face.names.package`, which says how to install it
}


def test_one_file_each_knows_hydra_fsspec_and_the_launcher():
    """Catches configuration, stores and the launcher's environment handled in several places."""
    users = {library: {file for file, tree in TREES.items() if library in imports(tree)} for library in LIBRARIES}
    assert users == LIBRARIES
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}
    readers = {
        file
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in launcher
    }
    assert readers == {"distributed.py"}


def test_one_place_knows_where_the_project_lies():
    """Catches a path from a file's own place, which is wrong as soon as the file moves."""
    assert [file for file, tree in TREES.items() if "__file__" in ast.unparse(tree)] == ["config.py"]


def test_nobody_is_sent_from_the_files_to_read_into_a_folder():
    """Catches a docstring that sends a first reader from one of the files to read into a folder."""
    for file in list(TAKES)[:9]:
        words = ast.get_docstring(TREES[f"{file}.py"]) or ""
        sent = [room for room in ROOMS if re.search(rf"\b[Rr]ead [^.]*`{room}/", words)]
        assert not sent, file
