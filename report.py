"""What a run tells people: the header, the progress bar, TensorBoard's curves and the closing summary.

Read it after `corpus.py`. It is apart from `trainer.py`, which calls it, because nothing here changes what is trained.
`config.py` comes next. `python report.py` prints a table of all runs.
"""

import environment  # isort: skip, before torch is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import json
import logging
import math
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

log = logging.getLogger(__name__)
log.setLevel(logging.DEBUG)  # main.log has every report; the console only what is worth a line there

SECONDS_BETWEEN_LINES = 5.0  # on a console that is no terminal, and so has no bar


class Reporter:
    """Speaks on the console, in main.log and to TensorBoard; on ranks other than 0 it takes every report silently.

    Args:
        run_dir: where TensorBoard's events go, and the profile.
        is_main: whether this is rank 0.
        dry_run: write no files.
        profile: write down what three of the first steps spend their time on.
    """

    def __init__(self, run_dir: str, is_main: bool, dry_run: bool = False, profile: bool = False):
        self.run_dir, self.is_main, self.dry_run = run_dir, is_main, dry_run
        self.profiler = make_profiler(run_dir) if profile and is_main and not dry_run else None
        self.watch = Stopwatch()
        self.losses: dict[int, tuple[float, float]] = {}  # by step: on the training text's passage, on unseen text
        self._began = self._last_line = time.perf_counter()
        self.writer: Any = None  # TensorBoard's
        self.bar: Any = None

    def header(self, lines: list[str], config: dict[str, Any], step: int, total_steps: int) -> None:
        """Say what will happen, and open the curves and the bar."""
        if not self.is_main:
            return
        from torch.utils.tensorboard import SummaryWriter  # a second of imports that other ranks save

        for line in lines:
            log.info("%s", line)
        self.config = {f"{group}.{key}": value for group, values in config.items() for key, value in values.items()}
        self.first_step, self.total_steps = step, total_steps
        if not self.dry_run:
            # purge_step: what was logged after the snapshot that a run resumes from would stand there twice.
            self.writer = SummaryWriter(self.run_dir, purge_step=step + 1)
        table = "\n".join(f"| {key} | {value} |" for key, value in self.config.items())
        self._write("add_text", "config", f"| key | value |\n| --- | --- |\n{table}", step)
        no_bar, form = not sys.stderr.isatty(), bar_format(total_steps)
        self.bar = load_tqdm()(total=total_steps, initial=step, disable=no_bar, dynamic_ncols=True, bar_format=form)
        if self.profiler is not None:
            self.profiler.start()

    def step_done(self) -> None:
        """Learn that a training step is done, reported or not."""
        if self.profiler is not None:
            self.profiler.step()

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Report a training step: tags of TensorBoard and their values."""
        if not self.is_main:
            return
        for tag, value in values.items():
            self._write("add_scalar", tag, value, step)
        loss, rate, speed = (values[f"train/{key}"] for key in ("loss", "learning_rate", "tokens_per_second"))
        self.bar.set_postfix_str(f"loss {loss:.3f}, {short_number(speed)} tokens/s", refresh=False)
        self.bar.update(step - self.bar.n)
        now = time.perf_counter()
        is_line = self.bar.disable and (now - self._last_line > SECONDS_BETWEEN_LINES or step == self.total_steps)
        if is_line:
            self._last_line = now
        level, words = logging.INFO if is_line else logging.DEBUG, "loss %.4f, learning rate %.2e, %.0f tokens/s"
        log.log(level, f"step %d/%d: {words}", step, self.total_steps, loss, rate, speed)

    def evaluation(self, step: int, loss: float, train_loss: float, text: str) -> None:
        """Report an evaluation: its loss, that of a passage of the training text, in nats a character; a sample."""
        if not self.is_main:
            return
        bits, self.losses[step] = loss / math.log(2), (train_loss, loss)
        log.info("step %d: evaluation loss %.4f (%.3f bits a character)", step, loss, bits)
        self._write("add_scalar", "eval/loss", loss, step)
        self._write("add_scalar", "eval/bits_per_char", bits, step)
        self._write("add_scalar", "eval/train_loss", train_loss, step)
        if text:
            plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
            log.info('    "%s"', plain.replace("\n", " / "))  # one sees it learn to spell
            self._write("add_text", "samples", "\n".join(f"    {line}" for line in text.split("\n")), step)

    def flush(self) -> None:
        """Bring the curves to the disk."""
        self._write("flush")

    def close(self) -> None:
        """Close the curves and the bar, however the run ended."""
        if self.bar is not None:
            self.bar.close()
        self._write("close")
        if self.profiler is not None:
            self.profiler.stop()  # in a very short run, the profile ends here
            self.profiler = None

    def finished(
        self, step: int, best_loss: float, best_step: int, text: str, tokens_per_step: int, best_snapshot: str
    ) -> None:
        """Close the curves and the bar, and say how it went and what to do next."""
        if not self.is_main:
            return
        self._write_hyperparameters(best_loss, step)
        self.close()
        if text:
            log.info("a sample of step %d:\n\n%s\n", step, text)
        tokens, seconds = (step - self.first_step) * tokens_per_step, time.perf_counter() - self._began
        since = " since this start" if self.first_step else ""
        speed = f", {tokens:,} tokens in {seconds:.0f} s{since}" if tokens else ""
        unknown = (math.nan, math.nan)
        (train_loss, loss), then = self.losses.get(step, unknown), self.losses.get(best_step, unknown)
        log.info("finished: %d steps, evaluation loss %.4f, best %.4f%s", step, loss, best_loss, speed)
        if self.dry_run:
            log.info("that was a dry run: model, text and machine fit together, and of the run nothing was written")
            return
        learned = lesson(train_loss, loss, then[0], best_loss, best_step, step)
        for line in learned:
            log.info("%s", line)
        cap = self.config.get("trainer_config.max_steps")
        key = "max_steps" if cap is not None and cap <= step else "max_epochs"
        if step < self.total_steps:
            key = "patience"
        log.info("written: %s", self.run_dir)
        log.info("to write text: %s", command("generate.py", best_snapshot))
        log.info("to look into it: %s", command("look.py", best_snapshot))
        go_on = f"to go on, raise trainer_config.{key}; " if len(learned) == 1 else ""  # no advice against the other
        log.info("%sto start over, set trainer_config.resume=false", go_on)

    def _write_hyperparameters(self, best_loss: float, step: int) -> None:
        """Fill TensorBoard's HParams tab, by three records; add_hparams would make a run of its own for them."""
        from torch.utils.tensorboard.summary import hparams

        plain = {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in self.config.items()}
        for record in hparams(plain, {"eval/best_loss": best_loss}):  # what the table of a sweep compares, too
            self._write("add_summary", record)
        self._write("add_scalar", "eval/best_loss", best_loss, step)

    def _write(self, method: str, *args: Any) -> None:
        """Call the TensorBoard writer. Curves are not worth a run: on a full disk they end, and it goes on."""
        try:
            if self.writer is not None:
                target = self.writer.file_writer if method == "add_summary" else self.writer
                getattr(target, method)(*args)
        except OSError as error:
            log.error("no more curves: %s", error)
            self.writer = None


