"""Question: how fast is this program on one GPU, what limits it there, and how good does `baby_gpt` get?

Each measurement is a process of its own, one after the other. What fails or runs out of memory costs its own row only.

1. `baby_gpt`: the whole command `python main.py +recipe=baby_gpt`, its seconds and its evaluation losses. Beside it
   stands what nanoGPT's README says of the same sizes: a best validation loss of 1.4697, after about 3 minutes on an
   A100. (nanoGPT's loss is a mean over random windows of the same tenth of the text, ours one over all of it.)
2. Steps of `baby_gpt` and `gpt2_small`, eager and compiled, `gpt2_small` under each strategy on one rank:
   * tokens per second over whole optimizer steps, with nothing measured inside them;
   * their share of the device's published peak in bfloat16, for devices that `PEAK_TFLOPS` knows. The arithmetic of a
     token is counted as in `train_throughput.py`; Muon's products count nothing;
   * the milliseconds of fetching and copying a batch, of forward, backward and the rest (clipping, the agreement of the
     ranks, the optimizer), by events in the device's own queue, so that the step is not slowed down. Where the device
     waits for the host, the wait counts to the part that comes next;
   * the milliseconds that the host needs to hand out a step, when the device had nothing to do before. Where they are
     as many as the step's, the host limits the step (its launches, in general), and not the device;
   * an evaluation of the whole evaluation text, and a sample of 64 characters, as in the middle of a run;
   * the peak of the memory. A micro-batch that doesn't fit is halved until it does.
3. Generation: greedy tokens per second of a model of `baby_gpt`'s sizes in float32, with and without the cache.
4. Start-up: seconds from the command to the first optimizer step; that of `baby_gpt` includes its compilation.
5. Repeatability: two runs with `trainer_config.deterministic=true`: are weights and losses the same, bit by bit?

The first steps (compilation, allocation) come before the clock starts; it starts and stops when the device has done all
that it was given. After 9.5 minutes nothing new begins, and what is being measured is given up; so what is worth most
is measured first, in the order of `answer`. The compiled rows need a C compiler.

    python benchmarks/gpu.py [--text PATH] [--json PATH] [--quick] [--device cpu]

Units: seconds of wall time; milliseconds, medians over steps; nats per character; tokens per second; GB (1e9 bytes).
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _common import PROJECT, environment, machine, print_table
from generation import LARGE, PROMPT, SMALL, V, generate_uncached, make_model
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from startup import seconds_to_first_step
from time_to_loss import Run, read_curve
from torch import Tensor

from config import Config
from console.reporter import peak_memory
from data.corpus import download_corpus
from distributed import leave, process_group
from large.memory import is_out_of_memory
from large.plan import model_flops
from main import build_trainer
from snapshot import load_snapshot
from trainer import Trainer, run_eagerly

NANOGPT_LOSS = 1.4697  # README of github.com/karpathy/nanoGPT: the best validation loss of train_shakespeare_char.py
NANOGPT_SECONDS = 180.0  # "about 3 minutes" on one A100, says the same

# Products in bfloat16 with sums in float32, without sparsity, as NVIDIA publishes it: in the data sheets of A100, H100,
# H200, L4 and L40S (those that give the rate with sparsity: half of it), and in the white papers of the architectures
# GA102 and Ada for the two GeForce cards. By the name that torch gives.
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.0,
}

SECONDS = 570.0  # after which nothing new begins: "under ten minutes"

QUICK_RUN = [  # lays a model of 8,000 parameters and 8 steps over each recipe
    *("data_config.block_size=16", "data_config.truncate=0.1", "gpt_config.model_type=null"),
    *("gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=16"),
    *("trainer_config.batch_size=4", "trainer_config.max_steps=8", "trainer_config.eval_every_steps=4"),
    *("trainer_config.sample_tokens=8", "trainer_config.log_every_steps=1", "trainer_config.compile=false"),
]

Result = dict[str, Any]  # what a measurement yields, as it comes into the JSON file; {"failed": why} if it has failed


# ------------------------------------------------------------------------------------ inside a measuring process


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Phases:
    """When each phase of some optimizer steps began, by events in the device's queue; on a CPU by the clock.

    An event is reached when all work before it is done, so nobody has to wait for it while the steps are running.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """From here on, time is spent on `phase`."""
        if self.device.type == "cpu":
            self.marks.append((phase, time.perf_counter()))
        else:
            event = torch.Event(self.device, enable_timing=True)
            event.record()
            self.marks.append((phase, event))

    def marked(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that begins a phase."""

        def call(*arguments: Any) -> Any:
            self.mark(phase)
            return function(*arguments)

        return call

    def batches(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass batches on: waiting for one is a phase, and what is done with it is the forward pass at first."""
        while True:
            self.mark("data")
            batch = next(batches)
            self.mark("forward")
            yield batch

    def milliseconds(self, first: str) -> dict[str, float]:
        """Medians over the steps, each of which begins with the phase `first`; the last mark ends the last step."""
        wait_for(self.device)
        steps: list[dict[str, float]] = []
        for (phase, begin), (_, end) in itertools.pairwise(self.marks):
            if phase == first:
                steps.append({})
            duration = 1e3 * (end - begin) if self.device.type == "cpu" else begin.elapsed_time(end)
            steps[-1][phase] = steps[-1].get(phase, 0.0) + duration
        return {phase: statistics.median(step[phase] for step in steps) for phase in steps[0]}


def milliseconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Of a second call; the first one sets up what it needs."""
    function()
    wait_for(device)
    begin = time.perf_counter()
    function()
    wait_for(device)
    return 1e3 * (time.perf_counter() - begin)


def time_parts(trainer: Trainer, step: Callable[[Any], None], batches: Any, steps: int) -> dict[str, float]:
    """Milliseconds of the parts of a step.

    The step is the trainer's own. It tells where it is by what it calls: the scaler takes part in every precision.
    """
    phases = Phases(trainer.ranks.device)
    scaler: Any = trainer.scaler
    scaler.scale, scaler.unscale_ = phases.marked("backward", scaler.scale), phases.marked("rest", scaler.unscale_)
    marked_batches = phases.batches(batches)
    for _ in range(steps):
        phases.mark("start")  # seeds and learning rates, up to the first batch
        step(marked_batches)
    phases.mark("end")
    parts = phases.milliseconds("start")
    parts["rest"] += parts.pop("start")
    return parts


def time_steps(trainer: Trainer, warm_up: int, steps: int) -> Result:
    """Train, and tell how long whole steps take, their parts, an evaluation and a sample."""
    device = trainer.ranks.device
    batches = trainer._batches()
    trainer.model.train()

    def step(batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        trainer._train_step(batches)
        trainer.state.step += 1

    for _ in range(warm_up):
        step(batches)
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step(batches)
    wait_for(device)
    seconds = (time.perf_counter() - begin) / steps

    host = []
    for _ in range(max(3, steps // 3)):  # more of them than wait for the device because they log
        wait_for(device)
        begin = time.perf_counter()
        step(batches)
        host.append(1e3 * (time.perf_counter() - begin))

    parts = time_parts(trainer, step, batches, max(3, steps // 3))
    peak = peak_memory(trainer.ranks.device)
    with run_eagerly(trainer.config.compile):
        evaluation = milliseconds_of(trainer.evaluate, device)
        short_sample = milliseconds_of(lambda: trainer.sample(64), device)
    return {
        "tokens_per_second": trainer.config.batch_size * trainer.block_size / seconds,
        "step_ms": 1e3 * seconds,
        **{f"{phase}_ms": parts[phase] for phase in ("data", "forward", "backward", "rest")},
        "host_ms": statistics.median(host),
        "evaluation_ms": evaluation,
        "sample_ms": short_sample,
        "peak_memory_gb": peak,
        "model_flops_per_token": model_flops(trainer.raw_model),
        "dtype": str(trainer.dtype).removeprefix("torch."),
    }


def measure_steps(text: str, is_quick: bool, overrides: list[str]) -> Result:
    """`time_steps` of a configuration; {"out_of_memory": its micro-batch} where that was too large."""
    with initialize_config_dir(str(PROJECT), version_base="1.3"):
        cfg = compose("gpt2_train_cfg", overrides=overrides)
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), cfg))
    settings = config.trainer_config
    with (
        tempfile.TemporaryDirectory() as run_dir,
        process_group(settings.timeout_minutes, settings.device, settings.strategy == "fsdp") as ranks,
    ):
        trainer = build_trainer(config, text, ranks, run_dir)
        try:
            result = time_steps(trainer, *((1, 3) if is_quick else (10, 30)))
        except RuntimeError as error:  # CUDA, cuBLAS and torch's allocator each have words of their own for it
            if not is_out_of_memory(error):
                raise
            result = {"out_of_memory": trainer.micro_batch_size}
        name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
        return {"device": name, "micro_batch_size": trainer.micro_batch_size, **result}


def measure_generation(device_wish: str, is_quick: bool) -> Result:
    """Tokens per second with and without the cache, for one sample and for eight."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None or device_wish == "cpu" else accelerator
    sizes, block_size, tokens = (SMALL, 32, 32) if is_quick else (LARGE, 256, 512)
    model = make_model(sizes, block_size).to(device)
    rows = []
    for samples in (1, 8):
        idx = torch.randint(V, (samples, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
        ways: dict[str, Callable[[], Tensor]] = {
            "cached": lambda idx=idx: model.generate(idx, tokens),  # type: ignore[misc]
            "uncached": lambda idx=idx: generate_uncached(model, idx, tokens),  # type: ignore[misc]
        }
        speeds = {way: 1e3 * samples * tokens / milliseconds_of(ways[way], device) for way in ways}
        is_same = torch.equal(ways["cached"](), ways["uncached"]())
        rows.append({"samples": samples, "tokens": tokens, **speeds, "same_tokens": is_same})
    return {"rows": rows}


# ------------------------------------------------------------------------------------ what starts them


class Bench:
    """Starts the measurements, and keeps what they yield.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.began = time.monotonic()
        self.text = str(arguments.text.resolve())
        self.overrides = [f"trainer_config.device={arguments.device}", f"data_config.path={self.text}"]
        self.overrides += QUICK_RUN if arguments.quick else []
        self.results: Result = {"machine": machine(), "device": "", "quick": arguments.quick}

    def left(self) -> float | None:
        """The seconds that are left; None for --quick, which may run on any machine."""
        return None if self.arguments.quick else self.began + SECONDS - time.monotonic()

    def run(self, *command: object) -> str:
        """The standard output of a Python program, which may take as long as there is time left.

        Raises:
            subprocess.CalledProcessError: it has failed.
            subprocess.TimeoutExpired: the time is over.
        """
        # cuBLAS adds in a fixed order only if its workspace has a fixed size; without `deterministic` nobody asks.
        env = {**environment(self.arguments.threads), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        words = [sys.executable, *map(str, command)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=self.left(), check=True)
        return done.stdout

    def ask(self, what: str, *overrides: str) -> Result:
        """What a measuring process of this file reports."""
        a = self.arguments
        options = ["--measure", what, "--text", self.text, "--device", a.device, *["--quick"] * a.quick]
        answer: Result = json.loads(self.run(__file__, *options, *overrides).splitlines()[-1])
        return answer

    def attempt(self, name: str, measure: Callable[[], Result]) -> Result:
        """What a measurement yields, or why it has failed; the others don't suffer from it."""
        left = self.left()
        try:
            result = measure() if left is None or left > 0 else {"failed": "the time was over"}
        except subprocess.TimeoutExpired:
            result = {"failed": "the time was over"}
        except subprocess.CalledProcessError as error:
            result = {"failed": last_line(error.stderr)}
        except SystemExit as error:  # of `seconds_to_first_step`
            result = {"failed": last_line(str(error))}
        print(f"{time.monotonic() - self.began:.0f} s: {name}: {result}", file=sys.stderr, flush=True)
        return result

    def keep(self, name: str, result: Any) -> None:
        """Put a result into the JSON file at once: what comes later can't cost it."""
        self.results |= {name: result, "seconds": time.monotonic() - self.began}
        self.arguments.json.parent.mkdir(parents=True, exist_ok=True)
        self.arguments.json.write_text(json.dumps(self.results, indent=2, allow_nan=False) + "\n", encoding="utf-8")

    # ---------------------------------------------------------------- the five questions

    def whole_run(self) -> Result:
        """`baby_gpt` from the command to its end."""
        with tempfile.TemporaryDirectory() as run_dir:
            begin = time.perf_counter()
            self.run(PROJECT / "main.py", "+recipe=baby_gpt", f"hydra.run.dir={run_dir}", *self.overrides)
            run = Run(time.perf_counter() - begin, read_curve(run_dir))
        seconds = run.seconds_to(NANOGPT_LOSS)
        best = min(loss for _, loss in run.curve)
        return {
            "wall_seconds": run.wall,
            "training_seconds": run.training,
            "final_loss": run.final_loss,
            "best_loss": best,
            "seconds_to_best_loss": run.seconds_to(best),
            "seconds_to_nanogpts_loss": seconds if math.isfinite(seconds) else None,
        }

    def steps(self, recipe: str, strategy: str, is_compiled: bool) -> Result:
        """Steps of a recipe, with the largest micro-batch of halves that fits."""
        settings = [f"+recipe={recipe}", *self.overrides, f"trainer_config.compile={str(is_compiled).lower()}"]
        if strategy != "ddp":  # the default
            settings.append(f"trainer_config.strategy={strategy}")
        result = self.ask("steps", *settings)
        while "out_of_memory" in result:
            micro = result["out_of_memory"] // 2
            if micro == 0:
                return {"failed": "out of memory with one window in a micro-batch"}
            result = self.ask("steps", *settings, f"trainer_config.micro_batch_size={micro}")
        self.results["device"] = result["device"]
        return result | {"share_of_peak": share_of_peak(result)}

    def start_up(self, *overrides: str) -> Result:
        """Seconds to the first optimizer step of a run that ends there."""
        return dict(seconds_to_first_step([sys.executable], self.arguments.threads, [*self.overrides, *overrides]))

    def repeat(self) -> Result:
        """Two short runs of `baby_gpt` that must be the same."""
        ends, losses = [], []
        settings = ["trainer_config.deterministic=true", "trainer_config.eval_every_steps=50"]
        settings += [] if self.arguments.quick else ["trainer_config.max_steps=100"]
        for _ in range(2):
            with tempfile.TemporaryDirectory() as run_dir:
                command = ["+recipe=baby_gpt", f"hydra.run.dir={run_dir}", *self.overrides, *settings]
                self.run(PROJECT / "main.py", *command)
                ends.append(load_snapshot(str(Path(run_dir) / "gpt_snapshot.pt")))
                losses.append([loss for _, loss in read_curve(run_dir)])
        one, other = (end["model"] for end in ends)
        is_same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        return {"steps": ends[0]["step"], "same_weights": is_same, "same_losses": losses[0] == losses[1]}


def last_line(text: str) -> str:
    """The last line that isn't empty: the error, in general."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no word about it")


def share_of_peak(result: Result) -> float | None:
    """The part of the device's published rate in bfloat16 that training needs; None if it isn't known."""
    peak = PEAK_TFLOPS.get(result["device"])
    if peak is None or result["dtype"] != "bfloat16":
        return None
    return float(result["tokens_per_second"] * result["model_flops_per_token"] / (1e12 * peak))


def cells(result: Result, *forms: str) -> list[object]:
    """Columns of a table, each by name and format, as in "step_ms:.1f"; empty where there is no figure."""
    if "failed" in result:
        return [f"failed: {result['failed']}", *[""] * (len(forms) - 1)]
    parts = [form.partition(":") for form in forms]
    return ["" if result.get(name) is None else format(result[name], form) for name, _, form in parts]


def print_tables(results: Result) -> None:
    """Print all that was measured."""
    note = f"On {results['device'] or 'an unknown device'}."
    forms = ["wall_seconds:.1f", "training_seconds:.1f", "final_loss:.4f", "best_loss:.4f", "seconds_to_best_loss:.1f"]
    ours = ["ours", *cells(results["baby_gpt"], *forms, "seconds_to_nanogpts_loss:.1f")]
    theirs = ["nanoGPT's README, one A100", f"about {NANOGPT_SECONDS:.0f}", "", "", str(NANOGPT_LOSS), "", ""]
    header = ["`baby_gpt`", "wall, s", "training, s", "final loss", "best loss", "training s to it", "s to nanoGPT's"]
    print_table(header, [ours, [*theirs]], note)

    forms = ["micro_batch_size:d", "tokens_per_second:,.0f", "share_of_peak:.1%", "step_ms:.1f", "data_ms:.2f"]
    forms += ["forward_ms:.2f", "backward_ms:.2f", "rest_ms:.2f", "host_ms:.2f"]
    forms += ["evaluation_ms:.0f", "sample_ms:.0f", "peak_memory_gb:.2f"]
    print()
    print_table(
        [
            *("recipe", "strategy", "compiled", "micro-batch", "tokens/s", "share of the bfloat16 peak", "step, ms"),
            *("data, ms", "forward, ms", "backward, ms", "clipping and optimizer, ms", "host alone, ms"),
            *("evaluation, ms", "sample of 64, ms", "peak memory, GB"),
        ],
        [[r["recipe"], r["strategy"], "yes" if r["compiled"] else "no", *cells(r, *forms)] for r in results["steps"]],
        note,
    )
    print()
    header = ["samples", "tokens of each", "cached, tokens/s", "uncached, tokens/s", "same tokens"]
    forms = ["samples:d", "tokens:d", "cached:,.0f", "uncached:,.0f", "same_tokens"]
    rows = results["generation"].get("rows", [results["generation"]])
    print_table(header, [cells(row, *forms) for row in rows], f"{note} Greedy, in float32.")
    print()
    starts = [[f"`{name}`", *cells(result, "seconds:.2f")] for name, result in results["start_up"].items()]
    print_table(["from the command to the first step", "s"], starts, note)
    print()
    same = cells(results["repeat"], "steps:d", "same_weights", "same_losses")
    print_table(["`deterministic=true`, two runs: steps", "same weights", "same losses"], [same], note)


def answer(bench: Bench) -> None:
    """Measure everything, write it down and print it."""
    rows: list[Result] = []

    def steps(recipe: str, strategy: str, is_compiled: bool) -> None:
        row = {"recipe": recipe, "strategy": strategy, "compiled": is_compiled}
        words = f"steps of {recipe}, {strategy}, {'compiled' if is_compiled else 'eager'}"
        rows.append(row | bench.attempt(words, lambda: bench.steps(recipe, strategy, is_compiled)))
        bench.keep("steps", rows)

    # What is worth most comes first: where the time is short, it ends the last.
    bench.keep("baby_gpt", bench.attempt("baby_gpt to its end", bench.whole_run))
    steps("gpt2_small", "ddp", False)
    steps("gpt2_small", "ddp", True)
    bench.keep("repeat", bench.attempt("two equal runs", bench.repeat))
    steps("baby_gpt", "ddp", False)
    steps("baby_gpt", "ddp", True)
    bench.keep("generation", bench.attempt("generation", lambda: bench.ask("generation")))
    starts = {"python main.py": bench.attempt("start-up", bench.start_up)}
    compiled = bench.attempt("start-up", lambda: bench.start_up("+recipe=baby_gpt"))
    bench.keep("start_up", starts | {"python main.py +recipe=baby_gpt": compiled})
    steps("gpt2_small", "fsdp", False)  # one rank has nobody to share with: what the strategy itself costs
    steps("gpt2_small", "fsdp", True)
    print_tables(bench.results)
    print(f"\nwritten: {bench.arguments.json}")


def main() -> None:
    """Measure, print and write; with --measure, be one of the processes that do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, 8 steps, nothing compiled; the figures mean nothing"
    )
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--text", type=Path, help="default: tiny-shakespeare, with --quick the bundled text")
    parser.add_argument("--json", type=Path, default=PROJECT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", choices=["steps", "generation"], help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure == "generation":
        print(json.dumps(measure_generation(arguments.device, arguments.quick)))
    if arguments.measure == "steps":
        print(json.dumps(measure_steps(str(arguments.text), arguments.quick, arguments.overrides)))
        leave(0)
    if arguments.measure:
        return
    if arguments.device == "auto" and not torch.accelerator.is_available():
        sys.exit("error: torch finds no GPU here; --quick --device cpu tries out whether the benchmark itself works")
    if arguments.quick:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # to torch.compile: leave everything as it is
    if arguments.text is None:
        arguments.text = PROJECT / "data" / ("sample.txt" if arguments.quick else "input.txt")
        if not arguments.text.exists():
            try:
                download_corpus(arguments.text)
            except OSError as error:
                sys.exit(f"error: tiny-shakespeare can't be downloaded ({error}); name a text with --text PATH")
    answer(Bench(arguments))


if __name__ == "__main__":
    main()
