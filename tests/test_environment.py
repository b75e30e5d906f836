"""What is settled before torch is loaded: Pythons, OpenMP, Ctrl-C before there is anything to save, a lost console."""

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANGS, PROJECT, TINY_RUN, run_program

from snapshot import load_snapshot

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")

COMMANDS = ["main.py", "generate.py", "look.py", "export.py", "report.py"]


@pytest.mark.parametrize(
    "name", ["console/environment.py", "main.py", "generate.py", "look.py", "export.py", "report.py"]
)
def test_an_old_python_can_read_the_first_files(name):
    """Catches a SyntaxError in place of the line that says which Python is needed."""
    ast.parse((PROJECT / name).read_text(encoding="utf-8"), feature_version=(3, 7))


@pytest.mark.parametrize(("version", "name"), [((3, 9), "main"), ((3, 15), "main"), ((3, 15), "generate")])
def test_another_python_is_one_line(version, name):
    """Catches a traceback from the depths of some package where Python is too old or too new."""
    script = f"import sys; sys.version_info = {(*version, 0, 'final', 0)}; import {name}"
    process = run_program(sys.executable, "-c", script, is_real=True)
    assert process.returncode == 1
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: this is Python {version[0]}.{version[1]}, and the project needs 3.10 to 3.14")


