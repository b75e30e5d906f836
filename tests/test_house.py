"""The shape of the project: which module may import which, and how long a function may be."""

import ast

import pytest
from conftest import PROJECT

MODULES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in PROJECT.glob("*.py")}

# What each module may import of the project. Whatever isn't listed here is a new room, which needs a reason.
ALLOWED = {
    "environment": set(),  # comes before torch, which all the others import
    "corpus": set(),
    "char_dataset": set(),
    "sampling": set(),
    "model": {"sampling"},
    "optimizer": {"distributed"},  # for the three words that also work where each rank has a part of a tensor
    "distributed": set(),
    "sharding": {"distributed", "model"},
    "snapshot": set(),
    "snapshot_contents": {"char_dataset", "model", "optimizer", "snapshot"},
    "hugging_face": {"model", "snapshot"},
    "from_hugging_face": {"hugging_face", "model", "snapshot"},
    "run_files": {"distributed", "from_hugging_face", "snapshot", "snapshot_contents"},
    "report": {"config", "environment", "model", "snapshot", "snapshot_contents"},  # all but one for its table of runs
    "config": {"char_dataset", "model", "optimizer"},
    "machines": {"char_dataset", "distributed", "snapshot"},
    "memory": {"config", "distributed", "model", "sharding"},
    "plan": {"char_dataset", "config", "distributed", "memory", "model", "optimizer", "sharding"},
    "trainer": {
        *("char_dataset", "config", "distributed", "memory", "model", "optimizer", "report"),
        *("run_files", "sharding", "snapshot"),
    },
    "main": {
        *("char_dataset", "config", "corpus", "distributed", "environment", "machines", "memory"),
        *("model", "plan", "report", "run_files", "snapshot", "snapshot_contents", "trainer"),
    },
    "interactive": {"char_dataset", "sampling"},
    "generate": {"char_dataset", "environment", "interactive", "model", "sampling", "snapshot", "snapshot_contents"},
    "look": {"char_dataset", "environment", "generate", "model", "page_data"},  # it finds its snapshot as generate does
    "export": {
        *("char_dataset", "environment", "generate", "hugging_face", "model", "model_card", "snapshot"),
        "snapshot_contents",
    },
    "model_card": {"char_dataset", "page_data", "snapshot"},  # the curves, as the page shows them
    "page_data": {"char_dataset", "corpus", "model", "report", "run_files", "snapshot"},
}


def imports(tree: ast.Module) -> set[str]:
    """The top-level names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_every_module_has_its_place():
    """Catches a new top-level module that nobody has given a place in the reading order."""
    assert sorted(MODULES) == sorted(ALLOWED)


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_run_one_way(name):
    """Catches a circle, and a room that one can't read without reading all the others first."""
    assert imports(MODULES[name]) & set(MODULES) <= ALLOWED[name]


def test_one_module_each_knows_hydra_fsspec_and_the_launcher():
    """Catches configuration, stores and the launcher's environment handled in several places."""
    users = {library: {name for name, tree in MODULES.items() if library in imports(tree)} for library in LIBRARIES}
    assert users == LIBRARIES
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}
    readers = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in launcher
    }
    assert readers == {"distributed"}


LIBRARIES = {
    "hydra": {"main"},
    "omegaconf": {"main"},
    "fsspec": {"corpus", "snapshot"},  # the one reads texts, the other writes
    "tqdm": {"report"},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_no_function_is_longer_than_a_page(name):
    """Catches functions of more than 55 lines and classes of more than 320: nobody reads them in one go."""
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            limit = 55 if isinstance(node, ast.FunctionDef) else 320
            assert node.end_lineno - node.lineno < limit, f"{node.name} in {name}.py"


def test_the_core_of_each_file_comes_first():
    """Catches armour in front of the core, file by file; together 666 lines, all of nanoGPT (it was 1,287 once)."""
    core = {
        "char_dataset": ["CharVocabulary", "CharDataset", "WindowSampler"],
        "model": ["CausalSelfAttention", "MLP", "Block", "GPT.__init__", "GPT.forward"],
        "optimizer": ["split_parameters", "create_optimizer", "learning_rate_factor"],
        "trainer": ["Trainer.fit", "Trainer._train_step", "Trainer.evaluate", "Trainer.evaluate_on"],
    }
    passed = {}
    for module, names in core.items():
        ends = {}
        for node in MODULES[module].body:
            ends[getattr(node, "name", "")] = node.end_lineno
            for inner in getattr(node, "body", []):
                ends[f"{getattr(node, 'name', '')}.{getattr(inner, 'name', '')}"] = inner.end_lineno
        passed[module] = max(ends[name] for name in names)
    assert {module: lines for module, lines in passed.items() if lines > LINES_TO_PASS[module]} == {}
    assert sum(LINES_TO_PASS.values()) <= 666


LINES_TO_PASS = {"char_dataset": 172, "model": 178, "optimizer": 124, "trainer": 192}
