"""Draws the pictures of README.md and TUTORIAL.md, from the project's own functions and from runs.

python docs/pictures.py mask schedule muon ranks restart  # the ones named, or all five: docs/NAME.png
python docs/pictures.py curves RUN_DIR RUN_DIR            # docs/curves.png from two finished runs' TensorBoard events
python docs/pictures.py run RUN_DIR                       # docs/run.png: one run's losses, and what it writes meanwhile
python docs/pictures.py terminal COMMAND ...              # docs/terminal.gif: the command, recorded in a terminal
python docs/pictures.py page look.html                    # docs/page.png: two parts of a page of look.py, by Chromium
"""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
PROJECT = DOCS.parent
sys.path[:0] = [str(PROJECT), str(DOCS / "mistakes")]

from char_dataset import CharDataset, CharVocabulary, WindowSampler  # noqa: E402
from config import Config  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from muon import MuonWithAdamW, orthogonalize  # noqa: E402
from optimizer import create_optimizer, learning_rate_factor, set_learning_rate  # noqa: E402
from snapshot import load_snapshot  # noqa: E402

BLUE, ORANGE, GREEN, RED, GREY = "#1f77b4", "#e07b00", "#2a8a3e", "#c22f2f", "#8a8a8a"  # told apart without colour too
plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 110})


def save(figure: Figure, name: str) -> None:
    """Write docs/NAME.png on white, so that it reads on dark pages too."""
    figure.savefig(DOCS / f"{name}.png", facecolor="white", bbox_inches="tight")
    plt.close(figure)
    print(f"docs/{name}.png: {(DOCS / f'{name}.png').stat().st_size / 1024:.0f} KB")


def attention_weights(T: int, float_mask: bool) -> Tensor:
    """What each query takes from each key where all scores are equal: (T, T)."""
    q = k = torch.zeros(1, 1, T, 8)
    v = torch.eye(T)[None, None]  # the output is then the weights themselves
    if float_mask:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.tril(torch.ones(T, T)))[0, 0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]


def draw_mask() -> None:
    """The causal mask, the mask that leaks, and what a trained model makes of the leak."""
    from float_mask import loss_by_position

    T = 8
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), width_ratios=[1, 1, 1.5], layout="constrained")
    for axis, name, weights in (
        (axes[0], "is_causal=True", attention_weights(T, float_mask=False)),
        (axes[1], "float tril mask, added", attention_weights(T, float_mask=True)),
    ):
        axis.imshow(weights.sqrt(), cmap="Blues", vmin=0, vmax=1)
        for i in range(T):
            for j in range(T):
                weight = float(weights[i, j])
                leaks = j > i and weight > 0
                colour = RED if leaks else "white" if weight > 0.3 else "black"
                text = f"{weight:.2f}".lstrip("0") if weight else "0"
                axis.text(j, i, text, ha="center", va="center", fontsize=7, color=colour, weight=700 if leaks else 400)
        axis.set(title=name, xlabel="key: position looked at", ylabel="query: position that looks")
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    for (name, loss), colour, style in zip(
        loss_by_position(quick=False).items(), (RED, BLUE), ("-", "--"), strict=True
    ):
        axes[2].plot(range(len(loss)), loss, color=colour, linestyle=style, label=name)
        axes[2].plot(len(loss) - 1, loss[-1], "o", color=colour)
    axes[2].set(title="loss on unseen text after 450 steps", xlabel="position in the window", ylabel="nats a character")
    axes[2].set_ylim(bottom=-0.1)
    axes[2].legend(frameon=False, loc=(0.05, 0.4))
    save(figure, "mask")


