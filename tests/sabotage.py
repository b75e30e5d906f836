"""main.py with one fault built in, for test_faults.py: `torchrun tests/sabotage.py FAULT STEP RANK overrides...`.

At optimizer step STEP, rank RANK raises, hangs, or gets a loss that is not a number. Or it dies early: in its first
attempt, before it looks for a snapshot.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main
from trainer import Trainer

fault, step, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
del sys.argv[1:4]
train_step = Trainer._train_step


def sabotaged(trainer, batches):
    if trainer.step == step and trainer.ranks.rank == rank:
        if fault == "raise":
            raise RuntimeError("the very root of the evil")
        if fault == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun waits half a minute for it
            time.sleep(1000)
        if fault == "nan":
            next(trainer.raw_model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    return train_step(trainer, batches)


def killed(trainer):
    if trainer.ranks.rank == rank and not trainer.ranks.is_restart:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10000)  # the other one gets no further either, until torchrun ends it


Trainer._train_step = sabotaged  # type: ignore[method-assign]
if fault == "die early" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Trainer.resume = killed  # type: ignore[method-assign]
main.main()
