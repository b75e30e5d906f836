"""The training loop: steps, evaluation, snapshots.

Sixth module of the reading order: it puts together what the five before it made, and `main.py` starts it. Read `fit`
first, it is the table of contents; then `_train_step` and `evaluate`.
"""

import dataclasses
import hashlib
import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from char_dataset import CharDataset, CharVocabulary, WindowSampler, evaluation_batches
from distributed import (
    Ranks,
    StopRequest,
    all_reduce_max,
    all_reduce_sum,
    broadcast_from_main,
    gather_on_main,
    ignore_signals,
)
from model import GPT
from optimizer import (
    OptimizerConfig,
    create_optimizer,
    learning_rate_factor,
    load_optimizer_state,
    set_learning_rate,
)
from report import Reporter, SilentReporter, parameter_norm, peak_memory
from snapshot import (
    Snapshot,
    best_url,
    check_matches,
    load_newest,
    load_snapshot,
    prepare,
    save_snapshot,
    set_aside,
)

log = logging.getLogger(__name__)

AMP_DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class TrainerConfig:
    """How long, in what portions and how precisely to train. Units and meaning: `gpt2_train_cfg.yaml`."""

    max_epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 32
    micro_batch_size: int | None = None
    data_loader_workers: int = 0
    grad_norm_clip: float | None = 1.0
    snapshot_path: str | None = None
    use_amp: bool = True
    amp_dtype: str = "auto"
    device: str = "auto"
    compile: bool = False
    seed: int = 1337
    resume: bool = True
    log_every_steps: int = 10
    eval_every_steps: int = 250
    save_every_steps: int = 250
    sample_tokens: int = 500
    patience: int | None = None
    init_from: str | None = None
    dry_run: bool = False
    profile: bool = False
    deterministic: bool = False
    timeout_minutes: float = 10.0

    def __post_init__(self) -> None:
        for name in (
            *("max_epochs", "batch_size", "log_every_steps", "eval_every_steps", "save_every_steps"),
            *("max_steps", "micro_batch_size", "timeout_minutes", "grad_norm_clip", "patience"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"trainer_config.{name}={value}: must be above 0")
        for name in ("data_loader_workers", "seed", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"trainer_config.{name}={getattr(self, name)}: must be at least 0")
        if self.amp_dtype not in AMP_DTYPES:
            raise ValueError(f"trainer_config.amp_dtype={self.amp_dtype}: must be one of {', '.join(AMP_DTYPES)}")
        if self.device not in ("auto", "cpu"):
            raise ValueError(
                f"trainer_config.device={self.device}: must be auto (an accelerator if there is one) or cpu"
            )
        if not self.use_amp and self.amp_dtype not in ("auto", "float32"):
            raise ValueError(
                f"trainer_config.use_amp=false trains in float32, and amp_dtype={self.amp_dtype} contradicts it; "
                "set one or the other"
            )

    def sequences_per_forward(self, world_size: int) -> int:
        """The micro-batch of one rank, in sequences: what was asked for, or all of the rank's share of a step.

        Raises:
            ValueError: batch_size is not a whole number of micro-batches on every rank.
        """
        micro = self.micro_batch_size or max(1, self.batch_size // world_size)
        if self.batch_size % (world_size * micro):
            raise ValueError(
                f"trainer_config.batch_size={self.batch_size} is not divisible by {world_size} ranks x "
                f"micro_batch_size={micro} = {world_size * micro}; every rank must get the same number of micro-batches"
            )
        return micro


def choose_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """The type that matrix products are computed in; the weights themselves stay float32.

    Raises:
        ValueError: the type that was asked for can't be had on this device.
    """
    # 1. No mixed precision.
    if not config.use_amp or config.amp_dtype == "float32":
        return torch.float32
    can_bfloat16 = _computes_in_bfloat16(device)
    # 2. The best that the hardware really computes in. bfloat16 has float32's range and needs no scaler; float16 is
    #    for older GPUs that only have that; elsewhere narrow types are emulated and only cost.
    if config.amp_dtype == "auto":
        if can_bfloat16:
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" else torch.float32
    # 3. What the user insists on, wherever torch can do it at all (slowly, perhaps: that is how CPUs test float16).
    if not torch.amp.is_autocast_available(device.type):
        raise ValueError(
            f"trainer_config.amp_dtype={config.amp_dtype} can't be had on device {device.type}, which has no mixed "
            "precision in this torch; use amp_dtype=auto"
        )
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[config.amp_dtype]


def _computes_in_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # older ones can't tell: float32
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return device.type == "xpu"


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of one rank's dropout in one optimizer step: ranks and steps draw independent masks.

    Seeding every step anew, instead of saving the generator's state, makes a restarted run draw the same masks.
    """
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def fingerprint(*parts: np.ndarray) -> str:
    """SHA-256 of arrays in their order, hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(str(part.shape).encode())
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


class RunError(Exception):
    """The run can't go on, and it is no bug: the message says, in one line, what happened and what to do."""


class Stopwatch:
    """Seconds since the last report: those spent training, and among them those spent waiting for data."""

    def __init__(self, first_step: int):
        self.first_step = first_step
        self.seconds = self.data_seconds = 0.0

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count what happens in a with-block as training."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens in a with-block, inside `training`, as waiting for data."""
        began = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - began


class Trainer:
    """Trains a GPT on the windows of a text.

    Args:
        config, optimizer_config: what the user chose.
        model: the GPT, initialised alike on all ranks, still on the CPU.
        vocabulary: of the text; goes into the snapshots.
        train_codes, eval_codes: the two parts of the encoded text.
        ranks: this process's place among the ranks.
        run_dir: where TensorBoard's events go.
        snapshot_path: path or fsspec URL of the snapshot.
        full_config: the whole configuration as plain dictionaries; goes into the snapshots.

    Raises:
        ValueError: the numbers don't fit together (see the message).
    """

    def __init__(
        self,
        config: TrainerConfig,
        optimizer_config: OptimizerConfig,
        model: GPT,
        vocabulary: CharVocabulary,
        train_codes: np.ndarray,
        eval_codes: np.ndarray,
        ranks: Ranks,
        run_dir: str,
        snapshot_path: str,
        full_config: dict[str, Any],
    ):
        self.config, self.optimizer_config, self.full_config = config, optimizer_config, full_config
        self.vocabulary, self.eval_codes, self.ranks = vocabulary, eval_codes, ranks
        self.snapshot_path = snapshot_path
        self.corpus = fingerprint(train_codes, eval_codes) if ranks.is_main else ""

        self.micro_batch_size = config.sequences_per_forward(ranks.world_size)
        self.accumulation_steps = config.batch_size // (self.micro_batch_size * ranks.world_size)
        self.block_size = model.config.block_size
        self.dtype = choose_dtype(config, ranks.device)
        # On GPUs, the few products that autocast leaves in float32 may go through the tensor cores, as TF32.
        torch.set_float32_matmul_precision("highest" if self.dtype == torch.float32 else "high")

        self.raw_model = model.to(ranks.device)  # saved, evaluated and sampled under its own names
        if config.compile:
            self.raw_model.compile()
        self.model: torch.nn.Module = self.raw_model  # trained
        if ranks.world_size > 1:
            self.model = DistributedDataParallel(self.raw_model, gradient_as_bucket_view=True)
        # float16 has too small a range for Muon's products.
        muon_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        self.optimizer = create_optimizer(self.raw_model, optimizer_config, muon_dtype)
        # float16 alone needs its losses scaled up to keep small gradients; disabled, the scaler passes all through.
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.dtype == torch.float16)

        dataset = CharDataset(train_codes, self.block_size)
        self.sampler = WindowSampler(dataset, config.batch_size, ranks.world_size, ranks.rank, config.seed)
        self.loader = DataLoader(
            dataset,
            batch_size=self.micro_batch_size,
            sampler=self.sampler,
            num_workers=config.data_loader_workers,
            collate_fn=_as_it_is,
            pin_memory=ranks.device.type == "cuda",
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # or the loader would draw from the global one, and shift the dropout
        )

        self.watch = Stopwatch(0)  # what the next report is about
        self.reporter = Reporter(run_dir, config.dry_run, config.profile) if ranks.is_main else SilentReporter()
        # All that changes while training, apart from the weights and the optimizer's state:
        self.step = 0  # optimizer steps done
        self.total_steps = config.max_epochs * self.sampler.steps_per_epoch
        if config.max_steps is not None:
            self.total_steps = min(self.total_steps, config.max_steps)
        if config.dry_run:
            self.total_steps = min(self.total_steps, 2)
        self.stop_request = StopRequest()
        self.stop_signal = 0  # the signal on which all ranks agreed to stop; 0: go on
        self.save_errors: dict[str, str] = {}  # by URL: why the last save there failed
        self.eval_loss = math.nan  # of the last evaluation, nats a character
        self.text = ""  # sampled at the last evaluation
        self.best_eval_loss = math.inf  # nats a character
        self.best_step = 0  # the optimizer step it was found at

    # ------------------------------------------------------------------------------------------------ the loop

    def fit(self) -> None:
        """Train from where the run stands to its end, or until a signal asks to stop (`stop_signal` tells).

        Call `resume` first, unless the run starts from scratch.

        Raises:
            RunError: the loss or the gradient is not finite, the launcher died, or the end could not be saved.
        """
        self.stop_request.listen()
        self._report_header()
        batches = self._batches()
        self.model.train()
        first_step, self.watch = self.step, Stopwatch(self.step)
        if self.step == 0 and self.config.init_from is not None:
            log.info("starting from the model of %s; its evaluation loss is to be beaten:", self.config.init_from)
            self._evaluate_and_keep_best()
        while True:
            if self._is_due(self.config.eval_every_steps):
                self._evaluate_and_keep_best()
            if self.step >= self.total_steps or self.stop_signal:
                break
            with self.watch.training():
                loss, grad_norm = self._train_step(batches)
                self.step += 1
                is_reported = self._is_due(self.config.log_every_steps)
                if is_reported:
                    loss_value = loss.item()  # here alone the loop waits for the device
            self.reporter.step_done()
            if is_reported:
                self._report_step(loss_value, grad_norm)
                self.watch = Stopwatch(self.step)
            if self._is_due(self.config.save_every_steps) or self.stop_signal:
                self._save(self.snapshot_path)
        self._report_end(self.step - first_step)
        if self.save_errors:
            raise RunError(f"the last snapshot could not be saved: {'; '.join(self.save_errors.values())}")

    def _is_due(self, every: int, ahead: int = 0) -> bool:
        """Whether what happens every so many steps, and at the end, happens now, or so many steps ahead."""
        step = self.step + ahead
        return step > 0 and (step % every == 0 or step >= self.total_steps)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches from the present step on, epoch after epoch: (x, y), each int64 (B, T)."""
        while True:
            epoch, first_step = divmod(self.step, self.sampler.steps_per_epoch)
            self.sampler.set_epoch(epoch, first_step)
            for x, y in self.loader:
                device = self.ranks.device
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def _train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """One optimizer step on one global batch.

        Returns:
            (mean loss of this rank's share in nats, norm of the global gradient before clipping): scalars, still on
            the device, because reading them would make the program wait for it.
        """
        torch.manual_seed(step_seed(self.config.seed, self.step, self.ranks.rank))
        set_learning_rate(self.optimizer, self._learning_rate_factor())
        mean_loss = torch.zeros((), device=self.ranks.device)
        for micro_step in range(self.accumulation_steps):
            with self.watch.waiting():
                x, y = next(batches)  # (B, T) each
            with self._gradients_stay_local(until=micro_step == self.accumulation_steps - 1):
                with self._autocast():
                    _, loss = self.model(x, y)
                # Micro-batches and ranks are equally large, so the mean of their means is the global batch's mean.
                loss = loss / self.accumulation_steps
                self.scaler.scale(loss).backward()  # scale: lifts small float16 gradients above zero
            mean_loss += loss.detach()
        self.scaler.unscale_(self.optimizer)  # before clipping, which must see the true norm
        grad_norm = clip_grad_norm_(self.raw_model.parameters(), self.config.grad_norm_clip or math.inf)
        self._agree_to_step(mean_loss, grad_norm)
        self.scaler.step(self.optimizer)  # leaves the step out where a gradient overflowed
        self.scaler.update()  # and lowers the scale then
        self.optimizer.zero_grad(set_to_none=True)
        return mean_loss, grad_norm

    def _agree_to_step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Let all ranks decide together, while the weights are still unchanged, whether to go on.

        Raises:
            RunError: on some rank the loss or the gradient is not finite, or the launcher is gone.
        """
        # On an accelerator, reading a number makes the program wait: there only steps that wait anyway are looked at,
        # and those that are saved. On a CPU the number is at hand.
        asked = self.stop_request.signal  # read once: it may come at any moment
        due = asked or self._is_due(self.config.log_every_steps, 1) or self._is_due(self.config.save_every_steps, 1)
        is_broken = False
        if due or self.ranks.device.type == "cpu":
            # An infinite gradient is float16's daily life: the scaler leaves that step out.
            is_broken = not (math.isfinite(loss) and (self.scaler.is_enabled() or math.isfinite(grad_norm)))
        broken, orphaned, self.stop_signal = all_reduce_max([is_broken, self.stop_request.is_orphaned(), asked])
        if broken:
            raise RunError(
                f"step {self.step + 1}: the loss or its gradient is not finite, at learning rates "
                f"{[group['lr'] for group in self.optimizer.param_groups]}; the last snapshot is from before. "
                "Lower the learning rates or trainer_config.grad_norm_clip, and start again"
            )
        if orphaned:
            raise RunError(f"step {self.step + 1}: torchrun is gone; leaving without another snapshot")

    def _gradients_stay_local(self, until: bool) -> AbstractContextManager[None]:
        """Around forward and backward: no all-reduce of the gradients until the last micro-batch of a step."""
        if until or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.ranks.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _learning_rate_factor(self) -> float:
        c = self.optimizer_config
        return learning_rate_factor(self.step, c.warmup_steps, self.total_steps, c.min_lr_ratio, c.lr_decay)

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self) -> float:
        """Mean loss over every target of the evaluation text, each scored once, in nats a character, on all ranks."""
        sums = gather_on_main(list(self._sum_losses()), self.ranks)
        if len(sums) > 1:
            per_rank = ", ".join(f"{loss_sum / max(count, 1):.4f} on {count:.0f}" for loss_sum, count in sums)
            log.info("evaluation losses of the ranks: %s characters", per_rank)
        # Sum first, divide once: ranks may hold different counts. Only rank 0 has anything to sum.
        mean = sum(s for s, _ in sums) / sum(count for _, count in sums) if sums else 0.0
        return float(broadcast_from_main(mean))

    @torch.no_grad()
    def _sum_losses(self) -> tuple[float, float]:
        """(Sum of the losses, number of targets) over this rank's share of the evaluation text."""
        losses, counts = [], []
        was_training = self.raw_model.training
        self.raw_model.eval()  # or dropout would make the loss too high, and another one every time
        try:
            for x, y in evaluation_batches(
                self.eval_codes, self.block_size, self.micro_batch_size, self.ranks.rank, self.ranks.world_size
            ):
                with self._autocast():
                    _, loss = self.raw_model(x.to(self.ranks.device), y.to(self.ranks.device))
                losses.append(loss)
                counts.append(int((y != -1).sum()))
        finally:
            self.raw_model.train(was_training)
        means = torch.stack(losses).tolist() if losses else []
        return sum(m * count for m, count in zip(means, counts, strict=True)), float(sum(counts))

    def _evaluate_and_keep_best(self) -> None:
        self.eval_loss = loss = self.evaluate()
        self.text = self.sample() if self.ranks.is_main else ""
        self.reporter.evaluation(self.step, loss, self.text)
        if loss < self.best_eval_loss:
            self.best_eval_loss, self.best_step = loss, self.step
            self._save(best_url(self.snapshot_path), keep_previous=False)
        # Early stopping. The best step is in the best snapshot, so a restart can't lose count.
        patience = (self.config.patience or math.inf) * self.config.eval_every_steps
        if self.step - self.best_step >= patience and self.step < self.total_steps:
            log.info("no lower evaluation loss since step %d: stopping early", self.best_step)
            if not self._is_due(self.config.save_every_steps):
                self._save(self.snapshot_path)
            self.total_steps = self.step

    @torch.no_grad()
    def sample(self) -> str:
        """Text of the present model that starts after a line's end (or, where the text has no lines, anywhere)."""
        if not self.config.sample_tokens:
            return ""
        idx = self.vocabulary.encode(self.vocabulary.start)[None].to(self.ranks.device)  # (1, 1)
        random = torch.Generator(self.ranks.device).manual_seed(self.config.seed)
        out = self.raw_model.generate(idx, self.config.sample_tokens, 0.8, do_sample=True, generator=random)  # (1, T)
        return self.vocabulary.decode(out[0, 1:])

    # ------------------------------------------------------------------------------------------------ snapshots

    def _identity(self) -> Snapshot:
        """What a snapshot must share with this run to be continued by it."""
        return {
            "model_config": dataclasses.asdict(self.raw_model.config),
            "vocabulary": self.vocabulary.characters,
            "optimizer_name": self.optimizer_config.name,
            "corpus": self.corpus,
        }

    def _save(self, url: str, keep_previous: bool = True) -> None:
        if not self.ranks.is_main or self.config.dry_run:
            return
        snapshot = {
            **self._identity(),
            "step": self.step,
            "samples": self.step * self.config.batch_size,
            "model": self.raw_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "best_eval_loss": self.best_eval_loss,
            "config": self.full_config,
            "torch_version": str(torch.__version__),
        }
        self.reporter.flush()  # the curves up to here belong to it
        try:
            save_snapshot(snapshot, url, keep_previous)
            self.save_errors.pop(url, None)
        except Exception as error:  # a full disk, a store that answers 500: the next save may work again
            self.save_errors[url] = f"{url}: {type(error).__name__}: {error}"
            log.error("step %d could not be saved, training goes on: %s", self.step, self.save_errors[url])

    def _best_so_far(self) -> tuple[float, int]:
        """(Loss, step) of the best snapshot, which may be newer than the last one; (inf, 0) where none can be used."""
        try:
            best = load_snapshot(best_url(self.snapshot_path))
            check_matches(best, self._identity())
        except FileNotFoundError:  # there was no evaluation yet
            return math.inf, 0
        except ValueError as error:  # damaged, or of another run
            log.warning("no usable best snapshot, the next evaluation makes one: %s", error)
            return math.inf, 0
        return best["best_eval_loss"], best["step"]

    def resume(self) -> None:
        """Go on from the run's snapshot if there is one; with resume=false, move old snapshots aside instead.

        Raises:
            ValueError: the snapshot is of another run, or damaged beyond its predecessor.
        """
        if self.config.dry_run:
            return
        snapshot = None
        if self.ranks.is_main:
            prepare(self.snapshot_path)
            # Started over by torchrun, a run that was told to start over goes on: it has already done so.
            if self.config.resume or self.ranks.is_restart:
                snapshot = load_newest(self.snapshot_path)
                if snapshot is not None:
                    check_matches(snapshot, self._identity())
                    snapshot["best"] = self._best_so_far()
            else:
                for name in set_aside(self.snapshot_path):
                    log.info("moved an old snapshot aside: %s", name)
        # Read once, by one rank: the others may have no access, and must not see another file.
        snapshot = broadcast_from_main(snapshot)
        if snapshot is None:
            return
        self.raw_model.load_state_dict(snapshot["model"])
        load_optimizer_state(self.optimizer, snapshot["optimizer"])
        if snapshot["scaler"]:  # empty where the run wasn't in float16 up to now
            self.scaler.load_state_dict(snapshot["scaler"])
        self.step = snapshot["step"]
        self.best_eval_loss, self.best_step = snapshot["best"]
        log.info("going on from %s after step %d of %d", self.snapshot_path, self.step, self.total_steps)
        for group, values in self.full_config.items():
            for key, value in values.items():
                old = snapshot["config"].get(group, {}).get(key)
                if old != value and key != "init_from":  # where the run once began, it can't begin again
                    log.info("the configuration has changed and wins: %s.%s was %s, is %s", group, key, old, value)
        if self.step >= self.total_steps:
            log.info("this run is already finished: there is nothing left to train")

    # ------------------------------------------------------------------------------------------------ reports

    def _report_header(self) -> None:
        c, ranks, parameters = self.raw_model.config, self.ranks, self.raw_model.num_parameters() / 1e6
        lines = [
            f"model: {parameters:.2f} M parameters ({c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, context "
            f"{c.block_size}, vocabulary {c.vocab_size})",
            f"text: {self.sampler.targets + 1} characters to train on, {len(self.eval_codes)} to evaluate on; "
            f"{self.sampler.steps_per_epoch} steps an epoch, {self.total_steps} in all",
            f"a step: {self.config.batch_size} windows = {ranks.world_size} ranks x {self.accumulation_steps} "
            f"micro-batches of {self.micro_batch_size}; {str(self.dtype).removeprefix('torch.')} on {ranks.device}, "
            f"optimizer {self.optimizer_config.name}",
            f"snapshot: {self.snapshot_path}",
        ]
        self.reporter.header(lines, self.full_config, self.step, self.total_steps)

    def _report_step(self, loss: float, grad_norm: Tensor) -> None:
        watch, steps = self.watch, self.step - self.watch.first_step
        values = {  # the loss of the global batch: the mean over ranks, whose shares are equally large
            "train/loss": all_reduce_sum([loss])[0] / self.ranks.world_size,
            "train/learning_rate": self.optimizer.param_groups[-1]["lr"],
            "train/grad_norm": grad_norm.item(),
            "train/param_norm": parameter_norm(self.raw_model),
            "train/tokens_per_second": steps * self.config.batch_size * self.block_size / watch.seconds,
            "time/data_seconds_per_step": watch.data_seconds / steps,
            "time/compute_seconds_per_step": (watch.seconds - watch.data_seconds) / steps,
            "memory/peak_gb": peak_memory(self.ranks.device),
        }
        self.reporter.train_step(self.step, values)

    def _report_end(self, steps: int) -> None:
        if self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            self.reporter.stopped(
                f"stopped by {name} after step {self.step} of {self.total_steps}; start again to go on"
            )
            return
        tokens = steps * self.config.batch_size * self.block_size
        self.reporter.finished(self.step, self.eval_loss, self.best_eval_loss, self.text, tokens)


def _as_it_is(batch: Any) -> Any:
    """The loader's collate function: `CharDataset.__getitems__` has already put the batch together."""
    return batch
