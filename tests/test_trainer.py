"""The training loop: steps, accumulation, ranks, evaluation, and going on after a stop.

Started as a program, this file is one rank of the runs that the tests below compare.
"""

import copy
import dataclasses
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import PROJECT, SAMPLE_TEXT, TINY_RUN, read_losses, run_ranks
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import distributed
import muon
from char_dataset import CharDataset, CharVocabulary, WindowSampler
from config import Config
from console import reporter
from console.signals import STOP_SIGNALS
from distributed import Ranks, all_reduce_max, choose_dtype, process_group
from main import build_trainer
from model import GPT
from optimizer import learning_rate_factor
from saving import run_snapshots
from saving.run_snapshots import RunError
from snapshot import load_snapshot, save_snapshot
from trainer import Trainer, step_seed

# What the tests below vary; a step is always the same 12 windows.
MICRO_BATCHES = {1: (12, 6, 4, 3), 2: (6, 3, 2), 3: (4, 2, 1)}  # ranks: sequences in a forward pass
SEVERAL = [2, pytest.param(3, marks=pytest.mark.slow)]  # ranks
SHARED_OUT = [
    *((2, micro) for micro in MICRO_BATCHES[2]),
    *(pytest.param(3, micro, marks=pytest.mark.slow) for micro in MICRO_BATCHES[3]),
]
NO_CLIPPING = "trainer_config.grad_norm_clip=null"
DROPOUT = ["gpt_config.embd_pdrop=0.2", "gpt_config.resid_pdrop=0.2", "gpt_config.attn_pdrop=0.2"]
TWO_EPOCHS = ["trainer_config.max_epochs=2", "trainer_config.max_steps=30"]  # 24 steps, and 6 of the second epoch


class StopHereError(Exception):
    """What the tests stop a run with, in the middle of a step."""


def make_trainer(run_dir: Path, *overrides: str, ranks: Ranks) -> Trainer:
    """A trainer of the tiny run, put together in this process by the code that main.py uses."""
    yaml = OmegaConf.load(PROJECT / "gpt2_train_cfg.yaml")
    groups = {key: value for key, value in yaml.items() if str(key).endswith("_config")}
    cfg = OmegaConf.merge(
        OmegaConf.structured(Config),
        groups,
        OmegaConf.from_dotlist([*TINY_RUN, "trainer_config.sample_tokens=0", *overrides]),
    )
    config: Any = OmegaConf.to_object(cfg)
    return build_trainer(config, config.data_config.path, ranks, str(run_dir))


@contextmanager
def world_of_one() -> Iterator[Ranks]:
    """A process group of this process alone; environment and signal handlers are put back afterwards."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in alone.items():
            patch.setenv(name, value)
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        try:
            with process_group(1.0) as ranks:
                yield ranks
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for number, handler in handlers.items():  # a trainer installs its own
                signal.signal(number, handler)


@pytest.fixture
def alone() -> Iterator[Ranks]:
    with world_of_one() as ranks:
        yield ranks


def before_each_step(trainer: Trainer, call: Callable[[], None]) -> None:
    """Call something right before the optimizer changes the weights."""
    trainer.optimizer.register_step_pre_hook(lambda *_: call())


def watch_gradients(trainer: Trainer) -> list[dict[str, Tensor]]:
    """The gradients, by parameter name, that the optimizer gets in each step (clipped, if the run clips)."""
    seen: list[dict[str, Tensor]] = []

    def look() -> None:
        seen.append({n: p.grad.clone() for n, p in trainer.raw_model.named_parameters() if p.grad is not None})

    before_each_step(trainer, look)
    return seen


def watch_places(trainer: Trainer) -> list[list[int]]:
    """Where in memory the gradients are, at the begin of each forward pass; 0 for those that aren't there."""
    seen: list[list[int]] = []

    def look(model: torch.nn.Module, _: Any) -> None:
        if model.training:
            seen.append([0 if p.grad is None else p.grad.data_ptr() for p in model.parameters()])

    trainer.raw_model.register_forward_pre_hook(look)
    return seen


def stop_in_step(trainer: Trainer, step: int) -> None:
    """Let a run fail in its optimizer step `step`, counted from 0."""

    def stop() -> None:
        if trainer.step == step:
            raise StopHereError

    before_each_step(trainer, stop)


def go_on_after_stop(run_dir: Path, step: int, *overrides: str, ranks: Ranks) -> None:
    """Stop a run in a step, then do what a second start of the program does."""
    first = make_trainer(run_dir, *overrides, ranks=ranks)
    stop_in_step(first, step)
    with pytest.raises(StopHereError):
        first.fit()
    second = make_trainer(run_dir, *overrides, ranks=ranks)
    second.resume()
    assert 0 < second.step <= step
    second.fit()


def flatten(state: Any, path: str = "") -> dict[str, Any]:
    """A nested state as one dictionary from path to leaf."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else None
    if items is None:
        return {path: state}
    return {key: leaf for name, part in items for key, leaf in flatten(part, f"{path}/{name}").items()}


def assert_same_end(run_dir: Path, other_dir: Path) -> None:
    """Both runs ended with the same weights, optimizer state and losses, to the bit."""
    one, other = (load_snapshot(str(d / "gpt_snapshot.pt")) for d in (run_dir, other_dir))
    for part in ("step", "model", "optimizer", "scaler", "best_eval_loss"):
        a, b = flatten(one[part]), flatten(other[part])
        assert a.keys() == b.keys()
        for name, leaf in a.items():
            assert torch.equal(leaf, b[name]) if isinstance(leaf, Tensor) else leaf == b[name], f"{part}{name}"
    for tag in ("train/loss", "eval/loss"):
        assert read_losses(run_dir, tag) == read_losses(other_dir, tag)


def sample_codes() -> tuple[Tensor, Tensor]:
    """The tiny run's two parts of the text, encoded without the trainer: a tenth of it, cut at 0.9."""
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    codes = CharVocabulary.of(text).encode(text)[: int(len(text) * 0.1)]
    cut = int(len(codes) * 0.9)
    return codes[:cut], codes[cut:]


def global_batch() -> tuple[Tensor, Tensor]:
    """The 12 windows of the first optimizer step as one batch."""
    dataset = CharDataset(sample_codes()[0].numpy().astype("uint8"), 16)
    sampler = WindowSampler(dataset, batch_size=12, num_replicas=1, rank=0, seed=1337)
    sampler.set_epoch(0)
    windows = [dataset[start] for start in list(sampler)[:12]]
    return torch.stack([x for x, _ in windows]), torch.stack([y for _, y in windows])


def explicit_mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax at the targets, by indexing; (B, T, V) and (B, T)."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    return (logits.logsumexp(dim=1) - logits[torch.arange(len(targets)), targets]).mean()


def with_opinions(trainer: Trainer) -> Trainer:
    """Make an untrained model's losses differ from window to window: else all means of them are nearly equal."""
    with torch.no_grad():
        trainer.raw_model.wte.weight.mul_(20)
    return trainer


