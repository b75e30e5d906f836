"""The scaled initialisation reaches the attention's output and not the MLP's (TUTORIAL.md, chapter 4).

It happens where names are matched, and the MLP's last layer is called something else than `c_proj`.
"""

from typing import Any

import torch
from _shared import batch_of, is_quick, print_table, read_parts, small_model
from torch import Tensor, nn

from model import GPT

N_LAYER = 8


def forget_mlp(model: GPT) -> GPT:
    """THE MISTAKE: the MLP's output projection keeps the standard deviation of all other layers."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.c_proj.weight"):
            nn.init.normal_(parameter, std=0.02)
    return model


@torch.no_grad()
def measure(model: GPT, x: Tensor) -> list[float]:
    """[Standard deviation of the MLP's output weights, of its output, of the stream before and after the blocks]."""
    seen: dict[str, Tensor] = {}
    first: Any = model.h[0]
    hooks = [
        model.drop.register_forward_hook(lambda module, args, out: seen.update(before=out)),
        first.mlp.register_forward_hook(lambda module, args, out: seen.update(branch=out)),
        model.h[-1].register_forward_hook(lambda module, args, out: seen.update(after=out)),
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return [float(t.std()) for t in (first.mlp.c_proj.weight, seen["branch"], seen["before"], seen["after"])]


if __name__ == "__main__":
    T = 64
    codes, _, vocab_size = read_parts(T, is_quick(__doc__))
    batch = batch_of(codes, T, 32, seed=0)[0]
    rows = []
    for name, prepare in (("wrong: attention only", forget_mlp), ("right: both projections", lambda model: model)):
        torch.manual_seed(0)
        rows.append((name, measure(prepare(small_model(vocab_size, T, n_layer=N_LAYER, n_embd=128)), batch)))
    print(f"{N_LAYER} blocks; standard deviations at the start of training")
    print_table(["MLP's output weights", "MLP's output", "stream before blocks", "stream after blocks"], rows)