def lesson(
    train_loss: float, loss: float, best_train_loss: float, best_loss: float, best_step: int, step: int
) -> list[str]:
    """What the losses of a run mean, in words.

    Args:
        train_loss, loss: of the last evaluation, on a passage of the training text and on unseen text.
        best_train_loss, best_loss: when the loss on unseen text was lowest; the first is NaN where it isn't known.
        best_step: the optimizer step of that evaluation.
        step: the last one.
    """
    lines = [f"learned: {train_loss:.2f} on the text it trained on, {loss:.2f} on unseen text"]
    if loss > best_loss + 0.01 and train_loss < best_train_loss:  # if it has risen on both, it is something else
        lines.append(f"unseen text: lowest at step {best_step:,} of {step:,} ({best_loss:.2f}, the best snapshot)")
        lines.append(
            "after that it learned its text by heart; try more dropout (gpt_config.resid_pdrop) or fewer epochs"
        )
    return lines


class Stopwatch:
    """Seconds of training since the last report, and among them those spent waiting for data."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin a new report at an optimizer step."""
        self.first_step, self._began, self._paused, self.data_seconds = step, time.perf_counter(), 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return time.perf_counter() - self._began - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: evaluations and snapshots. A pause within a pause counts once."""
        began, paused_before = time.perf_counter(), self._paused
        yield
        self._paused = paused_before + time.perf_counter() - began

    def waiting_for(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Pass batches on, and count the time that each one takes to come."""
        began = time.perf_counter()
        for batch in batches:
            self.data_seconds += time.perf_counter() - began
            yield batch
            began = time.perf_counter()


