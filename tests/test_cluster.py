"""Many machines: the batch file for SLURM, a node that dies, ranks that don't start from the same.

The machines are groups of processes on this one, and SLURM is `slurm.py`. What counts is that a run ends as if nothing
had been.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANGS, PROJECT, SAMPLE_TEXT, TINY_RUN, free_port
from test_faults import KILLED_RUN, LONG_RUN, assert_identical, output

from distributed import leave_if_lost
from large.machines import program_files


def settings(strategy: str) -> list[str]:
    """Of the run that is disturbed: 120 steps on four ranks."""
    return [*LONG_RUN, *KILLED_RUN, *([] if strategy == "ddp" else [f"trainer_config.strategy={strategy}"])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[str], Path]:
    """The run directory of a strategy's run on four ranks, made once."""
    made: dict[str, Path] = {}

    def run(strategy: str) -> Path:
        if strategy not in made:
            made[strategy] = tmp_path_factory.mktemp("runs") / "undisturbed"
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
            command = [*launcher, "main.py", f"hydra.run.dir={made[strategy]}", *settings(strategy)]
            process = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=HANGS, check=False)
            assert process.returncode == 0, process.stderr
        return made[strategy]

    return run


# ------------------------------------------------------------------------------------ SLURM


def submit(folder: Path, torchrun: str, *arguments: str, **environment: str) -> list[int]:
    """What sbatch does with recipes/slurm.sh, on two nodes of two ranks: the exit code of each start of the job.

    Args:
        folder: where the stand-ins for SLURM's commands go, and the output: folder/job.out.
        torchrun: the body of a shell script that stands in for torchrun.
        arguments: of main.py.
        environment: of the job.
    """
    commands = folder / "bin"
    commands.mkdir(parents=True)
    tools = {name: f'exec "{sys.executable}" "{PROJECT}/tests/slurm.py" {name} "$@"' for name in SLURM}
    for name, body in {**tools, "torchrun": torchrun}.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    job = random.choice([n for n in range(10000) if is_free(20000 + n)])
    environment = {
        **os.environ,
        **{"PATH": f"{commands}:{os.environ['PATH']}", "STAND_IN": str(folder), "RANKS_PER_NODE": "2"},
        **{"SLURM_JOB_ID": str(job), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"},
        **environment,
    }
    codes: list[int] = []
    with open(folder / "job.out", "a") as out:
        while not codes or (folder / "requeued").exists():
            (folder / "requeued").unlink(missing_ok=True)
            command = ["bash", str(PROJECT / "recipes" / "slurm.sh"), *arguments]
            job_process = subprocess.run(
                command, env=environment, cwd=PROJECT, stdout=out, stderr=out, timeout=HANGS, check=False
            )
            codes.append(job_process.returncode)
    return codes


SLURM = ("srun", "scancel", "scontrol", "squeue")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.timeout(600)  # three starts of four ranks, one after the other where there are few cores
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp"])  # passes under fsdp, too; the suite would take two minutes more
def test_a_job_under_slurm_ends_as_if_nothing_had_been(undisturbed, tmp_path, strategy):
    """A signal that torchrun dies of, a job that isn't started again, ranks that meet in an old store after a kill."""
    run_dir = tmp_path / "run"
    # A rank of the second node is killed in mid-run; later, from another rank, the whole job gets SIGUSR1.
    faults = f"kill,slurm {random.randrange(25, 50)},{random.randrange(65, 110)} 3,1"
    torchrun = f'''
        words=()
        for word in "$@"; do
            if [ "$word" = main.py ]; then words+=(tests/sabotage.py {faults}); else words+=("$word"); fi
        done
        exec "{sys.executable}" -m torch.distributed.run "${{words[@]}}"
    '''
    codes = submit(tmp_path / "slurm", torchrun, f"hydra.run.dir={run_dir}", *settings(strategy))
    said = (tmp_path / "slurm" / "job.out").read_text()
    assert codes == [128 + signal.SIGTERM, 0], said
    assert "stopped by SIGUSR1 after step" in said
    assert said.count("going on from") == 2  # after the kill, and in the second start of the job
    assert_identical(run_dir, undisturbed(strategy))


@pytest.mark.parametrize(
    ("signals", "code", "state", "expected"),
    [
        ("", 0, "RUNNING", [0]),
        ("", 1, "RUNNING", [1]),  # an error would come again in each start, for ever
        ("USR1", 1, "RUNNING", [143, 0]),
        ("TERM", 1, "RUNNING", [143, 0]),
        ("TERM", 0, "RUNNING", [0]),  # it has finished just then
        ("TERM", 1, "COMPLETING", [143]),  # scancel: its user doesn't want it any more
    ],
)
def test_a_job_starts_again_where_it_was_stopped_alone(tmp_path, signals, code, state, expected):
    """A preempted job that is not started again, and a failed, finished or cancelled one that is, for ever.

    torchrun is a script here, which gets the signal together with the shell around it, in the first start only.
    """
    torchrun = f'''
        if [ -e "$STAND_IN/second" ]; then exit 0; fi
        if [ -n "{signals}" ]; then kill -s "{signals}" $PPID; fi
        until mkdir "$STAND_IN/first" || mkdir "$STAND_IN/second"; do sleep 0; done
        until [ -e "$STAND_IN/second" ]; do sleep 0.1; done  # both nodes are here, and this is the first start
        exit {code}
    '''
    assert submit(tmp_path / "slurm", torchrun, STATE=state) == expected


# ------------------------------------------------------------------------------------ a node that dies


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp"])  # passes under ddp, too
def test_a_node_that_dies_and_comes_back(undisturbed, tmp_path, strategy):
    """A node whose agent dies too: the others wait for ever, or count their restarts otherwise and never meet it.

    If it is the node at which all meet, the others must end, so that a scheduler can start the job again.
    """
    run_dir, port = tmp_path / "run", free_port()
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", "--max-restarts=3"),
        *("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=job"),
    ]

    def start_node(dies_at: int | None = None) -> subprocess.Popen[bytes]:
        # Whichever of the nodes has ranks 0 and 1, this one has rank 0 or 2.
        fault = ["tests/sabotage.py", "node", f"{dies_at},{dies_at}", "0,2"]
        command = [*launcher, *(["main.py"] if dies_at is None else fault), f"hydra.run.dir={run_dir}"]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(f"{run_dir}.out", "a") as out:
            return subprocess.Popen(
                [*command, *settings(strategy)], cwd=PROJECT, env=environment, stdout=out, stderr=out
            )

    host = start_node(dies_at=random.randrange(65, 110))
    while is_free(port):  # until the first one is where they meet
        time.sleep(0.05)
    other = start_node(dies_at=random.randrange(25, 50))
    assert other.wait(HANGS) == -signal.SIGKILL, output(run_dir)
    other = start_node()
    assert host.wait(HANGS) == -signal.SIGKILL, output(run_dir)  # it went on, with the same agent, to its own end
    assert other.wait(HANGS) != 0
    nodes = [start_node(), start_node()]
    assert [node.wait(HANGS) for node in nodes] == [0, 0], output(run_dir)
    assert output(run_dir).count("going on from") == 2
    assert_identical(run_dir, undisturbed(strategy))


