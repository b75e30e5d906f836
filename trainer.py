"""The training loop: steps, evaluation, snapshots.

It puts together what the modules before it made, and `main.py` starts it. Read `fit` first, it is the table of
contents; then `_train_step` and `evaluate`. `distributed.py` comes next.
"""

import dataclasses
import logging
import math
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from char_dataset import CharDataset, CharVocabulary, WindowSampler, evaluation_batches
from config import TrainerConfig, choose_dtype
from distributed import (
    Ranks,
    StopRequest,
    all_reduce_max,
    all_reduce_sum,
    broadcast_form,
    broadcast_from_main,
    gather_on_main,
    ignore_signals,
    load_weights,
    settle_buckets,
    start_workers,
    whole,
)
from memory import choose_micro_batch
from model import GPT
from optimizer import (
    OptimizerConfig,
    create_optimizer,
    learning_rate_factor,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)
from report import Reporter, peak_memory
from run_files import RunError, RunSnapshots, differences, fingerprint
from sharding import distribute, gather_tensors, gradients_stay_local, local, named_weights, norm, plain_copy
from snapshot import Snapshot, best_url

log = logging.getLogger(__name__)


@dataclass
class State:
    """What changes while training, apart from the weights, the optimizer and its scaler."""

    total_steps: int  # the optimizer step at which the run ends
    step: int = 0  # optimizer steps done
    eval_loss: float = math.nan  # of the last evaluation, nats a character
    best_eval_loss: float = math.inf  # the lowest so far, nats a character
    best_step: int = 0  # the optimizer step it was found at
    stop_signal: int = 0  # the signal on which all ranks agreed to stop; 0: go on


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
        self.vocabulary, self.eval_codes, self.ranks, self.snapshot_path = vocabulary, eval_codes, ranks, snapshot_path
        self.block_size = model.config.block_size
        self.train_passage = train_codes[-max(len(eval_codes) // 10, self.block_size + 1) :]

        self.dtype = choose_dtype(config, ranks.device)  # of matrix products; the weights stay float32
        self.autocast = torch.autocast(ranks.device.type, self.dtype, enabled=self.dtype != torch.float32)
        # On GPUs, what autocast leaves in float32 may go through the tensor cores as TF32, but not in a float32 run.
        torch.set_float32_matmul_precision("highest" if self.dtype == torch.float32 else "high")
        self.raw_model = model  # saved and evaluated: without DDP's prefix before every name
        self.model = distribute(model, config.strategy, self.dtype, config.compile, ranks.device)  # trained
        self.parameters = dict(model.named_parameters())  # by name; what two modules share, once
        self.optimizer = create_optimizer(self.raw_model, optimizer_config, self.dtype, ranks.rank, ranks.world_size)
        # float16 alone needs its losses scaled up to keep small gradients; disabled, the scaler passes all through.
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.dtype == torch.float16)
        self.micro_batch_size = choose_micro_batch(self.raw_model, self.optimizer, config, ranks.world_size, self.dtype)
        self.accumulation_steps = config.batch_size // (self.micro_batch_size * ranks.world_size)

        dataset = CharDataset(train_codes, self.block_size)
        self.sampler = WindowSampler(dataset, config.batch_size, ranks.world_size, ranks.rank, config.seed)
        self.loader = make_loader(self, dataset)
        self.state = State(total_steps=config.steps_in_all(self.sampler.steps_per_epoch))

        self.stop_request = StopRequest()
        self.reporter = Reporter(run_dir, ranks.is_main, config.dry_run, config.profile)
        self.snapshots: RunSnapshots | None = None
        if ranks.is_main and not config.dry_run:
            identity, launch = self._identity(fingerprint(train_codes, eval_codes)), ranks.launch
            self.snapshots = RunSnapshots(run_dir, snapshot_path, identity, launch, self.optimizer, self.parameters)

    # ------------------------------------------------------------------------------------------------ the loop

    def fit(self) -> None:
        """Train from where the run stands to its end, or until a signal asks to stop (`state.stop_signal` tells).

        Call `resume` first, unless the run starts from scratch.

        Raises:
            RunError: the loss or the gradient is not finite, the launcher died, or the end could not be saved.
        """
        self._start()
        batches = self._batches()
        self.model.train()
        while self.step < self.state.total_steps and not self.state.stop_signal:
            loss, grad_norm = self._train_step(batches)
            self.state.step += 1
            self._report_step(loss, grad_norm)
            if self._is_due(self.config.save_every_steps) or self.state.stop_signal:
                self._save()
            if self._is_due(self.config.eval_every_steps):
                self._evaluate_and_keep_best()
        self._finish()

    def _train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """One optimizer step on one global batch.

        Returns:
            (mean loss of this rank's share in nats, norm of the global gradient before clipping): scalars, still on
            the device, because reading them would make the program wait for it.
        """
        torch.manual_seed(step_seed(self.config.seed, self.step, self.ranks.rank))  # dropout draws from this
        c = self.optimizer_config
        factor = learning_rate_factor(self.step, c.warmup_steps, self.state.total_steps, c.min_lr_ratio, c.lr_decay)
        set_learning_rate(self.optimizer, factor)
        mean_loss = torch.zeros((), device=self.ranks.device)
        for micro_step in range(self.accumulation_steps):
            x, y = next(batches)  # (B, T) each
            with gradients_stay_local(self.model, is_last=micro_step == self.accumulation_steps - 1):
                with self.autocast:
                    _, loss = self.model(x, y)
                # Micro-batches and ranks are equally large, so the mean of their means is the global batch's mean.
                loss = loss / self.accumulation_steps
                self.scaler.scale(loss).backward()  # scale: lifts small float16 gradients above zero
            mean_loss += loss.detach()
        self.scaler.unscale_(self.optimizer)  # before clipping, which must see the true norm
        grad_norm = whole(clip_grad_norm_(self.raw_model.parameters(), self.config.grad_norm_clip or math.inf))
        self._agree_to_step(mean_loss, grad_norm)  # raises where something is wrong, before the weights change
        self.scaler.step(self.optimizer)  # leaves the step out where a float16 gradient overflowed
        self.scaler.update()  # and lowers the scale then
        self.optimizer.zero_grad(set_to_none=self.ranks.world_size == 1)  # several: they are views of what DDP sends
        return mean_loss, grad_norm

    def evaluate(self) -> float:
        """Mean loss over every target of the evaluation text, each scored once, in nats a character, on all ranks."""
        return self.evaluate_on(self.eval_codes)

    def evaluate_on(self, codes: np.ndarray) -> float:
        """Mean loss over every target of an encoded text (N,), as `evaluate` has it."""
        sums = gather_on_main(list(self._sum_losses(codes)), self.ranks)
        if len(sums) > 1:
            per_rank = ", ".join(f"{loss_sum / max(count, 1):.4f} on {count:.0f}" for loss_sum, count in sums)
            log.info("losses of the ranks, text of %d characters: %s characters", len(codes), per_rank)
        # Sum first, divide once: ranks may hold different counts. Only rank 0 has anything to sum.
        mean = sum(s for s, _ in sums) / sum(count for _, count in sums) if sums else 0.0
        return float(broadcast_from_main(mean))

    @torch.no_grad()
    def _sum_losses(self, codes: np.ndarray) -> tuple[float, float]:
        """(Sum of the losses, number of targets) over this rank's share of a text (N,)."""
        losses, counts = [], []
        was_training = self.raw_model.training
        self.raw_model.eval()  # or dropout would make the loss too high, and another one every time
        try:
            for x, y in evaluation_batches(
                codes, self.block_size, self.micro_batch_size, self.ranks.rank, self.ranks.world_size
            ):
                with self.autocast:
                    _, loss = self.raw_model(x.to(self.ranks.device), y.to(self.ranks.device))
                if (y != -1).any():  # else the ranks had unequal shares, and the mean of no targets is no number
                    losses.append(loss)
                    counts.append(int((y != -1).sum()))
        finally:
            self.raw_model.train(was_training)
        means = torch.stack(losses).tolist() if losses else []
        return sum(m * count for m, count in zip(means, counts, strict=True)), float(sum(counts))

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    def _is_due(self, every: int, ahead: int = 0) -> bool:
        """Whether the present step, or one so many steps ahead, is a multiple of `every`, or the last one."""
        step = self.step + ahead
        return step > 0 and (step % every == 0 or step >= self.state.total_steps)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches from the present step on, epoch after epoch: (x, y), each int64 (B, T)."""
        device = self.ranks.device
        non_blocking = device.type == "cuda"  # from pinned memory; elsewhere a copy could be read before it is there
        while True:
            epoch, first_step = divmod(self.step, self.sampler.steps_per_epoch)
            self.sampler.set_epoch(epoch, first_step)
            for x, y in self.reporter.watch.waiting_for(start_workers(self.loader)):
                yield x.to(device, non_blocking=non_blocking), y.to(device, non_blocking=non_blocking)

    # ------------------------------------------------------- around the steps: start, evaluations, snapshots, reports

    def _start(self) -> None:
        """Say what will happen, and do what comes before the first step."""
        self.reporter.header(header_lines(self), self.full_config, self.step, self.state.total_steps)
        if self.step == 0 and self.config.init_from is not None:
            log.info("starting from the model of %s; its evaluation loss is to be beaten:", self.config.init_from)
            self._evaluate_and_keep_best()
        elif self._is_due(self.config.eval_every_steps) or 0 < self.step == self.state.best_step:
            # A stop may have come between save and evaluation; or the best snapshot is the latest, by a second name,
            # and was written before its loss was known.
            self._evaluate_and_keep_best()
        if self.step < self.state.total_steps:
            shape = self.micro_batch_size, self.block_size
            settle_buckets(self.model, self.autocast, torch.zeros(shape, dtype=torch.int64, device=self.ranks.device))
        self.reporter.watch.restart(self.step)

    def _evaluate_and_keep_best(self) -> None:
        check_finite(self)
        with self.reporter.watch.paused(), run_eagerly(self.config.compile):
            state = self.state
            state.eval_loss = self.evaluate()
            if not math.isfinite(state.eval_loss):
                raise diverged(self, f"step {self.step}: the evaluation loss is not finite")
            train_loss = self.evaluate_on(self.train_passage)  # where it is much lower, the text is learned by heart
            # A token costs a pass through the model while the other ranks wait: a line is enough here.
            text = sample(self, min(self.config.sample_tokens, 64))
            self.reporter.evaluation(self.step, state.eval_loss, train_loss, text)
            if state.eval_loss < state.best_eval_loss:
                state.best_eval_loss, state.best_step = state.eval_loss, self.step
                self._save(is_best=True)
            self._stop_early_if_patience_is_over()

    def _stop_early_if_patience_is_over(self) -> None:
        # The best step is in the best snapshot, so a restart can't lose count.
        patience = (self.config.patience or math.inf) * self.config.eval_every_steps
        if self.step - self.state.best_step >= patience and self.step < self.state.total_steps:
            log.info("no lower evaluation loss since step %d: stopping early", self.state.best_step)
            if not self._is_due(self.config.save_every_steps):
                self._save()
            self.state.total_steps = self.step

    def _finish(self) -> None:
        state = self.state
        if state.stop_signal:
            self.reporter.close()
            name = signal.Signals(state.stop_signal).name
            how = "start again" if self.config.resume else "start again without trainer_config.resume=false"
            log.info("stopped by %s after step %d of %d; %s to go on", name, self.step, state.total_steps, how)
        else:
            tokens = self.config.batch_size * self.block_size  # in a step
            best, text = best_url(self.snapshot_path), sample(self, self.config.sample_tokens)
            self.reporter.finished(self.step, state.best_eval_loss, state.best_step, text, tokens, best)
        if self.snapshots is not None and self.snapshots.errors:
            raise RunError(f"the last snapshot could not be saved: {'; '.join(self.snapshots.errors.values())}")

    def _identity(self, corpus: str) -> Snapshot:
        """What a snapshot must share with this run to be continued by it; `corpus` is the text's fingerprint."""
        return {
            "model_config": dataclasses.asdict(self.raw_model.config),
            "vocabulary": self.vocabulary.characters,
            "optimizer_name": self.optimizer_config.name,
            "corpus": corpus,
        }

    def _save(self, is_best: bool = False) -> None:
        """Write down all that the rest of the run depends on; rank 0 does, and not in a dry run."""
        check_finite(self)
        if self.config.dry_run:
            return
        state = {
            "step": self.step,
            "samples": self.step * self.config.batch_size,
            "model": gather_tensors(named_weights(self.raw_model)),
            "optimizer": gather_tensors(optimizer_state(self.optimizer, self.parameters)),
            "scaler": self.scaler.state_dict(),
            "best_eval_loss": self.state.best_eval_loss,
            "best_step": self.state.best_step,
            "config": self.full_config,
            "torch_version": str(torch.__version__),
        }
        if self.snapshots is not None:
            with self.reporter.watch.paused():
                self.reporter.flush()  # the curves up to here belong to it
                self.snapshots.save(state, is_best)

    def resume(self) -> None:
        """Go on from the run's snapshot if there is one; with resume=false, move old snapshots aside instead.

        Raises:
            ValueError: the snapshot is of another run, or damaged beyond its predecessor.
        """
        snapshot = None
        if self.snapshots is not None:
            snapshot = self.snapshots.open(self.config.resume, self.ranks.is_restart)
        # Read once, by one rank: the others may have no access, and must not see another file. Tensors come one by one.
        snapshot = broadcast_form(snapshot)
        if snapshot is None:
            return
        load_weights(self.parameters, snapshot["model"])
        load_optimizer_state(self.optimizer, self.parameters, snapshot["optimizer"])
        if snapshot["scaler"]:  # empty where the run wasn't in float16 up to now
            self.scaler.load_state_dict(snapshot["scaler"])
        self.state.step = snapshot["step"]
        self.state.best_eval_loss, self.state.best_step = snapshot["best"]  # `RunSnapshots.open` has put it there
        # Where the run once began stays in its snapshots, also when it isn't named any more.
        began = snapshot["config"].get("trainer_config", {}).get("init_from")
        self.full_config["trainer_config"]["init_from"] = began
        for name, was, now in differences(snapshot["config"], self.full_config):
            if name != "trainer_config.resume":  # no property of the run
                log.info("the configuration has changed and wins: %s was %s, is %s", name, was, now)
        if self.step >= self.state.total_steps:
            log.info("this run is already finished: there is nothing left to train")

    def _report_step(self, loss: Tensor, grad_norm: Tensor) -> None:
        watch = self.reporter.watch
        if self._is_due(self.config.log_every_steps):
            # Reading the loss waits for the device: only in steps that log or save.
            self.reporter.train_step(self.step, step_values(self, loss.item(), grad_norm))
            watch.restart(self.step)
        with watch.paused():
            self.reporter.step_done()

    # ------------------------------------------------------------------------------ armour: faults of any of the ranks

    def _agree_to_step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Let all ranks decide together, while the weights are still unchanged, whether to go on.

        Raises:
            RunError: on some rank the loss or the gradient is not finite, or the launcher is gone.
        """
        # The first call alone does something. Until then a signal ends the program at once: there is nothing to save.
        self.stop_request.listen()
        # On an accelerator, reading a number makes the program wait: there only steps that wait anyway are looked at,
        # and those that are saved or evaluated. On a CPU the number is at hand.
        asked, c = self.stop_request.signal, self.config  # the signal is read once: it may come at any moment
        due = asked or any(self._is_due(n, 1) for n in (c.log_every_steps, c.save_every_steps, c.eval_every_steps))
        is_broken = False
        if due or self.ranks.device.type == "cpu":
            # In float16 an infinite gradient is normal now and then: the scaler leaves that step out.
            is_broken = not (math.isfinite(loss) and (self.scaler.is_enabled() or math.isfinite(grad_norm)))
        broken, orphaned, self.state.stop_signal = all_reduce_max([is_broken, self.stop_request.is_orphaned(), asked])
        if broken:
            raise diverged(self, f"step {self.step + 1}: the loss or its gradient is not finite")
        if orphaned:
            raise RunError(f"step {self.step + 1}: torchrun is gone; leaving without another snapshot")


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of one rank's dropout in one optimizer step: ranks and steps draw independent masks.

    Seeding every step anew, instead of saving the generator's state, makes a restarted run draw the same masks.
    """
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def check_finite(trainer: Trainer) -> None:
    """Raise RunError where the weights or the optimizer's state are not finite: such are never evaluated nor saved.

    All ranks raise, or none.
    """
    # The norm: where it overflows, the weights are as good as infinite.
    is_finite = math.isfinite(norm(trainer.parameters.values()))
    averages = [local(value) for values in trainer.optimizer.state.values() for value in values.values()]
    if averages:
        is_finite &= bool(
            torch.stack([average.isfinite().all() for average in averages]).all()
        )  # one look at the device
    if all_reduce_max([not is_finite])[0]:  # a rank may have shards only
        raise diverged(trainer, f"step {trainer.step} has left weights or optimizer state that are not finite")


def diverged(trainer: Trainer, what: str) -> RunError:
    """The error of a run that has diverged, with the step to go back to; rank 0, which knows that, speaks for all."""
    last = trainer.snapshots.last_step if trainer.snapshots is not None else None
    back = "there is no snapshot yet"
    if last is not None:
        condition = "" if trainer.config.resume else "without trainer_config.resume=false "
        back = f"the last snapshot is of step {last}: {condition}the next start goes on from there"
    return RunError(
        f"{what}, at learning rates {[group['lr'] for group in trainer.optimizer.param_groups]}; {back}. "
        "Lower the learning rates or trainer_config.grad_norm_clip, and start again"
    )


@torch.no_grad()
def sample(trainer: Trainer, length: int) -> str:
    """Text of the present model that starts after a newline (or, where the text has no lines, anywhere).

    Rank 0 alone writes it; on the others it is empty.
    """
    model = plain_copy(trainer.raw_model) if length > 0 else None
    if model is None or not trainer.ranks.is_main:
        return ""
    device, vocabulary = model.wte.weight.device, trainer.vocabulary
    idx = vocabulary.encode(vocabulary.start)[None].to(device)  # (1, 1)
    random = torch.Generator(device).manual_seed(trainer.config.seed)
    out = model.generate(idx, length, 0.8, do_sample=True, generator=random)  # (1, T)
    return vocabulary.decode(out[0, 1:])


def run_eagerly(is_compiled: bool) -> AbstractContextManager[None]:
    """Around what a compiled model does beside training: each other shape or mode would compile another graph."""
    if not is_compiled:
        return nullcontext()  # a second of imports that other runs save
    return torch.compiler.set_stance("force_eager")


def make_loader(trainer: Trainer, dataset: CharDataset) -> DataLoader:
    """The loader of micro-batches; `CharDataset.__getitems__` has put each together already."""
    return DataLoader(
        dataset,
        batch_size=trainer.micro_batch_size,
        sampler=trainer.sampler,
        num_workers=trainer.config.data_loader_workers,
        collate_fn=_as_it_is,
        pin_memory=trainer.ranks.device.type == "cuda",
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # or the loader would draw from the global one, and shift the dropout
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def step_values(trainer: Trainer, loss: float, grad_norm: Tensor) -> dict[str, float]:
    """What is logged of a step, by TensorBoard's tags; speeds are means since the last report."""
    watch = trainer.reporter.watch
    steps, seconds, data_seconds = trainer.step - watch.first_step, watch.seconds, watch.data_seconds
    return {  # the loss of the global batch: the mean over ranks, whose shares are equally large
        "train/loss": all_reduce_sum([loss])[0] / trainer.ranks.world_size,
        "train/learning_rate": trainer.optimizer.param_groups[-1]["lr"],
        "train/grad_norm": grad_norm.item(),
        "train/param_norm": norm(trainer.parameters.values()),
        "train/tokens_per_second": steps * trainer.config.batch_size * trainer.block_size / seconds,
        "time/data_seconds_per_step": data_seconds / steps,
        "time/compute_seconds_per_step": (seconds - data_seconds) / steps,
        "memory/peak_gb": peak_memory(trainer.ranks.device),
    }


def header_lines(trainer: Trainer) -> list[str]:
    """What a run says before its first step, in lines that fit a terminal of 80 columns."""
    c, config, state = trainer.raw_model.config, trainer.config, trainer.state
    size = trainer.raw_model.num_parameters() / 1e6
    return [
        f"model: {size:.2f} M parameters ({c.n_layer} layers, {c.n_head} heads, width {c.n_embd})",
        f"text: {trainer.sampler.targets + 1:,} characters to train on, {len(trainer.eval_codes):,} to evaluate on",
        f"guessing evenly among {c.vocab_size} different characters: loss {math.log(c.vocab_size):.2f}",
        f"steps: {state.total_steps:,} of {config.batch_size} windows of {c.block_size} characters; "
        f"an epoch: {trainer.sampler.steps_per_epoch:,}",
        f"machine: {str(trainer.dtype).removeprefix('torch.')} on {trainer.ranks.device}; a step: "
        f"{trainer.ranks.world_size} ranks x {trainer.accumulation_steps} x {trainer.micro_batch_size} windows",
        f"optimizer: {trainer.optimizer_config.name}; "
        + ("a dry run: nothing will be saved" if config.dry_run else f"snapshots: {trainer.snapshot_path}"),
    ]
