"""Who am I among the ranks: real runs of two processes, of two nodes, of one without a launcher."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    HANGS,
    PROJECT,
    TINY_RUN,
    TORCHRUN,
    free_port,
    memory_of_this_process,
    read_losses,
    run_program,
    spawn,
    start_program,
    take_place,
)

from console.signals import StopRequest, ignore_signals
from distributed import (
    all_gather,
    all_reduce_sum,
    broadcast_form,
    broadcast_from_main,
    choose_device,
    copy_from_main,
    distribute,
    leave_if_lost,
    load_weights,
    process_group,
)
from snapshot import load_snapshot

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch):
    """An environment without a launcher's variables; what a test adds to them is taken out again."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")  # makes pytest remember that it wasn't there
        monkeypatch.delenv(name)
    return monkeypatch


def assert_one_writer(run_dir: Path) -> None:
    """The run left one set of files, written by one process."""
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1
    assert not list(run_dir.glob("*.tmp"))
    lines = (run_dir / "main.log").read_text(encoding="utf-8").splitlines()
    reports = [line.split(" ", 1)[1] for line in lines if " step " in line or "model:" in line or "finished" in line]
    # 20 training steps, 2 evaluations, the model's size, and the end.
    assert len(reports) >= 20 + 2 + 2
    assert len(set(reports)) == len(reports)
    assert load_snapshot(str(run_dir / "gpt_snapshot.pt"))["step"] == 20
    assert list(read_losses(run_dir)) == list(range(1, 21))


def test_two_ranks_share_one_run_directory_and_one_writer(two_rank_run):
    """Catches a time-stamped directory for every rank, and ranks that log or write events beside rank 0."""
    folder, process = two_rank_run
    assert process.returncode == 0, process.stderr
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert_one_writer(folder / "run")


def test_the_console_speaks_once(two_rank_run):
    """Catches reports printed by every rank."""
    folder, process = two_rank_run
    assert process.stderr.count("step 20/20:") == 1  # on a console that is no terminal, lines are few
    assert "[rank 1]" not in process.stderr
    log = (folder / "run" / "main.log").read_text(encoding="utf-8")
    for step in range(1, 21):
        assert log.count(f"step {step}/20:") == 1


def test_two_nodes_finish_with_one_writer(tmp_path):
    """Catches MASTER_ADDR set in the program, and a writer or a gather list chosen by local_rank == 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    launcher += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=test"]
    command = [*launcher, str(PROJECT / "main.py"), f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN]
    outs = [tmp_path / "one.out", tmp_path / "other.out"]
    nodes = [start_program(*command, out=out) for out in outs]
    try:
        outputs = [(node.wait(HANGS), out.read_text()) for node, out in zip(nodes, outs, strict=True)]
    finally:
        for node in nodes:
            node.kill()
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert_one_writer(tmp_path / "run")
    # Only the node of rank 0 reports: which of the two that is, the rendezvous decides.
    assert sorted("step 20/20" in words for _, words in outputs) == [False, True]


def test_runs_without_a_launcher(tmp_path):
    """Catches a program that needs torchrun, or two GPUs: on a CPU it must train, and exit with 0."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    process = subprocess.run(
        [sys.executable, PROJECT / "main.py", f"hydra.run.dir={tmp_path}", *TINY_RUN],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "float32 on cpu" in process.stderr
    assert_one_writer(tmp_path)


def end_many_groups(rank: int, ports: list[int]) -> None:
    """One of two ranks that train a moment, and let go of all that they had, again and again."""

    def train_a_moment() -> None:
        with process_group(1.0) as ranks:
            model = distribute(torch.nn.Linear(64, 64), "ddp", torch.float32, False, ranks.device)
            for _ in range(3):
                model(torch.randn(8, 64)).sum().backward()

    for port in ports:
        take_place(rank, 2, port)
        train_a_moment()


def test_two_groups_in_a_row_at_one_address():
    """Catches a sweep of several ranks without torchrun whose second run meets at the addresses of the first."""
    spawn(end_many_groups, 2, [free_port()] * 3)


def test_the_end_of_a_group_hangs_on_nothing():
    """Catches a group that is freed while gloo's thread lets go of a tensor: each waits for what the other holds."""
    spawn(end_many_groups, 2, [free_port() for _ in range(30)])


def test_a_failure_of_one_rank_fails_the_job(tmp_path):
    """Catches an exit code of 0 after a failure: a scheduler would think that the run is done."""
    program = tmp_path / "fails.py"
    program.write_text(
        "from distributed import process_group, all_gather\n"
        "with process_group(30.0) as ranks:\n"
        "    all_gather(ranks.rank)\n"
        "    assert ranks.rank != 1, 'this rank fails'\n"
        "    all_gather(ranks.rank)\n"  # the others wait here, and must not wait for long
    )
    process = run_program(*TORCHRUN, "--nproc_per_node=2", program, env={"PYTHONPATH": str(PROJECT)})
    assert process.returncode != 0
    assert "this rank fails" in process.stderr


