"""Runs too large for one device or one machine: what fits, shards, the plan, many nodes."""

import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import (
    HANGS,
    PROJECT,
    SAMPLE_TEXT,
    TINY_RUN,
    TORCHRUN,
    free_port,
    memory_of_this_process,
    read_losses,
    run_program,
    run_ranks,
    spawn,
    take_place,
    train,
)
from filelock import FileLock
from test_faults import KILLED_RUN, LONG_RUN, output
from test_trainer import DROPOUT, StopHereError, assert_same_end, make_trainer, stop_in_step, world_of_one
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from config import ArchitectureConfig, Config, TrainerConfig, complete
from distributed import Ranks, distribute, gather_tensors, is_shard, leave_if_lost, local, norm, process_group, whole
from large import memory, plan
from large.machines import program_files, versions, warn_of_separate_disks
from large.memory import is_out_of_memory, recompute_in_backward
from large.sharding import check_shardable
from model import GPT, GPTConfig
from optimizer import OptimizerConfig, create_optimizer
from saving.run_snapshots import RunError
from snapshot import load_snapshot

SMALL: dict[str, Any] = {"vocab_size": 17, "block_size": 24, "n_layer": 3, "n_head": 2, "n_embd": 32}
WITH_DROPOUT: dict[str, Any] = {**SMALL, "embd_pdrop": 0.2, "resid_pdrop": 0.2, "attn_pdrop": 0.2}


def make_model(recomputes: bool) -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(**WITH_DROPOUT))
    if recomputes:
        recompute_in_backward(model)
    return model


def some_windows() -> tuple[Tensor, Tensor]:
    """(x, y) of four windows."""
    codes = torch.randint(17, (4, 25), generator=torch.Generator().manual_seed(2))
    return codes[:, :-1], codes[:, 1:]


# ------------------------------------------------------------------------------------ activation checkpointing


def test_gradients_are_the_same_to_the_bit():
    """Catches a second forward pass with other dropout masks, and parameters or weights of other names."""
    gradients = []
    for recomputes in (False, True):
        model = make_model(recomputes)
        torch.manual_seed(3)
        _, loss = model(*some_windows())
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, recomputed = gradients
    assert list(plain) == list(recomputed)
    assert list(make_model(True).state_dict()) == list(make_model(False).state_dict())
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


def saved_bytes(recomputes: bool) -> int:
    """What a forward pass keeps for the backward pass, without parameters; each piece of memory once."""
    model = make_model(recomputes)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _, loss = model(*some_windows())
    assert loss.requires_grad
    return sum(kept.values())


def test_blocks_keep_nothing_but_their_input():
    """Catches checkpoints that don't save memory, because a layer's tensors are kept as well."""
    plain, recomputed = saved_bytes(False), saved_bytes(True)
    stream = 4 * 24 * 32 * 4  # bytes of (B, T, C) in float32: what a block has to keep
    # Each block of the plain model keeps at least 16 times that: the inputs of two norms, two products of the width,
    # one of three and two of four times the width.
    assert plain - recomputed > SMALL["n_layer"] * 15 * stream
    assert recomputed < plain / 3


def test_generation_is_unaffected():
    """Catches blocks that lose their cache, or compute twice where there is no backward pass."""
    prompt = torch.tensor([[3, 1, 4]])
    model = make_model(True)
    calls = []
    for block in model.h:
        block.mlp.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(model.generate(prompt, 30), make_model(False).generate(prompt, 30))
    # Up to 24 positions, one pass for each token; the last half of the context once more whenever it is full.
    assert len(calls) == SMALL["n_layer"] * 30


def test_a_run_that_computes_twice_ends_like_one_that_does_not(tmp_path):
    """Catches a key that does nothing, and results that depend on it."""
    calls = []
    for name, key in (("plain", "false"), ("twice", "true")):
        with world_of_one() as ranks:
            settings = [*DROPOUT, f"trainer_config.activation_checkpointing={key}", "trainer_config.max_steps=5"]
            trainer = make_trainer(tmp_path / name, *settings, ranks=ranks)
            counter: list[int] = []
            trainer.raw_model.h[0].mlp.register_forward_pre_hook(
                lambda module, _, counter=counter: counter.append(module.training)
            )
            trainer.fit()
            calls.append(sum(counter))
    assert calls == [5, 10]
    assert_same_end(tmp_path / "plain", tmp_path / "twice")


def test_compiled_blocks_that_compute_twice_are_one_graph():
    """Catches a checkpoint at which the compiler stops: as many graphs as layers, and slower steps."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:  # a backend that compiles nothing
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = make_model(True)
    model.compile(backend=count)
    _, loss = model(*some_windows())
    loss.backward()
    assert len(graphs) == 1


# ------------------------------------------------------------------------------------ micro_batch_size=auto

NOTHING_LEFT = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to ..."


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError(NOTHING_LEFT), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(NOTHING_LEFT), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    """Catches any other bug that is taken for a lack of memory, and CPUs, whose error has no type of its own."""
    assert is_out_of_memory(error) is expected


def test_torch_still_words_it_like_that():
    """Catches a torch whose words have changed: nothing would be recognised on CPUs any more."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(("share", "most", "tried"), [(12, 12, [12]), (12, 4, [12, 6, 3]), (15, 2, [15, 5, 1])])
