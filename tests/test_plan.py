"""The plan: parameters, bytes and operations, against a real step, another way of counting, and published figures.

Started as a program by `real_peak`, this file takes steps of a real run and prints the memory that they took.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, run_program, train
from test_trainer import make_trainer, world_of_one
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from config import MODEL_TYPES, SIZES, Config, TrainerConfig
from distributed import Ranks
from large import plan
from model import GPT, GPTConfig
from optimizer import OptimizerConfig, create_optimizer

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
# Released with 50,257 tokens and 1,024 positions; counted from OpenAI's files, as in test_model.py.
PUBLISHED = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
# Some hundred MB each, so that the interpreter's own memory doesn't matter. One is mostly activations, the other mostly
# weights, which count three times with Muon, whose products need room as well.
LONG = ["data_config.block_size=256", "trainer_config.batch_size=32"]
SHORT = ["gpt_config.n_layer=2", "trainer_config.batch_size=2"]
REAL_RUNS = {
    "activations": [*LONG, "gpt_config.n_layer=4", "gpt_config.n_embd=128", "trainer_config.micro_batch_size=16"],
    "weights, Muon": [*SHORT, "gpt_config.n_embd=640", "optimizer_config.name=muon"],
}


def memory_of_this_process(key: str) -> int:
    """Bytes that the kernel counts: VmRSS now, VmHWM at most up to now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def take_real_steps(folder: Path, name: str) -> None:
    """Print what two steps of a run take at most, and what the plan says of them."""
    small = [word for word in REAL_RUNS[name] if word.startswith(("optimizer", "trainer_config.activation"))]
    for words in (small, REAL_RUNS[name]):  # the small one loads whatever is loaded late
        with world_of_one() as ranks:
            before = memory_of_this_process("VmRSS")
            trainer = make_trainer(folder, *words, "data_config.truncate=1", ranks=ranks)
            batches = trainer._batches()
            for _ in range(2):
                trainer._train_step(batches)
                trainer.state.step += 1
    peak = memory_of_this_process("VmHWM") - before
    needs = plan.work_out(
        *(trainer.raw_model.config, trainer.config, trainer.optimizer_config, ALONE, trainer.micro_batch_size)
    )
    print(json.dumps({"real": peak, "planned": needs.peak}))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_RUNS)
def test_the_planned_peak_is_that_of_a_real_step(tmp_path, name):
    """Catches activations, gradients, optimizer state or temporary results that are left out, or counted twice."""
    # Freed memory goes back to the kernel at once: what glibc keeps for later is no need of the step.
    env = {"PYTHONPATH": str(PROJECT), "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    process = run_program(sys.executable, __file__, tmp_path, name, env=env, is_real=True)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["real"] > 150e6
    # 20 %: page sizes, the batch, and what kernels allocate within themselves.
    assert result["planned"] == pytest.approx(result["real"], rel=0.2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_published_models(name):
    """Catches a model that isn't the one that would be trained, such as one whose head counts twice."""
    sizes = GPTConfig(vocab_size=50257, block_size=1024, **dict(zip(SIZES, MODEL_TYPES[name], strict=True)))
    config = TrainerConfig(batch_size=1, use_amp=False)
    needs = plan.work_out(sizes, config, OptimizerConfig(name="adamw"), ALONE, 1)
    assert needs.parameters == PUBLISHED[name]
    assert needs.weights == needs.gradients == 4 * PUBLISHED[name]
    assert needs.optimizer == pytest.approx(8 * PUBLISHED[name], rel=1e-5)  # and a counter for each tensor


@pytest.mark.parametrize("recomputes", [False, True])
def test_operations_are_those_that_torch_counts(recomputes):
    """Catches a formula that forgets attention, the head, the second forward pass, or Muon's products."""
    sizes = GPTConfig(vocab_size=50, block_size=32, n_layer=3, n_head=2, n_embd=48)
    config = TrainerConfig(batch_size=4, use_amp=False, activation_checkpointing=recomputes)
    model = GPT(sizes)
    optimizer = create_optimizer(model, OptimizerConfig())
    if recomputes:
        plan.recompute_in_backward(model)
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    # Attention as two plain products: torch doesn't count its fused kernel on CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens)[1].backward()
        optimizer.step()
    needs = plan.work_out(sizes, config, OptimizerConfig(), ALONE, 4)
    # Computing twice ends with the last tensor that is needed: the last product of each block isn't repeated.
    unneeded = 2 * 4 * 32 * 4 * 48 * 48 * 3 if recomputes else 0
    assert counter.get_total_flops() == needs.operations - unneeded


@pytest.mark.parametrize("recomputes", [False, True])
def test_computing_twice_needs_less_memory(recomputes):
    """Catches a plan that ignores trainer_config.activation_checkpointing."""
    sizes = GPTConfig(vocab_size=50, block_size=128, n_layer=8, n_head=2, n_embd=64)
    needs = [
        plan.work_out(sizes, TrainerConfig(activation_checkpointing=key, use_amp=False), OptimizerConfig(), ALONE, 16)
        for key in (False, recomputes)
    ]
    assert (needs[1].activations < needs[0].activations / 3) is recomputes
    assert (needs[1].peak < needs[0].peak / 2) is recomputes


def test_shards_are_a_ranks_part():
    """Catches a plan that is the same for both strategies, and one that forgets what is gathered."""
    sizes = GPTConfig(vocab_size=50, block_size=64, n_layer=8, n_head=2, n_embd=128)
    config: Any = TrainerConfig(batch_size=16, use_amp=False)
    ranks = Ranks(0, 0, 4, torch.device("cpu"))
    whole = plan.work_out(sizes, config, OptimizerConfig(), ranks, 4)
    config.strategy = "fsdp"
    part = plan.work_out(sizes, config, OptimizerConfig(), ranks, 4)
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name) / 4, abs=1)
    assert part.activations == whole.activations
    block = 4 * 12 * 128 * 128  # bytes of its matrices
    saved = 0.75 * (whole.weights + whole.gradients + whole.optimizer)
    assert whole.peak - part.peak == pytest.approx(saved - 3 * block, rel=0.05)  # its weights; gradients in two sums
    more = plan.work_out(sizes, config, OptimizerConfig(), ranks, 2)  # two micro-batches
    assert more.gradients == whole.gradients


