"""The benchmark for GPUs, tried out without one: each test names the mistake that would turn it red."""

import argparse
import importlib
import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import PROJECT, run_program

STEP_FIGURES = [
    *("tokens_per_second", "step_ms", "data_ms", "forward_ms", "backward_ms", "rest_ms", "host_ms"),
    *("evaluation_ms", "sample_ms", "peak_memory_gb", "model_flops_per_token"),
]


@pytest.fixture
def gpu(monkeypatch) -> ModuleType:
    """benchmarks/gpu.py as a module."""
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    return importlib.import_module("gpu")


@pytest.fixture
def bench(gpu, tmp_path) -> Any:
    return gpu.Bench(
        argparse.Namespace(
            text=PROJECT / "data" / "sample.txt", device="cpu", quick=False, threads=1, json=tmp_path / "gpu.json"
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)  # ten processes start here, one after the other
def test_the_benchmark_for_gpus_runs_whole(gpu, tmp_path):
    """Catches a benchmark that no longer fits the program: it would be noticed on a rented GPU, minute by minute."""
    path = tmp_path / "folder" / "gpu.json"
    command = [PROJECT / "benchmarks" / "gpu.py", "--quick", "--device", "cpu", "--json", path]
    run = run_program(sys.executable, *command, timeout=1100)
    assert run.returncode == 0, run.stderr
    assert "failed" not in run.stdout + path.read_text()
    assert str(path) in run.stdout
    results = json.loads(path.read_text())
    names = ["machine", "device", "quick", "baby_gpt", "seconds", "steps", "repeat", "generation", "start_up"]
    assert list(results) == names
    assert (results["device"], results["quick"]) == ("cpu", True)

    whole = results["baby_gpt"]
    assert 0.0 < whole["training_seconds"] < whole["wall_seconds"]
    assert 0.0 < whole["best_loss"] <= whole["final_loss"] < 2 * math.log(65)
    assert whole["seconds_to_nanogpts_loss"] is None  # after 8 steps

    kinds = [(row["recipe"], row["strategy"], row["compiled"]) for row in results["steps"]]
    recipes = [("gpt2_small", "ddp"), ("baby_gpt", "ddp"), ("gpt2_small", "fsdp")]
    assert kinds == [(*recipe, compiled) for recipe in recipes for compiled in (False, True)]
    for row in results["steps"]:
        assert all(0.0 < row[name] < math.inf for name in STEP_FIGURES), row
        assert row["micro_batch_size"] == 4
        assert row["share_of_peak"] is None  # a CPU's isn't published

    assert [row["samples"] for row in results["generation"]["rows"]] == [1, 8]
    assert all(row["cached"] > 0.0 < row["uncached"] and row["same_tokens"] for row in results["generation"]["rows"])
    assert all(result["seconds"] > 0.0 for result in results["start_up"].values())
    assert results["repeat"] == {"steps": 8, "same_weights": True, "same_losses": True}


def test_each_phase_of_a_step_gets_its_own_time(gpu, monkeypatch):
    """Catches time that counts to the phase before or after, and micro-batches of which only the last one counts."""
    now = [100.0]
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now[0])  # a clock that only the lines below move

    def after(seconds: float) -> None:
        now[0] += seconds

    def fetched():
        while True:
            after(0.001)
            yield "batch"

    phases = gpu.Phases(torch.device("cpu"))
    batches, scale = phases.batches(fetched()), phases.marked("backward", after)
    for _ in range(3):
        phases.mark("start")
        after(0.032)
        for _ in range(2):  # micro-batches
            assert next(batches) == "batch"
            after(0.002)
            scale(0.004)
        phases.mark("rest")
        after(0.016)
    phases.mark("end")
    wanted = {"start": 32.0, "data": 2.0, "forward": 4.0, "backward": 8.0, "rest": 16.0}
    assert phases.milliseconds("start") == pytest.approx(wanted, abs=1e-6)  # a clock's 100 s have 14 digits behind it


def test_a_micro_batch_that_does_not_fit_is_halved(bench, monkeypatch):
    """Catches a benchmark that a smaller GPU ends, and a step that trains on fewer windows instead."""
    asked = []

    def ask(what, *overrides):
        asked.append([word for word in overrides if "batch" in word or "strategy" in word])
        micro = 32 >> (len(asked) - 1)
        if micro > 8:
            return {"out_of_memory": micro, "device": "NVIDIA L4"}
        figures = {"tokens_per_second": 1e4, "model_flops_per_token": 1e9, "dtype": "bfloat16"}
        return {"micro_batch_size": micro, "device": "NVIDIA L4", **figures}

    monkeypatch.setattr(bench, "ask", ask)
    result = bench.steps("gpt2_small", "ddp", False)
    assert asked == [[], ["trainer_config.micro_batch_size=16"], ["trainer_config.micro_batch_size=8"]]
    assert result["micro_batch_size"] == 8
    assert result["share_of_peak"] == pytest.approx(1e13 / 121e12)  # as published for this one
    assert bench.results["device"] == "NVIDIA L4"
    monkeypatch.setattr(bench, "ask", lambda *_: {"out_of_memory": 1, "device": "NVIDIA L4"})
    assert "out of memory" in bench.steps("gpt2_small", "ddp", False)["failed"]