def explicit_evaluation(model: torch.nn.Module, codes: Tensor | None = None) -> float:
    """Mean loss over all targets of a text, the evaluation text unless given, window by window, target by target."""
    codes = sample_codes()[1] if codes is None else codes
    losses = []
    model.eval()
    with torch.no_grad():
        for start in range(0, len(codes) - 1, 16):
            stop = min(start + 16, len(codes) - 1)
            logits = model(codes[None, start:stop])[0][0].double()
            for row, target in zip(logits, codes[start + 1 : stop + 1], strict=True):
                losses.append(float(row.logsumexp(dim=0) - row[target]))
    model.train()
    assert len(losses) == len(codes) - 1
    return math.fsum(losses) / len(losses)


# ------------------------------------------------------------------------------------ what one of several ranks does


def run_as_rank(folder: Path) -> None:
    """One rank of the runs that the tests look at: results of all ranks go to folder/results.pt."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    result: dict[str, Any] = {}
    before_ddp: list[dict[str, Tensor]] = []

    class WatchedDDP(DistributedDataParallel):
        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any):
            before_ddp.append(copy.deepcopy(module.state_dict()))  # DDP itself makes all ranks equal to rank 0
            super().__init__(module, *args, **kwargs)

    vars(distributed)["DistributedDataParallel"] = WatchedDDP
    with process_group(1.0) as ranks:
        for micro in MICRO_BATCHES[ranks.world_size]:
            trainer = make_trainer(
                *(folder / f"micro{micro}", f"trainer_config.micro_batch_size={micro}", NO_CLIPPING),
                "trainer_config.max_steps=3",
                ranks=ranks,
            )
            gradients, places = watch_gradients(trainer), watch_places(trainer)
            calls: list[int] = []

            def count_and_reduce(state, bucket, calls=calls):  # DDP wants its own annotations or none
                calls.append(1)
                return allreduce_hook(state, bucket)

            assert isinstance(trainer.model, DistributedDataParallel)
            trainer.model.register_comm_hook(None, count_and_reduce)
            trainer.fit()
            result[f"gradient{micro}"], result[f"all_reduces{micro}"] = gradients[0], len(calls)
            result[f"places{micro}"] = places
            pieces = {p.grad.untyped_storage().data_ptr() for p in trainer.raw_model.parameters() if p.grad is not None}
            result[f"pieces{micro}"] = len(pieces)

        trainer = make_trainer(
            *(folder / "removed", "trainer_config.micro_batch_size=2", NO_CLIPPING, "trainer_config.max_steps=3"),
            ranks=ranks,
        )
        zero_grad: Callable[..., None] = trainer.optimizer.zero_grad
        vars(trainer.optimizer)["zero_grad"] = lambda set_to_none: zero_grad(set_to_none=True)
        trainer.fit()

        trainer = with_opinions(make_trainer(folder / "evaluation", *DROPOUT, ranks=ranks))
        messages.clear()
        result["evaluation"] = trainer.evaluate()
        result["evaluation_messages"] = list(messages)
        result["maximum"] = all_reduce_max([ranks.rank, 5, -ranks.rank])
        result["initial_weights"] = before_ddp[-1]

        make_trainer(folder / "losses", ranks=ranks).fit()

        trainer = make_trainer(
            *(folder / "dropout", "gpt_config.embd_pdrop=0.5", "trainer_config.max_steps=2"),
            f"trainer_config.micro_batch_size={6 // ranks.world_size}",
            ranks=ranks,
        )
        masks: list[Tensor] = []

        def keep_mask(module: torch.nn.Module, _: Any, out: Tensor) -> None:
            if module.training:
                masks.append(out == 0)

        trainer.raw_model.drop.register_forward_hook(keep_mask)
        trainer.fit()
        result["masks"] = torch.stack(masks[2:])  # (steps * accumulation, B, T, C), without the two passes before them

        settings = [*DROPOUT, "trainer_config.micro_batch_size=2"]
        make_trainer(folder / "straight", *settings, ranks=ranks).fit()
        go_on_after_stop(folder / "stopped", 13, *settings, ranks=ranks)

        results: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(results, result)
        if ranks.is_main:
            torch.save(results, folder / "results.pt")


@pytest.fixture(scope="module")
def rank_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, list[dict[str, Any]]]]:
    """Runs of real processes, each started once: number of ranks -> (folder, results by rank).

    Two ranks are on two nodes; three are on one.
    """
    runs: dict[int, tuple[Path, str]] = {}

    def get(n: int) -> tuple[Path, list[dict[str, Any]]]:
        if n not in runs:
            folder = tmp_path_factory.mktemp(f"ranks{n}")
            process = run_ranks(n, __file__, folder, nodes=n == 2, env={"PYTHONPATH": str(PROJECT)})
            runs[n] = folder, process.stderr if process.returncode else ""
        folder, failure = runs[n]
        if failure:
            pytest.fail(f"ranks failed: {failure[:2000]}", pytrace=False)
        return folder, torch.load(folder / "results.pt")

    return get


# ------------------------------------------------------------------------------------ a step


def expected_gradient(ranks: Ranks, run_dir: Path) -> tuple[dict[str, Tensor], float]:
    """Gradient and value of the mean loss of the first step's windows, as one batch through a plain model."""
    model = make_trainer(run_dir, ranks=ranks).raw_model
    x, y = global_batch()
    loss = explicit_mean_loss(model(x)[0], y)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, loss.item()