def draw_schedule() -> None:
    """The learning-rate factor of the default run, of one with warm-up and floor that one can see, and of wsd."""
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    total = 1100
    for warmup, floor, decay, colour, style in (
        (20, 0.0, "linear", BLUE, "-"),
        (200, 0.1, "cosine", ORANGE, "--"),
        (20, 0.0, "wsd", GREEN, ":"),
    ):
        factors = [learning_rate_factor(step, warmup, total, floor, decay) for step in range(total + 100)]
        axis.plot(
            factors, color=colour, linestyle=style, label=f"{decay}, warmup_steps={warmup}, min_lr_ratio={floor:g}"
        )
    axis.axvline(total, color=GREY, linewidth=0.8)
    axis.annotate("total_steps", (total, 0.95), (-4, 0), textcoords="offset points", ha="right", color=GREY)
    axis.set(xlabel="optimizer step", ylabel="factor of the peak learning rate", ylim=(0, 1.05), xlim=(0, total + 100))
    axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    save(figure, "schedule")


def gradient_average(name: str, steps: int) -> tuple[Tensor, int]:
    """Train the default model on the bundled play: (a matrix's average of gradients, Muon's Newton-Schulz steps)."""
    from _shared import batch_of, read_parts

    config = Config()
    T, c = config.data_config.block_size, config.optimizer_config
    codes, _, vocab_size = read_parts(T, quick=True)
    torch.manual_seed(config.trainer_config.seed)
    model = GPT(config.model_config(vocab_size))
    optimizer = create_optimizer(model, c)
    assert isinstance(optimizer, MuonWithAdamW)
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate_factor(step, c.warmup_steps, 1100, c.min_lr_ratio, c.lr_decay))
        _, loss = model(*batch_of(codes, T, config.trainer_config.batch_size, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state[model.get_parameter(name)]["momentum_buffer"], optimizer.parts["muon"].defaults["ns_steps"]


def draw_muon() -> None:
    """The singular values of a matrix's average of gradients, and of what Muon makes of it."""
    average, ns_steps = gradient_average("h.1.mlp.c_fc.weight", steps=100)
    update = orthogonalize(average[None], torch.float32, ns_steps)[0]
    before, after = torch.linalg.svdvals(average), torch.linalg.svdvals(update)
    before = before / before[0]
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    numbers = range(1, len(before) + 1)
    axis.plot(numbers, before, color=BLUE, label="before: the average of the gradients (its largest set to 1)")
    axis.plot(numbers, after, color=ORANGE, linestyle="--", label="after: what Muon makes of it")
    for values, height, colour in ((before, 0.14, BLUE), (after, 1.1, ORANGE)):
        words = f"{int((values > 0.5).sum())} of {len(values)} above 0.5"
        axis.text(0.5 * len(values), height, words, ha="center", color=colour)
    axis.axhline(0.5, color=GREY, linewidth=0.8)
    axis.set(xlabel="direction, from the strongest to the weakest", ylabel="strength (singular value)")
    axis.set(xlim=(1, len(before)), ylim=(0, 1.35))
    axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, "muon")


def draw_ranks() -> None:
    """Which windows of a text make up each optimizer step, and which rank has them, for 1, 2 and 3 ranks."""
    T, batch_size = 8, 6
    dataset = CharDataset(np.zeros(270, dtype=np.uint8), T)
    figure, axes = plt.subplots(1, 3, figsize=(11, 2.9), sharey=True, layout="constrained")
    for world_size, axis in zip((1, 2, 3), axes, strict=True):
        for rank in range(world_size):
            sampler = WindowSampler(dataset, batch_size, world_size, rank, seed=3)
            sampler.set_epoch(0)
            colour, hatch = ((BLUE, ""), (ORANGE, "//"), (GREEN, ".."))[rank]
            share = batch_size // world_size
            for i, start in enumerate(sampler):
                axis.barh(i // share + 1, T, left=start, height=0.7, color=colour, hatch=hatch, edgecolor="white")
            axis.bar(0, 0, color=colour, hatch=hatch, edgecolor="white", label=f"rank {rank}")
        steps = sampler.steps_per_epoch
        axis.set(title=f"{world_size} rank" + "s" * (world_size > 1), xlabel="character of the text")
        axis.set(xlim=(0, len(dataset.codes)), ylim=(steps + 0.6, 0.4), yticks=range(1, steps + 1))
        axis.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22), columnspacing=1)
    axes[0].set_ylabel("optimizer step")
    save(figure, "ranks")