def test_tries_divisors_of_the_share(tmp_path, monkeypatch, share, most, tried):
    """Catches micro-batches that don't divide the rank's share, and a search that stops too early or too late.

    And a trial of several micro-batches that doesn't keep room for the gradients that they add up.
    """
    seen, accumulating = [], []

    def try_step(size: int, *arguments: Any) -> None:
        seen.append(size)
        accumulating.append(arguments[-1])
        if size > most:
            raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(memory, "try_step", try_step)

    settings = [f"trainer_config.batch_size={share}", "trainer_config.micro_batch_size=auto"]
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, *settings, ranks=ranks)
    assert seen == tried
    assert accumulating == [size < share for size in tried]
    assert trainer.micro_batch_size == tried[-1]
    assert trainer.accumulation_steps * trainer.micro_batch_size == share


def test_another_error_of_the_trial_is_not_swallowed(tmp_path, monkeypatch):
    """Catches a bug that is taken for a lack of memory, and ends as "not even one window fits"."""

    def fail(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(memory, "try_step", fail)
    with world_of_one() as ranks, pytest.raises(RuntimeError, match="mat1 and mat2"):
        make_trainer(tmp_path, "trainer_config.micro_batch_size=auto", ranks=ranks)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("recomputes", ["true", "false"])
def test_the_trial_takes_as_much_memory_as_a_step(tmp_path, monkeypatch, optimizer, recomputes):
    """Catches a trial that forgets layers, gradients or the optimizer's state: the first real step would fail."""
    sizes = {"n_layer": 6, "n_head": 2, "n_embd": 64}
    settings = [f"gpt_config.{name}={size}" for name, size in sizes.items()]
    settings += [f"optimizer_config.name={optimizer}", f"trainer_config.activation_checkpointing={recomputes}"]
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, *settings, ranks=ranks)
        with saved_tensors_hooks(count, lambda tensor: tensor):
            memory.try_step(12, trainer.raw_model, trainer.optimizer, trainer.dtype, recomputes == "true")
        in_trial = sum(kept)
        kept.clear()
        with saved_tensors_hooks(count, lambda tensor: tensor):
            trainer._train_step(trainer._batches())
        assert in_trial == pytest.approx(sum(kept), rel=0.01)

        room = sum(t.nbytes for t in memory.room_for_later(trainer.raw_model, trainer.optimizer, trainer.dtype))
        state = [t for values in trainer.optimizer.state.values() for t in values.values() if t.ndim > 0]
        gradients = [p.grad if p.grad is not None else p for p in trainer.raw_model.parameters()]
        assert room == sum(t.nbytes for t in [*state, *gradients])


WIDE = ["gpt_config.n_embd=128", "gpt_config.n_layer=4"]  # mostly weights
MANY = ["gpt_config.n_embd=32", "gpt_config.n_layer=4", "data_config.block_size=64"]  # mostly activations


@pytest.mark.parametrize(
    ("sizes", "dtype", "recomputes"), [(WIDE, "bfloat16", False), (MANY, "float32", False), (MANY, "float32", True)]
)
def test_the_trials_peak_is_that_of_a_step(tmp_path, sizes, dtype, recomputes):
    """Catches a trial without its placeholders, narrow copies, backward pass or precision, or that drops them early."""
    settings = [*sizes, "trainer_config.micro_batch_size=6", "optimizer_config.name=adamw"]
    settings += ["trainer_config.use_amp=true", f"trainer_config.amp_dtype={dtype}"]
    settings += [f"trainer_config.activation_checkpointing={recomputes}"]
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, *settings, ranks=ranks)
        with plan.LiveBytes() as trial:
            count(trainer.raw_model)
            memory.try_step(6, trainer.raw_model, trainer.optimizer, trainer.dtype, recomputes, accumulates=True)
        batches = trainer._batches()
        with plan.LiveBytes() as step:
            count(trainer.raw_model)
            trainer._train_step(batches)  # makes the averages
            step.peak = step.now
            trainer._train_step(batches)  # its second micro-batch finds gradients
    # Measured: 1.07, 1.01 and 1.02. The stand-in's own block comes on top, and nothing may be missing.
    assert 1.0 <= trial.peak / step.peak < 1.1


def count(model: GPT) -> None:
    """Let `plan.LiveBytes` know of weights that were there before it; it counts the bytes of all results."""
    for p in model.parameters():
        p.detach()


def run_with_little_memory(run_dir: Path, most: int, *overrides: str) -> Any:
    """Two ranks, of which rank 1 has memory for so many windows at once."""
    return run_ranks(
        *(2, PROJECT / "tests" / "sabotage.py", "memory", most, 1),
        *(f"hydra.run.dir={run_dir}", *TINY_RUN, "trainer_config.batch_size=16", *DROPOUT, *overrides),
    )


def test_the_smallest_memory_decides_for_all_ranks(tmp_path):
    """Catches ranks of different micro-batches, which wait for each other for ever, and a result that depends on it."""
    found = run_with_little_memory(tmp_path / "auto", 2, "trainer_config.micro_batch_size=auto")
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stderr.splitlines() if "trainer_config.micro_batch_size=auto" in line]
    assert len(lines) == 1
    assert "2 of a rank's 8 windows fit into memory at once" in lines[0]
    assert "2 ranks x 4 x 2 windows" in found.stderr
    given = train(
        *(tmp_path / "given", "trainer_config.batch_size=16", *DROPOUT, "trainer_config.micro_batch_size=2"), ranks=2
    )
    assert given.returncode == 0, given.stderr
    assert_same_end(tmp_path / "auto", tmp_path / "given")


def test_where_not_even_one_window_fits(tmp_path):
    """Catches a search without an end, and ranks that wait for the one that gave up."""
    run = run_with_little_memory(tmp_path / "run", 0, "trainer_config.micro_batch_size=auto")
    assert run.returncode == 1
    lines = [line for line in run.stderr.splitlines() if "error: trainer_config.micro_batch_size=auto" in line]
    assert lines
    assert all("one window of 16 characters" in line and "activation_checkpointing=true" in line for line in lines)


