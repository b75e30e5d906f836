"""Clipping a gradient that still carries the scaler's factor (TUTORIAL.md, chapter 7).

Everything is computed in float32 here: the order of the calls is the mistake, not the precision.
"""

import torch
from _shared import batch_of, is_quick, print_table, read_parts, small_model
from torch.nn.utils import clip_grad_norm_

from optimizer import OptimizerConfig, create_optimizer

LEARNING_RATE, CLIP = 1e-3, 1.0


def train(unscale_first: bool, steps: int, quick: bool) -> list[float]:
    """Returns: [norm of the first gradient that is applied, first change of a weight / learning rate, final loss]."""
    T = 32
    codes, evaluation, vocab_size = read_parts(T, quick)
    torch.manual_seed(0)
    model = small_model(vocab_size, T, n_layer=4, n_embd=128)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = create_optimizer(model, OptimizerConfig(name="adamw", learning_rate=LEARNING_RATE, weight_decay=0.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for step in range(steps):
        _, loss = model(*batch_of(codes, T, 12, seed=step))
        scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), CLIP)
        else:  # THE MISTAKE: the norm that is clipped is 65536 times too large
            clip_grad_norm_(model.parameters(), CLIP)
            scaler.unscale_(optimizer)
        if step == 0:
            norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            change = ((after - before).abs().mean() / LEARNING_RATE).item()
    with torch.no_grad():
        _, loss = model(*batch_of(evaluation, T, 100, seed=0))
    return [norm, change, loss.item()]


if __name__ == "__main__":
    quick = is_quick(__doc__)
    steps = 30 if quick else 200
    print_table(
        ["norm applied", "first step / learning rate", f"loss after {steps} steps"],
        [
            ("wrong: clip, then unscale", train(False, steps, quick)),
            ("right: unscale, then clip", train(True, steps, quick)),
        ],
    )