# ------------------------------------------------------------------------------------- `python report.py`: all the runs

PROJECT = Path(__file__).resolve().parent


@dataclass
class Run:
    """What a run directory says of its run."""

    name: str
    text: str  # fingerprint of the text: losses on different texts can't be compared
    loss: float  # the lowest on the evaluation text, nats a character; infinite before the first evaluation
    steps: int
    parameters: int
    seconds: float  # of training, without evaluations and snapshots; 0 where there are no curves
    speed: float  # tokens a second in these seconds
    settings: list[str]  # that are not the defaults: "group.key=value"


def main() -> None:
    """Print the table of all runs below a folder."""
    parser = argparse.ArgumentParser(description="Print a table of all runs, the lowest evaluation loss first.")
    parser.add_argument("folder", nargs="?", type=Path, default=PROJECT / "runs", help="where they are (runs)")
    folder = parser.parse_args().folder
    places = {path.parent for name in ("gpt_snapshot.pt", "config.yaml") for path in folder.rglob(name)}
    if not places:
        sys.exit(f"error: no runs in {folder}; train one with python main.py, or name the folder that holds them")
    runs = []
    for place in sorted(places):
        try:
            runs.append(read_run(place, str(place.relative_to(folder.parent if place == folder else folder))))
        except Exception as error:  # noqa: PERF203 - odd contents raise almost anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            print(f"skipped {place}: {reason}", file=sys.stderr)
    if not runs:
        sys.exit("error: none of these runs can be read")
    try:
        print(run_table(runs), flush=True)
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_run(run_dir: Path, name: str) -> Run:
    """Read a run's latest snapshot and its curves; what is wrong with them is raised as it comes."""
    from config import Config  # imported here, because training doesn't need these
    from model import GPT, GPTConfig
    from snapshot import load_snapshot, previous_url
    from snapshot_contents import check_contents

    url = str(run_dir / "gpt_snapshot.pt")
    try:
        snapshot = load_snapshot(url)
    except FileNotFoundError as error:  # not yet; or in the middle of a save; or trainer_config.snapshot_path
        url = previous_url(url)
        if not Path(url).exists():
            raise ValueError("there is no gpt_snapshot.pt: it hasn't saved yet, or saves to another place") from error
        snapshot = load_snapshot(url)
    check_contents(snapshot, url)
    with torch.device("meta"):  # no memory: it is only counted
        parameters = GPT(GPTConfig(**snapshot["model_config"])).num_parameters()
    config, step = snapshot["config"], snapshot["step"]
    defaults = json.loads(json.dumps(asdict(Config())))  # with lists for tuples, as in YAML
    settings = [  # as one types them
        f"{group}.{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for group, values in config.items()
        for key, value in values.items()
        if value != defaults[group].get(key) and key != "resume"  # how it was started, and not what it is
    ]
    events = read_events(run_dir)
    losses, speeds = scalars(events, "eval/loss"), scalars(events, "train/tokens_per_second")
    # The latest snapshot was written before the evaluation of its own step; the curve may end early, on a full disk.
    loss = min([snapshot["best_eval_loss"], *(value for _, value in losses if math.isfinite(value))])
    tokens_per_step = config["trainer_config"]["batch_size"] * snapshot["model_config"]["block_size"]
    before, seconds = 0, 0.0
    for at, speed in speeds:  # of the steps since the last report
        before, seconds = at, seconds + (at - before) * tokens_per_step / speed
    speed = before * tokens_per_step / seconds if seconds else 0.0
    return Run(name, snapshot["corpus"], loss, step, parameters, seconds, speed, settings)