def receive_as_rank(rank, folder):
    """One of two ranks that hand on a snapshot of 128 MB and odd tensors: its memory, and what it has got."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    odd = {
        "turned": torch.arange(12.0).view(3, 4).T,
        "narrow": torch.full((2,), 0.1, dtype=torch.bfloat16),
        "number": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }
    targets = {name: torch.full_like(value, 7) for name, value in odd.items()}
    weights = {str(i): torch.full((1 << 20,), float(i) if rank == 0 else -1.0) for i in range(32)}
    snapshot = {"model": weights | odd, "step": 3, "list": [1, "a"]} if rank == 0 else None
    broadcast_from_main("what the first one needs is not counted")
    copy_from_main(torch.zeros(1 << 20), torch.zeros(1 << 20))
    before = memory_of_this_process("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    form = broadcast_form(snapshot)
    load_weights({**targets, **{name: weights[name] for name in weights}}, form["model"])
    grown = memory_of_this_process("VmHWM") - before
    assert all(bool((tensor == int(name)).all()) for name, tensor in weights.items())
    torch.save({"grown": grown / (32 << 22), "form": (form["step"], form["list"]), **targets}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_a_snapshot_travels_tensor_by_tensor(tmp_path):
    """Catches a snapshot that every rank has whole beside its model, and tensors of another order or type."""
    spawn(receive_as_rank, 2, str(tmp_path))
    for rank in (0, 1):
        there = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert there["grown"] < 0.5  # one tensor of 32, and some ten megabytes for what the transport needs
        assert there["form"] == (3, [1, "a"])
        assert torch.equal(there["turned"], torch.arange(12.0).view(3, 4).T)
        assert torch.equal(there["narrow"], torch.full((2,), 0.1, dtype=torch.bfloat16))
        assert there["number"] == 3
        assert there["empty"].shape == (0, 4)


def test_a_taken_port_is_named_in_one_line(no_launcher, tmp_path):
    """Catches "has lost another rank" where there is no other rank: MASTER_PORT belongs to somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        no_launcher.setenv("MASTER_PORT", str(server.getsockname()[1]))
        run = run_program(sys.executable, PROJECT / "main.py", f"hydra.run.dir={tmp_path / 'run'}", *TINY_RUN)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: rank 0 can't meet the others")
    assert "address already in use" in line
    assert "MASTER_PORT to a free port" in line
    assert not (tmp_path / "run").exists()


def test_a_host_that_does_not_exist_is_named(no_launcher):
    """Catches an address that leads nowhere and is reported as a rank that was lost."""
    no_launcher.setenv("MASTER_ADDR", "nowhere.invalid")
    no_launcher.setenv("MASTER_PORT", str(free_port()))
    with (
        pytest.raises(ValueError, match=r"MASTER_ADDR=nowhere.invalid, .*connect.*set MASTER_ADDR"),
        process_group(0.02),
    ):
        pass


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (
            RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:4711. This may indicate a crash"),
            True,
        ),
        (RuntimeError(f"{GLOO}pair.cc:553] Read error [127.0.0.1]:4711: Connection reset by peer"), True),
        (RuntimeError(f"{GLOO}unbound_buffer.cc:87] Timed out waiting 6000ms for recv operation to complete"), True),
        (
            dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed. Did the server crash?"),
            True,
        ),
        (
            dist.DistBackendError("NCCL error, remote process exited or there was a network error\nncclRemoteError"),
            True,
        ),
        (dist.DistBackendError("NCCL error, invalid usage\nLast error:\nDuplicate GPU detected"), False),
        (RuntimeError(f"Gloo connectFullMesh failed with {GLOO}pair.cc:144] timed out waiting for connect"), False),
        (RuntimeError(f"{GLOO}device.cc:208] rv != -1. Unable to resolve hostname"), False),
    ],
)
def test_an_error_is_told_by_its_own_words(monkeypatch, capsys, error, is_lost):
    """Catches errors that say nothing but "has lost another rank", and that claim where nobody is lost."""
    left, waited = [], []
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setattr("distributed.leave", left.append)
    monkeypatch.setattr("time.sleep", waited.append)
    leave_if_lost(error)
    (line,) = capsys.readouterr().err.splitlines()
    assert left == [1]
    assert ("rank 5 has lost another rank" in line) == is_lost == bool(waited)
    assert line.startswith("error: rank 5: ") != is_lost
    assert all(part in line for part in str(error).splitlines())


