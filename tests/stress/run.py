"""The stress test of fault tolerance: `python tests/stress/run.py`, twelve minutes on two idle cores, Linux only.

Not part of the default suite, which holds a fast version of each of these. Faults are done for real, at random
moments that `--seed` repeats as far as processes allow; the end must be as if nothing had been. The last thing
printed is a table; the exit code is 1 if anything was lost.
"""

import argparse
import contextlib
import functools
import http.client
import http.server
import io
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from alterations import alterations
from conftest import SAMPLE_TEXT, Started, read_losses
from test_faults import LONG_RUN, is_running, output, start, wait_for_step, workers
from test_trainer import flatten, make_trainer, world_of_one

from snapshot import Snapshot, best_url, load_newest, load_snapshot, prepare, previous_url, save_snapshot

ALONE = [sys.executable]
TWO_RANKS = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc_per_node=2", "--max-restarts=20"),
]
TIMED = str(Path(__file__).resolve().parent / "timed.py")
# With dropout and accumulation, as all runs of test_faults.py, and long enough for ten kills.
LONGER = ["trainer_config.max_steps=1000", "trainer_config.max_epochs=5", "trainer_config.eval_every_steps=50"]
# For faults at the start of a run.
SHORTER = ["data_config.truncate=0.4", "trainer_config.max_steps=60", "trainer_config.eval_every_steps=30"]


@dataclass
class Row:
    """A line of the table: one kind of fault, how often it was tried, and what was lost."""

    fault: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)

    def add(self, problem: str, times: int = 1) -> None:
        """Count a fault; an empty problem means that nothing was lost."""
        self.tried += times
        self.lost += [problem] * times if problem else []
        if problem:
            print(f"    LOST ({self.fault}): {problem}", flush=True)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# ------------------------------------------------------------------------------------------------ comparing


def value_difference(left: Any, right: Any, name: str = "") -> str:
    """The name of the first entry in which two snapshots differ, in type or in any bit; empty if there is none."""
    if type(left) is not type(right):
        return f"{name} is a {type(left).__name__}, not a {type(right).__name__}"
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return f"keys of {name}"
        return next(filter(None, (value_difference(left[key], right[key], f"{name}.{key}") for key in left)), "")
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return f"length of {name}"
        pairs = enumerate(zip(left, right, strict=True))
        return next(filter(None, (value_difference(a, b, f"{name}.{i}") for i, (a, b) in pairs)), "")
    if isinstance(left, torch.Tensor):
        return "" if left.dtype == right.dtype and torch.equal(left, right) else name
    return "" if left == right else name


def run_difference(run: Path, undisturbed: Path, url: str = "") -> str:
    """What distinguishes a finished run from the undisturbed one; empty if they are identical to the last bit."""
    left, right = (
        load_snapshot(url or str(run / "gpt_snapshot.pt")),
        load_snapshot(str(undisturbed / "gpt_snapshot.pt")),
    )
    assert len(flatten(right["optimizer"])) > 20  # there is something to compare
    for part in ("step", "samples", "model", "optimizer", "scaler", "best_eval_loss"):
        difference = value_difference(left[part], right[part], part)
        if difference:
            return f"differs from the undisturbed run: {difference}"
    for tag in ("train/loss", "eval/loss"):
        a, b = read_losses(run, tag), read_losses(undisturbed, tag)
        wrong = [step for step in sorted({*a, *b}) if a.get(step) != b.get(step)]
        if wrong:
            return f"{tag} differs at {len(wrong)} of {len(b)} steps: {wrong[:5]}"
    return ""


# ------------------------------------------------------------------------------------------------ processes


def descendants(pid: int) -> list[int]:
    """A process's children, their children, and so on."""
    try:
        children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*children, *(p for child in children for p in descendants(child))]


@contextlib.contextmanager
def running(run_dir: Path, *overrides: str, launcher: list[str]) -> Iterator[Started]:
    """A run that is gone at the end of the with-block, and all that it has started with it."""
    process = start(run_dir, *overrides, launcher=launcher, is_real=True)
    try:
        yield process
    finally:
        for pid in descendants(process.pid):  # torchrun gives each worker a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def finish(process: Started, run_dir: Path, undisturbed: Path, url: str = "") -> str:
    """Wait for the end; what is wrong with it, empty if nothing is."""
    code = process.wait(600)
    return run_difference(run_dir, undisturbed, url) if code == 0 else f"exit code {code}: {last_words(run_dir)}"


def last_words(run_dir: Path) -> str:
    return " | ".join(output(run_dir).splitlines()[-6:])[-1200:]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60, pause: float = 0.002) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(pause)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a with-block that takes too long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Stress:
    """What the parts share: a temporary directory, the random numbers, the undisturbed runs, the table.

    Args:
        seed: of all random moments.
        folder: an empty directory.
    """

    def __init__(self, seed: int, folder: Path):
        self.seed, self.folder, self.rows = seed, folder, list[Row]()
        self.random = random.Random(seed)

    def row(self, fault: str) -> Row:
        self.rows.append(Row(fault))
        return self.rows[-1]

    @functools.cached_property
    def alone(self) -> Path:
        """One rank, 300 steps, undisturbed."""
        return self.undisturbed("alone", ALONE, [])

    @functools.cached_property
    def together(self) -> Path:
        """Two ranks, 1000 steps, undisturbed."""
        return self.undisturbed("together", TWO_RANKS, LONGER)

    @functools.cached_property
    def short(self) -> Path:
        """Two ranks, 60 steps, undisturbed."""
        return self.undisturbed("short", TWO_RANKS, SHORTER)

    def undisturbed(self, name: str, launcher: list[str], overrides: list[str]) -> Path:
        """The run directory of a run that nothing happens to."""
        began, run_dir = time.monotonic(), self.folder / f"undisturbed-{name}"
        with running(run_dir, *overrides, launcher=launcher) as process:
            assert process.wait(600) == 0, output(run_dir)
        say(f"undisturbed run ({name}): {time.monotonic() - began:.0f} s")
        return run_dir


# ------------------------------------------------------------------------------------------------ 1. killed ranks

KILLS_PER_RUN = [*["start-up"] * 3, *["training"] * 3, *["evaluation"] * 2, *["saving"] * 2]


