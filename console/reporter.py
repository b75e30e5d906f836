"""What a run tells people: the header, the progress bar, TensorBoard's curves and the closing summary.

Nothing here changes what is trained. `logs.py` sends the lines to the console and to main.log.
"""

import logging
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from config import PROJECT
from console.logs import load_tqdm
from console.text import printable

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
        self.end = ""  # what has ended the run: "max_steps", for example; empty while it lasts
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
        no_bar, form = not sys.stderr.isatty(), BAR_FORMAT
        self.bar = load_tqdm()(total=total_steps, initial=step, disable=no_bar, dynamic_ncols=True, bar_format=form)
        if self.profiler is not None:
            self.profiler.start()

    def step_done(self) -> None:
        """Learn that a training step is done, reported or not."""
        if self.profiler is not None:
            self.profiler.step()

    def train_step(self, step: int, values: dict[str, float], rates: dict[str, float], tokens_per_step: int) -> None:
        """Report a training step: tags of TensorBoard and their values, and the learning rates by name.

        Speeds are means since the last report.
        """
        if not self.is_main:
            return
        steps, seconds, waiting = step - self.watch.first_step, self.watch.seconds, self.watch.data_seconds
        values = {
            **values,
            "train/learning_rate": rates["AdamW"],
            **({"train/muon_learning_rate": rates["Muon"]} if "Muon" in rates else {}),
            "train/tokens_per_second": steps * tokens_per_step / seconds,
            "time/data_seconds_per_step": waiting / steps,
            "time/compute_seconds_per_step": (seconds - waiting) / steps,
        }
        for tag, value in values.items():
            self._write("add_scalar", tag, value, step)
        loss, speed = values["train/loss"], values["train/tokens_per_second"]
        self.bar.set_postfix_str(bar_words(loss, rates, speed, shutil.get_terminal_size().columns), refresh=False)
        self.bar.update(step - self.bar.n)
        now = time.perf_counter()
        is_line = self.bar.disable and (now - self._last_line > SECONDS_BETWEEN_LINES or step == self.total_steps)
        if is_line:
            self._last_line = now
        level, words = logging.INFO if is_line else logging.DEBUG, "loss %.4f, learning rate %s, %.0f tokens/s"
        log.log(level, f"step %d/%d: {words}", step, self.total_steps, loss, named(rates), speed)

    def evaluation(self, step: int, loss: float, train_loss: float, text: str) -> None:
        """Report an evaluation: its loss, that of a passage of the training text, in nats per character; a sample."""
        if not self.is_main:
            return
        bits, self.losses[step] = loss / math.log(2), (train_loss, loss)
        log.info("step %d: evaluation loss %.4f (%.3f bits per character)", step, loss, bits)
        self._write("add_scalar", "eval/loss", loss, step)
        self._write("add_scalar", "eval/bits_per_char", bits, step)
        self._write("add_scalar", "eval/train_loss", train_loss, step)
        if text:
            log.info('    "%s"', printable(text).replace("\n", " / "))  # one sees it learn to spell
            self._write("add_text", "samples", "\n".join(f"    {line}" for line in text.split("\n")), step)

    def note_end(self, step: int, reason: str) -> None:
        """Write down, beside the curves, what has ended the run at a step: a key, a signal, or an error."""
        self.end = reason
        self._write("add_text", "end", reason, step)

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
        cap = self.config.get("trainer_config.max_steps")
        key = "max_steps" if cap is not None and cap <= step else "max_epochs"
        if step < self.total_steps:
            key = "patience"
        self.note_end(step, key)
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
            log.info("that was a dry run: model, text and machine fit together; nothing was written")
            return
        learned = lesson(train_loss, loss, then[0], best_loss, best_step, step)
        for line in learned:
            log.info("%s", line)
        log.info("written: %s", self.run_dir)
        log.info("to see the curves: %s", shlex.join(["tensorboard", "--logdir", self.run_dir]))
        log.info("to write text: %s", command("generate.py", best_snapshot))
        log.info("to look inside: %s", command("look.py", best_snapshot))
        also = "" if self.config.get("trainer_config.resume", True) else " and leave out trainer_config.resume=false"
        go_on = f"to go on, raise trainer_config.{key}{also}; " if len(learned) == 1 else ""  # not against other advice
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


# ---------------------------------------------------------------------------- armour: bars, commands, profiles, memory


BAR_FORMAT = "step {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


def bar_words(loss: float, rates: dict[str, float], speed: float, columns: int) -> str:
    """What stands behind the bar. 80 columns have no room for the speed in a long run, whose other numbers are long."""
    return f"loss {loss:#.4g}, {named(rates)}" + (f", {short_number(speed)} tokens/s" if columns >= 100 else "")


def named(rates: dict[str, float]) -> str:
    """Learning rates with the names of whose they are, in words: Muon 0.03, AdamW 0.01."""
    return ", ".join(f"{name} {rate:.2g}" for name, rate in rates.items())


def short_number(number: float) -> str:
    """21,800, and 12.3M from a million on."""
    return f"{number:,.0f}" if number < 999_999.5 else f"{number / 1e6:,.1f}M"


def command(name: str, snapshot: str) -> str:
    """What to type to start a program with a snapshot, wherever the run was started and whatever both are called."""
    program = PROJECT / name
    place = program.name if Path.cwd() == program.parent else str(program)
    return shlex.join(["python", place, "--snapshot", snapshot])


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