def watch(run_dir: Path, began: float, kill_at: int | None) -> list[tuple[float, int]]:
    """Run main.py, note when it reports each step, and kill it (SIGKILL) at one of them.

    Returns:
        (seconds since `began`, step) of every report.
    """
    command = [sys.executable, PROJECT / "main.py", f"hydra.run.dir={run_dir}", "trainer_config.max_steps=60"]
    command += [f"data_config.path={PROJECT / 'data' / 'sample.txt'}", "trainer_config.save_every_steps=20"]
    command += ["trainer_config.log_every_steps=1", "trainer_config.eval_every_steps=1000"]
    command += ["trainer_config.sample_tokens=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([str(c) for c in command], env=environment, stderr=subprocess.DEVNULL)
    log = run_dir / "main.log"
    offset = log.stat().st_size if log.exists() else 0
    reports: list[tuple[float, int]] = []
    while process.poll() is None:
        time.sleep(0.005)
        if not log.exists():
            continue
        with open(log, encoding="utf-8") as file:
            file.seek(offset)
            found = [int(step) for step in re.findall(r"step (\d+)/\d+: loss", file.read())]
        reports += [(time.perf_counter() - began, step) for step in found[len(reports) :]]
        if reports and reports[-1][1] == kill_at:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return reports


def draw_restart() -> None:
    """The timeline of a run that is killed between two snapshots and started again."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        first = watch(Path(folder), began, kill_at=33)
        restarted = time.perf_counter() - began
        second = watch(Path(folder), began, kill_at=None)
    assert first[-1][1] == 33
    assert second[0][1] == 21, "the run went on from the snapshot of step 20"
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axis.plot(*zip(*[r for r in first if r[1] <= 20], strict=True), color=BLUE, linewidth=2)
    lost = [r for r in first if r[1] >= 20]
    axis.plot(*zip(*lost, strict=True), color=RED, linewidth=2, linestyle=":", label="computed, and lost")
    axis.plot(*zip(*second, strict=True), color=BLUE, linewidth=2, label="computed, and kept")
    saved = [r for r in first if r[1] == 20] + [r for r in second if r[1] in (40, 60)]
    axis.plot(*zip(*saved, strict=True), "o", color=GREEN, markersize=8, label="snapshot")
    axis.plot(*first[-1], "X", color=RED, markersize=10)
    axis.annotate("SIGKILL", first[-1], (8, 4), textcoords="offset points", color=RED)
    axis.axvspan(restarted, second[0][0], color=GREY, alpha=0.2, linewidth=0)
    middle = (restarted + second[0][0]) / 2
    axis.annotate("starts again,\nreads the snapshot", (middle, 2), ha="center", fontsize=9)
    axis.annotate("", second[0], saved[0], arrowprops={"arrowstyle": "->", "color": GREEN, "linestyle": "--"})
    axis.set(xlabel="seconds since the first start", ylabel="optimizer steps done", xlim=(0, None), ylim=(0, 63))
    axis.legend(frameon=False, loc="upper left")
    save(figure, "restart")


def read_scalars(run_dir: str, tag: str) -> tuple[list[int], list[float]]:
    """(Steps, values) of one of TensorBoard's curves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(run_dir, size_guidance={"scalars": 0})
    events.Reload()
    points = events.Scalars(tag)
    return [p.step for p in points], [p.value for p in points]


def draw_curves(run_dirs: list[str]) -> None:
    """Losses of finished runs, over their optimizer steps: training thin, evaluation thick."""
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for run_dir, colour, marker in zip(run_dirs, (BLUE, ORANGE), ("o", "s"), strict=True):
        axis.plot(*read_scalars(run_dir, "train/loss"), color=colour, linewidth=0.6, alpha=0.6)
        steps, losses = read_scalars(run_dir, "eval/loss")
        name = Path(run_dir).resolve().name
        axis.plot(steps, losses, color=colour, marker=marker, label=f"{name}: evaluation (thin: training)")
        axis.annotate(f"{losses[-1]:.3f}", (steps[-1], losses[-1]), (6, 0), textcoords="offset points", va="center")
    axis.set(xlabel="optimizer step", ylabel="loss, nats a character", ylim=(1.2, 2.8), xlim=(0, None))
    axis.legend(frameon=False)
    save(figure, "curves")


YARDSTICK = 1.905  # what nanoGPT's settings for a CPU end at: the recorded median in docs/results.md


def untrained_text(run_dir: str, length: int) -> str:
    """What the model of a run wrote before its first step: the same seed makes the same weights and the same draws."""
    snapshot = load_snapshot(f"{run_dir}/gpt_snapshot.pt")
    seed, vocabulary = snapshot["config"]["trainer_config"]["seed"], CharVocabulary(snapshot["vocabulary"])
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**snapshot["model_config"]))
    random = torch.Generator().manual_seed(seed)
    out = model.generate(vocabulary.encode("\n")[None], length, 0.8, do_sample=True, generator=random)
    return vocabulary.decode(out[0, 1:])