def attempt(pid: int) -> int:
    """Which of torchrun's attempts a worker belongs to; -1 before it is really there, or when it is gone."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return -1
    found = re.search(rb"(?:^|\0)TORCHELASTIC_RESTART_COUNT=(\d+)", environment)
    return int(found[1]) if found and is_running(pid) else -1


def attempts(process: Started) -> list[int]:
    try:
        return [attempt(pid) for pid in workers(process)]
    except OSError:
        return []


def wait_for_moment(moment: str, run_dir: Path, log_start: int, process: Started, rng: random.Random) -> None:
    """Let the run come to where it is to be killed."""

    def last_step() -> int:
        """The last step that the present attempt has reported; 0: none yet."""
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before its next kill: {last_words(run_dir)}")
        path = run_dir / "main.log"
        found = re.findall(r" step (\d+)/", path.read_text()[log_start:]) if path.exists() else []
        return int(found[-1]) if found else 0

    if moment == "start-up":  # imports, rendezvous, reading the text and the snapshot
        time.sleep(rng.uniform(0, 4.5))
        return
    wait_for(lambda: last_step() > 0, "a first step")
    if moment == "training":
        time.sleep(rng.uniform(0, 1))
    elif moment == "evaluation":  # follows the report of its step at once, and takes about as long as these
        reported = last_step()
        wait_for(lambda: last_step() > reported and last_step() % 50 == 0, "an evaluation", pause=0)
        time.sleep(rng.uniform(0, 0.05))
    else:
        wait_for(
            lambda: any(name.endswith(".tmp") for name in os.listdir(run_dir)), "a snapshot being written", pause=0
        )
        time.sleep(rng.choice([0, 0, 0.001, 0.003]))


def kill_ranks(stress: Stress) -> None:
    """20 SIGKILLs of a rank, ten in each of two runs."""
    row = stress.row("SIGKILL of a random rank (6 starting up, 6 training, 4 evaluating, 4 saving)")
    undisturbed = stress.together
    for number in (1, 2):
        run_dir, moments = stress.folder / f"killed-{number}", list(KILLS_PER_RUN)
        stress.random.shuffle(moments)
        problem = ""
        try:
            with running(run_dir, *LONGER, launcher=TWO_RANKS) as process:
                for count, moment in enumerate(moments):
                    wait_for(lambda n=count: attempts(process) == [n, n], f"attempt {count}, got {attempts(process)}")  # type: ignore[misc]
                    log = run_dir / "main.log"
                    log_start = len(log.read_text()) if log.exists() else 0
                    wait_for_moment(moment, run_dir, log_start, process, stress.random)
                    rank = stress.random.randrange(2)
                    if attempts(process) != [count, count]:
                        problem = f"attempt {count} failed on its own: {last_words(run_dir)}"
                        break
                    os.kill(workers(process)[rank], signal.SIGKILL)
                    lines = log.read_text()[log_start:].splitlines() if log.exists() else []
                    say(f"run {number}, kill {count + 1}: rank {rank}, {moment}; log: {lines[-1] if lines else '-'}")
                last, deadline = 0, time.monotonic() + 120
                while process.poll() is None and time.monotonic() < deadline and not problem:
                    last = max([last, *attempts(process)])
                    time.sleep(0.05)
                problem = problem or finish(process, run_dir, undisturbed)
                if not problem and last != len(moments):
                    problem = f"{last} restarts for {len(moments)} kills"
        except Exception as error:  # what is lost must be in the table
            problem = f"{type(error).__name__}: {error}"
        row.add(problem, times=len(moments))
        say(f"run {number}: {problem or 'identical with the undisturbed run'}")


# ------------------------------------------------------------------------------------------------ 2. killed writers


def state(step: int, numbers: int = 1_000_000) -> Snapshot:
    """A snapshot of 4 MB whose every number says which one it is."""
    return {"step": step, "model": {"w": torch.full((numbers,), float(step))}}


def what_is_wrong(url: str, at_least: int) -> str:
    """Empty if the newest snapshot is whole and not older than the last completed one, and left-overs go."""
    try:
        snapshot = load_newest(url)
        if snapshot is None or snapshot["step"] < at_least:
            return f"snapshot {at_least} was complete, and {snapshot and snapshot['step']} is what is left"
        if not torch.equal(
            snapshot["model"]["w"], state(snapshot["step"], snapshot["model"]["w"].numel())["model"]["w"]
        ):
            return f"snapshot {snapshot['step']} holds wrong numbers"
        prepare(url)
    except (ValueError, OSError) as error:
        return str(error)
    leftovers = [name for name in os.listdir(os.path.dirname(url)) if name.endswith(".tmp")]
    return f"left over: {leftovers}" if leftovers else ""


def write_for_ever(url: str, step: int, done: int) -> None:
    """Save one snapshot after another; a byte to the pipe `done` after each."""
    while True:
        save_snapshot(state(step), url)
        os.write(done, b".")
        step += 1


def kill_writers(stress: Stress) -> None:
    """50 kills of a process that saves, at random moments of the writing."""
    row = stress.row("SIGKILL while a snapshot is written")
    folder = stress.folder / "writers"
    folder.mkdir()
    url = str(folder / "gpt_snapshot.pt")
    began = time.monotonic()
    for step in range(10):
        save_snapshot(state(step), url)
    duration = (time.monotonic() - began) / 10
    step, in_the_middle = 10, 0
    for _ in range(50):
        read, write = os.pipe()
        # Forked, so that no attempt costs the seconds of importing torch.
        writer = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(url, step, write))
        writer.start()
        os.close(write)
        try:
            os.read(read, 1)
            time.sleep(stress.random.uniform(0, 3 * duration))
        finally:
            writer.kill()
            writer.join()
        completed = step  # the first, waited for above
        while answer := os.read(read, 1000):
            completed += len(answer)
        os.close(read)
        in_the_middle += any(name.endswith(".tmp") for name in os.listdir(folder)) or not os.path.exists(url)
        row.add(what_is_wrong(url, completed))
        step = completed + 2
        save_snapshot(state(step - 1), url)
    row.fault += f" (4 MB, {duration * 1000:.0f} ms; {in_the_middle} of 50 left half a file)"
    kill_between_operations(stress, folder)


def save_and_die(url: str, step: int, operation: int, after: bool) -> None:
    """Save, and be killed right before or after one of the calls that reach the disk."""
    calls = 0

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == operation and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args)
            if calls == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    os.replace, os.fsync, os.link = deadly(os.replace), deadly(os.fsync), deadly(os.link)
    save_snapshot(state(step, 1000), url)


def kill_between_operations(stress: Stress, folder: Path) -> None:
    """Kill at every boundary of a save, which random moments seldom hit; also where the newest file is damaged."""
    row = stress.row("SIGKILL before and after each fsync, link and rename of a save; newest whole, damaged or missing")
    url = str(folder / "gpt_snapshot.pt")
    for newest in ("whole", "damaged", "missing"):
        operation = 0
        exit_code: int | None = -1
        while exit_code:
            operation += 1
            for after in (False, True):
                for step in (1, 2):
                    save_snapshot(state(step, 1000), url)
                if newest == "damaged":
                    os.truncate(url, 500)
                    load_newest(url)  # as every start does, and it must make the next save safe
                elif newest == "missing":
                    os.unlink(url)
                writer = multiprocessing.get_context("fork").Process(
                    target=save_and_die, args=(url, 3, operation, after)
                )
                writer.start()
                writer.join(20)
                exit_code = writer.exitcode
                if exit_code == 0:  # a save has no more calls than that
                    break
                problem = what_is_wrong(url, 2 if newest == "whole" else 1)
                when = f"newest {newest}, killed {'after' if after else 'before'} call {operation}: "
                row.add(problem and when + problem)


# ------------------------------------------------------------------------------------------------ 3. damaged files


def damage(stress: Stress) -> None:
    """Cut a real snapshot off, and flip single bits of it: it is refused, or what it says is unchanged."""
    folder = stress.folder / "damaged"
    folder.mkdir()
    url = str(folder / "gpt_snapshot.pt")
    shutil.copy(stress.alone / "gpt_snapshot.prev.pt", previous_url(url))
    whole = (stress.alone / "gpt_snapshot.pt").read_bytes()
    original, previous, size = load_snapshot(str(stress.alone / "gpt_snapshot.pt")), load_snapshot(previous_url(url)), 0
    size = len(whole)
    assert previous["step"] < original["step"]

    def what_happens(content: bytes) -> str:
        """What a resume would do: "refused", "harmless", or what is wrong."""
        Path(url).write_bytes(content)
        try:
            loaded = load_newest(url)
        except Exception as error:  # there is a whole one, so that nothing may be raised
            return f"{type(error).__name__}: {error}"
        if loaded is None:
            return "taken for a fresh start"
        if loaded["step"] == original["step"]:
            difference = value_difference(loaded, original)
            return f"not noticed, and differs: {difference}" if difference else "harmless"
        difference = value_difference(loaded, previous)
        return f"neither the newest nor the previous: {difference}" if difference else "refused"

    row = stress.row(f"snapshot of {size} bytes cut off")
    lengths = {0, 1, 2, size - 2, size - 1, *stress.random.sample(range(size), 195)}
    for length in sorted(lengths):
        answer = what_happens(whole[:length])
        row.add("" if answer == "refused" else f"cut off after {length} of {size} bytes: {answer}")

    row = stress.row("")
    ends = [(position, bit) for position in (*range(64), *range(size - 64, size)) for bit in range(8)]
    flips = [*ends, *((stress.random.randrange(size), stress.random.randrange(8)) for _ in range(300))]
    counts: Counter[str] = Counter()
    for position, bit in flips:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << bit
        answer = what_happens(bytes(flipped))
        counts[answer] += 1
        row.add("" if answer in ("refused", "harmless") else f"bit {bit} of byte {position} flipped: {answer}")
    row.fault = f"a bit of it flipped ({counts['refused']} refused; {counts['harmless']} in padding: nothing changed)"


# ------------------------------------------------------------------------------------------------ 4. a full disk


class Disk:
    """A small disk that can be filled up: a tmpfs where this process may mount one, else a limit on file sizes."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(folder)]
        try:
            mounted = subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
        except OSError:
            mounted = False
        self.kind = "tmpfs of 640 kB" if mounted else "RLIMIT_FSIZE"
        self.is_tmpfs = mounted

    def fill(self, process: Started | None = None, spare: int = 16384) -> None:
        """Leave so many bytes free: enough for a probe, not for a snapshot."""
        if not self.is_tmpfs:
            if process:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (80_000, resource.RLIM_INFINITY))
            return
        # By a copy of the file system's own account, so that a save in progress fails as well.
        with open(self.folder / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        if spare:
            os.truncate(self.folder / "ballast", max(0, os.path.getsize(self.folder / "ballast") - spare))

    def free(self, process: Started | None = None) -> None:
        if not self.is_tmpfs:
            if process:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return
        (self.folder / "ballast").unlink(missing_ok=True)

    def snapshots(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.glob("gpt_snapshot*") if path.suffix != ".tmp"}

    def close(self) -> None:
        if self.is_tmpfs:
            subprocess.run(["umount", "-l", str(self.folder)], timeout=10, check=False)


def fill_disk(stress: Stress) -> None:
    """A disk that is full to the end of the run, at the next start, after that no more; and in between."""
    undisturbed = stress.alone
    disk = Disk(stress.folder / "disk")
    try:
        full_to_the_end(stress, disk, undisturbed)
        full_for_a_while(stress, disk, undisturbed)
    finally:
        disk.close()


def failures(run_dir: Path) -> int:
    return output(run_dir).count("could not be saved, training goes on")


def full_to_the_end(stress: Stress, disk: Disk, undisturbed: Path) -> None:
    row = stress.row(f"disk full to the end, at the next start, and freed ({disk.kind})")
    run_dir, url = stress.folder / "full", str(disk.folder / "gpt_snapshot.pt")
    target = f"trainer_config.snapshot_path={url}"
    with running(run_dir, target, launcher=ALONE) as process:
        wait_for_step(run_dir, stress.random.randrange(45, 140))
        disk.fill(process)
        wait_for(lambda: failures(run_dir) > 0, "a failed save")
        before = disk.snapshots()
        code = process.wait(60)
    log, last = output(run_dir), output(run_dir).splitlines()[-1]
    if code != 1 or "step 300/300" not in log or not last.startswith("error: the last snapshot could not be saved"):
        row.add(f"exit code {code}: {last}")
    elif disk.snapshots() != before or list(disk.folder.glob("*.tmp")):
        row.add(f"{os.listdir(disk.folder)}: not what was there before")
    else:
        row.add("")
    step = load_snapshot(url)["step"]

    if disk.is_tmpfs:
        disk.fill(spare=0)
        with running(run_dir, target, launcher=ALONE) as process:
            code = process.wait(60)
        last = output(run_dir).splitlines()[-1]
        refused = code == 1 and "can't be written" in last and disk.snapshots() == before
        row.add("" if refused else f"full at the start: exit code {code}: {last}")

    disk.free()
    with running(run_dir, target, launcher=ALONE) as process:
        problem = finish(process, run_dir, undisturbed, url)
    row.add(problem)
    say(f"full from step {step} to the end, then freed: {problem or 'identical'}")


def full_for_a_while(stress: Stress, disk: Disk, undisturbed: Path) -> None:
    row = stress.row(f"disk full for a while in mid-run ({disk.kind})")
    for path in disk.folder.iterdir():
        path.unlink()
    run_dir, url = stress.folder / "full-for-a-while", str(disk.folder / "gpt_snapshot.pt")
    with running(run_dir, f"trainer_config.snapshot_path={url}", launcher=ALONE) as process:
        cycles = [stress.random.randrange(begin, begin + 40) for begin in (25, 110, 195)]
        for step in cycles:
            wait_for_step(run_dir, step)
            before = failures(run_dir)
            disk.fill(process)
            wait_for(lambda n=before: failures(run_dir) > n, "a failed save")  # type: ignore[misc]
            disk.free(process)
        problem = finish(process, run_dir, undisturbed, url)
    row.add(problem, times=len(cycles))
    say(f"full for a while after steps {cycles}, {failures(run_dir)} failed saves: {problem or 'identical'}")


# ------------------------------------------------------------------------------------------------ 5. a faulty store


class FaultyStore(http.server.ThreadingHTTPServer):
    """An HTTP proxy on 127.0.0.1 in front of an S3 server, that answers with faults.

    Args:
        port: of the S3 server, on 127.0.0.1.
        rng: decides which requests fail.
    """

    daemon_threads = True

    def __init__(self, port: int, rng: random.Random):
        super().__init__(("127.0.0.1", 0), _Proxy)
        self.port, self.random, self.lock = port, rng, threading.Lock()
        self.rates: dict[str, float] = {}  # probability of each fault
        self.refuses: Callable[[str, str, bool], bool] = lambda method, path, is_copy: False  # always with 500
        self.is_silent: Callable[[str, bool], bool] = lambda method, is_copy: False  # by method: never an answer
        self.stores_in_silence = False  # whether such a request reaches the S3 server
        self.counts: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()

    def choose(self, method: str, path: str, is_copy: bool) -> str:
        """The fault of this request; empty: none. At most two in a row: what is tested is patience, not luck."""
        with self.lock:
            if self.refuses(method, path, is_copy):
                self.counts["refused"] += 1
                return "500"
            request, draw = f"{method} {path}", self.random.random()
            for fault, rate in self.rates.items():
                draw -= rate
                if draw < 0 and self._in_a_row[request] < 2:
                    self._in_a_row[request] += 1
                    self.counts[fault] += 1
                    return fault
            self._in_a_row[request] = 0
            return ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up (because they are killed) are no news."""


class _Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyStore

    def _forward(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        is_copy = "x-amz-copy-source" in self.headers
        fault = self.server.choose(self.command, self.path.split("?")[0], is_copy)
        if fault == "hangs up in a request":
            self.rfile.read(length // 2)
            return self._hang_up()
        body = self.rfile.read(length)
        if self.server.is_silent(self.command, is_copy):
            self.server.counts["no answer"] += 1
            if self.server.stores_in_silence:
                self._ask(body)
            while self.server.is_silent(self.command, is_copy):
                time.sleep(0.02)
            return self._hang_up()
        if fault == "500":
            return self._answer(500, [], b"<Error><Code>InternalError</Code><Message>sorry</Message></Error>")
        if fault == "slow":
            time.sleep(2)
        status, headers, content = self._ask(body)
        self._answer(status, headers, content, len(content) // 2 if fault == "hangs up in an answer" else None)
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the S3 server answers: status, headers, content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, half: int | None = None) -> None:
        own = ("connection", "transfer-encoding", "date", "server")
        kept = [(name, value) for name, value in headers if name.lower() not in own]
        if not any(name.lower() == "content-length" for name, _ in kept):
            kept.append(("Content-Length", str(len(content))))
        if half is not None and not half:  # no body to cut: cut the answer's first line
            self.wfile.write(b"HTTP/1.1 2")
            return self._hang_up()
        self.send_response(status)
        for name, value in kept:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:half])
        return self._hang_up() if half is not None else None

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def faulty_store(rng: random.Random) -> Iterator[FaultyStore]:
    """An S3 server with a bucket named "bucket", behind the proxy; the environment points to the proxy."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    port = int(moto.get_host_and_port()[1])
    store = FaultyStore(port, rng)
    threading.Thread(target=store.serve_forever, daemon=True).start()
    environment = {
        **{"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"},
        **{"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "NO_PROXY": "127.0.0.1"},
        **{"AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.server_port}", "AWS_EC2_METADATA_DISABLED": "true"},
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    s3fs.S3FileSystem.clear_instance_cache()  # of another one of these
    try:
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield store
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        store.shutdown()
        store.server_close()
        moto.stop()


def s3(key: str, content: bytes | None = None) -> bytes:
    """Write, or read, an object of the bucket, without s3fs."""
    import boto3

    client = boto3.client("s3")
    if content is not None:
        client.put_object(Bucket="bucket", Key=key, Body=content)
    return client.get_object(Bucket="bucket", Key=key)["Body"].read()


def fetch(name: str, folder: Path) -> str:
    """Copy a run's snapshots from the bucket to a folder, and return the newest one's path there."""
    folder.mkdir()
    for tag in ("", ".prev"):
        (folder / f"gpt_snapshot{tag}.pt").write_bytes(s3(f"{name}/gpt_snapshot{tag}.pt"))
    return str(folder / "gpt_snapshot.pt")


FAULTS = {"500": 0.12, "hangs up in a request": 0.06, "hangs up in an answer": 0.06, "slow": 0.04}


def fault_store(stress: Stress) -> None:
    """Train to an S3 server that fails now and then, for a while, and for good."""
    undisturbed = stress.alone, stress.together
    with faulty_store(random.Random(stress.seed)) as store:
        row = stress.row("")
        for part in (now_and_then, killed_on_s3):
            store.rates, store.counts = dict(FAULTS), Counter()
            problem = part(stress, store, *undisturbed)
            counts, store.rates = Counter(store.counts), {}
            say(f"S3, {part.__name__}: {dict(counts)}: {problem or 'identical'}")
            row.add(problem, times=max(1, counts.total()))
        row.fault = "S3 requests answered with 500, cut off in the request or the answer, or 2 s late"
        outage(stress, store, undisturbed[0])
        for refusal in (last_save_refused, refused_after_damage):
            refusal(stress, store)
            store.refuses = lambda method, path, is_copy: False


def now_and_then(stress: Stress, store: FaultyStore, alone: Path, together: Path) -> str:
    run_dir = stress.folder / "s3"
    with running(run_dir, "trainer_config.snapshot_path=s3://bucket/s3/gpt_snapshot.pt", launcher=ALONE) as process:
        code = process.wait(600)
        store.rates = {}
        if code:
            return f"exit code {code}: {last_words(run_dir)}"
        return run_difference(run_dir, alone, fetch("s3", stress.folder / "s3-copy"))


def killed_on_s3(stress: Stress, store: FaultyStore, alone: Path, together: Path) -> str:
    row = stress.row("SIGKILL of a rank, resumed from that S3 server")
    run_dir = stress.folder / "s3-killed"
    target = "trainer_config.snapshot_path=s3://bucket/s3-killed/gpt_snapshot.pt"
    # Where snapshots are taken doesn't change the training; fewer of them take less time.
    with running(run_dir, *LONGER, target, "trainer_config.save_every_steps=200", launcher=TWO_RANKS) as process:
        for begin in (210, 610):
            wait_for_step(run_dir, begin + stress.random.randrange(200))
            os.kill(stress.random.choice(workers(process)), signal.SIGKILL)
            time.sleep(0.5)
        code = process.wait(600)
        store.rates = {}
        if code:
            problem = f"exit code {code}: {last_words(run_dir)}"
        else:
            problem = run_difference(run_dir, together, fetch("s3-killed", stress.folder / "s3-killed-copy"))
    if not problem and output(run_dir).count("going on from") != 2:
        problem = f"{output(run_dir).count('going on from')} resumptions after 2 kills"
    row.add(problem, times=2)
    return problem


def outage(stress: Stress, store: FaultyStore, alone: Path) -> None:
    row = stress.row("S3 server that answers nothing but 500 until a save has failed")
    run_dir = stress.folder / "s3-outage"
    target = "trainer_config.snapshot_path=s3://bucket/s3-outage/gpt_snapshot.pt"
    with running(run_dir, target, launcher=ALONE) as process:
        wait_for_step(run_dir, stress.random.randrange(30, 200))
        store.refuses = lambda method, path, is_copy: True
        wait_for(lambda: failures(run_dir) > 0, "a failed save")
        store.refuses = lambda method, path, is_copy: False
        code = process.wait(600)
    problem = f"exit code {code}: {last_words(run_dir)}" if code else ""
    row.add(problem or run_difference(run_dir, alone, fetch("s3-outage", stress.folder / "s3-outage-copy")))


def refuse(store: FaultyStore, key: str) -> None:
    """Let the store refuse to take one object, and take all others."""
    store.refuses = lambda method, path, is_copy: method == "PUT" and path.endswith(key) and not is_copy


def last_save_refused(stress: Stress, store: FaultyStore) -> None:
    """The last snapshot is refused, and the best one, which is saved right after it, is taken."""
    row = stress.row("S3 server that takes the best snapshot, but not the last: the exit code says so")
    run_dir, key = stress.folder / "s3-last", "s3-last/gpt_snapshot.pt"
    refuse(store, key)
    target = f"trainer_config.snapshot_path=s3://bucket/{key}"
    with running(run_dir, target, "trainer_config.save_every_steps=100000", launcher=ALONE) as process:
        code = process.wait(600)
    best = load_snapshot("s3://bucket/" + key.replace(".pt", ".best.pt"))["step"]
    # Else this would pass without having tried anything.
    # The best one alone is never there: before each of them, a latest is tried, and at the end once more.
    assert (best, failures(run_dir)) == (300, 3), f"best at step {best}, {failures(run_dir)} failed saves"
    row.add("" if code == 1 else f"exit code {code}, though step 300 could not be saved: {last_words(run_dir)}")


def refused_after_damage(stress: Stress, store: FaultyStore) -> None:
    """The newest snapshot is damaged, the previous one is whole, and the next save is refused."""
    row = stress.row("S3: newest damaged, resumed from the previous, next save refused: the previous is still there")
    run_dir, key = stress.folder / "s3", "s3/gpt_snapshot.pt"
    s3(key, s3(key)[:-1])
    refuse(store, key)
    with running(run_dir, f"trainer_config.snapshot_path=s3://bucket/{key}", launcher=ALONE) as process:
        process.wait(600)
    assert "going on from the previous snapshot" in output(run_dir), last_words(run_dir)
    assert failures(run_dir), last_words(run_dir)
    try:
        snapshot = load_newest(f"s3://bucket/{key}")
        row.add("" if snapshot and snapshot["step"] == 280 else f"step {snapshot and snapshot['step']}, not 280")
    except ValueError as error:
        row.add(str(error))


# ------------------------------------------------------------------------------------------------ 6. a silent store

SECONDS_TO_ANSWER = 3
SILENCES: list[tuple[str, Callable[[str, bool], bool], bool]] = [  # (what, is it silent?, does it store?)
    ("PUTs are lost", lambda method, is_copy: method == "PUT", False),
    ("PUTs arrive", lambda method, is_copy: method == "PUT" and not is_copy, True),
    ("all requests are lost", lambda method, is_copy: True, False),
]


def silent_store(stress: Stress) -> None:
    """A store that takes requests and doesn't answer, for a while, three times in one run."""
    row = stress.row("S3 server that doesn't answer (PUTs are lost, PUTs arrive, all requests are lost) for a while")
    undisturbed, run_dir, url = stress.alone, stress.folder / "s3-silent", "s3://bucket/s3-silent/gpt_snapshot.pt"
    launcher, target = [*ALONE, TIMED, str(SECONDS_TO_ANSWER), "0"], f"trainer_config.snapshot_path={url}"
    with (
        faulty_store(random.Random(stress.seed)) as store,
        running(run_dir, target, launcher=launcher) as process,
    ):
        for (what, is_silent, stores), begin in zip(SILENCES, (25, 110, 195), strict=True):
            wait_for_step(run_dir, stress.random.randrange(begin, begin + 40))
            before, store.counts, store.stores_in_silence = failures(run_dir), Counter(), stores
            store.is_silent = is_silent
            wait_for(lambda: store.counts["no answer"] > 0, "a save")
            # The deadline, and what a busy machine needs; the store's own client would try for minutes.
            wait_for(lambda n=before: failures(run_dir) > n, "a failed save", SECONDS_TO_ANSWER + 20)  # type: ignore[misc]
            store.is_silent = lambda method, is_copy: False
            failed = int(re.findall(r"step (\d+) could not be saved", output(run_dir))[-1])
            wait_for(lambda n=failed: load_snapshot(url)["step"] > n, "a save after that", pause=0.05)  # type: ignore[misc]
            say(f"S3, {what}: the save of step {failed} failed, a later one worked")
        code = process.wait(600)
        problem = f"exit code {code}: {last_words(run_dir)}" if code else ""
        problem = problem or run_difference(run_dir, undisturbed, fetch("s3-silent", stress.folder / "s3-silent-copy"))
    if not problem and "no answer from the store within" not in output(run_dir):
        problem = f"failed for another reason: {last_words(run_dir)}"
    row.add(problem, times=len(SILENCES))


# ------------------------------------------------------------------------------------------------ 7. two runs


def rival_runs(stress: Stress) -> None:
    """Two runs with one snapshot_path, started at about the same time."""
    row = stress.row("two runs with one snapshot_path (a file, on S3): one finishes, the other names both and ends")
    with faulty_store(random.Random(stress.seed)):
        for number, place in enumerate((f"{stress.folder}/shared", "s3://bucket/shared") * 2, 1):
            url = f"{place}-{number}/gpt_snapshot.pt"
            problem = rivals(stress, number, url)
            row.add(problem)
            say(f"two runs at {url}: {problem or 'one has finished, the other one has ended'}")


def rivals(stress: Stress, number: int, url: str) -> str:
    """Let two runs save to one URL; what is wrong afterwards, empty if nothing is."""
    codes: dict[Path, int] = {}
    settings = [
        f"trainer_config.snapshot_path={url}",
        f"trainer_config.save_every_steps={stress.random.choice([1, 2, 5, 20])}",
        *("trainer_config.max_steps=150", "trainer_config.eval_every_steps=75"),
    ]
    with contextlib.ExitStack() as stack:
        processes = {}
        for seed in (1, 2):
            run_dir = stress.folder / f"rival-{number}-{seed}"
            run = running(run_dir, *settings, f"trainer_config.seed={seed}", launcher=ALONE)
            processes[run_dir] = stack.enter_context(run)
            time.sleep(stress.random.uniform(0, 0.5))
        for run_dir, process in processes.items():
            codes[run_dir] = process.wait(600)
    winner, loser = sorted(codes, key=lambda run_dir: codes[run_dir])
    if (codes[winner], codes[loser]) != (0, 1):
        return " and ".join(f"exit code {code}: {last_words(run_dir)}" for run_dir, code in codes.items())
    for candidate in (url, previous_url(url)):
        snapshot = load_snapshot(candidate)
        seed = snapshot["config"]["trainer_config"]["seed"]
        if snapshot["run"]["directory"] != str(winner) or seed != int(winner.name[-1]):
            return f"{candidate} is of {snapshot['run']} with seed {seed}, and {winner} has finished"
    best = load_snapshot(best_url(url))["run"]["directory"]
    step = load_snapshot(url)["step"]
    if step != 150 or best not in (str(winner), str(loser)):
        return f"the last snapshot is of step {step}, the best one of {best}"
    theirs, ours = re.escape(str(winner)), re.escape(str(loser))
    late = rf"now holds step \d+ of another run \({theirs}\), and this run \({ours}\) does not overwrite it"
    early = rf"holds step \d+ of the run in {theirs}, and this run's directory is {ours};"  # refused at its start
    if not re.match(rf"error: {re.escape(url)} ({late}|{early})", output(loser).splitlines()[-1]):
        return f"ended without naming both: {last_words(loser)}"
    return next((f"traceback: {last_words(run)}" for run in codes if "Traceback" in output(run)), "")


# ------------------------------------------------------------------------------------------------ 8. starting over

# When a launch that was told to start over is killed: before the old run is moved aside, during that, after it, and
# after the first steps. Before and after are short of the next moment on most machines, and no harm where they aren't.
OVER_KILLS = [
    *(["before"], ["during"], ["during", "during"], ["before", "during"]),
    *(["during", "after"], ["after"], ["later"], ["during", "later"]),
]


def contents(folder: Path) -> dict[str, bytes]:
    """All files under a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start_over(stress: Stress) -> None:
    """Launches with resume=false in the directory of a finished run, whose best snapshot is whole or damaged."""
    row = stress.row("SIGKILL of a rank, told to start over: before, while and after the old run is moved aside")
    undisturbed = stress.short
    old = stress.undisturbed("old", ALONE, [*SHORTER, "trainer_config.seed=2"])
    for number, moments in enumerate(OVER_KILLS, 1):
        run_dir = Path(shutil.copytree(old, stress.folder / f"over-{number}"))
        is_damaged = number % 2 == 0
        if is_damaged:
            os.truncate(run_dir / "gpt_snapshot.best.pt", 1000)
        before = contents(run_dir)
        problem = killed_while_starting_over(stress, run_dir, moments) or run_difference(run_dir, undisturbed)
        aside = contents(run_dir / "old-1")
        wrong = [name for name in sorted({*before, *aside}) if before.get(name) != aside.get(name)]
        more = [path.name for path in run_dir.glob("old-*") if path.name != "old-1"]
        if wrong or more:
            problem = f"{problem} old-1 differs from the old run: {wrong}; beside it: {more}".lstrip()
        row.add(problem, times=len(moments))
        say(f"{run_dir.name}{', old best damaged' * is_damaged}: {problem or 'identical, and the old run is complete'}")


def killed_while_starting_over(stress: Stress, run_dir: Path, moments: list[str]) -> str:
    """Start over, with one kill of a random rank in each attempt; what is wrong at the end, empty if nothing is."""
    rng = stress.random
    # A tenth of a second for each of six files: or no kill would ever come in between.
    launcher = [*TWO_RANKS, TIMED, "60", "0.1"]
    moving, moved = run_dir / "old-1.moving", run_dir / "old-1"
    with running(run_dir, *SHORTER, "trainer_config.resume=false", launcher=launcher) as process:
        for count, moment in enumerate(moments):
            wait_for(lambda n=count: attempts(process) == [n, n], f"attempt {count}")  # type: ignore[misc]
            if moment == "before":
                time.sleep(rng.uniform(0, 3))
            elif moment == "during":
                wait_for(lambda: moving.exists() or moved.exists(), "the old run being moved")
                time.sleep(rng.uniform(0, 0.7))
            else:
                wait_for(moved.exists, "the old run moved")
                time.sleep(rng.uniform(0, 1))
            if moment == "later":
                wait_for_step(run_dir, rng.randrange(1, 50))
            with contextlib.suppress(FileNotFoundError, IndexError, ProcessLookupError):  # it may have ended already
                os.kill(rng.choice(workers(process)), signal.SIGKILL)
            state = next(
                (f"{len(os.listdir(path))} files in {path.name}" for path in (moved, moving) if path.exists()), "-"
            )
            say(f"{run_dir.name}, kill {count + 1}: {moment}; {state}")
        code = process.wait(600)
    return f"exit code {code}: {last_words(run_dir)}" if code else ""


# ------------------------------------------------------------------------------------- 9. what a directory remembers


def remember(stress: Stress) -> None:
    """Runs whose latest snapshot is gone, or whose snapshots lie elsewhere, or are broken in mid-run; an odd name."""
    lost_latest(stress)
    start_over_outside(stress)
    break_in_mid_run(stress)
    odd_name(stress)


def lost_latest(stress: Stress) -> None:
    """A start where only the best snapshot is left, or that names another place: refused, and nothing is touched."""
    row = stress.row("latest and previous deleted, or another snapshot_path typed: one line, and nothing is touched")
    for number in range(6):
        run_dir = Path(shutil.copytree(stress.alone, stress.folder / f"lost-{number}"))
        typed = [f"trainer_config.snapshot_path={stress.folder / 'elsewhere.pt'}"] if number % 2 else []
        if not typed:
            for name in ("gpt_snapshot.pt", "gpt_snapshot.prev.pt"):
                (run_dir / name).unlink()
        before = contents(run_dir)
        with running(run_dir, *typed, launcher=ALONE if number < 4 else TWO_RANKS[:-1]) as process:
            code = process.wait(600)
        is_told = re.search(
            r"^error: the run in .* has .*; to go on, say .*; to start over and ", output(run_dir), re.M
        )
        problem = "" if code == 1 and is_told else f"exit code {code}: {last_words(run_dir)}"
        row.add(problem or ("" if contents(run_dir) == before else "files have changed"))


def start_over_outside(stress: Stress) -> None:
    """As `start_over`, for runs whose snapshots lie outside, at a place that the new command doesn't name."""
    row = stress.row("the same where the old run's snapshots lie elsewhere; the old run goes on by its directory")
    store = stress.folder / "store"
    for number, moments in enumerate((["during"], ["during", "during"], ["before", "after"]), 1):
        run_dir, place = stress.folder / f"outside-{number}", store / str(number)
        settings = [*SHORTER, "trainer_config.seed=2", f"trainer_config.snapshot_path={place / 'mine.pt'}"]
        with running(run_dir, *settings, launcher=ALONE) as process:
            problem = f"exit code {process.wait(600)}: {last_words(run_dir)}" if process.wait(600) else ""
        before = contents(place)
        problem = problem or killed_while_starting_over(stress, run_dir, moments)
        problem = problem or run_difference(run_dir, stress.short)
        if contents(place) != {f"old-1/{name}": content for name, content in before.items()}:
            problem = f"{problem} the old run's snapshots: {[*contents(place)]}".lstrip()
        with running(run_dir / "old-1", *settings[:-1], launcher=ALONE) as process:
            if process.wait(600) or "already finished" not in output(run_dir / "old-1"):
                problem = f"{problem} old-1: {last_words(run_dir / 'old-1')}".lstrip()
        row.add(problem, times=len(moments))
        say(f"{run_dir.name}: {problem or 'identical, and the old run is complete'}")


def break_in_mid_run(stress: Stress) -> None:
    """The snapshots of a run at work are cut off or replaced by directories, three times each."""
    row = stress.row("a snapshot of a run at work cut off, or replaced by a directory: it ends as if nothing had been")
    for number in range(4):
        run_dir = stress.folder / f"broken-{number}"
        with running(run_dir, launcher=ALONE) as process:
            broken = 0
            while broken < 3:
                path = run_dir / stress.random.choice(("gpt_snapshot.pt", "gpt_snapshot.best.pt"))
                wait_for(lambda p=path: p.is_file() or process.poll() is not None, path.name)  # type: ignore[misc]
                time.sleep(stress.random.uniform(0, 0.3))
                steps = re.findall(r" step (\d+)/", (run_dir / "main.log").read_text())
                if process.poll() is not None or int(steps[-1]) > 280:
                    break  # after the last save, nothing makes up for it
                with contextlib.suppress(OSError):  # a save may come in between
                    if stress.random.random() < 0.5:
                        os.truncate(path, 1000)
                    else:
                        path.unlink()
                        path.mkdir()
                    broken += 1
            problem = finish(process, run_dir, stress.alone)
        row.add(problem, times=broken)
        say(f"{run_dir.name}: {problem or 'identical with the undisturbed run'}")


def odd_name(stress: Stress) -> None:
    """Runs in directories whose names look like chains of URLs: killed, gone on with, started over."""
    row = stress.row("SIGKILL of a rank of a run in a directory named like a chain of URLs; then started over")
    for name in ("a::b", "s3::memory", "zip::run"):
        run_dir = stress.folder / name
        try:
            with running(run_dir, *SHORTER, launcher=TWO_RANKS) as process:
                wait_for(lambda: attempts(process) == [0, 0], "the ranks")
                wait_for_step(run_dir, stress.random.randrange(1, 50))
                os.kill(stress.random.choice(workers(process)), signal.SIGKILL)
                problem = finish(process, run_dir, stress.short)
            with running(run_dir, *SHORTER, "trainer_config.resume=false", launcher=ALONE) as process:
                code = process.wait(600)
            problem = problem or (f"exit code {code}: {last_words(run_dir)}" if code else "")
            problem = problem or run_difference(run_dir / "old-1", stress.short)
        except Exception as error:  # what is lost must be in the table
            problem = f"{type(error).__name__}: {error}"
        row.add(problem)
        say(f"{name}: {problem or 'identical with the undisturbed run'}")


# ------------------------------------------------------------------------------------------------ 10. odd contents


def open_odd_ones(stress: Stress) -> None:
    """All alterations of a snapshot, whole files with its digest; and some without."""
    folder = stress.folder / "odd"
    folder.mkdir()
    (folder / "other.txt").write_text(SAMPLE_TEXT.read_text(encoding="utf-8").swapcase())
    runs = {
        "mine": [],
        "seed": ["trainer_config.seed=2", "trainer_config.max_steps=5"],
        "text": [f"data_config.path={folder / 'other.txt'}", "trainer_config.max_steps=5"],
    }
    url = str(folder / "opened" / "gpt_snapshot.pt")
    rows = [stress.row(""), stress.row("")]
    with world_of_one() as ranks:
        for name, overrides in runs.items():
            trainer = make_trainer(folder / name, *overrides, ranks=ranks)
            trainer.resume()
            trainer.fit()
            trainer.stop_request.stop_listening()
        genuine = torch.load(folder / "mine" / "gpt_snapshot.pt")
        mine, *others = (load_snapshot(str(folder / name / "gpt_snapshot.pt")) for name in runs)
        cases = alterations(mine, dict(zip(("seed", "text"), others, strict=True)))
        trainer = make_trainer(folder / "opened", ranks=ranks)
        prepare(url)
        shutil.copy(folder / "mine" / "gpt_snapshot.prev.pt", previous_url(url))
        previous = load_snapshot(previous_url(url))
        assert previous["step"] < mine["step"]

        for what, odd in cases:
            torch.save({"digest": genuine["digest"], **odd}, url)
            try:
                opened = trainer.snapshots.open(trainer._check) or {}
                opened.pop("best", None)
                difference = value_difference(opened, previous)
                rows[0].add(f"{what}: not the previous one: {difference}" if difference else "")
            except Exception as error:  # there is a whole one, so that nothing may be raised
                rows[0].add(f"{what}: {type(error).__name__}: {error}")

        endings: Counter[str] = Counter()
        for what, odd in stress.random.sample(cases, 400):
            torch.save(odd, url)
            trainer.state.step = -1
            try:
                trainer.resume()
                ending = "previous" if trainer.step == previous["step"] else "used"
                rows[1].add("" if trainer.step >= 0 else f"{what}: taken for a fresh start")
            except ValueError as error:
                ending = "refused"  # main.py says it in one line
                rows[1].add("" if len(str(error).splitlines()) == 1 else f"{what}: {error}")
            except Exception as error:  # a traceback
                ending = "traceback"
                rows[1].add(f"{what}: {type(error).__name__}: {error}")
            endings[ending] += 1
    rows[0].fault = "a whole snapshot with one part removed, replaced or of another run: the previous one is used"
    rows[1].fault = f"some of these without a digest: no traceback ({dict(endings)})"


# ------------------------------------------------------------------------------------------------ all of it

PARTS: dict[str, Callable[[Stress], None]] = {
    "ranks": kill_ranks,
    "writers": kill_writers,
    "damage": damage,
    "disk": fill_disk,
    "s3": fault_store,
    "silence": silent_store,
    "rivals": rival_runs,
    "over": start_over,
    "remember": remember,
    "odd": open_odd_ones,
}
HANGS = 1800  # seconds after which a part counts as hanging; the longest one takes five minutes on an idle machine


def main() -> int:
    """Do it, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--strategy", default="ddp", help="of all runs: ddp or fsdp")
    arguments = parser.parse_args()
    LONG_RUN.append(f"trainer_config.strategy={arguments.strategy}")
    say(f"seed {arguments.seed}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # clean up then, too
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # "restart detected", at every one
    for name in ("snapshot", "saving.run_snapshots"):
        logging.getLogger(name).setLevel(logging.ERROR)  # "is not a whole snapshot", a thousand times
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="stress-"))
    stress = Stress(arguments.seed, folder)
    try:
        for name in [arguments.only] if arguments.only else PARTS:
            part_began = time.monotonic()
            try:
                with time_limit(HANGS):
                    PARTS[name](stress)
            except Exception as error:  # what could not be tried to its end counts as lost
                stress.row(f"{name}, to its end").add(f"{type(error).__name__}: {error}")
            say(f"{name}: {time.monotonic() - part_began:.0f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    table = io.StringIO()
    table.write("\n| fault | tried | survived | lost |\n| --- | ---: | ---: | ---: |\n")
    for row in stress.rows:
        table.write(f"| {row.fault} | {row.tried} | {row.tried - len(row.lost)} | {len(row.lost)} |\n")
    print(f"{table.getvalue()}\nseed {arguments.seed}, {time.monotonic() - began:.0f} s")
    return int(any(row.lost for row in stress.rows))


if __name__ == "__main__":
    sys.exit(main())