def run_table(runs: list[Run]) -> str:
    """One line for each run, the lowest loss first; runs of one text stand together."""

    def order(run: Run) -> tuple[bool, float]:
        return not math.isfinite(run.loss), run.loss

    lines = ["  loss    steps   parameters  seconds  tokens/s  run, and what it sets other than the defaults"]
    texts = list(dict.fromkeys(run.text for run in sorted(runs, key=order)))  # that of the lowest loss first
    for text in texts:
        if text != texts[0]:
            lines.append("another text, whose losses don't compare with those above:")
        for run in sorted((run for run in runs if run.text == text), key=order):
            speed = f"{run.seconds:7,.0f}  {run.speed:8,.0f}" if run.seconds else f"{'?':>7}  {'?':>8}"
            words = " ".join([run.name, *run.settings])
            lines.append(f"{run.loss:6.4f}  {run.steps:7,}  {run.parameters:11,}  {speed}  {words}")
    return "\n".join(lines)


def read_events(run_dir: Path, points: int = 0) -> Any:
    """TensorBoard's reader of a run's curves and samples; at most so many points of a curve, or all."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second to import

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": points, "tensors": 0})
    events.Reload()
    return events


def scalars(events: Any, tag: str) -> list[tuple[int, float]]:
    """A curve: (step, value) each; empty where there is none."""
    return [(event.step, event.value) for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


# ---------------------------------------------------------------- armour: consoles, profiles, platforms, help, sweeps

_lock = threading.RLock()  # of the console


def load_tqdm() -> Any:
    """tqdm's class of bars, imported late because it takes a while.

    Its own lock is one among processes. Where these aren't forked, multiprocessing would say at the end of a run that
    a semaphore has leaked.
    """
    from tqdm import tqdm

    tqdm.set_lock(_lock)
    return tqdm


def bar_format(total_steps: int) -> str:
    """How the bar looks. It fits 80 columns: a long run, whose numbers are long, shows only the time that is left."""
    elapsed = "{elapsed} elapsed, " if total_steps < 10_000 else ""
    return f"step {{n_fmt}}/{{total_fmt}} |{{bar}}| {elapsed}{{remaining}} left{{postfix}}"


def short_number(number: float) -> str:
    """21,800, and 12.3M from a million on."""
    return f"{number:,.0f}" if number < 999_999.5 else f"{number / 1e6:,.1f}M"


def command(name: str, snapshot: str) -> str:
    """What to type to start a program with a snapshot, wherever the run was started and whatever both are called."""
    program = Path(__file__).with_name(name)
    place = program.name if Path.cwd() == program.parent else str(program)
    return shlex.join(["python", place, "--snapshot", snapshot])


@dataclass
class Outcome:
    """How a run of a sweep ended."""

    number: int  # in the order of the runs, from 1 on
    run_dir: str
    loss: float = math.nan  # the lowest evaluation loss, nats a character
    failure: str = ""  # why it failed, in one line; empty where it didn't

    def note(self, error: BaseException) -> bool:
        """Say and remember what has ended the run; tell whether it was a failure, and not a signal."""
        code = error.code if isinstance(error, SystemExit) else None
        if not isinstance(error, Exception | SystemExit) or (isinstance(code, int) and code > 128):
            self.failure = "stopped"
            return False
        if isinstance(error, Exception):  # a bug
            traceback.print_exception(error)
            code = f"{type(error).__name__}: {error}"
        self.failure = " ".join(str(code).split()).removeprefix("error: ")
        if not isinstance(code, int):  # the other ranks leave the word to rank 0
            sys.stderr.write(f"run {self.number} failed: {self.failure}\n")
        return True


def sweep_table(outcomes: list[Outcome]) -> str:
    """The runs of a sweep, one in each line: the lowest loss first, then those without a number, then the failed."""

    def place(run: Outcome) -> tuple[bool, bool, float, int]:
        is_number = math.isfinite(run.loss)
        return bool(run.failure), not is_number, run.loss if is_number else 0.0, run.number

    lines = [
        f"  run {run.number}: {f'failed: {run.failure}' if run.failure else f'evaluation loss {run.loss:.4f}'}"
        f"  {run.run_dir}"
        for run in sorted(outcomes, key=place)
    ]
    return "\n".join(["", "the runs of this sweep, best first:", *lines, ""])


def set_up_logging(is_main: bool, prefix: str, log_file: Path | None) -> None:
    """Rank 0 reports on the console and in main.log; the others speak up only when something is wrong."""
    level = logging.INFO if is_main else logging.WARNING
    handlers: list[logging.Handler] = [ConsoleHandler(level)]
    if log_file is not None:
        target = LogFile(log_file, encoding="utf-8", delay=True)
        target.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
        handlers.append(WaitingLines(target))
    form = f"%(asctime)s {prefix}%(message)s"
    logging.basicConfig(level=level, format=form, datefmt="%H:%M:%S", handlers=handlers, force=True)
    logging.getLogger("hydra").setLevel(logging.WARNING)  # it counts the runs of a sweep from 0, and we from 1


def open_log_file() -> None:
    """Begin main.log, with what was said up to now: only now it is clear whose run directory this is.

    A run that was moved aside takes its log with it, and must not get lines of the run that comes after it.
    """
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, WaitingLines):
            root.removeHandler(handler)
            root.addHandler(handler.file)
            for record in handler.buffer:
                if handler.file in root.handlers:  # a full disk may have ended it
                    handler.file.handle(record)


class WaitingLines(MemoryHandler):
    """Lines that are to go to main.log, if it is opened at all: a command that is refused leaves no word in it."""

    def __init__(self, file: "LogFile"):
        super().__init__(10_000, logging.CRITICAL + 1)
        self.file = file  # not MemoryHandler's own target, to which Python 3.11 would write at the end of the program


class ConsoleHandler(logging.Handler):
    """Writes log lines to standard error, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        load_tqdm().write(self.format(record), file=sys.stderr)


