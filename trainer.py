"""The training loop: steps, evaluation, snapshots.

It puts together what the modules before it made, and `main.py` starts it. Read `fit` first, it is the table of
contents; then `_train_step` and `evaluate`; `_save` says what is in a snapshot. `distributed.py` comes next. Its
functions have something to do where there are several ranks; on one, `whole`, `all_gather`, `gather_tensors` and
`broadcast_form` give back what they got. `reporter.watch` is a stopwatch.
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

from char_dataset import CharDataset, Text, WindowSampler, evaluation_batches
from config import Config, TrainerConfig, ranks_in_words
from console.reporter import Reporter, named, peak_memory
from console.signals import StopRequest, ignore_signals, start_workers
from distributed import (
    Ranks,
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    broadcast_form,
    choose_dtype,
    distribute,
    gather_tensors,
    gradients_stay_local,
    is_orphaned,
    is_sharded,
    load_weights,
    local,
    norm,
    settle_buckets,
    whole,
)
from model import GPT, sum_losses
from optimizer import (
    OptimizerConfig,
    create_optimizer,
    learning_rate_factor,
    learning_rates,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)
from saving.contents import check_continuable, differences
from saving.finding import model_of
from saving.run_snapshots import RunError, RunSnapshots
from snapshot import Snapshot

log = logging.getLogger(__name__)


@dataclass
class State:
    """What changes while training, apart from the weights, the optimizer and its scaler."""

    total_steps: int  # the optimizer step at which the run ends
    step: int = 0  # optimizer steps done
    eval_loss: float = math.nan  # of the last evaluation, nats per character
    best_eval_loss: float = math.inf  # the lowest so far, nats per character
    best_step: int = 0  # the optimizer step it was found at
    stop_signal: int = 0  # the signal on which all ranks agreed to stop; 0: go on


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of one rank's dropout in one optimizer step: ranks and steps draw independent masks.

    Seeding every step anew, instead of saving the generator's state, makes a restarted run draw the same masks.
    """
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