# ------------------------------------------------------------------------------------ machines that differ


def run_two(first: list[object], second: list[object]) -> list[tuple[int, str]]:
    """(Exit code, standard error) of two ranks on two nodes; given: for each, main.py of a project, and arguments."""
    common = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**os.environ, **common, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, words in enumerate((first, second))
    ]
    try:
        errors = [node.communicate(timeout=HANGS)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, error) for node, error in zip(nodes, errors, strict=True)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The project's files once more, as they would be on another machine."""
    folder = tmp_path_factory.mktemp("copies") / "project"
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns(".*", "tests", "docs", "runs", "__pycache__"))
    return folder


def test_the_disks_of_two_machines(copy, tmp_path):
    """Catches a run that would begin anew without a word when another machine becomes rank 0.

    And two copies of one project, in other folders, that are taken for different ones.
    """
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "run"
    (code, words), (other_code, other_words) = run_two(
        [PROJECT / "main.py", f"hydra.run.dir={here}", *TINY_RUN, "trainer_config.max_steps=1"],
        [copy / "main.py", f"hydra.run.dir={there}", *TINY_RUN, "trainer_config.max_steps=1"],
    )
    assert (code, other_code) == (0, 0), words + other_words
    (warning,) = [line for line in words.splitlines() if "isn't that of rank" in line]
    assert f"the disk of {here}/gpt_snapshot.pt isn't that of rank 1 ({socket.gethostname()})" in warning
    assert "trainer_config.snapshot_path" in warning
    assert warning.split("WARNING")[1] in (here / "main.log").read_text()
    assert "WARNING" not in other_words
    assert not list(here.glob("*.tmp"))