def test_a_strategy_reaches_the_program(bench, monkeypatch):
    """Catches two rows of one strategy; the default isn't named, so that it is really the default's row."""
    asked = []
    monkeypatch.setattr(bench, "ask", lambda *overrides: asked.append(overrides) or {"out_of_memory": 1})
    for strategy in ("ddp", "other"):
        bench.steps("gpt2_small", strategy, True)
    assert [[word for word in words if "strategy" in word] for words in asked] == [
        [],
        ["trainer_config.strategy=other"],
    ]
    assert all("trainer_config.compile=true" in words for words in asked)


@pytest.mark.parametrize(("device", "dtype"), [("NVIDIA Something New", "bfloat16"), ("NVIDIA H200", "float32")])
def test_no_share_of_a_peak_that_is_not_known(gpu, device, dtype):
    """Catches a share of another device's rate, or of another type's."""
    figures = {"tokens_per_second": 1e4, "model_flops_per_token": 1e9, "dtype": dtype, "device": device}
    assert gpu.share_of_peak(figures) is None


def test_what_fails_costs_its_own_row_only(bench, monkeypatch):
    """Catches one failure that takes all other figures with it, and a benchmark that never ends."""

    def fail(error: BaseException) -> dict[str, Any]:
        raise error

    error = subprocess.CalledProcessError(1, ["python"], stderr="Traceback ...\nRuntimeError: no kernel\n\n")
    bench.keep("baby_gpt", bench.attempt("one", lambda: fail(error)))
    assert bench.attempt("another", lambda: fail(subprocess.TimeoutExpired("python", 1.0))) == {
        "failed": "the time was over"
    }
    assert bench.attempt("a third", lambda: fail(SystemExit("Traceback ...\nerror: no text\n"))) == {
        "failed": "error: no text"
    }
    written = json.loads(bench.arguments.json.read_text())
    assert written["baby_gpt"] == {"failed": "RuntimeError: no kernel"}
    assert bench.attempt("a fourth", lambda: {"seconds": 1.0}) == {"seconds": 1.0}
    bench.began = time.monotonic() - 1000.0
    assert bench.attempt("too late", lambda: fail(AssertionError("begun"))) == {"failed": "the time was over"}


@pytest.mark.parametrize(
    ("words", "is_memory"),
    [("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True), ("no kernel", False)],
)
def test_memory_that_cublas_lacks_halves_the_micro_batch_too(gpu, monkeypatch, words, is_memory):
    """Catches a row that is lost because the memory ended within cuBLAS, and bugs that are taken for that."""

    def fail(*_: Any) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(gpu, "time_steps", fail)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    text = PROJECT / "data" / "sample.txt"
    settings = [*gpu.QUICK_RUN, "trainer_config.device=cpu", f"data_config.path={text}"]
    expected: Any = nullcontext() if is_memory else pytest.raises(RuntimeError, match=words)
    try:
        with expected:
            assert gpu.measure_steps(str(text), True, settings)["out_of_memory"] == 4
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_what_is_worth_most_is_measured_first(bench, gpu, monkeypatch, capsys):
    """Catches a limit of time that costs the figures that people look for, and leaves those of fsdp on one rank."""
    begun = []
    monkeypatch.setattr(bench, "attempt", lambda name, measure: begun.append(name) or {"failed": "the time was over"})
    gpu.answer(bench)
    assert begun[:3] == ["baby_gpt to its end", "steps of gpt2_small, ddp, eager", "steps of gpt2_small, ddp, compiled"]
    assert begun[-2:] == ["steps of gpt2_small, fsdp, eager", "steps of gpt2_small, fsdp, compiled"]
    assert len(begun) == len(set(begun)) + 1 == 11  # two starts
    assert "failed: the time was over" in capsys.readouterr().out


def test_tables_of_failures_only(bench, gpu, capsys):
    """Catches a table that needs every figure: the one that is there would not be shown."""
    failed = {"failed": "no kernel"}
    row = {"recipe": "baby_gpt", "strategy": "ddp", "compiled": True, **failed}
    parts = {"baby_gpt": failed, "steps": [row], "generation": failed, "start_up": {"main": failed}, "repeat": failed}
    gpu.print_tables({**bench.results, **parts})
    assert capsys.readouterr().out.count("failed: no kernel") == 5


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_a_gpu_it_says_so(tmp_path):
    """Catches figures of a CPU under the name of a GPU."""
    path = tmp_path / "gpu.json"
    run = run_program(sys.executable, PROJECT / "benchmarks" / "gpu.py", "--json", path)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("error: torch finds no GPU here")
    assert len(run.stderr.splitlines()) == 1
    assert not path.exists()