def test_running_out_of_memory_is_one_line_that_says_what_to_do(tmp_path):
    """Catches a traceback, and advice to try numbers by hand."""
    run = run_with_little_memory(tmp_path / "run", 2)
    assert run.returncode == 1
    (line,) = [line for line in run.stderr.splitlines() if "error: out of memory" in line]
    assert "trainer_config.micro_batch_size=auto" in line
    assert "trainer_config.activation_checkpointing=true" in line


# ------------------------------------------------------------------------------------ shards

STRATEGIES = ("ddp", "fsdp")
OPTIMIZERS = ("muon", "adamw")
WORLDS = (1, 2, 3, 4)
MICRO_BATCHES = {1: 6, 2: 3, 3: 2, 4: 1}  # by number of ranks: two passes for a step of 12 windows, or three
# All 36 pairs of 1, 2 and 4 ranks under either strategy pass; these 16 take half of the time.
WRITERS = [(1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")]
# What is compared with one rank under ddp.
RUNS = [(1, "ddp"), (2, "ddp"), (1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp")]


def run_as_rank(rank: int, folder: Path, ports: dict[int, int]) -> None:
    """One of so many processes, which are the ranks of worlds of one, two, three and four ranks in turn."""
    torch.set_num_threads(1)
    for world in ports:
        if rank >= world:
            continue
        take_place(rank, world, ports[world])
        with process_group(2.0) as ranks:
            for strategy in STRATEGIES:
                key = f"trainer_config.strategy={strategy}"
                for name in OPTIMIZERS if (world, strategy) in RUNS else ():
                    micro = f"trainer_config.micro_batch_size={MICRO_BATCHES[world]}"
                    # Clipping is always at work.
                    settings = [key, f"optimizer_config.name={name}", micro, "trainer_config.grad_norm_clip=0.3"]
                    make_trainer(folder / f"{world}-{strategy}-{name}", *settings, ranks=ranks).fit()
                look_closer(folder / f"{world}-{strategy}", key, ranks)
                if world <= 2:
                    train_in_bfloat16(folder / f"{world}-{strategy}-bfloat16", key, ranks)
                if world == 2:  # evaluations in steps that aren't saved, and training after them
                    settings = [key, "trainer_config.eval_every_steps=3", "trainer_config.max_steps=7"]
                    run_dir = folder / f"between-{strategy}"
                    make_trainer(run_dir, *settings, "trainer_config.sample_tokens=5", ranks=ranks).fit()
                if (world, strategy) in WRITERS:
                    trainer = make_trainer(folder / f"from-{world}-{strategy}", key, ranks=ranks)
                    stop_in_step(trainer, 12)
                    with pytest.raises(StopHereError):
                        trainer.fit()


def go_on_as_rank(rank: int, folder: Path, ports: dict[int, int]) -> None:
    """The same processes go on with what every one of WRITERS has left."""
    torch.set_num_threads(1)
    for world in ports:
        readers = [strategy for strategy in STRATEGIES if (world, strategy) in WRITERS]
        if rank >= world or not readers:
            continue
        take_place(rank, world, ports[world])
        with process_group(2.0) as ranks:
            writers_there = [(writers, other) for writers, other in WRITERS if writers in ports]
            for strategy, (writers, other) in itertools.product(readers, writers_there):
                run_dir = folder / f"from-{writers}-{other}-by-{world}-{strategy}"
                if ranks.is_main:
                    shutil.copytree(folder / f"from-{writers}-{other}", run_dir)
                dist.barrier()
                settings = [f"trainer_config.strategy={strategy}", "trainer_config.max_steps=12"]
                trainer = make_trainer(run_dir, *settings, ranks=ranks)
                trainer.resume()
                assert trainer.step == 10
                trainer.fit()


class Sums(TorchDispatchMode):
    """Counts the sums over ranks of which each gets its part."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def look_closer(file: Path, key: str, ranks: Any) -> None:
    """What a rank has of a model, its mask of dropout, an evaluation in which one rank has no window left.

    What a step of two micro-batches holds and sends, and who notices that one rank's average is not finite.
    """
    result: dict[str, Any] = {}
    settings = [key, *DROPOUT, "data_config.truncate=0.07", "optimizer_config.name=adamw"]
    settings += [f"trainer_config.micro_batch_size={MICRO_BATCHES[ranks.world_size]}", "trainer_config.batch_size=12"]
    trainer = make_trainer(Path(f"{file}-looked"), *settings, ranks=ranks)
    result["norm"] = norm(trainer.parameters.values())
    result["initial"] = gather_tensors({name: p.detach().clone() for name, p in trainer.parameters.items()})
    result["evaluation"] = trainer.evaluate()
    result["held"] = sum(local(p).numel() for p in trainer.raw_model.parameters())
    masks = []
    trainer.raw_model.drop.register_forward_hook(
        lambda module, _, out: masks.append(out == 0) if module.training else 0
    )
    torch.manual_seed(5 + ranks.rank)
    trainer.model.train()
    trainer.model(torch.zeros(2, 16, dtype=torch.int64))
    result["mask"] = masks[0]
    result["gathered"] = [tensor is not None for tensor in gather_tensors(trainer.parameters).values()]
    blocks: Any = trainer.raw_model.h
    blocks[1].mlp.register_forward_pre_hook(
        lambda *_: result.update(others_are_shards=is_shard(blocks[0].mlp.c_fc.weight))
    )
    for accumulates in (False, True):
        room = memory.room_for_later(trainer.raw_model, trainer.optimizer, torch.float32, accumulates)
        result[f"room {accumulates}"] = sum(tensor.numel() for tensor in room)
    with Sums() as sums:
        trainer._train_step(trainer._batches())
    result["sums"] = sums.count
    if ranks.rank == ranks.world_size - 1:
        local(trainer.optimizer.state[trainer.parameters["wpe.weight"]]["exp_avg"])[0] = math.nan
    with pytest.raises(RunError):  # on all ranks
        trainer._check_finite()
    with pytest.MonkeyPatch.context() as patch:
        model, compiled = GPT(GPTConfig(**SMALL)), list[torch.nn.Module]()
        patch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
        distribute(model, trainer.config.strategy, torch.float32, True, ranks.device)
        result["compiled"] = [name for name, module in model.named_modules() if module in compiled]
    torch.save(result, f"{file}-rank{ranks.rank}.pt")


def train_in_bfloat16(folder: Path, key: str, ranks: Any) -> None:
    """Three steps of two micro-batches, which are the same on one rank and on two; the first gradients, and types."""
    settings = [key, "trainer_config.use_amp=true", "trainer_config.amp_dtype=bfloat16", "trainer_config.max_steps=3"]
    settings += ["trainer_config.micro_batch_size=6", "trainer_config.grad_norm_clip=null"]
    trainer = make_trainer(folder, *settings, ranks=ranks)
    micro_batches = trainer._batches()

    def as_two_ranks_have_them() -> Iterator[tuple[Tensor, Tensor]]:
        for one, other in zip(micro_batches, micro_batches, strict=True):
            x, y = (torch.cat(pair) for pair in zip(one, other, strict=True))
            yield from ((x[rank::2], y[rank::2]) for rank in range(2))

    if ranks.world_size == 1:
        vars(trainer)["_batches"] = as_two_ranks_have_them
    gradients, types = list[dict[str, Tensor]](), set[tuple[str, torch.dtype, torch.dtype]]()
    block: Any = trainer.raw_model.h[1]
    for name, module in {"ln": block.ln_1, "fc": block.mlp.c_fc, "ln_f": trainer.raw_model.ln_f}.items():
        module.register_forward_hook(
            lambda m, _, out, name=name: types.add((name, m.weight.dtype, out.dtype)) if m.training else None
        )
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: whole(p.grad).clone() for name, p in trainer.parameters.items()})
    )
    trainer.fit()
    if ranks.is_main:
        torch.save({"gradient": gradients[0], "types": {*types}}, folder / "first_step.pt")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, worker_id):
    """The folder of all runs that the tests below compare, by real processes; with three and four ranks if asked."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":  # one of pytest-xdist's workers: whoever comes first makes it for all of them
        shared = shared.parent
    folder = shared / "sharding"
    is_slow = any(item.get_closest_marker("slow") and item.path == request.path for item in request.session.items)
    with FileLock(f"{folder}.lock"):
        for program in (run_as_rank, go_on_as_rank) if not folder.exists() else ():
            folder.mkdir(exist_ok=True)
            ports = {world: free_port() for world in (WORLDS if is_slow else WORLDS[:2])}
            spawn(program, max(ports), folder, ports)
    return folder


def slow_beyond_two(values, ranks=lambda value: value[0]):
    """Parameters of tests, of which those with more than two ranks are marked slow."""
    return [pytest.param(value, marks=pytest.mark.slow if ranks(value) > 2 else ()) for value in values]


# The order in which float32 numbers are added differs with the number of ranks: some 1e-7 of a loss in a step, and
# twenty steps multiply that. A wrong gradient, norm, or average shows from the second step on, in 1e-3 and more.
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("run", slow_beyond_two(RUNS))
def test_the_numbers_are_those_of_one_rank(runs, run, name):
    """Catches shards that are updated, clipped, accumulated or averaged in another way than the whole."""
    run, reference = runs / f"{run[0]}-{run[1]}-{name}", runs / f"1-ddp-{name}"
    for tag, count in (("train/loss", 20), ("eval/loss", 2), ("train/grad_norm", 20), ("train/param_norm", 20)):
        there, here = read_losses(reference, tag), read_losses(run, tag)
        assert len(here) == count
        for step, value in there.items():
            assert here[step] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), (tag, step)
    a, b = (load_snapshot(str(folder / "gpt_snapshot.pt")) for folder in (reference, run))
    assert (
        a["optimizer"].keys()
        == b["optimizer"].keys()
        == dict(GPT(GPTConfig(**a["model_config"])).named_parameters()).keys()
    )
    for part in ("model", "optimizer"):
        assert_close(b[part], a[part])


def assert_close(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Compare what two snapshots hold of each parameter.

    The bias of keys adds the same to all scores of a query, which softmax doesn't see: its gradient is rounding alone,
    and AdamW takes steps of full size from that.
    """
    assert here.keys() == there.keys()
    for name, value in there.items():
        atol = 1e-2 if name.endswith("c_attn.bias") else 1e-5
        torch.testing.assert_close(here[name], value, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("reader", slow_beyond_two(WRITERS))
@pytest.mark.parametrize("writer", slow_beyond_two(WRITERS))
def test_a_snapshot_goes_on_under_any_strategy_and_number_of_ranks(runs, writer, reader):
    """Catches state that only the strategy or the number of ranks that wrote it can read."""
    end = runs / "from-{}-{}-by-{}-{}".format(*writer, *reader)
    reference = runs / "from-1-ddp-by-1-ddp"
    there, here = read_losses(reference), read_losses(end)
    for step in (11, 12):
        assert here[step] == pytest.approx(there[step], abs=TOLERANCE)
    a, b = (load_snapshot(str(folder / "gpt_snapshot.pt")) for folder in (reference, end))
    assert b["step"] == 12
    assert_close(b["model"], a["model"])


def test_a_best_snapshot_between_two_saves(runs):
    """Catches weights that an evaluation leaves gathered: saved as such, their memory can't be given free."""
    ddp, fsdp = (load_snapshot(str(runs / f"between-{strategy}" / "gpt_snapshot.best.pt")) for strategy in STRATEGIES)
    assert ddp["step"] == fsdp["step"] == 7
    assert_close(fsdp["model"], ddp["model"])


@pytest.mark.parametrize("world", slow_beyond_two(WORLDS, ranks=lambda world: world))
def test_ranks_hold_shares_and_drop_and_evaluate_as_before(runs, world):
    """Catches ranks that hold everything, draw other masks than under DDP, or hang where one has no window left."""
    whole = torch.load(runs / "1-ddp-rank0.pt", weights_only=True)
    held = 0
    for rank in range(world):
        ddp, fsdp = (
            torch.load(runs / f"{world}-{strategy}-rank{rank}.pt", weights_only=True) for strategy in STRATEGIES
        )
        assert ddp["held"] == whole["held"]
        held += fsdp["held"]
        assert fsdp["held"] <= whole["held"] / world * 1.1  # rows don't always divide evenly
        assert torch.equal(ddp["mask"], fsdp["mask"])
        for result in (ddp, fsdp):
            assert result["norm"] == pytest.approx(whole["norm"], rel=1e-6)
            assert result["evaluation"] == pytest.approx(whole["evaluation"], abs=1e-6)
    assert held == whole["held"]


@pytest.mark.parametrize("world", slow_beyond_two(WORLDS, ranks=lambda world: world))
def test_what_a_step_of_shards_holds_and_sends(runs, world):
    """Catches what no result shows: all ranks keep what is gathered, blocks that are gathered at once, sums too many.

    And a trial of "auto" that takes gradients for shards while they are whole, and blocks that nobody compiles.
    """
    n = torch.load(runs / "1-ddp-rank0.pt", weights_only=True)["held"]  # numbers of the whole model
    for strategy, rank in itertools.product(STRATEGIES, range(world)):
        result = torch.load(runs / f"{world}-{strategy}-rank{rank}.pt", weights_only=True)
        assert set(result["gathered"]) == {rank == 0}
        assert result["compiled"] == (["h.0", "h.1", "h.2"] if strategy == "fsdp" else [""])  # "": the model
        assert result["others_are_shards"] == (strategy == "fsdp")
        # Two micro-batches: each of two blocks, and the rest of the model, are summed after the last one only.
        assert result["sums"] == (3 if strategy == "fsdp" and world > 1 else 0)
        # A gradient and AdamW's two averages; the gradient in whole while micro-batches add up.
        assert result["room False"] == 3 * result["held"]
        assert result["room True"] == 2 * result["held"] + n


@pytest.mark.parametrize("run", [(2, "ddp"), (1, "fsdp"), (2, "fsdp")])
def test_bfloat16_narrows_what_is_gathered_and_nothing_that_is_summed(runs, run):
    """Catches gradients that ranks sum in bfloat16, weights gathered in float32, norms or embeddings in bfloat16."""
    folder, reference = runs / f"{run[0]}-{run[1]}-bfloat16", runs / "1-ddp-bfloat16"
    there, here = (torch.load(place / "first_step.pt", weights_only=True) for place in (reference, folder))
    wide, narrow = torch.float32, torch.bfloat16
    gathered = narrow if run[1] == "fsdp" else wide
    assert here["types"] == {("ln", gathered, wide), ("fc", gathered, narrow), ("ln_f", wide, wide)}
    for name, gradient in there["gradient"].items():
        # All are sums of two numbers in float32, the same two on either side. But of a block's norms, which fsdp has
        # gathered in bfloat16, each of the two is rounded to 8 bits.
        rounding = 2**-7 if run[1] == "fsdp" and ".ln_" in name else 1e-6
        torch.testing.assert_close(here["gradient"][name], gradient, rtol=rounding, atol=rounding * 0.1, msg=name)
    losses = read_losses(reference)
    assert read_losses(folder) == {step: pytest.approx(loss, abs=2e-3) for step, loss in losses.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", slow_beyond_two(WORLDS, ranks=lambda world: world))
def test_initial_weights_do_not_depend_on_the_strategy(runs, world, strategy):
    """Catches shards drawn in another order, by another generator, or of rows that another rank has as well."""
    torch.manual_seed(TrainerConfig.seed)
    sizes = {"vocab_size": len(set(SAMPLE_TEXT.read_text())), "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**sizes))
    initial = torch.load(runs / f"{world}-{strategy}-rank0.pt", weights_only=True)["initial"]
    for name, p in model.named_parameters():
        assert torch.equal(initial.pop(name), p), name
    assert not initial


def test_no_rank_makes_the_whole_model(tmp_path, monkeypatch):
    """Catches a model made in full before it is sharded: on a host with eight ranks, eight times over."""
    devices = []

    def look(model: GPT, *others: Any) -> Any:
        devices.append({p.device.type for p in model.parameters()})
        return distribute(model, *others)

    monkeypatch.setattr("trainer.distribute", look)
    with world_of_one() as ranks:
        for strategy in STRATEGIES:
            make_trainer(tmp_path, f"trainer_config.strategy={strategy}", ranks=ranks)
    assert devices == [{"cpu"}, {"meta"}]


def build_sharded(rank: int, folder: Path, port: int) -> None:
    """What building a trainer takes of this rank's memory, as a share of the model's weights, in a file."""
    torch.set_num_threads(1)
    take_place(rank, 2, port)
    settings = ["trainer_config.strategy=fsdp", "gpt_config.n_layer=8"]
    with process_group(2.0, is_sharded=True) as ranks:
        make_trainer(folder, *settings, ranks=ranks)  # loads what is loaded late
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = memory_of_this_process("VmRSS")
        model = make_trainer(folder, *settings, "gpt_config.n_embd=512", ranks=ranks).raw_model
        grown = memory_of_this_process("VmHWM") - before
    (folder / f"rank{rank}").write_text(str(grown / (4 * model.num_parameters())))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_building_takes_a_shard_and_a_tensor(tmp_path):
    """Catches memory for the whole model on each rank, for a moment at least: 100 MB here, 28 GB for 7 billion."""
    spawn(build_sharded, 2, tmp_path, free_port())
    for rank in range(2):
        assert 0.4 < float((tmp_path / f"rank{rank}").read_text()) < 0.8  # a half, and the largest tensor


def test_a_sharded_model_starts_from_another(tmp_path):
    """Catches weights that are loaded before there is memory for them, and then drawn anew."""
    with world_of_one() as ranks:
        make_trainer(tmp_path / "base", "trainer_config.max_steps=1", ranks=ranks).fit()
        base = tmp_path / "base" / "gpt_snapshot.pt"
        settings = [f"trainer_config.init_from={base}", "trainer_config.strategy=fsdp"]
        weights = gather_tensors(make_trainer(tmp_path / "run", *settings, ranks=ranks).raw_model.state_dict())
        for name, value in load_snapshot(str(base))["model"].items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("is_shard", [False, True])
@pytest.mark.parametrize(("rank", "copies"), [(0, 1), (1, 0)])
def test_what_is_gathered_goes_to_the_main_memory_of_rank_0(monkeypatch, rank, copies, is_shard):
    """Catches a whole model in every rank's main memory, and snapshots whose tensors ask for the GPU of rank 0."""
    copied: list[str] = []

    class OnGPU:
        def __init__(self) -> None:
            if is_shard:
                self.full_tensor = lambda: self

        def detach(self) -> Any:
            return self

        def cpu(self) -> str:
            copied.append("cpu")
            return "cpu"

    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    tensor = OnGPU()
    expected = "cpu" if rank == 0 else None
    assert gather_tensors({"a": tensor, "b": {"c": tensor}}) == {"a": expected, "b": {"c": expected}}
    assert len(copied) == copies


@pytest.mark.parametrize(
    ("dtype", "device", "words"), [(torch.float16, "cuda", "float16"), (torch.float32, "mps", "mps")]
)
def test_what_cannot_be_sharded_is_refused(dtype, device, words):
    """Catches a loss scale that every rank adapts to its own shards, and a device without collectives."""
    with pytest.raises(ValueError, match=f"strategy=fsdp doesn't work .*{words}"):
        check_shardable(dtype, torch.device(device))


# ------------------------------------------------------------------------------------ the plan

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
# Some hundred MB each, so that the interpreter's own memory doesn't matter. One is mostly activations, the other mostly
# weights, which count three times with Muon, whose products need room as well.
LONG = ["data_config.block_size=256", "trainer_config.batch_size=32"]
SHORT = ["gpt_config.n_layer=2", "trainer_config.batch_size=2"]
REAL_RUNS = {
    "activations": [*LONG, "gpt_config.n_layer=4", "gpt_config.n_embd=128", "trainer_config.micro_batch_size=16"],
    "scores, bfloat16": [
        *(
            "data_config.block_size=512",
            "trainer_config.batch_size=16",
            "gpt_config.n_layer=4",
            "gpt_config.n_embd=128",
        ),
        *("trainer_config.use_amp=true", "trainer_config.amp_dtype=bfloat16"),
    ],
    "weights, Muon": [*SHORT, "gpt_config.n_embd=640", "optimizer_config.name=muon"],
}


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


def test_parameters_of_a_published_model():
    """Catches a model that isn't the one that would be trained, such as one whose head counts twice."""
    sizes, published = complete(ArchitectureConfig(model_type="gpt2"), 50257, 1024), 124_439_808  # as in test_model.py
    needs = plan.work_out(sizes, TrainerConfig(batch_size=1, use_amp=False), OptimizerConfig(name="adamw"), ALONE, 1)
    assert needs.parameters == published
    assert needs.weights == needs.gradients == 4 * published
    assert needs.optimizer == pytest.approx(8 * published, rel=1e-5)  # and a counter for each tensor


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


def test_work_and_memory_are_a_ranks_share(monkeypatch):
    """Catches a rank that is told the work of all, Muon's included, or all of a machine's memory."""
    sizes = GPTConfig(vocab_size=50, block_size=32, n_layer=2, n_head=2, n_embd=64)
    config = TrainerConfig(batch_size=16, use_amp=False)
    one, four = (
        plan.work_out(sizes, config, OptimizerConfig(), Ranks(0, 0, world, torch.device("cpu")), 4) for world in (1, 4)
    )
    assert four.operations == one.operations / 4
    found = []
    for nodes in ([platform.node()], [platform.node()] * 4, [platform.node(), "another"]):
        monkeypatch.setattr(plan, "all_gather", lambda _, nodes=nodes: nodes)
        found.append(plan.memory_found(torch.device("cpu")))
    assert found == [found[0], found[0] // 4, found[0]]


def test_what_is_gathered_has_the_width_of_the_products():
    """Catches blocks that are gathered in bfloat16 and planned as if it were float32, or the other way round."""
    model = GPT(GPTConfig(vocab_size=50, block_size=32, n_layer=2, n_head=2, n_embd=64))
    peaks = []
    for dtype in (torch.float32, torch.bfloat16):
        needs = plan.Needs(model.num_parameters(), 1, 0, 0, 0, 0, 0, 0.0)
        plan.shard_evenly(needs, model, 2, dtype, False)
        peaks.append(needs.peak)
    block = sum(p.numel() for p in model.h[0].parameters())
    assert peaks[0] - peaks[1] == 2 * block + 2 * block  # two bytes less of each weight, and of each gradient


def test_the_slowest_rank_sets_the_pace(monkeypatch):
    """Catches a bound by the fastest rank: all wait for the slowest."""
    monkeypatch.setattr(plan, "memory_found", lambda _: 0)
    monkeypatch.setattr(plan, "all_gather", lambda _: [4e9, 1e9, 2e9])
    config = Config(trainer_config=TrainerConfig(batch_size=4, use_amp=False, max_steps=15))
    with world_of_one() as ranks:
        lines, _ = plan.plan(config, 17, np.zeros(10_000, dtype=np.uint8), ranks)
    assert "at the 1 GFLOP/s" in lines[-1]
    operations = plan.work_out(config.model_config(17), config.trainer_config, OptimizerConfig(), ALONE, 4).operations
    assert f"at least {plan.duration(15 * operations / 1e9)}," in lines[-1]


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


def test_a_plan_is_printed_and_leaves_nothing(tmp_path):
    """Catches a plan that allocates a model that doesn't fit, trains, or leaves files; and one by every rank."""
    named = [
        "gpt_config.model_type=gpt2-medium",
        *(f"gpt_config.{key}=null" for key in ("n_layer", "n_head", "n_embd")),
    ]
    process = train(tmp_path / "run" / "x", "trainer_config.plan=true", *named, ranks=2)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    # 24 blocks of 12 C² weights and 13 C others, the last norm, and vectors for 60 characters and 16 positions.
    assert lines[0].startswith(f"model: {24 * (12 * 1024**2 + 13 * 1024) + (2 + 60 + 16) * 1024:,} parameters")
    assert "on each rank (2 ranks, ddp), at 6 windows of 16 characters" in lines[1]
    for word in ("weights", "gradients", "optimizer state", "activations", "peak", "memory found", "largest named"):
        assert sum(line.strip().startswith(word) for line in lines) == 1
    assert " 20 steps" in process.stdout
    assert "time: at least" in process.stdout
    assert [*tmp_path.iterdir()] == []


def test_a_plan_times_real_steps(tmp_path):
    """Catches a bound that no run comes near, in the place of the time that this one takes; and a plan that saves."""
    process = train(tmp_path / "run" / "x", "trainer_config.plan=true", ranks=2)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1].startswith("time: about ")
    assert process.stdout.count("time: ") == 1
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("memory", "rate", "is_timed"),
    [(10**10, 1e9, True), (10**10, 1e4, False), (10**4, 1e9, False), (0, 1e9, False)],
)
def test_real_steps_are_for_what_fits_and_ends(monkeypatch, memory, rate, is_timed):
    """Catches a plan that needs all of a machine's memory, or an hour."""
    monkeypatch.setattr(plan, "memory_found", lambda _: memory)
    monkeypatch.setattr(plan, "matrix_rate", lambda *_: rate)
    config = Config(trainer_config=TrainerConfig(batch_size=4, use_amp=False, max_steps=30))
    config.gpt_config.n_layer = 1
    codes = np.zeros(10_000, dtype=np.uint8)
    with world_of_one() as ranks:
        lines, was_timed = plan.plan(config, 17, codes, ranks)
    assert was_timed is is_timed
    assert sum(line.startswith("time: at least") for line in lines) == (not is_timed)


def test_the_time_is_that_of_steps_and_evaluations(tmp_path, monkeypatch):
    """Catches the first steps, which compile and allocate, taken for the rest; and evaluations that nobody counts."""
    now, steps = [0.0], []

    def after(seconds: float, result: Any = None) -> Any:
        now[0] += seconds
        return result

    def step(_: Any) -> None:
        steps.append(60.0 if len(steps) < 2 else 0.5)
        after(steps[-1])

    with world_of_one() as ranks:
        settings = ["trainer_config.micro_batch_size=2", "trainer_config.eval_every_steps=100"]
        # 23 epochs of 24 steps, of which the last one isn't finished; evaluated at 100, 200, ..., and at the end
        settings += ["trainer_config.max_epochs=50", "trainer_config.max_steps=530"]
        trainer = make_trainer(tmp_path, *settings, ranks=ranks)
        monkeypatch.setattr(plan.time, "perf_counter", lambda: now[0])  # a clock that only the lines below move
        monkeypatch.setattr(plan, "sum_losses", lambda _, batches: after(0.25 * len(batches)))
        monkeypatch.setattr(trainer, "_train_step", step)
        monkeypatch.setattr(trainer, "sample", lambda length: after(3.0))
        seconds, evaluation = plan.time_steps(trainer), plan.time_evaluation(trainer)
    assert seconds == pytest.approx(0.5)
    # The evaluation text, and a tenth as much of the other one, in windows of 16 characters, two at a time.
    batches = math.ceil(len(trainer.text.eval_codes) / 32) + math.ceil(len(trainer.text.eval_codes) / 320)
    assert evaluation == pytest.approx(3.0 + 0.25 * batches, rel=0.05)  # a window more or less
    minutes = (530 * seconds + 6 * evaluation) / 60
    assert plan.time_line(trainer, seconds, evaluation).startswith(f"time: about {minutes:.0f} minutes (0.5 s per step")


def test_durations_in_words():
    """Catches 90,000 seconds, and hours of a hundred minutes."""
    seconds = [0.4, 89, 91, 720, 6000, 100_000, 10**6, 10**9]
    assert [plan.duration(number) for number in seconds] == [
        *("0 s", "89 s", "2 minutes", "12 minutes", "1.7 hours", "27.8 hours", "11.6 days", "11,574.1 days")
    ]


# ------------------------------------------------------------------------------------ many machines


def undisturbed(run_dir: Path, *settings: str) -> Path:
    """The run directory of a run of 120 steps on four ranks."""
    launcher = [*TORCHRUN, "--nproc_per_node=4"]
    process = run_program(*launcher, PROJECT / "main.py", f"hydra.run.dir={run_dir}", *DISTURBED, *settings)
    assert process.returncode == 0, process.stderr
    return run_dir


DISTURBED = [*LONG_RUN, *KILLED_RUN]


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
def test_a_job_under_slurm_ends_as_if_nothing_had_been(tmp_path):
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
    codes = submit(tmp_path / "slurm", torchrun, f"hydra.run.dir={run_dir}", *DISTURBED)
    said = (tmp_path / "slurm" / "job.out").read_text()
    assert codes == [128 + signal.SIGTERM, 0], said
    assert "stopped by SIGUSR1 after step" in said
    assert said.count("going on from") == 2  # after the kill, and in the second start of the job
    assert_same_end(run_dir, undisturbed(tmp_path / "undisturbed"))


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


def test_a_job_has_the_time_that_a_large_snapshot_takes():
    """Catches a rank 0 that is killed while it saves, because its limit, or the other nodes', is for small models."""
    batch_file = (PROJECT / "recipes" / "slurm.sh").read_text()
    guide = (PROJECT / "docs" / "cluster.md").read_text()
    found = {
        option: int(re.search(rf"{re.escape(option)}([0-9]+)", batch_file)[1])
        for option in ("--shutdown-timeout=", "--wait=", "--signal=USR1@", "--mem=")
    }
    ours, others, before_the_limit, _ = found.values()
    size = 3e9 * 3 * 4 / 1e9  # GB: 3 billion weights and two averages of each, in float32
    assert ours >= size * (2.7 + 1000 / 250)  # seconds of a CPU for each GB, and a disk that writes 250 MB/s
    assert others >= ours  # ranks that have nothing to save end at once
    assert before_the_limit >= ours + others
    for option in ("--shutdown-timeout=", "--wait=", "--signal=USR1@"):
        assert set(re.findall(rf"{re.escape(option)}([0-9]+)", guide)) == {str(found[option])}


# ------------------------------------------------------------------------------------ a node that dies


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_node_that_dies_and_comes_back(tmp_path):
    """A node whose agent dies too: the others wait for ever, or count their restarts otherwise and never meet it.

    If it is the node at which all meet, the others must end, so that a scheduler can start the job again.
    """
    run_dir, port, fsdp = tmp_path / "run", free_port(), "trainer_config.strategy=fsdp"
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
            return subprocess.Popen([*command, *DISTURBED, fsdp], cwd=PROJECT, env=environment, stdout=out, stderr=out)

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
    assert_same_end(run_dir, undisturbed(tmp_path / "undisturbed", fsdp))


# ------------------------------------------------------------------------------------ machines that differ


AS_COPY = """
import sys
from pathlib import Path
from console import environment
environment.guard()
from large import machines
machines.PROJECT = Path(sys.argv.pop(1))
import main
main.main()
"""


def run_two(*nodes: list[object]) -> list[tuple[int, str]]:
    """(Exit code, standard error) of two ranks on two nodes; given: for each, a copy of the project, and arguments."""
    common = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def run(rank: int) -> tuple[int, str]:
        process = run_program(sys.executable, "-c", AS_COPY, *nodes[rank], env={**common, "RANK": str(rank)})
        return process.returncode, process.stderr

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


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
        [PROJECT, f"hydra.run.dir={here}", *TINY_RUN, "trainer_config.max_steps=1"],
        [copy, f"hydra.run.dir={there}", *TINY_RUN, "trainer_config.max_steps=1"],
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


def test_what_must_be_alike_before_the_first_step(monkeypatch):
    """Catches a torch that isn't compared, paths that must be equal on all machines, and paths that nobody looks at."""
    own = versions(Config().as_dict())

    def differing(**settings: Any) -> list[str]:
        config = Config()
        for key, value in settings.items():
            vars(config.data_config if key == "path" else config.trainer_config)[key] = value
        there = versions(config.as_dict())
        assert own.keys() == there.keys()
        return [name for name in own if own[name] != there[name]]

    assert differing() == []
    assert differing(seed=2) == ["configuration"]
    for key in ("snapshot_path", "init_from"):  # one machine names it, another doesn't; or each has its own
        assert differing(**{key: "/here/x.pt"}) == ["configuration"]
    assert differing(path="/here/text") == ["configuration"]
    own = versions(Config(trainer_config=TrainerConfig(snapshot_path="/there/x.pt")).as_dict())
    assert differing(snapshot_path="/here/x.pt") == []
    own = versions(Config().as_dict())
    monkeypatch.setattr(torch, "__version__", "2.0")
    assert differing() == ["torch"]


@pytest.mark.parametrize("place", ["memory://bucket/gpt_snapshot.pt", "{folder}/gpt_snapshot.pt"])
def test_no_warning_about_disks_where_there_is_one_or_none(tmp_path, caplog, place):
    """Catches a warning that snapshots in a store can't be seen by other machines."""
    with world_of_one() as ranks:
        warn_of_separate_disks(place.format(folder=tmp_path), ranks)
    assert caplog.messages == []
    assert [*tmp_path.iterdir()] == []


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
    (code, words), (other_code, other_words) = run_two([copy, *arguments], [altered, *other])
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


if __name__ == "__main__":
    take_real_steps(Path(sys.argv[1]), sys.argv[2])
