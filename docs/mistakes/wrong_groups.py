"""Parameters in the wrong optimizer group, or in none (TUTORIAL.md, chapter 6).

`AdamW(model.parameters())` decays everything; sorting by kinds of layers and names forgets what has another name.
"""

import torch
from _shared import batch_of, is_quick, print_table, read_parts, small_model
from torch import nn

from model import GPT
from optimizer import OptimizerConfig, create_optimizer, learning_rate_factor, set_learning_rate

CONFIG = OptimizerConfig(name="adamw", learning_rate=4e-3, weight_decay=0.1)


def decay_everything(model: GPT) -> torch.optim.Optimizer:
    """THE MISTAKE: one group for all."""
    return torch.optim.AdamW(model.parameters(), CONFIG.learning_rate, CONFIG.betas, weight_decay=CONFIG.weight_decay)


def forget_some(model: GPT) -> torch.optim.Optimizer:
    """THE MISTAKE: linear layers and biases are listed; gains of norms and the positions are in neither list."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": CONFIG.weight_decay}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, CONFIG.learning_rate, CONFIG.betas)


def train(optimizer: torch.optim.Optimizer, model: GPT, steps: int, quick: bool) -> list[float]:
    """Returns: [mean gain of the norms, mean norm of a position's embedding, loss on unseen text]."""
    T = model.config.block_size
    codes, evaluation, _ = read_parts(T, quick)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate_factor(step, 20, steps, 0.1, "cosine"))
        _, loss = model(*batch_of(codes, T, 16, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    gains = torch.cat([m.weight for m in model.modules() if isinstance(m, nn.LayerNorm)])
    with torch.no_grad():
        _, loss = model(*batch_of(evaluation, T, 300, seed=0))
    return [gains.mean().item(), model.wpe.weight.norm(dim=1).mean().item(), loss.item()]


if __name__ == "__main__":
    quick = is_quick(__doc__)
    _, _, vocab_size = read_parts(32, quick)
    rows = []
    for name, make in (
        ("wrong: everything decays", decay_everything),
        ("wrong: some in no group", forget_some),
        ("right: create_optimizer", lambda model: create_optimizer(model, CONFIG)),
    ):
        torch.manual_seed(0)
        model = small_model(vocab_size, 32)
        rows.append((name, train(make(model), model, 60 if quick else 600, quick)))
    print_table(["mean gain of the norms", "norm of a position", "loss"], rows)
