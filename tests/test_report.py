"""`python report.py`: the table of all runs."""

import math
import sys

import pytest
from conftest import read_losses, run_program
from test_trainer import make_trainer, world_of_one

from report import Run, run_table
from snapshot import load_snapshot, save_snapshot


def test_the_table_of_all_runs(tmp_path):
    """Catches the latest loss for the lowest, another run's settings, half a speed, a table that one bad file ends."""
    settings = {
        "long": [],
        "deep/er": ["gpt_config.n_layer=3", "trainer_config.max_steps=6", "trainer_config.log_every_steps=4"],
    }
    with world_of_one() as ranks:
        trainers = {name: make_trainer(tmp_path / name, *chosen, ranks=ranks) for name, chosen in settings.items()}
        losses = iter([2.5, 2.8])
        vars(trainers["long"])["evaluate"] = lambda: next(losses)
        for trainer in trainers.values():
            trainer.fit()
    for name in ("cut off", "empty", "odd", "without config"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("{}")
    whole = (tmp_path / "long" / "gpt_snapshot.pt").read_bytes()
    (tmp_path / "cut off" / "gpt_snapshot.pt").write_bytes(whole[: len(whole) // 2])
    state = load_snapshot(str(tmp_path / "long" / "gpt_snapshot.pt"))
    save_snapshot({**state, "config": {"trainer_config": 3}}, str(tmp_path / "odd" / "gpt_snapshot.pt"))
    save_snapshot({**state, "config": {}}, str(tmp_path / "without config" / "gpt_snapshot.pt"))
    process = run_program(sys.executable, "report.py", tmp_path)
    assert process.returncode == 0, process.stderr
    head, *lines = process.stdout.splitlines()
    assert head.split()[:5] == ["loss", "steps", "parameters", "seconds", "tokens/s"]
    rows = {line.split()[5]: line.split() for line in lines}
    assert list(rows) == sorted(rows, key=lambda name: float(rows[name][0]))
    assert rows["long"][0] == "2.5000"
    assert rows["deep/er"][0] == f"{read_losses(tmp_path / 'deep/er', 'eval/loss')[6]:.4f}"
    assert [rows["long"][1], rows["deep/er"][1]] == ["20", "6"]
    for name, trainer in trainers.items():
        assert int(rows[name][2].replace(",", "")) == sum(p.numel() for p in trainer.raw_model.parameters())
        speeds = read_losses(tmp_path / name, "train/tokens_per_second")
        steps = [at - before for before, at in zip([0, *speeds], speeds, strict=False)]
        seconds = sum(count * 12 * 16 / speed for count, speed in zip(steps, speeds.values(), strict=True))
        assert float(rows[name][4].replace(",", "")) == pytest.approx(trainer.step * 12 * 16 / seconds, abs=1)
    assert "gpt_config.n_layer=3" in rows["deep/er"]
    assert "gpt_config.n_layer=3" not in rows["long"]
    assert set(rows["deep/er"]) - set(rows["long"]) >= {
        "trainer_config.max_steps=6",
        "trainer_config.log_every_steps=4",
    }
    skipped = process.stderr.strip().splitlines()
    assert [line.split(": ")[0] for line in skipped] == [
        f"skipped {tmp_path / name}" for name in ("cut off", "empty", "odd", "without config")
    ]


def test_a_table_without_runs(tmp_path):
    """Catches a traceback, and an empty table that looks like an answer."""
    process = run_program(sys.executable, "report.py", tmp_path / "nowhere")
    assert (process.returncode, process.stdout) == (1, "")
    advice = "train one with python main.py, or name the folder that holds them"
    assert process.stderr == f"error: no runs in {tmp_path / 'nowhere'}; {advice}\n"


def test_runs_without_a_loss_or_curves_come_last():
    """Catches a run that has diverged at the top, and a division by no seconds at all."""
    runs = [
        Run("a", "text", math.nan, 3, 10, 1.0, 5.0, []),
        Run("b", "text", math.inf, 3, 10, 0.0, 0.0, []),
        Run("c", "text", 2.0, 3, 10, 1.0, 5.0, []),
    ]
    lines = run_table(runs).splitlines()[1:]
    assert lines[0].endswith("c")
    assert lines[2].split() == ["inf", "3", "10", "?", "?", "b"]


def test_losses_on_different_texts_are_not_ranked():
    """Catches a short play's loss among Shakespeare's: a run without a network looks like any other."""
    losses = [("a", "one", 1.5), ("b", "other", 1.2), ("c", "one", 1.6), ("d", "other", 2.0)]
    table = run_table([Run(name, text, loss, 3, 10, 1.0, 5.0, []) for name, text, loss in losses])
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["b", "d", "above:", "a", "c"]
