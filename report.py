"""What a run tells people: the header, the progress bar, TensorBoard's curves and the closing summary.

Seventh module of the reading order, after `trainer.py`, which calls it: apart, because nothing here changes what is
trained. `main.py` comes next. Rank 0 has a `Reporter` that speaks; the other ranks have the silent base class, so that
the loop needs no tests of the rank.
"""

import logging
import math
import sys
import time
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)
log.setLevel(logging.DEBUG)  # main.log has every report; the console only what is worth a line there

SECONDS_BETWEEN_LINES = 5.0  # on a console that is no terminal, and so has no bar


class SilentReporter:
    """What ranks other than 0 have: takes every report and does nothing."""

    def header(self, lines: list[str], config: dict[str, Any], step: int, total_steps: int) -> None:
        """Say what will happen, and open the curves and the bar."""

    def step_done(self) -> None:
        """Learn that a training step is done, reported or not."""

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Report a training step: tags of TensorBoard and their values."""

    def evaluation(self, step: int, loss: float, text: str) -> None:
        """Report an evaluation: its loss in nats a character, and a sample."""

    def flush(self) -> None:
        """Bring the curves to the disk."""

    def close(self) -> None:
        """Close the curves and the bar, however the run ended."""

    def stopped(self, message: str) -> None:
        """Say that the run was interrupted."""

    def finished(self, step: int, loss: float, best_loss: float, text: str, tokens: int) -> None:
        """Close the curves and the bar, and say how it went and what to do next."""


class Reporter(SilentReporter):
    """Speaks on the console, in main.log and to TensorBoard.

    Args:
        run_dir: where TensorBoard's events go, and the profile.
        dry_run: write nothing there.
        profile: write there what three of the first steps spend their time on.
    """

    def __init__(self, run_dir: str, dry_run: bool = False, profile: bool = False):
        self.run_dir, self.dry_run = run_dir, dry_run
        # The first steps set everything up and are slow; three of the next ones are recorded.
        schedule = torch.profiler.schedule(wait=5, warmup=1, active=3, repeat=1)
        self.profiler = (
            torch.profiler.profile(schedule=schedule, on_trace_ready=self._write_profile)
            if profile and not dry_run
            else None
        )
        self._began = self._last_line = time.perf_counter()
        self.writer: Any = None
        self.bar: Any = None

    def _write(self, method: str, *args: Any) -> None:
        """Call the TensorBoard writer. Curves are not worth a run: on a full disk they end, and it goes on."""
        try:
            if self.writer is not None:
                target = self.writer.file_writer if method == "add_summary" else self.writer
                getattr(target, method)(*args)
        except OSError as error:
            log.error("no more curves: %s", error)
            self.writer = None

    def _write_profile(self, profiler: torch.profiler.profile) -> None:
        path = f"{self.run_dir}/trace.json"
        profiler.export_chrome_trace(path)
        log.info("profile of three steps: %s (open it at https://ui.perfetto.dev)", path)

    def header(self, lines: list[str], config: dict[str, Any], step: int, total_steps: int) -> None:
        """See the base class."""
        from torch.utils.tensorboard import SummaryWriter  # a second of imports that other ranks save
        from tqdm import tqdm

        for line in lines:
            log.info("%s", line)
        # purge_step: what was logged after the snapshot that a run resumes from would stand there twice.
        if not self.dry_run:
            self.writer = SummaryWriter(self.run_dir, purge_step=step + 1)
        self.config = {f"{group}.{key}": value for group, values in config.items() for key, value in values.items()}
        table = "\n".join(f"| {key} | {value} |" for key, value in self.config.items())
        self._write("add_text", "config", f"| key | value |\n| --- | --- |\n{table}", step)
        self.total_steps = total_steps
        self.bar = tqdm(
            total=total_steps, initial=step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        if self.profiler is not None:
            self.profiler.start()

    def step_done(self) -> None:
        """See the base class."""
        if self.profiler is not None:
            self.profiler.step()

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """See the base class."""
        for tag, value in values.items():
            self._write("add_scalar", tag, value, step)
        words = (
            f"loss {values['train/loss']:.4f}, learning rate {values['train/learning_rate']:.2e}, "
            f"{values['train/tokens_per_second']:.0f} tokens/s"
        )
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update(step - self.bar.n)
        now = time.perf_counter()
        is_line = self.bar.disable and (now - self._last_line > SECONDS_BETWEEN_LINES or step == self.total_steps)
        if is_line:
            self._last_line = now
        log.log(logging.INFO if is_line else logging.DEBUG, "step %d/%d: %s", step, self.total_steps, words)

    def evaluation(self, step: int, loss: float, text: str) -> None:
        """See the base class."""
        bits = loss / math.log(2)
        log.info("step %d: evaluation loss %.4f (%.3f bits a character)", step, loss, bits)
        self._write("add_scalar", "eval/loss", loss, step)
        self._write("add_scalar", "eval/bits_per_char", bits, step)
        if text:
            self._write("add_text", "samples", "\n".join(f"    {line}" for line in text.split("\n")), step)

    def flush(self) -> None:
        """See the base class."""
        self._write("flush")

    def close(self) -> None:
        """See the base class."""
        if self.bar is not None:
            self.bar.close()
        self._write("close")
        if self.profiler is not None:
            self.profiler.stop()  # in a very short run, the profile ends here
            self.profiler = None

    def stopped(self, message: str) -> None:
        """See the base class."""
        self.close()
        log.info("%s", message)

    def finished(self, step: int, loss: float, best_loss: float, text: str, tokens: int) -> None:
        """See the base class."""
        from torch.utils.tensorboard.summary import hparams

        # Three records, instead of add_hparams, which would make a run of its own for them.
        plain = {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in self.config.items()}
        for record in hparams(plain, {"eval/final_loss": loss}):
            self._write("add_summary", record)
        self._write("add_scalar", "eval/final_loss", loss, step)
        self.close()
        if text:
            log.info("a sample:\n\n%s\n", text)
        seconds = time.perf_counter() - self._began
        speed = f", {tokens} tokens in {seconds:.0f} s" if tokens else ""
        log.info("finished: %d steps, evaluation loss %.4f, best %.4f%s", step, loss, best_loss, speed)
        if self.dry_run:
            log.info("that was a dry run: model, text and machine fit together, and nothing was written")
            return
        log.info("written: %s", self.run_dir)
        log.info("text: python generate.py --snapshot %s/gpt_snapshot.best.pt", self.run_dir)
        cap = self.config.get("trainer_config.max_steps")
        key = "max_steps" if cap is not None and cap <= step else "max_epochs"
        if step < self.total_steps:
            key = "patience"
        log.info("to go on, raise trainer_config.%s; to start over, set trainer_config.resume=false", key)


class ConsoleHandler(logging.Handler):
    """Writes log lines to standard error, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def parameter_norm(model: nn.Module) -> float:
    """Euclidean norm of all parameters together."""
    return float(torch.stack([p.detach().norm() for p in model.parameters()]).norm())


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