def assert_gradients_equal(gradient: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert gradient.keys() == expected.keys()
    for name, wanted in expected.items():
        # Entries are below 1: float32 sums of a few hundred terms in another order differ by some 1e-7.
        assert (gradient[name] - wanted).abs().max() < 1e-6, name


@pytest.mark.parametrize("micro", MICRO_BATCHES[1])
def test_accumulated_gradient_is_that_of_one_big_batch(alone, tmp_path, micro):
    """Catches a loss that isn't divided by the number of micro-batches, and micro-batches left out or repeated."""
    trainer = make_trainer(
        *(tmp_path, f"trainer_config.micro_batch_size={micro}", NO_CLIPPING, "trainer_config.max_steps=1"), ranks=alone
    )
    gradients = watch_gradients(trainer)
    trainer.fit()
    expected, loss = expected_gradient(alone, tmp_path)
    assert_gradients_equal(gradients[0], expected)
    # Losses near 4 in float32: 1e-6 is two units of the last place, which TensorBoard's float32 keeps.
    assert read_losses(tmp_path)[1] == pytest.approx(loss, abs=2e-6)


@pytest.mark.parametrize(("n", "micro"), SHARED_OUT)
def test_ranks_gradient_is_that_of_one_big_batch(alone, tmp_path, rank_runs, n, micro):
    """Catches sums instead of means over ranks, ranks that train on the same windows, and unequal weights of them."""
    _, results = rank_runs(n)
    expected, _ = expected_gradient(alone, tmp_path)
    for result in results:
        assert_gradients_equal(result[f"gradient{micro}"], expected)


@pytest.mark.parametrize(("n", "micro"), SHARED_OUT)
def test_one_all_reduce_in_each_optimizer_step(rank_runs, n, micro):
    """Catches a missing no_sync, or one entered after the forward pass: an all-reduce for each micro-batch."""
    _, results = rank_runs(n)
    # The model fits in one of DDP's buckets, so its gradients travel once for each of the run's 3 steps, and in the two
    # passes before the first that settle the buckets.
    assert [result[f"all_reduces{micro}"] for result in results] == [2 + 3] * n


@pytest.mark.parametrize(("n", "micro"), SHARED_OUT)
def test_gradients_stay_where_they_are_sent_from(rank_runs, n, micro):
    """Catches gradients that are removed after a step, or lie elsewhere: DDP would copy each into its bucket."""
    folder, results = rank_runs(n)
    for result in results:
        assert result[f"pieces{micro}"] == 1  # all are views of the one bucket, instead of 28 pieces of memory
        first, *others = result[f"places{micro}"][2:]  # without those of the two passes that settle the buckets
        assert len(others) + 1 == 3 * 12 // (n * micro)
        assert all(first)
        assert all(places == first for places in others)
    if n == 2:  # a copy is multiplied by 1 / n, a gradient in its place divided by n: the same bits for powers of two
        assert_same_end(folder / "micro2", folder / "removed")
    kept, removed = read_losses(folder / "micro2"), read_losses(folder / "removed")
    # Three steps of float32 rounding, as above; a gradient that isn't set to zero shows in 1e-2.
    assert kept == {step: pytest.approx(loss, abs=1e-5) for step, loss in removed.items()}


def test_float16_scale_is_taken_out_before_clipping(alone, tmp_path):
    """Catches clipping before unscale_: the clipped gradient would be 65536 times too small."""
    # Threshold far below the norm (about 2), so that clipping is what decides the size of the update.
    settings = ["trainer_config.max_steps=1", "trainer_config.grad_norm_clip=0.5", "trainer_config.use_amp=true"]
    runs = {}
    for dtype in ("float32", "float16"):
        trainer = make_trainer(tmp_path / dtype, *settings, f"trainer_config.amp_dtype={dtype}", ranks=alone)
        before = {n: p.detach().clone() for n, p in trainer.raw_model.named_parameters()}
        gradients = watch_gradients(trainer)
        trainer.fit()
        update = torch.cat([(p.detach() - before[n]).flatten() for n, p in trainer.raw_model.named_parameters()])
        gradient = torch.cat([g.flatten() for g in gradients[0].values()])
        runs[dtype] = gradient, update, read_losses(tmp_path / dtype, "train/grad_norm")[1]
    exact, got = runs["float32"], runs["float16"]
    # float16 has 11 bits, an error of 5e-4 in each operation; the few in a row of two layers stay below 1e-2.
    assert got[2] == pytest.approx(exact[2], rel=1e-2)
    assert exact[2] > 0.5
    assert got[0].norm() == pytest.approx(0.5, rel=1e-2)
    assert (got[0] - exact[0]).norm() < 1e-2 * exact[0].norm()
    # A first step of Adam is the gradient's sign, which rounding turns where a gradient is nearly 0: hence wider.
    assert (got[1] - exact[1]).norm() < 0.2 * exact[1].norm()


@pytest.mark.parametrize(
    ("dtype", "scaled", "precision"),
    [("float32", False, "highest"), ("bfloat16", False, "high"), ("float16", True, "high")],
)
def test_what_each_type_needs(alone, tmp_path, dtype, scaled, precision):
    """Catches a scaler in types that need none, float16 without one, and TF32 in a run that promises float32."""
    settings = ["trainer_config.use_amp=true", f"trainer_config.amp_dtype={dtype}"]
    before = torch.get_float32_matmul_precision()
    try:
        assert make_trainer(tmp_path, *settings, ranks=alone).scaler.is_enabled() is scaled
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("use_amp", "wish", "device", "has_bfloat16", "expected"),
    [
        # 1. auto: what the hardware computes in.
        (True, "auto", "cuda", True, torch.bfloat16),
        (True, "auto", "cuda", False, torch.float16),
        (True, "auto", "cpu", True, torch.bfloat16),
        (True, "auto", "cpu", "amx", torch.bfloat16),  # another set of instructions for it
        (True, "auto", "cpu", False, torch.float32),
        (True, "auto", "xpu", True, torch.bfloat16),
        (True, "auto", "mps", False, torch.float32),
        # 2. No mixed precision.
        (False, "auto", "cuda", True, torch.float32),
        (False, "float32", "cpu", True, torch.float32),
        (True, "float32", "cuda", True, torch.float32),
        # 3. What the user insists on.
        (True, "float16", "cuda", True, torch.float16),
        (True, "float16", "cpu", False, torch.float16),
        (True, "bfloat16", "cpu", False, torch.bfloat16),
    ],
)
def test_choice_of_dtype(monkeypatch, use_amp, wish, device, has_bfloat16, expected):
    """Catches float16 where bfloat16 is to be had, and narrow types that a machine only emulates."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bfloat16)
    found = {"avx512_bf16": has_bfloat16 is True, "amx_bf16": has_bfloat16 == "amx", "avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device_type: True)
    assert choose_dtype(torch.device(device), use_amp, wish) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_are_computed_in_the_chosen_type(alone, tmp_path, dtype):
    """Catches autocast switched off in training or in evaluation: mixed precision that is gone without a word."""
    settings = ["trainer_config.use_amp=true", f"trainer_config.amp_dtype={dtype}", "trainer_config.max_steps=2"]
    trainer = make_trainer(tmp_path, *settings, ranks=alone)
    seen = set()
    trainer.raw_model.h[1].mlp.c_fc.register_forward_hook(lambda m, _, out: seen.add((m.training, out.dtype)))
    trainer.fit()
    assert seen == {(True, getattr(torch, dtype)), (False, getattr(torch, dtype))}
    assert all(p.dtype == torch.float32 for p in trainer.raw_model.parameters())


@pytest.mark.parametrize(
    ("dtype", "narrow"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")], ids=str
)
def test_muon_computes_in_a_type_with_enough_range(alone, tmp_path, monkeypatch, dtype, narrow):
    """Catches float16 in Muon's products, whose entries it can't hold, and float32 where bfloat16 is twice as fast."""
    settings = ["trainer_config.use_amp=true", f"trainer_config.amp_dtype={dtype}", "trainer_config.max_steps=1"]
    used = set()
    original = muon.orthogonalize
    monkeypatch.setattr(muon, "orthogonalize", lambda m, t, *rest: used.add(t) or original(m, t, *rest))
    make_trainer(tmp_path, *settings, ranks=alone).fit()
    assert used == {getattr(torch, narrow)}


@pytest.mark.parametrize("wish", ["float16", "bfloat16"])
def test_refuses_a_dtype_that_the_device_cannot_compute_in(monkeypatch, wish):
    """Catches a silent fallback: the run would not be what its configuration says."""
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device_type: False)
    with pytest.raises(ValueError, match=rf"amp_dtype={wish}.* mps.*auto"):
        choose_dtype(torch.device("mps"), True, wish)


@pytest.mark.parametrize(("optimizer", "band"), [("adamw", 0.03), ("muon", 0.004)])
def test_bfloat16_follows_the_curve_of_float32(alone, tmp_path, optimizer, band):
    """Catches what mixed precision must not narrow: weights kept in bfloat16, losses summed in it, moments in it."""
    settings = [
        *("data_config.truncate=1.0", "data_config.block_size=32", "gpt_config.n_embd=64"),
        *("trainer_config.max_steps=80", "trainer_config.max_epochs=9", f"optimizer_config.name={optimizer}"),
        "optimizer_config.learning_rate=8e-3",
    ]
    curves = []
    for dtype in ("float32", "bfloat16"):
        precision = ["trainer_config.use_amp=true", f"trainer_config.amp_dtype={dtype}"]
        make_trainer(tmp_path / dtype, *settings, *precision, ranks=alone).fit()
        curves.append(read_losses(tmp_path / dtype))
    float32, bfloat16 = curves
    assert float32[1] - float32[80] > 1.0  # it learns
    # Measured: 0.020 with AdamW, 0.0015 with Muon; with weights rounded to bfloat16 after each step 0.070 and 0.007.
    assert max(abs(bfloat16[step] - float32[step]) for step in float32) < band


def counting_reads(original: Callable[[Tensor], Any], reads: list[str]) -> Callable[[Tensor], Any]:
    def read(tensor: Tensor) -> Any:
        # Losses and norms are float32; what ranks agree on travels in other types, on the CPU anyway.
        if tensor.dtype == torch.float32:
            reads.append(original.__name__)
        return original(tensor)

    return read


def test_reads_nothing_from_the_device_in_steps_that_do_not_log(alone, tmp_path, monkeypatch):
    """Catches .item() on loss or norm in every step: on a GPU, the program would wait for it every time."""
    reads: list[str] = []
    for name in ("item", "tolist"):  # not float(): the finite check uses that on the CPU, where it costs nothing
        monkeypatch.setattr(Tensor, name, counting_reads(getattr(Tensor, name), reads))
    counts = []
    for steps in (4, 20):
        reads.clear()
        settings = [f"trainer_config.{key}_every_steps=1000" for key in ("log", "eval", "save")]
        make_trainer(tmp_path / str(steps), *settings, f"trainer_config.max_steps={steps}", ranks=alone).fit()
        counts.append(len(reads))
    assert counts[0] == counts[1] > 0  # those of the last step, which logs and evaluates


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("mps", False), ("xpu", False), ("cpu", False)])
def test_batches_are_copied_without_waiting_to_cuda_alone(alone, tmp_path, monkeypatch, device, expected):
    """Catches copies from memory that isn't pinned which are read before they are done: wrong batches on a Mac."""
    trainer = make_trainer(tmp_path, ranks=alone)
    trainer.ranks = dataclasses.replace(alone, device=torch.device(device))
    seen = []
    monkeypatch.setattr(Tensor, "to", lambda self, device, non_blocking: seen.append((device.type, non_blocking)))
    next(trainer._batches())
    assert seen == [(device, expected)] * 2


