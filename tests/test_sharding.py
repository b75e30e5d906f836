"""FSDP2: the numbers of DDP and of one rank, snapshots that don't know who wrote them, and what can't be had."""

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import free_port, read_losses, spawn
from filelock import FileLock
from test_trainer import DROPOUT, StopHereError, make_trainer, stop_in_step

from distributed import local, norm, process_group
from large.sharding import check_shardable
from model import GPT, GPTConfig
from snapshot import load_snapshot

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
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": ports[world]}
        os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
        with process_group(2.0) as ranks:
            for strategy in STRATEGIES:
                key = f"trainer_config.strategy={strategy}"
                for name in OPTIMIZERS if (world, strategy) in RUNS else ():
                    micro = f"trainer_config.micro_batch_size={MICRO_BATCHES[world]}"
                    # Clipping is always at work.
                    settings = [key, f"optimizer_config.name={name}", micro, "trainer_config.grad_norm_clip=0.3"]
                    make_trainer(folder / f"{world}-{strategy}-{name}", *settings, ranks=ranks).fit()
                look_closer(folder / f"{world}-{strategy}", key, ranks)
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
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": ports[world]}
        os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
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


def look_closer(file: Path, key: str, ranks: Any) -> None:
    """What a rank has of a model, its mask of dropout, an evaluation in which one rank has no window left."""
    result: dict[str, Any] = {}
    trainer = make_trainer(Path(f"{file}-looked"), key, *DROPOUT, "data_config.truncate=0.07", ranks=ranks)
    result["held"] = sum(local(p).numel() for p in trainer.parameters.values())
    result["norm"] = norm(trainer.parameters.values())
    result["evaluation"] = trainer.evaluate()
    masks = []
    trainer.raw_model.drop.register_forward_hook(
        lambda module, _, out: masks.append(out == 0) if module.training else 0
    )
    torch.manual_seed(5 + ranks.rank)
    trainer.model.train()
    trainer.model(torch.zeros(2, 16, dtype=torch.int64))
    result["mask"] = masks[0]
    torch.save(result, f"{file}-rank{ranks.rank}.pt")


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


@pytest.mark.parametrize(
    ("dtype", "device", "words"), [(torch.float16, "cuda", "float16"), (torch.float32, "mps", "mps")]
)
def test_what_cannot_be_sharded_is_refused(dtype, device, words):
    """Catches a loss scale that every rank adapts to its own shards, and a device without collectives."""
    with pytest.raises(ValueError, match=f"strategy=fsdp can't be had .*{words}"):
        check_shardable(dtype, torch.device(device))