class Trainer:
    """Trains a GPT on the windows of a text.

    Args:
        config: what the user chose.
        text: the encoded text, in two parts.
        model: the GPT, initialised alike on all ranks, still on the CPU; for fsdp on "meta", without weights.
        ranks: this process's place among the ranks.
        reporter: tells people what happens.
        snapshots: keeps what the run can go on from.

    Raises:
        ValueError: the numbers don't fit together (see the message).
    """

    def __init__(
        self, config: Config, text: Text, model: GPT, ranks: Ranks, reporter: Reporter, snapshots: RunSnapshots
    ):
        self.config, self.optimizer_config = config.trainer_config, config.optimizer_config
        self.full_config = config.as_dict()  # goes into every snapshot
        self.text, self.ranks, self.reporter, self.snapshots = text, ranks, reporter, snapshots
        self.stop_request = StopRequest()

        # The model, on its device, and what changes it.
        self.dtype = choose_dtype(ranks.device, self.config.use_amp, self.config.amp_dtype)
        self.autocast = torch.autocast(ranks.device.type, self.dtype, enabled=self.dtype != torch.float32)
        # On GPUs, what autocast leaves in float32 may go through the tensor cores as TF32, but not in a float32 run.
        torch.set_float32_matmul_precision("highest" if self.dtype == torch.float32 else "high")
        self.raw_model = model  # saved and evaluated: without DDP's prefix before every name
        self.model = distribute(model, self.config.strategy, self.dtype, self.config.compile, ranks.device)  # trained
        self.parameters = dict(model.named_parameters())  # by name; what two modules share, once
        self.optimizer = create_optimizer(model, self.optimizer_config, self.dtype, ranks.rank, ranks.world_size)
        # float16 alone needs its losses scaled up to keep small gradients; disabled, the scaler passes all through.
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.dtype == torch.float16)

        # The windows: a step's are shared out among the ranks, and a rank's share goes through in micro-batches.
        self.block_size = model.config.block_size
        self.micro_batch_size = self._choose_micro_batch()
        self.accumulation_steps = self.config.batch_size // (self.micro_batch_size * ranks.world_size)
        dataset = CharDataset(text.train_codes, self.block_size)
        self.sampler = WindowSampler(dataset, self.config.batch_size, ranks.world_size, ranks.rank, self.config.seed)
        self.loader = self._make_loader(dataset)
        self.state = State(total_steps=self.config.steps_in_all(self.sampler.steps_per_epoch))

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
        """Mean loss over every target of the evaluation text, each scored once, in nats per character, on all ranks."""
        return self.evaluate_on(self.text.eval_codes)

    def evaluate_on(self, codes: np.ndarray) -> float:
        """Mean loss over every target of an encoded text (N,), as `evaluate` has it."""
        batches = evaluation_batches(
            codes, self.block_size, self.micro_batch_size, self.ranks.rank, self.ranks.world_size
        )
        with self.autocast:
            own = sum_losses(self.raw_model, batches)
        sums = all_gather(own)  # (sum of the losses, number of targets) of each rank, on every rank
        if len(sums) > 1 and self.ranks.is_main:
            per_rank = ", ".join(f"{loss_sum / max(count, 1):.4f} on {count}" for loss_sum, count in sums)
            log.info("losses of the ranks, text of %d characters: %s characters", len(codes), per_rank)
        # Sum first, divide once: ranks may hold different counts. All add up the same numbers in the same order.
        return float(sum(loss_sum for loss_sum, _ in sums) / sum(count for _, count in sums))

    def _save(self, is_best: bool = False) -> None:
        """Write down all that the rest of the run depends on; rank 0 does, and not in a dry run.

        To this come "run", whose it is, and "format_version" and "digest", which tell whether it is whole.
        """
        self._check_finite()
        if self.config.dry_run:
            return
        state = {
            **self._identity(),
            "step": self.step,
            "samples": self.step * self.config.batch_size,
            "model": gather_tensors(self.raw_model.state_dict(keep_vars=True)),
            "optimizer": gather_tensors(optimizer_state(self.optimizer, self.parameters)),
            "scaler": self.scaler.state_dict(),
            "best_eval_loss": self.state.best_eval_loss,
            "best_step": self.state.best_step,
            "config": self.full_config,
            "torch_version": str(torch.__version__),
        }
        with self.reporter.watch.paused():
            self.reporter.flush()  # the curves up to here belong to it
            self.snapshots.save(state, is_best)

    def _identity(self) -> Snapshot:
        """What a snapshot must share with this run to be continued by it."""
        return {
            "model_config": dataclasses.asdict(self.raw_model.config),
            "vocabulary": self.text.vocabulary.characters,
            "optimizer_name": self.optimizer_config.name,
            "corpus": self.text.fingerprint,
        }

    def resume(self) -> None:
        """Go on from the run's snapshot if there is one; with resume=false, move old snapshots aside instead.

        Raises:
            ValueError: the snapshot is of another run, or damaged beyond its predecessor.
        """
        snapshot = self.snapshots.open(self._check)
        # Read once, by one rank: the others may have no access, and must not see another file. Tensors come one by one.
        snapshot = broadcast_form(snapshot)
        if snapshot is None:
            return
        load_weights(self.parameters, snapshot["model"])
        load_optimizer_state(self.optimizer, self.parameters, snapshot["optimizer"])
        if snapshot["scaler"]:  # empty where the run wasn't in float16 up to now
            self.scaler.load_state_dict(snapshot["scaler"])
        self.state.step = snapshot["step"]
        self.state.best_eval_loss, self.state.best_step = snapshot["best"]  # from `snapshots.open`
        # Where the run once began stays in its snapshots, also when it isn't named any more.
        began = snapshot["config"].get("trainer_config", {}).get("init_from")
        self.full_config["trainer_config"]["init_from"] = began
        for name, was, now in differences(snapshot["config"], self.full_config):
            if name not in ("trainer_config.resume", "trainer_config.snapshot_path"):  # the header has the place
                log.info("changed setting: %s was %s, now %s", name, was, now)
        self._say_if_rates_jump(snapshot["config"])
        if self.step >= self.state.total_steps:
            log.info("this run is already finished: there is nothing left to train")

    def _check(self, snapshot: Snapshot, url: str) -> None:
        """Raise ValueError unless this run can go on from a snapshot, DamagedSnapshotError if nobody can."""
        check_continuable(snapshot, url, self._identity(), self.optimizer, self.parameters)

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
        self.reporter.header(self._header(), self.full_config, self.step, self.state.total_steps)
        if self.step == 0 and self.config.init_from is not None:
            log.info("starting from the model of %s, which is evaluated first:", self.config.init_from)
            self._evaluate_and_keep_best()
        elif self._is_due(self.config.eval_every_steps):  # a stop may have come between save and evaluation
            self._evaluate_and_keep_best()
        if self.step < self.state.total_steps:
            shape = self.micro_batch_size, self.block_size
            settle_buckets(self.model, self.autocast, torch.zeros(shape, dtype=torch.int64, device=self.ranks.device))
        self.reporter.watch.restart(self.step)

    def _evaluate_and_keep_best(self) -> None:
        self._check_finite()
        with self.reporter.watch.paused(), run_eagerly(self.config.compile):
            state = self.state
            state.eval_loss = self.evaluate()
            if not math.isfinite(state.eval_loss):
                raise self._diverged(f"step {self.step}: the evaluation loss is not finite")
            train_loss = self.evaluate_on(self._train_passage())  # where it is much lower, the text is learned by heart
            # A token costs a pass through the model while the other ranks wait: a line is enough here.
            text = self.sample(min(self.config.sample_tokens, 64))
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
            name = signal.Signals(state.stop_signal).name
            self.reporter.note_end(self.step, name)
            self.reporter.close()
            how = "start again" if self.config.resume else "start again without trainer_config.resume=false"
            log.info("stopped by %s after step %d of %d; %s to go on", name, self.step, state.total_steps, how)
        else:
            tokens = self.config.batch_size * self.block_size  # in a step
            best, text = self.snapshots.best_url, self.sample(self.config.sample_tokens)
            self.reporter.finished(self.step, state.best_eval_loss, state.best_step, text, tokens, best)
        if self.snapshots.errors:
            raise RunError(f"the last snapshot could not be saved: {'; '.join(self.snapshots.errors.values())}")

    @torch.no_grad()
    def sample(self, length: int) -> str:
        """Text of the present model that starts after a newline (or, where the text has no lines, anywhere).

        Rank 0 alone writes it; on the others it is empty.
        """
        model = self.raw_model
        if length > 0 and is_sharded(model):  # no rank can write with its shards alone: all help to gather a whole one
            weights = gather_tensors(model.state_dict(keep_vars=True))
            model = model_of({"model_config": vars(model.config), "model": weights}) if self.ranks.is_main else model
        if length == 0 or not self.ranks.is_main:
            return ""
        device, vocabulary = model.wte.weight.device, self.text.vocabulary
        idx = vocabulary.encode(vocabulary.start)[None].to(device)  # (1, 1)
        random = torch.Generator(device).manual_seed(self.config.seed)
        out = model.generate(idx, length, 0.8, do_sample=True, generator=random)  # (1, T)
        return vocabulary.decode(out[0, 1:])

    def _train_passage(self) -> np.ndarray:
        """The end of the training text, a tenth as long as the evaluation text: how well is it known by heart?"""
        return self.text.train_codes[-max(len(self.text.eval_codes) // 10, self.block_size + 1) :]

    def _report_step(self, loss: Tensor, grad_norm: Tensor) -> None:
        watch = self.reporter.watch
        if self._is_due(self.config.log_every_steps):
            # Reading the loss waits for the device: only in steps that log or save.
            values = {  # the loss of the global batch: the mean over ranks, whose shares are equally large
                "train/loss": all_reduce_sum([loss.item()])[0] / self.ranks.world_size,
                "train/grad_norm": grad_norm.item(),
                "train/param_norm": norm(self.parameters.values()),
                "memory/peak_gb": peak_memory(self.ranks.device),
            }
            tokens = self.config.batch_size * self.block_size
            self.reporter.train_step(self.step, values, learning_rates(self.optimizer), tokens)
            watch.restart(self.step)
        with watch.paused():
            self.reporter.step_done()

    def _make_loader(self, dataset: CharDataset) -> DataLoader:
        """The loader of micro-batches; `CharDataset.__getitems__` has put each together already."""
        return DataLoader(
            dataset,
            batch_size=self.micro_batch_size,
            sampler=self.sampler,
            num_workers=self.config.data_loader_workers,
            collate_fn=_as_it_is,
            pin_memory=self.ranks.device.type == "cuda",
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # or the loader would draw from the global one, and shift the dropout
        )

    def _choose_micro_batch(self) -> int:
        """The windows in a forward pass on one rank: what was asked for, or with "auto" as many as fit into memory."""
        size = self.config.sequences_per_forward(self.ranks.world_size)
        if self.config.micro_batch_size == "auto":
            from large.memory import largest_micro_batch

            size = largest_micro_batch(size, self.raw_model, self.optimizer, self.config, self.dtype)
        return size

    def _header(self) -> list[str]:
        """What a run says before its first step, in lines that fit a terminal of 80 columns."""
        c, config, state = self.raw_model.config, self.config, self.state
        size, peaks = self.raw_model.num_parameters() / 1e6, learning_rates(self.optimizer, "initial_lr")
        # An evaluation goes forward only. A backward pass costs two forward passes, and recomputing is one more.
        characters, passes = len(self.text.eval_codes) + len(self._train_passage()), 3 + config.activation_checkpointing
        steps = max(1, round(characters / (config.batch_size * self.block_size * passes)))  # of its length
        advice = "most of the time goes into evaluations: raise data_config.train_split"
        return [
            f"model: {size:.2f} M parameters ({c.n_layer} layers, {c.n_head} heads, width {c.n_embd})",
            f"text: {self.sampler.targets + 1:,} characters to train on, {len(self.text.eval_codes):,} to evaluate on",
            f"guessing evenly among {c.vocab_size} different characters: loss {math.log(c.vocab_size):.2f}",
            f"steps: {state.total_steps:,} of {config.batch_size} windows of {c.block_size} characters; "
            f"an epoch: {self.sampler.steps_per_epoch:,}",
            f"evaluations: every {config.eval_every_steps:,} steps, each about as long as {steps:,} "
            f"step{'s' * (steps > 1)}",
            *[advice] * (steps > config.eval_every_steps),
            f"machine: {str(self.dtype).removeprefix('torch.')} on {self.ranks.device}; a step: "
            f"{ranks_in_words(self.ranks.world_size)} x {self.accumulation_steps} x {self.micro_batch_size} windows",
            f"peak learning rates: Muon {peaks['Muon']:g} (matrices of the blocks), AdamW {peaks['AdamW']:g} (the rest)"
            if "Muon" in peaks
            else f"peak learning rate: AdamW {peaks['AdamW']:g}",
            "a dry run: nothing will be saved" if config.dry_run else f"snapshots: {self.snapshots.url}",
        ]

    # ------------------------------------------------------------------------------ armour: faults of any of the ranks

    def _say_if_rates_jump(self, former: dict[str, Any]) -> None:
        """Log it if the next learning rate is higher than the configuration in a snapshot would have made it."""
        try:
            optimizer, c = OptimizerConfig(**former["optimizer_config"]), TrainerConfig(**former["trainer_config"])
            end = c.steps_in_all(self.sampler.targets // (c.batch_size * self.block_size))
        except (KeyError, TypeError, ValueError):  # of another version of this program: it isn't known
            return

        def factor(c: OptimizerConfig, step: int, end: int) -> float:
            return learning_rate_factor(step, c.warmup_steps, end, c.min_lr_ratio, c.lr_decay)

        was = max(factor(optimizer, step, end) for step in (max(0, self.step - 1), self.step))  # the last, the next
        now = factor(self.optimizer_config, self.step, self.state.total_steps)
        if now > was and self.step < self.state.total_steps:
            log.info(
                "the learning rate jumps up, from %.2f to %.2f of its peak; a run that may be prolonged should have "
                "optimizer_config.lr_decay=wsd from the start", was, now
            )  # fmt: skip

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
        broken, orphaned, self.state.stop_signal = all_reduce_max([is_broken, is_orphaned(), asked])
        if broken:
            raise self._diverged(f"step {self.step + 1}: the loss or its gradient is not finite")
        if orphaned:
            raise RunError(f"step {self.step + 1}: torchrun is gone; leaving without another snapshot")

    def _check_finite(self) -> None:
        """Raise RunError if weights or optimizer state are not finite: such are never evaluated nor saved.

        All ranks raise, or none.
        """
        # The norm: where it overflows, the weights are as good as infinite.
        is_finite = math.isfinite(norm(self.parameters.values()))
        averages = [local(value) for values in self.optimizer.state.values() for value in values.values()]
        if averages:  # one look at the device for all
            is_finite &= bool(torch.stack([average.isfinite().all() for average in averages]).all())
        if all_reduce_max([not is_finite])[0]:  # a rank may have shards only
            raise self._diverged(f"step {self.step} has left weights or optimizer state that are not finite")

    def _diverged(self, what: str) -> RunError:
        """The error of a run that has diverged, with the step to go back to. Rank 0, which knows it, speaks for all."""
        last, back = self.snapshots.last_step, "there is no snapshot yet"
        if last is not None:
            condition = "" if self.config.resume else "without trainer_config.resume=false "
            back = f"the last snapshot is of step {last}: {condition}the next start goes on from there"
        return RunError(
            f"{what}, at learning rates {named(learning_rates(self.optimizer))}; {back}. "
            "Lower the learning rates or trainer_config.grad_norm_clip, and start again"
        )


def run_eagerly(is_compiled: bool) -> AbstractContextManager[None]:
    """Around what a compiled model does beside training: each other shape or mode would compile another graph."""
    if not is_compiled:
        return nullcontext()  # a second of imports that other runs save
    return torch.compiler.set_stance("force_eager")


def _as_it_is(batch: Any) -> Any:
    return batch