def test_a_compiled_run_compiles_one_graph(alone, tmp_path, monkeypatch):
    """Catches graphs for evaluation's mode, its last batch and the sample: minutes of waiting on a large model."""
    graphs: list[Any] = []

    def count(graph, _):  # a backend that compiles nothing
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(GPT, "compile", lambda model: torch.nn.Module.compile(model, backend=count))
    settings = ["trainer_config.compile=true", "trainer_config.eval_every_steps=2", "trainer_config.max_steps=4"]
    make_trainer(tmp_path, *settings, "trainer_config.sample_tokens=20", ranks=alone).fit()
    assert len(graphs) == 1


def test_the_long_sample_is_made_once_at_the_end(alone, tmp_path, monkeypatch, caplog):
    """Catches 500 tokens at every evaluation, while all other ranks wait; and a long one that never comes."""
    lengths = []
    generate = GPT.generate
    monkeypatch.setattr(GPT, "generate", lambda *args, **how: lengths.append(args[2]) or generate(*args, **how))
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, "trainer_config.sample_tokens=300", ranks=alone).fit()
    assert lengths == [64, 64, 300]
    (message,) = [message for message in caplog.messages if message.startswith("a sample of")]
    assert len(message.removeprefix("a sample of step 20:\n\n").removesuffix("\n")) == 300

    lengths.clear()
    make_trainer(tmp_path / "short", "trainer_config.sample_tokens=20", ranks=alone).fit()
    assert lengths == [20, 20, 20]
    stopped = make_trainer(tmp_path / "stopped", "trainer_config.sample_tokens=300", ranks=alone)
    before_each_step(stopped, lambda: stopped.stop_request._remember(signal.SIGTERM, None))
    lengths.clear()
    stopped.fit()
    assert (stopped.step, lengths) == (2, [])


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_learning_rates_follow_the_schedule(alone, tmp_path, decay):
    """Catches a schedule that moves with every micro-batch or epoch, is one step late, or is the other one."""
    settings = ["optimizer_config.name=muon", "optimizer_config.learning_rate=2e-3", "optimizer_config.warmup_steps=5"]
    trainer = make_trainer(
        *(tmp_path, *settings, *TWO_EPOCHS, "optimizer_config.min_lr_ratio=0.1", "trainer_config.micro_batch_size=4"),
        *("optimizer_config.muon_learning_rate=0.04", f"optimizer_config.lr_decay={decay}"),
        ranks=alone,
    )
    used: list[tuple[float, ...]] = []
    before_each_step(trainer, lambda: used.append(tuple(group["lr"] for group in trainer.optimizer.param_groups)))
    trainer.fit()
    factors = [learning_rate_factor(step, 5, 30, 0.1, decay) for step in range(30)]
    assert used == [(0.04 * factor, 2e-3 * factor) for factor in factors]
    recorded = read_losses(tmp_path, "train/learning_rate")
    # TensorBoard stores float32, 7 digits.
    assert recorded == {step + 1: pytest.approx(2e-3 * factor, rel=1e-6) for step, factor in enumerate(factors)}


def test_every_epoch_has_an_order_of_its_own(alone, tmp_path):
    """Catches a loop that never calls set_epoch: all epochs would repeat the first one's windows in its order."""
    trainer = make_trainer(tmp_path, "trainer_config.max_epochs=2", "trainer_config.max_steps=null", ranks=alone)
    seen = []
    trainer.raw_model.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0]) if m.training else None)
    trainer.fit()
    assert len(seen) == 2 * 24
    for first, second in zip(seen[:24], seen[24:], strict=True):
        assert not torch.equal(first, second)


# ------------------------------------------------------------------------------------ what is reported of a step