class LogFile(logging.FileHandler):
    """main.log. It is not worth a run either: on a full disk it ends, and the run goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or none."""
        try:
            super().emit(record)  # opens the file at the first line
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        """Say once why the lines end here; logging's own way is a traceback for each of them."""
        logging.getLogger().removeHandler(self)
        log.error("no more lines in %s: %s", self.baseFilename, sys.exc_info()[1])


def make_profiler(run_dir: str) -> torch.profiler.profile:
    """A profiler of three steps; the ones before them set everything up and are slow."""

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(f"{run_dir}/trace.json")
        log.info("profile of three steps: %s/trace.json (open it at https://ui.perfetto.dev)", run_dir)

    schedule = torch.profiler.schedule(wait=5, warmup=1, active=3, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write)


def peak_memory(device: torch.device) -> float:
    """The most memory used so far, in GB: of a CUDA device, elsewhere of the process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def help_text(project: Path) -> str:
    """What --help prints: the configuration file with its comments, and the recipes with their first lines."""
    keys = (project / "gpt2_train_cfg.yaml").read_text(encoding="utf-8")
    recipes = {path.stem: path.read_text(encoding="utf-8") for path in sorted((project / "recipes").glob("*.yaml"))}
    return "\n".join(
        [
            f"Keys (set any of them as group.key=value):\n\n{keys[keys.index('data_config:') : keys.index('hydra:')]}",
            "hydra.run.dir=DIR: the run directory; it holds the snapshots, the curves and main.log",
            "-m: values separated by commas are tried in turn, and compared",
            "--cfg job: print what the configuration comes to, and end\n\nRecipes:\n",
            *(f"  +recipe={name:12} {text.splitlines()[0].lstrip('# ')}" for name, text in recipes.items()),
        ]
    )


if __name__ == "__main__":
    main()