def read_samples(run_dir: str) -> dict[int, str]:
    """The texts that a run wrote at its evaluations, by optimizer step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(run_dir, size_guidance={"tensors": 0})
    events.Reload()
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary")}
    return {step: "\n".join(line.removeprefix("    ") for line in text.split("\n")) for step, text in texts.items()}


def draw_run(run_dir: str, steps: tuple[int, ...] = (0, 100, 300)) -> None:
    """docs/run.png: the losses of one run beside what it wrote at some steps and at its end.

    The run must have been evaluated at these steps: python main.py trainer_config.eval_every_steps=100
    """
    samples = {0: untrained_text(run_dir, 500), **read_samples(run_dir)}
    if missing := [step for step in steps if step not in samples]:
        sys.exit(f"error: {run_dir} has no samples of steps {missing}; train with trainer_config.eval_every_steps=100")
    steps = (*steps, max(samples))
    figure = plt.figure(figsize=(11, 5.2), layout="constrained")
    grid = figure.add_gridspec(len(steps), 2, width_ratios=[1.15, 1])
    axis = figure.add_subplot(grid[:, 0])
    axis.plot(*read_scalars(run_dir, "train/loss"), color=BLUE, linewidth=0.7, alpha=0.7, label="training loss")
    at, losses = read_scalars(run_dir, "eval/loss")
    axis.plot(at, losses, color=ORANGE, marker="o", markersize=4, label="evaluation loss")
    axis.annotate(f"{losses[-1]:.2f}", (at[-1], losses[-1]), (4, 6), textcoords="offset points")
    for level, words in (
        (np.log(65), "guessing evenly: ln 65 = 4.17"),
        (YARDSTICK, "nanoGPT's CPU settings end at 1.91"),
    ):
        axis.axhline(level, color=GREY, linewidth=1, linestyle="--")
        axis.text(at[-1], level + 0.04, words, ha="right", color="#555555")
    axis.set(xlabel="optimizer step", ylabel="loss, nats a character", ylim=(1.2, 4.5), xlim=(0, None))
    axis.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.88))
    for row, step in enumerate(steps):
        panel = figure.add_subplot(grid[row, 1])
        panel.axis("off")
        lines = [line[:56] for line in samples[step].strip("\n").split("\n")][:5]
        panel.set_title(f"step {step:,}", loc="left", fontsize=10, weight="bold")
        panel.text(0, 1, "\n".join(lines), va="top", family="monospace", fontsize=8.5, parse_math=False)
    save(figure, "run")


COLUMNS, LINES = 100, 30  # of the recorded terminal


def record(command: list[str]) -> list[list[str]]:
    """Run a command in a terminal of its own; what stands on the screen, twice a second."""
    import pty

    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {' '.join(command)}\r\n".encode())
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("sh", ["sh", "-c", f"stty columns {COLUMNS} rows {LINES}; exec {shlex.join(command)}"])
    frames, began = [list(screen.display)], time.perf_counter()
    while True:
        due = began + 0.5 * len(frames) - time.perf_counter()
        if due <= 0:
            frames.append(list(screen.display))
        elif select.select([terminal], [], [], due)[0]:
            try:
                stream.feed(os.read(terminal, 1 << 16))
            except OSError:  # Linux's way to say that the other end is closed
                break
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit(f"error: the command failed:\n{chr(10).join(screen.display)}")
    return [*frames, list(screen.display)]


def draw_terminal(command: list[str], seconds: float = 12.0) -> None:
    """docs/terminal.gif: a recorded command, played in so many seconds; its end stays for five more."""
    from PIL import Image, ImageDraw, ImageFont

    frames = record(command)
    frames = [*frames[:: max(1, len(frames) // 60)], frames[-1]]
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"), 13)
    images = []
    for lines in frames:
        image = Image.new("P", (8 * COLUMNS + 24, 17 * LINES + 20), 0)
        image.putpalette([24, 26, 31, 220, 223, 228])
        draw = ImageDraw.Draw(image)
        draw.fontmode = "1"  # two colours: small files
        for number, line in enumerate(lines):
            text = line.replace(f"{PROJECT}/", "").rstrip()  # where the project lies is nobody's business
            draw.text((12, 10 + 17 * number), text, fill=1, font=font)
        images.append(image)
    pauses = [int(1000 * seconds / len(images))] * (len(images) - 1) + [5000]
    images[0].save(DOCS / "terminal.gif", save_all=True, append_images=images[1:], duration=pauses, loop=0)
    print(f"docs/terminal.gif: {(DOCS / 'terminal.gif').stat().st_size / 1024:.0f} KB, {len(images)} frames")


def draw_page(file: str) -> None:
    """Two parts of a page of look.py, side by side: surprise, and attention. It needs Debian's chromium."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 700, "height": 900})
        page.goto(Path(file).resolve().as_uri())
        page.wait_for_selector("body[data-ready]", state="attached")
        parts = []
        for name in ("surprise", "maps"):
            page.locator(f"#{name}").screenshot(path=f"{folder}/{name}.png")
            parts.append(Image.open(f"{folder}/{name}.png").convert("RGB"))
        browser.close()
    whole = Image.new("RGB", (sum(part.width for part in parts) + 24, max(part.height for part in parts)), "white")
    whole.paste(parts[0], (0, 0))
    whole.paste(parts[1], (parts[0].width + 24, 0))
    whole.quantize(64).save(DOCS / "page.png", optimize=True)
    print(f"docs/page.png: {(DOCS / 'page.png').stat().st_size / 1024:.0f} KB")