def test_speeds_are_of_whole_steps(alone, tmp_path, monkeypatch):
    """Catches tokens counted by micro-batch, seconds of several steps taken for one's, and waiting taken for work."""
    now = [100.0]
    monkeypatch.setattr(reporter.time, "perf_counter", lambda: now[0])  # a clock that only the lines below move
    trainer = make_trainer(
        *(tmp_path, "trainer_config.micro_batch_size=4", "trainer_config.log_every_steps=5"),
        "trainer_config.max_steps=10",
        ranks=alone,
    )
    fetch, evaluate = CharDataset.__getitems__, trainer.evaluate

    def fetch_in_half_a_second(dataset: CharDataset, starts: list[int]) -> tuple[Tensor, Tensor]:
        now[0] += 0.5
        return fetch(dataset, starts)

    def evaluate_in_a_minute() -> float:
        now[0] += 60.0
        return evaluate()

    def compute_for_two_seconds() -> None:
        now[0] += 2.0

    monkeypatch.setattr(CharDataset, "__getitems__", fetch_in_half_a_second)

    def export_a_profile() -> None:
        now[0] += 30.0

    monkeypatch.setattr(trainer, "evaluate", evaluate_in_a_minute)
    monkeypatch.setattr(trainer.reporter, "step_done", export_a_profile)
    before_each_step(trainer, compute_for_two_seconds)
    trainer.fit()
    # A step: 12 windows of 16 characters in three micro-batches, each of which takes half a second to come.
    for tag, wanted in (
        ("train/tokens_per_second", 12 * 16 / 3.5),
        ("time/data_seconds_per_step", 1.5),
        ("time/compute_seconds_per_step", 2.0),
    ):
        # TensorBoard stores float32, 7 digits.
        assert read_losses(tmp_path, tag) == {step: pytest.approx(wanted, rel=1e-6) for step in (5, 10)}, tag


@pytest.mark.parametrize("n", SEVERAL)
def test_speeds_are_of_all_ranks_together(rank_runs, n):
    """Catches a speed of one rank's share: the windows of a step are those of all of them."""
    folder, _ = rank_runs(n)
    tags = ("train/tokens_per_second", "time/data_seconds_per_step", "time/compute_seconds_per_step")
    speed, waiting, computing = (read_losses(folder / "losses", tag) for tag in tags)
    for step, tokens_per_second in speed.items():
        assert tokens_per_second * (waiting[step] + computing[step]) == pytest.approx(12 * 16, rel=1e-5)


def test_norms_are_those_of_all_numbers_together(alone, tmp_path):
    """Catches a sum of the parameters' norms, and a norm of the clipped gradient, which is never above the limit."""
    trainer = make_trainer(tmp_path, "trainer_config.max_steps=1", "trainer_config.grad_norm_clip=0.5", ranks=alone)
    trainer.fit()
    numbers = torch.cat([p.detach().flatten().double() for p in trainer.raw_model.parameters()])
    assert read_losses(tmp_path, "train/param_norm")[1] == pytest.approx(float(numbers.norm()), rel=1e-5)
    gradient, _ = expected_gradient(alone, tmp_path / "plain")
    norm = torch.cat([g.flatten().double() for g in gradient.values()]).norm()
    assert norm > 0.5
    assert read_losses(tmp_path, "train/grad_norm")[1] == pytest.approx(float(norm), rel=1e-4)  # float32 sums


def test_evaluations_are_recorded_in_nats_and_bits(alone, tmp_path, caplog):
    """Catches bits that are nats multiplied by ln 2: smaller than the nats, and so easily believed."""
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, ranks=alone).fit()
    nats, bits = read_losses(tmp_path, "eval/loss"), read_losses(tmp_path, "eval/bits_per_char")
    assert list(bits) == [10, 20]
    for step, loss in nats.items():
        assert 2 ** bits[step] == pytest.approx(math.exp(loss), rel=1e-5)  # either way: among how many it guesses
        said = next(message for message in caplog.messages if message.startswith(f"step {step}: evaluation loss"))
        assert said == f"step {step}: evaluation loss {loss:.4f} ({bits[step]:.3f} bits per character)"


def test_the_header_says_what_will_be_done(alone, tmp_path, caplog):
    """Catches figures of the wrong thing: characters less one, bits for nats, micro-batches and their size swapped."""
    trainer = make_trainer(tmp_path, "trainer_config.micro_batch_size=4", "trainer_config.max_steps=1", ranks=alone)
    with caplog.at_level(logging.INFO):
        trainer.fit()
    said = " ".join(caplog.messages)
    train_codes, eval_codes = sample_codes()
    V = len(set(SAMPLE_TEXT.read_text(encoding="utf-8")))
    # Embeddings, then of each of two blocks: four matrices of 12 C² with 9 C biases, two norms; the last norm.
    size = V * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 9 * 16 + 4 * 16) + 2 * 16
    assert f"{size / 1e6:.2f} M parameters (2 layers, 2 heads, width 16)" in said
    assert f"{len(train_codes):,} characters to train on, {len(eval_codes):,} to evaluate on" in said
    assert f"{V} different characters: loss {math.log(V):.2f}" in said
    assert "1 rank x 3 x 4 windows" in said
    assert "an epoch: 24" in said


@pytest.mark.parametrize(
    ("every", "recomputes", "passes", "is_long"), [(5, "false", 3, False), (5, "true", 4, False), (3, "false", 3, True)]
)
def test_the_header_says_what_an_evaluation_costs(alone, tmp_path, caplog, every, recomputes, passes, is_long):
    """Catches runs that spend most of their time on evaluations, while nobody says so, nor what to do about it."""
    settings = ["data_config.train_split=0.6", f"trainer_config.activation_checkpointing={recomputes}"]
    settings += [f"trainer_config.eval_every_steps={every}", "trainer_config.max_steps=1"]
    trainer = make_trainer(tmp_path, *settings, ranks=alone)
    with caplog.at_level(logging.INFO):
        trainer.fit()
    # The evaluation text and a tenth as much of the other one, forward only; a backward pass costs two forward passes.
    steps = round(1.1 * len(trainer.text.eval_codes) / (12 * 16) / passes)
    assert steps == {3: 4, 4: 3}[passes]
    assert f"evaluations: every {every} steps, each about as long as {steps} steps" in caplog.messages
    advice = [message for message in caplog.messages if "raise data_config.train_split" in message]
    assert len(advice) == is_long
    assert all(len(f"12:34:56 {message}") <= 80 for message in advice)


def test_the_summary_counts_this_starts_tokens(alone, tmp_path, caplog):
    """Catches tokens of one micro-batch in each step, and steps that an earlier start has done, in sum or speed."""
    make_trainer(tmp_path, "trainer_config.max_steps=5", ranks=alone).fit()
    trainer = make_trainer(tmp_path, "trainer_config.micro_batch_size=4", ranks=alone)
    trainer.resume()
    counted_from: list[int] = []
    before_each_step(trainer, lambda: counted_from.append(trainer.reporter.watch.first_step))
    with caplog.at_level(logging.INFO):
        trainer.fit()
    assert counted_from[0] == 5
    (said,) = [message for message in caplog.messages if message.startswith("finished: 20 steps")]
    assert f"{15 * 12 * 16:,} tokens in" in said


