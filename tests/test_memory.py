"""What doesn't fit into memory: blocks computed twice, the micro-batch that is found, and the message."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, TINY_RUN, run_ranks, train
from test_trainer import DROPOUT, assert_same_end, make_trainer, world_of_one
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from large import memory
from large.memory import is_out_of_memory, recompute_in_backward
from model import GPT, GPTConfig

SIZES: dict[str, Any] = {"vocab_size": 17, "block_size": 24, "n_layer": 3, "n_head": 2, "n_embd": 32}
WITH_DROPOUT: dict[str, Any] = {**SIZES, "embd_pdrop": 0.2, "resid_pdrop": 0.2, "attn_pdrop": 0.2}


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
    assert plain - recomputed > SIZES["n_layer"] * 15 * stream
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
    assert len(calls) == SIZES["n_layer"] * 30


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
    """Catches micro-batches that don't divide the rank's share, and a search that stops too early or too late."""
    seen = []
    monkeypatch.setattr(memory, "try_step", lambda size, *_: seen.append(size) if size <= most else fail(size))

    def fail(size: int) -> None:
        seen.append(size)
        raise torch.OutOfMemoryError("simulated")

    settings = [f"trainer_config.batch_size={share}", "trainer_config.micro_batch_size=auto"]
    with world_of_one() as ranks:
        trainer = make_trainer(tmp_path, *settings, ranks=ranks)
    assert seen == tried
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
