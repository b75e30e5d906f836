"""SLURM's commands, for test_large.py: `python slurm.py srun bash -c true` does on this machine what srun does.

Only what `recipes/slurm.sh` needs. A "node" is a group of processes. The folder STAND_IN remembers what SLURM would:
the processes of the job's tasks, and whether the job is to start again.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def srun(*words: str) -> int:
    """One task on each node: the highest of their exit codes."""
    command = list(words)
    while command[0].startswith("--"):
        command.pop(0)
    nodes = range(int(os.environ["SLURM_JOB_NUM_NODES"]))
    tasks = [subprocess.Popen(command, start_new_session=True) for _ in nodes]
    (Path(os.environ["STAND_IN"]) / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    codes = [task.wait() for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


def scancel(option: str, job: str) -> int:
    """Send a signal to every process of every task, as SLURM does."""
    number = getattr(signal, f"SIG{option.removeprefix('--signal=')}")
    for pid in descendants((Path(os.environ["STAND_IN"]) / "tasks").read_text().split()):
        if pid != os.getpid():  # it was a rank that has asked for it
            os.kill(pid, number)
    return 0


def scontrol(*words: str) -> int:
    """The names of the nodes (all are this machine), or the wish to start a job again."""
    if words[0] == "requeue":
        (Path(os.environ["STAND_IN"]) / "requeued").touch(exist_ok=False)
    else:
        assert words == ("show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
        sys.stdout.write("127.0.0.1\n" * int(os.environ["SLURM_JOB_NUM_NODES"]))
    return 0


def squeue(*options: str) -> int:
    """The state of the job."""
    sys.stdout.write(os.environ.get("STATE", "RUNNING") + "\n")
    return 0


def descendants(pids: list[str]) -> list[int]:
    """Processes and all that they have started, as far as it is still there."""
    found = []
    for pid in pids:
        found.append(int(pid))
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += descendants(children.read_text().split())
    return found


if __name__ == "__main__":
    tool, *arguments = sys.argv[1:]
    tools: dict[str, Callable[..., int]] = {
        "srun": srun, "scancel": scancel, "scontrol": scontrol, "squeue": squeue,
    }  # fmt: skip
    sys.exit(tools[tool](*arguments))
