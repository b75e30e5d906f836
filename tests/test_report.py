"""`python report.py`: the table of all runs."""

import math
import re
import sys

import pytest
from conftest import TINY_RUN, TINY_SIZES, read_losses, run_program
from test_trainer import make_trainer, world_of_one

from report import Run, read_runs, run_table
from saving.moving import write_config
from snapshot import load_snapshot, save_snapshot


def test_a_run_whose_snapshots_lie_elsewhere_is_in_the_table(tmp_path):
    """Catches a run that is left out, as if it had saved nothing, because its snapshots are not in its directory."""
    place = tmp_path / "store" / "mine.pt"
    with world_of_one() as ranks:
        settings = ["trainer_config.max_steps=5", f"trainer_config.snapshot_path={place}"]
        trainer = make_trainer(tmp_path / "runs" / "one", *settings, ranks=ranks)
        trainer.fit()
    write_config(tmp_path / "runs" / "one", trainer.full_config)
    assert [(run.name, run.steps) for run in read_runs(tmp_path / "runs")] == [("one", 5)]


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
        (tmp_path / name / "config.yaml").write_text("trainer_config: {}")
    whole = (tmp_path / "long" / "gpt_snapshot.pt").read_bytes()
    (tmp_path / "cut off" / "gpt_snapshot.pt").write_bytes(whole[: len(whole) // 2])
    state = load_snapshot(str(tmp_path / "long" / "gpt_snapshot.pt"))
    save_snapshot({**state, "config": {"trainer_config": 3}}, str(tmp_path / "odd" / "gpt_snapshot.pt"))
    save_snapshot({**state, "config": {}}, str(tmp_path / "without config" / "gpt_snapshot.pt"))
    process = run_program(sys.executable, "report.py", tmp_path)
    assert process.returncode == 0, process.stderr
    head, *lines = process.stdout.splitlines()
    assert max(map(len, [head, *lines])) <= 80
    assert head.split()[:5] == ["loss", "steps", "parameters", "seconds", "tokens/s"]
    rows = rows_of(lines)
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
    shared = [setting for setting in TINY_SIZES if setting in rows["long"]]
    assert [setting.split(".")[1] for setting in shared] == ["n_layer=2", "max_steps=20", "log_every_steps=1"]
    skipped = process.stderr.strip().splitlines()
    assert [line.split(": ")[0] for line in skipped] == [
        f"skipped {tmp_path / name}" for name in ("cut off", "empty", "odd", "without config")
    ]


def rows_of(lines: list[str]) -> dict[str, list[str]]:
    """The words of each row of a table, by the run's name: those of a row's later lines belong to its last column."""
    joined = re.sub(r"([,/.])?\n {49}(?=\S)", lambda match: match[1] or " ", "\n".join(lines))
    return {row.split()[5]: row.split() for row in joined.splitlines()}


def test_why_each_run_ended(tmp_path):
    """Catches a run that was stopped, has failed, or lost its patience, shown like one that came to its end."""
    script = (
        "import os, sys; sys.path.insert(0, '.'); import main, torch, trainer; step = trainer.Trainer._train_step\n"
        "fault = sys.argv.pop()\n"
        "def at_step_8(self, batches):\n"
        "    if self.step == 7 and fault.isdigit(): os.kill(os.getpid(), int(fault))\n"
        "    if self.step == 7 and fault == 'nan': torch.nn.init.constant_(self.raw_model.wte.weight, float('nan'))\n"
        "    return step(self, batches)\n"
        "trainer.Trainer._train_step = at_step_8; main.main()"
    )
    ends = {"9": "(unfinished)", "15": "(SIGTERM)", "nan": "(step 8: the loss or its gradient is not finite"}
    ends |= {"none": "(max_steps)"}
    for fault in ends:
        run_program(sys.executable, "-c", script, f"hydra.run.dir={tmp_path / fault}", *TINY_RUN, fault)
    with world_of_one() as ranks:
        patient = ["trainer_config.patience=1", "trainer_config.eval_every_steps=2"]
        trainer = make_trainer(tmp_path / "patient", *patient, ranks=ranks)
        vars(trainer)["evaluate"] = lambda: 2.0
        trainer.fit()
        earlier = make_trainer(tmp_path / "of an earlier version", "trainer_config.max_steps=1", ranks=ranks)
        vars(earlier.reporter)["note_end"] = lambda *_: None
        earlier.fit()
    # Gone on with, and killed before it has said anything: the old end is none any more.
    run_program(
        *(sys.executable, "-c", script.replace("== 7", "== 27"), f"hydra.run.dir={tmp_path / 'none'}", *TINY_RUN),
        *("trainer_config.max_steps=30", "trainer_config.max_epochs=2", "9"),
    )
    ends |= {"none": "(unfinished)", "patient": "(patience)"}
    shown = {run.name: run_table([run]) for run in read_runs(tmp_path)}
    assert "(" not in shown["of an earlier version"].partition("\n")[2]  # it isn't known
    for name, end in ends.items():
        assert f"{name} {end}" in " ".join(shown[name].split()), shown[name]


def test_a_name_is_shown_and_not_obeyed(tmp_path):
    """Catches a directory whose name clears the screen, or is no UTF-8 and ends the table in a traceback."""
    name = "a\x1b[2Jb"
    with world_of_one() as ranks:
        make_trainer(tmp_path / name, "trainer_config.max_steps=1", ranks=ranks).fit()
    (tmp_path / f"{name}\udcff").mkdir()
    (tmp_path / f"{name}\udcff" / "config.yaml").write_text("trainer_config: {}")
    process = run_program(sys.executable, "report.py", tmp_path)
    assert process.returncode == 0, process.stderr
    assert r"a\x1b[2Jb (max_steps)" in process.stdout
    assert rf"skipped {tmp_path}/a\x1b[2Jb\udcff: ValueError" in process.stderr
    nothing = run_program(sys.executable, "report.py", tmp_path / "\x1b[2J")
    assert nothing.stderr.startswith(rf"error: no runs in {tmp_path}/\x1b[2J; ")
    assert "\x1b" not in process.stdout + process.stderr + nothing.stderr


def test_a_name_of_overrides_is_not_followed_by_the_same_ones():
    """Catches each override of a sweep twice in its row, and what all runs of it share in every one."""
    names = ["optimizer_config.learning_rate=1e-3", "optimizer_config.learning_rate=2e-3"]
    settings = ["optimizer_config.learning_rate=0.001", "optimizer_config.learning_rate=0.002"]
    seeds = ["trainer_config.seed=1", "trainer_config.seed=2"]
    runs = [
        Run(name, "text", 1.0, 3, 10, 1.0, 5.0, [setting, seed, "gpt_config.n_layer=3"])
        for name, setting, seed in zip(names, settings, seeds, strict=True)
    ]
    lines = run_table(runs).splitlines()
    assert max(map(len, lines)) <= 80
    rows = rows_of(lines[1:])
    assert [rows[name][6:] for name in names] == [[seed] for seed in seeds]


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