def test_two_machines_with_one_disk(two_rank_run):
    """Catches a warning about the disk where all is well."""
    folder, process = two_rank_run
    assert "isn't that of rank" not in process.stderr
    assert not list((folder / "run").glob("*.tmp"))


def test_every_module_counts_as_the_program():
    """Catches a digest of one folder's files: ranks with two versions of the rest would train together in silence."""
    named = {str(path.relative_to(PROJECT)) for path in program_files()}
    assert named >= {"main.py", "muon.py", "large/sharding.py", "saving/run_snapshots.py", "data/corpus.py"}
    assert not any(name.startswith(("tests", "docs", "benchmarks")) for name in named)


@pytest.mark.parametrize("what", ["program", "text"])
def test_machines_that_differ_are_named(copy, tmp_path, what):
    """Catches ranks that train one model with two programs or on two texts, and a line from each of them."""
    altered = tmp_path / "project"
    shutil.copytree(copy, altered)
    arguments = [f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN]
    other = [*arguments]
    if what == "program":
        with open(altered / "large" / "sharding.py", "a") as file:  # not in the root, and loaded by few runs only
            file.write("# a change that another machine hasn't got yet\n")
        other.append("trainer_config.seed=2")  # and it was started by another command
    else:
        text = SAMPLE_TEXT.read_text(encoding="utf-8")
        (tmp_path / "text").write_text(text.replace("the", "teh"), encoding="utf-8")
        other = [f"data_config.path={tmp_path / 'text'}" if "config.path" in a else a for a in arguments]
    (code, words), (other_code, other_words) = run_two([copy / "main.py", *arguments], [altered / "main.py", *other])
    assert (code, other_code) == (1, 1), words + other_words
    (line,) = words.splitlines()
    assert line.startswith("error: not all ranks start from the same: ")
    assert f" on rank 1 ({socket.gethostname()})" in line
    assert f"{what} " in line
    assert ("configuration " in line) == (what == "program")
    assert "torch 2" not in line  # it is the same
    assert other_words == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("address", "interface", "on_this_node", "is_named"),
    [
        ("127.0.1.1", None, "2", True),
        ("10.1.2.3", None, "2", False),
        ("127.0.1.1", "eth0", "2", False),  # the user knows
        ("127.0.1.1", None, "4", False),  # one machine: there it does no harm
    ],
)
def test_a_name_that_leads_to_its_own_machine_is_named(monkeypatch, capsys, address, interface, on_this_node, is_named):
    """Catches "connection refused" between machines, with no word about /etc/hosts, which Debian writes that way."""
    monkeypatch.setattr("distributed.leave", lambda code: None)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": on_this_node}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    leave_if_lost(RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] Connection refused"))
    (line,) = capsys.readouterr().err.splitlines()
    assert ("leads to 127.0.1.1" in line and "GLOO_SOCKET_IFNAME" in line) == is_named