def test_other_errors_are_left_alone(monkeypatch, capsys):
    """Catches a bug whose traceback is swallowed because its message happens to speak of gloo, or of a time-out."""
    monkeypatch.setattr("distributed.leave", pytest.fail)
    leave_if_lost(RuntimeError("gloo is a backend, and this is a bug"))
    leave_if_lost(RuntimeError("the store's connection was reset by peer"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_rank", [True, False], ids=["all-variables", "address-and-port-only"])
def test_keeps_the_launchers_address_and_port(no_launcher, has_rank):
    """Catches MASTER_ADDR or MASTER_PORT overwritten: under torchrun the ranks would wait for each other forever."""
    port = free_port()
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if has_rank:
        given |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in given.items():
        no_launcher.setenv(name, value)
    with process_group(1.0):
        assert {name: os.environ[name] for name in given} == given
        socket.create_connection(("localhost", port), timeout=HANGS).close()  # that is where the ranks meet


def test_a_world_of_one_without_a_launcher(no_launcher):
    """Catches defaults that make a start without torchrun hang, or count the ranks wrongly."""
    with process_group(1.0) as ranks:
        assert (ranks.rank, ranks.local_rank, ranks.world_size) == (0, 0, 1)
        assert ranks.is_main
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_devices(monkeypatch):
    """Catches a CPU machine that is refused, ranks that share a device, and a device of the wrong index."""
    chosen = []
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert choose_device(3) == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert choose_device(1) == torch.device("xpu", 1)
    assert chosen == [1]
    with pytest.raises(ValueError, match=r"local rank 2 .* 2 of type xpu"):
        choose_device(2)
    assert choose_device(1, "cpu") == torch.device("cpu")
    assert chosen == [1]


def test_a_task_that_sees_one_device_takes_it(monkeypatch):
    """Catches a task of srun --gpus-per-task=1 that is refused, and ranks of torchrun that share the only device."""
    chosen = []
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert choose_device(3) == torch.device("xpu", 0)
    assert chosen == [0]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match=r"local rank 3 .* 1 of type xpu"):
        choose_device(3)


def test_a_ranks_device_is_counted_on_its_node(no_launcher):
    """Catches the rank over all nodes taken for the device's number, and device=cpu that doesn't arrive.

    There is no accelerator in this test: torch is made to say that there are two.
    """
    no_launcher.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    no_launcher.setattr(torch.accelerator, "device_count", lambda: 2)
    no_launcher.setattr(torch.accelerator, "set_device_index", lambda index: None)
    for name, value in {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        no_launcher.setenv(name, value)
    no_launcher.setenv("MASTER_PORT", "0")
    for wish, device in (("auto", torch.device("xpu", 1)), ("cpu", torch.device("cpu"))):
        with process_group(1.0, wish) as ranks:
            assert ranks.device == device


def test_sums_of_losses_are_exact(no_launcher):
    """Catches float32 between the ranks: a sum of millions of losses would lose its last digits."""
    many = float(2**24 + 1)  # the first whole number that float32 doesn't know
    with process_group(1.0):
        assert all_reduce_sum([many]) == [many]
        assert all_gather((many, 1)) == [(many, 1)]


@pytest.fixture
def own_handlers():
    """Signal handlers are put back after the test."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}  # or one would end the tests
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_first_signal_is_the_one_that_counts(own_handlers):
    """Catches an exit code of the last signal: a terminal that closes sends SIGHUP after the scheduler's SIGTERM."""
    request = StopRequest()
    request.listen()
    assert request.signal == 0
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        signal.raise_signal(number)
        assert request.signal == signal.SIGTERM


def test_nohup_is_respected(own_handlers):
    """Catches a run under nohup that a closed terminal stops all the same."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request = StopRequest()
    request.listen()
    signal.raise_signal(signal.SIGHUP)
    assert request.signal == 0


def test_half_a_launchers_environment_is_named(no_launcher):
    """Catches a KeyError for whoever sets RANK by hand, and not the rest."""
    no_launcher.setenv("RANK", "0")
    with pytest.raises(ValueError, match="RANK is set without LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; "):
        process_group(1.0).__enter__()


@pytest.mark.parametrize(("rank", "world_size"), [(5, 1), (-1, 1), (-1, 2), (2, 2)])
def test_a_rank_that_there_is_not_is_named(no_launcher, rank, world_size):
    """Catches a rank that looks for the others until its time is over, because RANK and WORLD_SIZE don't fit."""
    for name, value in zip(LAUNCHER_VARIABLES, (rank, 0, world_size, "127.0.0.1", free_port()), strict=True):
        no_launcher.setenv(name, str(value))
    with pytest.raises(ValueError, match=f"RANK={rank}, WORLD_SIZE={world_size}: .*from 0 to {world_size - 1}"):
        process_group(0.01).__enter__()


def test_loader_processes_ignore_the_signals(own_handlers):
    """Catches a worker that a Ctrl-C or SLURM's SIGUSR1 ends, with a traceback, before its rank has saved."""
    noticed = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    for number in numbers:
        signal.signal(number, lambda number, _: noticed.append(number))
    ignore_signals(0)
    for number in numbers:
        signal.raise_signal(number)
    assert noticed == []