def test_the_environment_is_settled_before_torch_is_loaded():
    """Catches an import that somebody has sorted: OpenMP reads its settings when torch loads it, and never again."""
    for name in COMMANDS:
        body = ast.parse((PROJECT / name).read_text(encoding="utf-8")).body
        first = next(node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
        assert ast.unparse(first) == "from console import environment"
    loaded = run_program(
        sys.executable, "-c", "from console import environment; import sys; print('torch' in sys.modules)", is_real=True
    )
    assert loaded.stdout == "False\n"


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_the_users_own_openmp_settings_win(given, spins):
    """Catches a setting that overrides what the user, or the administrator of a cluster, has chosen."""
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    script = "from console import environment; import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    process = subprocess.run(
        [sys.executable, "-c", script], env={**clean, **given}, cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == str(spins)


# ------------------------------------------------------------------------------------ Ctrl-C


def interrupt(command: list[str], moment: Callable[[int], bool]) -> tuple[int, str]:
    """Start a command in a process group of its own, send SIGINT to all of it at a moment; (exit code, its words)."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + HANGS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a child that has just ended
            if moment(process.pid):
                break
        time.sleep(0.005)
    else:
        process.kill()
        raise AssertionError(f"the moment never came: {process.communicate()[0]}")
    os.killpg(process.pid, signal.SIGINT)
    words = process.communicate(timeout=HANGS)[0]
    return process.returncode, words


def has_loaded(library: str) -> Callable[[int], bool]:
    return lambda pid: library in Path(f"/proc/{pid}/maps").read_text()


def compiles(pid: int) -> bool:
    """Whether one of its threads has started the C++ compiler."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return any(b"++" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)


@linux
@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
@pytest.mark.parametrize("command", ["main.py", "generate.py", "look.py"])
def test_ctrl_c_while_torch_is_loaded(command, library, tmp_path):
    """Catches a traceback through torch's imports, or exit code 1, from a Ctrl-C in the first second."""
    argument = f"hydra.run.dir={tmp_path / 'run'}" if command == "main.py" else "--snapshot=nothing.pt"
    assert interrupt([command, argument], has_loaded(library)) == (130, "stopped\n")
    assert not (tmp_path / "run").exists()


@linux
def test_ctrl_c_while_the_run_is_set_up(tmp_path):
    """Catches a traceback, or a directory that is left, from a Ctrl-C between Hydra and the first step."""
    run_dir = tmp_path / "some" / "run"
    code, words = interrupt(["main.py", f"hydra.run.dir={run_dir}", *TINY_RUN], lambda pid: run_dir.exists())
    assert code == 130
    assert words.endswith("stopped\n")
    assert "Traceback" not in words
    assert not (tmp_path / "some").exists() or any(run_dir.iterdir())


@linux
@pytest.mark.slow
def test_ctrl_c_while_the_model_is_compiled(tmp_path):
    """Catches 2,000 lines: the compiler gets the signal too, and torch tells all about its failure."""
    command = ["main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN, "trainer_config.compile=true"]
    code, words = interrupt(command, compiles)
    assert code == 130
    assert words.endswith("stopped\n")
    assert len(words.splitlines()) < 12


# ------------------------------------------------------------------------------------ a console that is gone


@pytest.mark.parametrize("console", ["2>&-", "2>/dev/full", "2>&- <&- >&-"])
def test_a_run_needs_no_console(console, tmp_path):
    """Catches a run that ends, or is reported as failed, because nobody can read what it says."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = [sys.executable, "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN]
    process = run_program("sh", "-c", f'exec "$@" {console}', "sh", *command)
    assert process.returncode == 0, (tmp_path / "run" / "main.log").read_text()
    assert load_snapshot(str(tmp_path / "run" / "gpt_snapshot.pt"))["step"] == 20
    assert "finished: 20 steps" in (tmp_path / "run" / "main.log").read_text()


@linux
def test_a_terminal_that_was_closed_costs_nothing(tmp_path):
    """Catches an "Input/output error" in the next line that a run would say, and a last step that isn't saved."""
    terminal, console = os.openpty()
    command = ["main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN, "trainer_config.max_steps=20"]
    process = subprocess.Popen(
        [sys.executable, *command], cwd=PROJECT, stdout=console, stderr=console, start_new_session=True
    )
    os.close(console)
    assert os.read(terminal, 1)  # it has begun to speak, so torch is loaded and the run is set up
    os.close(terminal)
    assert process.wait(HANGS) == 0
    assert load_snapshot(str(tmp_path / "run" / "gpt_snapshot.pt"))["step"] == 20


def test_generating_needs_no_standard_error(tmp_path):
    """Catches exit code 120 or a lost text, because a remark could not be made."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    run = run_program(sys.executable, "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN)
    assert run.returncode == 0, run.stderr
    command = [sys.executable, "generate.py", "--snapshot", tmp_path / "run" / "gpt_snapshot.pt", "--max-new-tokens=9"]
    for console in ("2>&-", "2>/dev/full"):
        process = run_program("sh", "-c", f'exec "$@" {console}', "sh", *command)  # no prompt: it says where it begins
        assert process.returncode == 0
        assert len(process.stdout) == 1 + 9 + 1


# ------------------------------------------------------------------------------------ Python 3.14

CHECK_OF_3_14 = """
import argparse, sys

def _check_help(self, action):
    if action.help and hasattr(self, "_get_formatter"):
        formatter = self._get_formatter()
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError) as exc:
            raise ValueError("badly formed help string") from exc

def add_argument(self, *args, _add=argparse._ActionsContainer.add_argument, **kwargs):
    action = _add(self, *args, **kwargs)
    self._check_help(action)
    return action

argparse._ActionsContainer._check_help = _check_help
argparse._ActionsContainer.add_argument = add_argument
sys.path.insert(0, ".")
"""


def test_python_3_14s_check_of_help_texts(tmp_path):
    """Catches "badly formed help string": in Python 3.14 argparse refuses a help text of Hydra's that is no string."""
    run_as_main = CHECK_OF_3_14 + "import main; main.main()"
    arguments = [f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN, "trainer_config.max_steps=2"]
    process = run_program(sys.executable, "-c", run_as_main, *arguments)
    assert process.returncode == 0, process.stderr
    shown = run_program(sys.executable, "-c", run_as_main, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "trainer_config" in shown.stdout
    # The check is there, and without our function Hydra doesn't pass it: when this fails, the function can go.
    without = CHECK_OF_3_14 + "import main; main.accept_hydras_help = lambda: None; main.main()"
    process = run_program(sys.executable, "-c", without, *arguments)
    assert process.returncode != 0
    assert "badly formed help string" in process.stderr


SLOW = pytest.mark.slow


@pytest.mark.parametrize("method", ["spawn", *(pytest.param(m, marks=SLOW) for m in ("fork", "forkserver"))])
def test_the_loaders_processes_under_every_start_method(method, tmp_path):
    """Catches what only forked workers can do, and a warning about a leaked semaphore at the end of the run.

    Python 3.14 starts processes by forkserver on Linux; macOS and Windows spawn them. The thread that fills a loader's
    queue, which holds two semaphores, ends late here, as it may on a busy machine.
    """
    script = (
        "import multiprocessing, multiprocessing.queues, runpy, sys, time\n"
        "def end_late(*args, feed=multiprocessing.queues.Queue._feed):\n"
        "    feed(*args); time.sleep(1)\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.queues.Queue._feed = staticmethod(end_late)\n"
        "    multiprocessing.set_start_method(sys.argv[1]); sys.argv = sys.argv[2:]; sys.path.insert(0, '.')\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-c", script, method, "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN]
    process = run_program(*command, "trainer_config.data_loader_workers=1", is_real=True)
    assert process.returncode == 0, process.stderr
    for word in ("leaked", "Traceback", "Warning"):
        assert word not in process.stderr
    plain = run_program(sys.executable, "main.py", f"hydra.run.dir={tmp_path / 'plain'}", *TINY_RUN)
    assert plain.returncode == 0, plain.stderr
    weights, expected = (load_snapshot(str(tmp_path / name / "gpt_snapshot.pt"))["model"] for name in ("run", "plain"))
    assert all((weights[name] == expected[name]).all() for name in expected)