# ------------------------------------------------------------------------------------ evaluation


def test_evaluation_is_in_eval_mode_without_gradients(alone, tmp_path):
    """Catches a missing model.eval(), with which dropout makes every evaluation another one, and a missing no_grad."""
    trainer = make_trainer(tmp_path, *DROPOUT, ranks=alone)
    modes = []
    trainer.raw_model.register_forward_hook(lambda m, *_: modes.append((m.training, torch.is_grad_enabled())))
    trainer.raw_model.train()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first == second
    assert set(modes) == {(False, False)}
    assert trainer.raw_model.training


@pytest.mark.parametrize("was_training", [True, False])
def test_evaluation_restores_the_mode_even_when_it_fails(alone, tmp_path, was_training):
    """Catches training on without dropout after an evaluation that raised."""
    trainer = make_trainer(tmp_path, ranks=alone)
    trainer.raw_model.train(was_training)

    def fail(*_: Any) -> None:
        raise StopHereError

    handle = trainer.raw_model.h[1].register_forward_hook(fail)
    with pytest.raises(StopHereError):
        trainer.evaluate()
    assert trainer.raw_model.training is was_training
    handle.remove()
    trainer.evaluate()
    assert trainer.raw_model.training is was_training


def test_evaluation_scores_every_target_once(alone, tmp_path):
    """Catches targets left out, scored twice, or batches weighted alike whatever their size."""
    trainer = make_trainer(tmp_path, *DROPOUT, "trainer_config.micro_batch_size=4", ranks=alone)
    # Mean of 513 losses near 4 in float32, against float64: errors of 1e-7 relative that partly cancel.
    assert trainer.evaluate() == pytest.approx(explicit_evaluation(trainer.raw_model), abs=1e-6)


@pytest.mark.parametrize("n", SEVERAL)
def test_evaluation_agrees_on_any_number_of_ranks(alone, tmp_path, rank_runs, n):
    """Catches padding to equal shares, and a mean of the ranks' means: 513 targets divide neither by 2 nor 16."""
    _, results = rank_runs(n)
    expected = explicit_evaluation(with_opinions(make_trainer(tmp_path, *DROPOUT, ranks=alone)).raw_model)
    for result in results:  # all ranks know it
        assert result["evaluation"] == pytest.approx(expected, abs=1e-5)  # losses near 7; a mean of means is 1e-4 off


@pytest.mark.parametrize("n", SEVERAL)
def test_rank_0_reports_the_loss_of_every_rank(rank_runs, n):
    """Catches an evaluation that only one rank's share went into: the reported counts must make up the text."""
    _, results = rank_runs(n)
    assert not any(result["evaluation_messages"] for result in results[1:])
    (message,) = results[0]["evaluation_messages"]
    shares = [part.split(" on ") for part in message.removesuffix(" characters").split(": ")[1].split(", ")]
    counts = [int(count) for _, count in shares]
    assert len(shares) == n
    assert sum(counts) == len(sample_codes()[1]) - 1
    assert counts == {2: [257, 256], 3: [176, 176, 161]}[n]  # 33 windows of 16, of which the last one has 1
    mean = sum(float(loss) * count for (loss, _), count in zip(shares, counts, strict=True)) / sum(counts)
    assert mean == pytest.approx(results[0]["evaluation"], abs=1e-4)  # the report has 4 decimals


