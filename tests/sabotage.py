"""main.py with one fault built in, for test_faults.py: `torchrun tests/sabotage.py FAULT STEP RANK overrides...`.

At optimizer step STEP, rank RANK raises, hangs, gets a gradient that is not a number ("nan"), is killed a moment later
("kill"), or gets a SIGTERM ("term"). The last two happen once: not again in a restarted run. STEP and RANK may be
lists, 30,80 and 0,1. "die early" kills the rank in its first attempt, before it looks for a snapshot. A fault that
comes from inside can't be late, however slow the machine is.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main
from trainer import Trainer

fault, steps, ranks = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
del sys.argv[1:4]
places = [(int(step), int(rank)) for step, rank in zip(steps, ranks, strict=True)]
train_step = Trainer._train_step


def is_first_time(run_dir, step):
    """Whether nothing has happened in this step of the run yet, in this process or in one before it."""
    try:
        Path(f"{run_dir}.{fault}-{step}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def sabotaged(trainer, batches):
    if (trainer.step, trainer.ranks.rank) in places:
        if fault == "raise":
            raise RuntimeError("the very root of the evil")
        if fault == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun waits half a minute for it
            time.sleep(1000)
        if fault == "nan":
            next(trainer.raw_model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
        if fault == "kill" and is_first_time(trainer.reporter.run_dir, trainer.step):
            threading.Timer(random.uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGKILL)).start()
        if fault == "term" and is_first_time(trainer.reporter.run_dir, trainer.step):
            signal.raise_signal(signal.SIGTERM)
    return train_step(trainer, batches)


def killed(trainer):
    if (0, trainer.ranks.rank) in places:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10000)  # the other one gets no further either, until torchrun ends it


Trainer._train_step = sabotaged  # type: ignore[method-assign]
if fault == "die early" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Trainer.resume = killed  # type: ignore[method-assign]
main.main()
