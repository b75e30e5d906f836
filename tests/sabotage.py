"""main.py with one fault built in, for test_faults.py: `torchrun tests/sabotage.py FAULT STEP RANK overrides...`.

At optimizer step STEP, rank RANK raises, hangs, gets a gradient that is not a number ("nan"), is killed a moment later
("kill"), gets a SIGTERM ("term"), has SLURM send SIGUSR1 to the whole job ("slurm"), or is killed with torchrun and all
ranks of its node ("node"). The last four happen once: not again in a restarted run. STEP and RANK may be lists, 30,80
and 0,1, and FAULT as well, or the same for all. "die early" kills the rank in its first attempt, before it looks for a
snapshot. "torchrun" kills torchrun, before torch is loaded. For "memory", STEP is the number of windows for which that
rank has memory, from the start on. A fault that comes from inside can't be late, however slow the machine is.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from console import environment  # noqa: F401  (first, as in main.py)

if sys.argv[1] == "torchrun":
    agent = os.getppid()
    run_dir = next(word.partition("=")[2] for word in sys.argv if word.startswith("hydra.run.dir="))
    Path(f"{run_dir}.rank{os.environ['RANK']}").touch()
    if os.environ["RANK"] == sys.argv[3]:
        while not Path(f"{run_dir}.rank0").exists():  # before its first lines, a rank can't know its launcher
            time.sleep(0.01)
        os.kill(agent, signal.SIGKILL)
    while os.getppid() == agent:
        time.sleep(0.01)

import torch

import main
from model import Block
from trainer import Trainer

faults, steps, ranks = (argument.split(",") for argument in sys.argv[1:4])
del sys.argv[1:4]
faults = faults * len(steps) if len(faults) == 1 else faults
places = {(int(step), int(rank)): fault for fault, step, rank in zip(faults, steps, ranks, strict=True)}
train_step = Trainer._train_step


def is_first_time(run_dir, fault, step):
    """Whether nothing has happened in this step of the run yet, in this process or in one before it."""
    try:
        Path(f"{run_dir}.{fault}-{step}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def sabotaged(trainer, batches):
    fault = places.get((trainer.step, trainer.ranks.rank))
    if fault == "raise":
        raise RuntimeError("the very root of the evil")
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun waits half a minute for it
        time.sleep(1000)
    if fault == "nan":
        trainer.raw_model.ln_f.register_forward_hook(spoil)  # and not at a parameter, of which there may be shards only
    if fault in ("kill", "term", "slurm", "node") and is_first_time(trainer.reporter.run_dir, fault, trainer.step):
        if fault == "kill":
            threading.Timer(random.uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGKILL)).start()
        if fault == "term":
            signal.raise_signal(signal.SIGTERM)
        if fault == "slurm":
            command = ["scancel", "--signal=USR1", os.environ["SLURM_JOB_ID"]]
            subprocess.run(command, check=True, start_new_session=True)  # or the signal would reach it as well
        if fault == "node":
            agent = os.getppid()
            ranks_here = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
            for pid in (agent, *(int(pid) for pid in ranks_here if int(pid) != os.getpid()), os.getpid()):
                os.kill(pid, signal.SIGKILL)
    return train_step(trainer, batches)


def spoil(module, arguments, output):
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * float("nan"))


def killed(trainer):
    if (0, trainer.ranks.rank) in places:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10000)  # the other one gets no further either, until torchrun ends it


forward = Block.forward


def narrow(block, x, cache=None, start=0):
    if len(x) > int(steps[0]):
        raise torch.OutOfMemoryError(f"simulated: no memory for {len(x)} windows")
    return forward(block, x, cache, start)


if faults[0] == "memory" and os.environ["RANK"] in ranks:
    Block.forward = narrow  # type: ignore[method-assign]
Trainer._train_step = sabotaged  # type: ignore[method-assign]
if faults[0] == "die early" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Trainer.resume = killed  # type: ignore[method-assign]
main.main()