def test_the_micro_batch_is_the_largest_that_fits():
    """Catches a plan of one micro-batch for a run that would choose another one."""
    sizes = GPTConfig(vocab_size=50, block_size=64, n_layer=2, n_head=2, n_embd=64)
    config = Config(trainer_config=TrainerConfig(batch_size=12, micro_batch_size="auto", use_amp=False))
    at_three = plan.work_out(sizes, config.trainer_config, config.optimizer_config, ALONE, 3).peak
    assert plan.work_out_what_fits(sizes, config, ALONE, at_three).micro_batch == 3
    assert plan.work_out_what_fits(sizes, config, ALONE, at_three - 1).micro_batch == 1
    assert plan.work_out_what_fits(sizes, config, ALONE, 10**12).micro_batch == 12


def test_a_model_that_does_not_fit_is_not_named():
    """Catches a largest model that is larger than the memory, or smaller than it could be."""
    sizes = GPTConfig(vocab_size=50, block_size=64, n_layer=2, n_head=2, n_embd=64)
    config = Config(trainer_config=TrainerConfig(batch_size=2, use_amp=False))
    assert plan.largest_that_fits(sizes, config, ALONE, 10**6) == "none"
    found = plan.largest_that_fits(sizes, config, ALONE, 150 * 10**6)
    assert found.startswith("gpt-mini")  # 2.7 M parameters; gopher-44m has 25 M, and needs 400 MB


@pytest.mark.parametrize("ranks", [2])
def test_a_plan_is_printed_and_leaves_nothing(tmp_path, ranks):
    """Catches a plan that allocates a model that doesn't fit, trains, or leaves files; and one by every rank."""
    named = [
        "gpt_config.model_type=gpt2-medium",
        *(f"gpt_config.{key}=null" for key in ("n_layer", "n_head", "n_embd")),
    ]
    process = train(tmp_path / "run" / "x", "trainer_config.plan=true", *named, ranks=ranks)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    # 24 blocks of 12 C² weights and 13 C others, the last norm, and vectors for 60 characters and 16 positions.
    assert lines[0].startswith(f"model: {24 * (12 * 1024**2 + 13 * 1024) + (2 + 60 + 16) * 1024:,} parameters")
    assert f"each of {ranks or 1} ranks (ddp), with {12 // (ranks or 1)} windows of 16 characters" in lines[1]
    for word in ("weights", "gradients", "optimizer state", "activations", "peak", "memory found", "largest named"):
        assert sum(line.strip().startswith(word) for line in lines) == 1
    assert " 20 steps" in process.stdout
    assert "time: at least" in process.stdout
    assert [*tmp_path.iterdir()] == []


if __name__ == "__main__":
    take_real_steps(Path(sys.argv[1]), sys.argv[2])