def main() -> None:
    """Draw what the command line names."""
    torch.set_num_threads(1)
    names = sys.argv[1:] or ["mask", "schedule", "muon", "ranks", "restart"]
    if names[0] == "curves":
        if len(names) != 3:
            sys.exit("error: name two run directories: python docs/pictures.py curves RUN_DIR RUN_DIR")
        draw_curves(names[1:])
        return
    if names[0] == "run":
        if len(names) != 2:
            sys.exit("error: name a run directory: python docs/pictures.py run RUN_DIR")
        draw_run(names[1])
        return
    if names[0] == "terminal":
        if len(names) == 1:
            sys.exit("error: name a command: python docs/pictures.py terminal COMMAND ...")
        draw_terminal(names[1:])
        return
    if names[0] == "page":
        if len(names) != 2:
            sys.exit("error: name a page of look.py: python docs/pictures.py page look.html")
        draw_page(names[1])
        return
    functions = {
        **{"mask": draw_mask, "schedule": draw_schedule, "muon": draw_muon},
        **{"ranks": draw_ranks, "restart": draw_restart},
    }
    for name in names:
        if name not in functions:
            sys.exit(
                f"error: no picture is called {name}; there are {', '.join(functions)}, curves, run, terminal and page"
            )
        functions[name]()


if __name__ == "__main__":
    main()