def test_what_was_learned_is_measured_on_the_training_text(alone, tmp_path):
    """Catches a loss on the evaluation text, with dropout, or on a passage that moves, under the other one's name."""
    trainer = make_trainer(tmp_path, *DROPOUT, "trainer_config.save_every_steps=20", ranks=alone)
    passages, evaluate_on = [], trainer.evaluate_on
    vars(trainer)["evaluate_on"] = lambda codes: passages.append(codes) or evaluate_on(codes)
    trainer.fit()
    train_codes, eval_codes = sample_codes()
    passage = train_codes[-(len(eval_codes) // 10) :]
    recorded = read_losses(tmp_path, "eval/train_loss")
    assert list(recorded) == [10, 20]
    assert recorded[20] == pytest.approx(explicit_evaluation(trainer.raw_model, passage), abs=1e-6)  # as above
    assert [passage.tolist() for passage in passages] == [eval_codes.tolist(), passage.tolist()] * 2


# ------------------------------------------------------------------------------------ randomness


@pytest.mark.parametrize("n", SEVERAL)
def test_all_ranks_start_as_one_model(alone, tmp_path, rank_runs, n):
    """Catches an initialisation seeded with the rank: ranks are compared before DDP copies rank 0's weights."""
    _, results = rank_runs(n)
    expected = make_trainer(tmp_path, *DROPOUT, ranks=alone).raw_model.state_dict()
    for result in results:
        assert all(torch.equal(tensor, result["initial_weights"][name]) for name, tensor in expected.items())


@pytest.mark.parametrize("n", SEVERAL)
def test_dropout_masks_differ_between_ranks_steps_and_micro_batches(rank_runs, n):
    """Catches one dropout seed on all ranks, and a seed that leaves the step out."""
    _, results = rank_runs(n)
    masks = [mask for result in results for mask in result["masks"]]
    assert len(masks) == n * 2 * 2  # ranks x steps x micro-batches
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            # Independent masks agree in half of their thousands of places; 0.1 is at least 6 deviations.
            assert (mask == other).double().mean() == pytest.approx(0.5, abs=0.1)


def test_step_seed_is_a_function_of_seed_step_and_rank():
    """Catches seeds that collide, as sums like seed + step + rank do, and seeds that a rerun can't repeat."""
    grid = [(seed, step, rank) for seed in (0, 1, 1337) for step in range(50) for rank in range(8)]
    seeds = [step_seed(*point) for point in grid]
    assert len(set(seeds)) == len(grid)
    assert seeds == [step_seed(*point) for point in grid]
    torch.manual_seed(max(seeds))  # within the range that torch takes


@pytest.mark.parametrize("n", SEVERAL)
def test_ranks_agree_on_the_largest_value(rank_runs, n):
    """Catches a sum: SIGTERM, 15, noticed by two ranks at once would become signal 30."""
    _, results = rank_runs(n)
    assert [result["maximum"] for result in results] == [[n - 1, 5, 0]] * n


# ------------------------------------------------------------------------------------ numbers that are not finite


def poison(trainer: Trainer, step: int) -> None:
    """Make the loss of one optimizer step, counted from 0, not a number."""

    def poisoned(module: torch.nn.Module, _: Any, out: Tensor) -> Tensor | None:
        return out * math.nan if module.training and trainer.step == step else None

    trainer.raw_model.ln_f.register_forward_hook(poisoned)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loss_that_is_not_a_number_ends_the_run_in_every_type(alone, tmp_path, dtype):
    """Catches a loss that nobody looks at in float16: the scaler, which forgives gradients, skips every step then."""
    settings = ["trainer_config.use_amp=true", f"trainer_config.amp_dtype={dtype}"]
    trainer = make_trainer(tmp_path, *settings, ranks=alone)
    poison(trainer, 7)
    with pytest.raises(RunError, match="step 8"):
        trainer.fit()
    assert load_snapshot(str(tmp_path / "gpt_snapshot.pt"))["step"] == 5
    assert all(p.isfinite().all() for p in trainer.raw_model.parameters())


def test_an_infinite_gradient_in_float16_costs_one_step_only(alone, tmp_path):
    """Catches a run that ends at float16's normal overflow, for which there is the scaler."""
    trainer = make_trainer(tmp_path, "trainer_config.use_amp=true", "trainer_config.amp_dtype=float16", ranks=alone)
    trainer.raw_model.wpe.weight.register_hook(lambda gradient: gradient * (math.inf if trainer.step == 7 else 1.0))
    trainer.fit()
    assert trainer.step == 20
    assert trainer.scaler.get_scale() == 65536 / 2
    assert all(p.isfinite().all() for p in trainer.raw_model.parameters())


@pytest.mark.parametrize("poisoned_step", [2, 4])
@pytest.mark.parametrize("due", ["log", "save", "eval", "signal"])
def test_accelerators_look_at_the_loss_before_the_steps_that_wait(alone, tmp_path, monkeypatch, due, poisoned_step):
    """Catches a look that comes one step late: weights that are no numbers would be saved, evaluated, or logged.

    There is no accelerator in this test. The check alone sees another type of device; all else is done on the CPU.
    """
    settings = [f"trainer_config.{key}_every_steps={5 if key == due else 1000}" for key in ("log", "save", "eval")]
    trainer = make_trainer(tmp_path, *settings, ranks=alone)
    check = trainer._agree_to_step

    def check_as_on_an_accelerator(*arguments: Any) -> None:
        trainer.ranks = dataclasses.replace(alone, device=torch.device("meta"))
        try:
            check(*arguments)
        finally:
            trainer.ranks = alone

    monkeypatch.setattr(trainer, "_agree_to_step", check_as_on_an_accelerator)
    if due == "signal":  # which is followed by a save
        trainer.raw_model.register_forward_hook(
            lambda *_: signal.raise_signal(signal.SIGTERM) if trainer.step == 4 else None
        )
    poison(trainer, poisoned_step)
    with pytest.raises(RunError, match="step 5"):  # step 5 is the first that is due; weights that are NaN stay NaN
        trainer.fit()
    assert not (tmp_path / "gpt_snapshot.pt").exists()


# ------------------------------------------------------------------------------------ stopping and going on


@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        (8, ["optimizer_config.name=muon"]),  # in the middle of an epoch
        (27, ["optimizer_config.name=muon"]),  # in the second one
        (24, ["optimizer_config.name=adamw", "trainer_config.save_every_steps=24"]),  # exactly between them
        (13, ["trainer_config.use_amp=true", "trainer_config.amp_dtype=float16"]),
        (13, ["trainer_config.data_loader_workers=1"]),
    ],
    ids=["middle", "second-epoch", "epoch-end-adamw", "float16", "loader-worker"],
)
def test_a_stopped_run_ends_like_one_that_was_not(alone, tmp_path, stop, settings):
    """Catches whatever a snapshot lacks: place in the epoch, moments, scale, schedule, randomness of dropout."""
    settings = [*settings, *DROPOUT, *TWO_EPOCHS, "trainer_config.micro_batch_size=4"]
    make_trainer(tmp_path / "straight", *settings, ranks=alone).fit()
    go_on_after_stop(tmp_path / "stopped", stop, *settings, ranks=alone)
    assert_same_end(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize("n", SEVERAL)
def test_stopped_ranks_end_like_ranks_that_were_not(rank_runs, n):
    """Catches ranks that go on with rank 0's dropout, or from different places.

    With three ranks a sum depends on its order in the last bit: a DDP that is new takes its first step in another one.
    """
    folder, _ = rank_runs(n)
    assert_same_end(folder / "straight", folder / "stopped")


def test_a_resumed_run_records_every_step(alone, tmp_path):
    """Catches curves with a hole or a doubled step where a run went on."""
    go_on_after_stop(tmp_path, 13, ranks=alone)
    assert list(read_losses(tmp_path)) == list(range(1, 21))
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 21))  # each of them once
    assert list(read_losses(tmp_path, "eval/loss")) == [10, 20]


def test_the_scale_is_resumed(alone, tmp_path):
    """Catches a scaler whose state isn't saved and loaded: it would start at 65536 after every restart."""
    settings = ["trainer_config.use_amp=true", "trainer_config.amp_dtype=float16"]
    make_trainer(tmp_path, *settings, "trainer_config.max_steps=3", ranks=alone).fit()
    url = str(tmp_path / "gpt_snapshot.pt")
    snapshot = load_snapshot(url)
    assert snapshot["scaler"]["_growth_tracker"] == 3
    snapshot["scaler"].update(scale=1024.0, _growth_tracker=7)
    save_snapshot(snapshot, url)
    trainer = make_trainer(tmp_path, *settings, "trainer_config.max_steps=5", ranks=alone)
    trainer.resume()
    trainer.fit()
    resumed = load_snapshot(url)["scaler"]
    assert (resumed["scale"], resumed["_growth_tracker"]) == (1024.0, 9)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_configuration_wins_over_the_snapshot(alone, tmp_path, caplog, name):
    """Catches load_state_dict bringing back the old learning rates, decay and betas without a word."""
    settings = [f"optimizer_config.name={name}", "optimizer_config.warmup_steps=0"]
    old = ["optimizer_config.learning_rate=1e-3", "optimizer_config.weight_decay=0.1"]
    new = ["optimizer_config.learning_rate=3e-3", "optimizer_config.weight_decay=0.3", "optimizer_config.betas=[.8,.9]"]
    make_trainer(tmp_path, *settings, *old, "trainer_config.max_steps=5", ranks=alone).fit()
    trainer = make_trainer(tmp_path, *settings, *new, "trainer_config.max_steps=10", ranks=alone)
    with caplog.at_level(logging.INFO):
        trainer.resume()
    seen = []
    before_each_step(trainer, lambda: seen.append([dict(group) for group in trainer.optimizer.param_groups]))
    trainer.fit()
    matrices, others = seen[0]
    assert others["lr"] == 3e-3 * learning_rate_factor(5, 0, 10, 0.0, "linear")
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert tuple(others["betas"]) == (0.8, 0.9)
    changes = [message for message in caplog.messages if "changed" in message]
    assert {
        "changed setting: optimizer_config.learning_rate was 0.001, now 0.003",
        "changed setting: optimizer_config.weight_decay was 0.1, now 0.3",
        "changed setting: trainer_config.max_steps was 5, now 10",
    } <= {*changes}
    assert not any("warmup_steps" in change for change in changes)


