"""main.py with two durations changed, for run.py: `timed.py SECONDS_TO_ANSWER SECONDS_A_MOVE main.py overrides...`.

A store that doesn't answer is given up sooner, and moving an old run aside takes so long that kills come in between.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import snapshot
from saving import moving, run_snapshots

snapshot.SECONDS_TO_ANSWER, seconds_a_move = float(sys.argv[1]), float(sys.argv[2])
del sys.argv[:3]
replace, set_aside = os.replace, moving.set_aside


def replace_slowly(*paths: Any, **options: Any) -> None:
    time.sleep(seconds_a_move / 2)
    replace(*paths, **options)
    time.sleep(seconds_a_move / 2)


def set_aside_slowly(*args: Any, **options: Any) -> str:
    os.replace = replace_slowly
    try:
        return set_aside(*args, **options)
    finally:
        os.replace = replace


for module in (moving, run_snapshots):
    vars(module)["set_aside"] = set_aside_slowly
runpy.run_path(sys.argv[0], run_name="__main__")