def test_the_end_is_saved_before_the_last_evaluation(alone, tmp_path, monkeypatch):
    """Catches a last stretch that is lost: 7 steps, saved every 5, and an evaluation that could fail."""
    trainer = make_trainer(tmp_path, "trainer_config.max_steps=7", "trainer_config.eval_every_steps=1000", ranks=alone)
    at_evaluation = []
    evaluate = trainer.evaluate

    def look_and_evaluate() -> float:
        at_evaluation.append((trainer.step, load_snapshot(str(tmp_path / "gpt_snapshot.pt"))["step"]))
        return evaluate()

    monkeypatch.setattr(trainer, "evaluate", look_and_evaluate)
    trainer.fit()
    assert at_evaluation == [(7, 7)]
    end = load_snapshot(str(tmp_path / "gpt_snapshot.pt"))
    assert (end["step"], end["samples"]) == (7, 7 * 12)
    assert load_snapshot(str(tmp_path / "gpt_snapshot.prev.pt"))["step"] == 5


def test_the_best_snapshot_is_a_file_of_its_own(alone, tmp_path, monkeypatch):
    """Catches one damaged file that is two snapshots, and a best one that doesn't know its own loss.

    And a best one alone, which looks like a run whose latest was lost; it comes first where evaluations are frequent.
    """
    written = []

    def save(state: dict[str, Any], url: str, *how: bool) -> None:
        written.append((state["step"], url))
        save_snapshot(state, url, *how)

    monkeypatch.setattr(run_snapshots, "save_snapshot", save)
    trainer = make_trainer(tmp_path, "trainer_config.eval_every_steps=3", "trainer_config.max_steps=5", ranks=alone)
    losses = iter([3.0, 2.0])
    monkeypatch.setattr(trainer, "evaluate", lambda: next(losses))
    trainer.fit()
    latest, best = str(tmp_path / "gpt_snapshot.pt"), str(tmp_path / "gpt_snapshot.best.pt")
    assert written == [(3, latest), (3, best), (5, latest), (5, best)]
    assert not Path(latest).samefile(best)
    kept = load_snapshot(best)
    assert (kept["step"], kept["best_step"], kept["best_eval_loss"]) == (5, 5, 2.0)


def test_the_best_loss_of_a_shared_file_is_known_after_a_restart(alone, tmp_path, monkeypatch):
    """Catches a best loss that was found after its file was written: the next evaluation would count as the best."""
    losses = {5: 3.0, 10: 2.0, 15: 2.5, 20: 2.25}
    for last_step in (10, 13, 20):  # stopped where both are due, and between two evaluations
        trainer = make_trainer(tmp_path, "trainer_config.eval_every_steps=5", ranks=alone)
        trainer.resume()
        monkeypatch.setattr(trainer, "evaluate", lambda run=trainer: losses[run.step])
        trainer.state.total_steps = last_step
        monkeypatch.setattr(trainer, "_finish", lambda: None)
        if last_step == 13:
            losses[13] = 2.75
        trainer.fit()
        assert (trainer.state.best_step, trainer.state.best_eval_loss) == (10, 2.0)
        assert load_snapshot(str(tmp_path / "gpt_snapshot.best.pt"))["step"] == 10


def test_an_equal_loss_is_no_better_one(alone, tmp_path, monkeypatch):
    """Catches a plateau that counts as progress: patience would never end the run."""
    trainer = make_trainer(tmp_path, "trainer_config.eval_every_steps=5", "trainer_config.patience=2", ranks=alone)
    monkeypatch.setattr(trainer, "evaluate", lambda: 2.0)
    trainer.fit()
    assert trainer.step == 15
    assert load_snapshot(str(tmp_path / "gpt_snapshot.best.pt"))["step"] == 5


def test_the_best_snapshot_of_another_run_is_not_this_runs_best(alone, tmp_path):
    """Catches a loss to be beaten that another model or text has reached: no snapshot would ever be the best again."""
    make_trainer(tmp_path / "run", "trainer_config.max_steps=5", ranks=alone).fit()
    make_trainer(tmp_path / "other", "trainer_config.max_steps=5", "gpt_config.n_embd=32", ranks=alone).fit()
    best = tmp_path / "run" / "gpt_snapshot.best.pt"
    foreign = load_snapshot(str(tmp_path / "other" / "gpt_snapshot.best.pt")) | {"best_eval_loss": 0.001}
    save_snapshot(foreign, str(best), keep_previous=False)
    trainer = make_trainer(tmp_path / "run", "trainer_config.max_steps=7", ranks=alone)
    trainer.resume()
    trainer.fit()
    assert load_snapshot(str(best))["step"] == 7
    assert load_snapshot(str(best))["model_config"]["n_embd"] == 16


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(alone, tmp_path, monkeypatch):
    """Catches a curve with a hole, and a best snapshot that is missed, where a run died between save and evaluation."""
    first = make_trainer(tmp_path, ranks=alone)

    def die() -> float:
        raise StopHereError

    monkeypatch.setattr(first, "evaluate", die)
    with pytest.raises(StopHereError):
        first.fit()
    second = make_trainer(tmp_path, ranks=alone)
    second.resume()
    assert second.step == 10
    second.fit()
    assert list(read_losses(tmp_path, "eval/loss")) == [10, 20]


def test_the_sample_is_repeatable_and_without_its_prompt(alone, tmp_path):
    """Catches a sample from the global generator, one without the run's seed, and one that begins with its newline."""
    trainer = make_trainer(tmp_path, "trainer_config.sample_tokens=30", ranks=alone)
    before = torch.get_rng_state()
    first, second = trainer.sample(30), trainer.sample(30)
    assert first == second
    assert len(first) == 30
    assert torch.equal(torch.get_rng_state(), before)
    trainer.config.seed += 1
    assert trainer.sample(30) != first


@pytest.mark.parametrize("stopped_in", [None, 18])
def test_patience_counts_across_a_restart(alone, tmp_path, monkeypatch, stopped_in):
    """Catches a run that goes on for ever, one that stops too early, and a count that begins anew with each start."""
    losses = {5: 3.0, 10: 2.0, 15: 2.5, 20: 2.25, 25: 1.0}
    settings = [
        *("trainer_config.patience=2", "trainer_config.max_steps=24", "trainer_config.save_every_steps=7"),
        "trainer_config.eval_every_steps=5",
    ]

    def evaluated(run):
        monkeypatch.setattr(run, "evaluate", lambda: losses[run.step])
        return run

    if stopped_in is not None:
        first = evaluated(make_trainer(tmp_path, *settings, ranks=alone))
        stop_in_step(first, stopped_in)
        with pytest.raises(StopHereError):
            first.fit()
    trainer = evaluated(make_trainer(tmp_path, *settings, ranks=alone))
    trainer.resume()
    trainer.fit()
    assert trainer.step == 20  # two evaluations after step 10
    assert load_snapshot(str(tmp_path / "gpt_snapshot.pt"))["step"] == 20
    assert load_snapshot(str(tmp_path / "gpt_snapshot.prev.pt"))["step"] == 14
    assert load_snapshot(str(tmp_path / "gpt_snapshot.best.pt"))["step"] == 10


if __name__ == "__main__":
    run_as_rank(Path(sys.argv[1]))
    distributed.leave(0)
