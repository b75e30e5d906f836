"""Muon: the optimizer that the default run uses for the matrices of the blocks. For a second reading.

A gradient's matrix has a few large singular values and many small ones, so most directions in it are hardly learned.
Muon keeps an average of the gradients, and in its place takes a matrix with the same directions whose singular values
are all near 1: every direction is learned at about the same speed. `optimizer.py` decides which parameters it gets.
`trainer.py` comes next.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer

from distributed import like, whole

Group = dict[str, Any]  # parameters that share a learning rate and a weight decay, as torch's optimizers take them


def orthogonalize(matrices: Tensor, dtype: torch.dtype, ns_steps: int) -> Tensor:
    """Replace matrices (n, rows, columns) by nearly orthogonal ones with the same singular vectors.

    Newton-Schulz iteration: an odd polynomial of a matrix acts on its singular values alone, and this one drives them
    towards 1 without a decomposition. Four steps bring all singular values above 1/200 of the matrix's norm between
    0.7 and 1.2. The coefficients are those of Jordan et al. (kellerjordan.github.io/posts/muon).

    Args:
        matrices: float32, any shape of matrix.
        dtype: to compute in; bfloat16 is exact enough for training, float32 for comparing runs.
        ns_steps: how often the polynomial is applied.
    """
    X = matrices.to(dtype)
    is_tall = X.size(1) > X.size(2)
    if is_tall:
        X = X.mT  # the products below are smaller this way round
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # all singular values at most 1
    a, b, c = 3.4445, -4.775, 2.0315
    for _ in range(ns_steps):
        A = X @ X.mT  # (n, rows, rows)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A²
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return (X.mT if is_tall else X).float()


class Muon(Optimizer):
    """Momentum, orthogonalized: Muon (Jordan et al. 2024) for all matrices of one shape at a time.

    torch has a Muon too, which takes one matrix after the other, in bfloat16 always: up to 1.6 times the time on small
    models, and a rounding that makes runs on one rank and on two differ after a dozen steps even where all else is
    float32.

    Args:
        groups: matrices with their "lr" and "weight_decay".
        dtype: what to orthogonalize in.
        rank, world_size: this process's place among those that hold the same matrices and gradients.
    """

    def __init__(self, groups: list[Group], dtype: torch.dtype, rank: int = 0, world_size: int = 1):
        # With a momentum of 0.9 instead of the usual 0.95, a run of 1,000 steps ended 0.01 nats lower; a fifth
        # Newton-Schulz step, as the authors take, costs 3 ms more in each step on a CPU and gains nothing.
        super().__init__(groups, {"momentum": 0.9, "ns_steps": 4})
        self.dtype, self.rank, self.world_size = dtype, rank, world_size

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for matrices in by_shape.values():
                self._step_alike(group, matrices)

    def _step_alike(self, group: Group, matrices: list[Tensor]) -> None:
        """Update n matrices of one shape."""
        rows, columns = matrices[0].shape
        # A matrix of (3C, C) is three side by side: those of queries, keys and values have no directions in common that
        # should be orthogonal. With all three as one matrix, a run of 1,250 steps ended 0.02 nats higher.
        if rows == 3 * columns:
            rows = columns
        gradients = [p.grad for p in matrices if p.grad is not None]
        for p in matrices:
            if not self.state[p]:  # only before a matrix's first step
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        averages = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(averages, gradients, 1.0 - group["momentum"])
        # Nesterov: the gradient that the average would give if this step's gradient came once more.
        lookahead = torch._foreach_lerp(gradients, averages, group["momentum"])
        together = torch.stack(lookahead)
        pieces = whole(together).view(-1, rows, columns)  # n of them, or 3n
        updates = self._orthogonalize_together(pieces, group["ns_steps"]).reshape(len(matrices), -1, columns)  # n again
        updates = like(updates, together)
        torch._foreach_mul_(matrices, 1.0 - group["lr"] * group["weight_decay"])
        # An orthogonal update of a tall matrix has small entries, so it gets a larger step.
        scale = math.sqrt(max(1.0, rows / columns))
        torch._foreach_add_(matrices, updates.unbind(), alpha=-group["lr"] * scale)

    def _orthogonalize_together(self, pieces: Tensor, ns_steps: int) -> Tensor:
        """`orthogonalize` of (n, rows, columns) with n shared out among the ranks; every rank gets all of the result.

        All have the same pieces. A product of one piece doesn't depend on the others, so the bits don't depend on the
        number of ranks; and where the ranks' devices differ, they get equal updates all the same.
        """
        if self.world_size == 1:
            return orthogonalize(pieces, self.dtype, ns_steps)
        share = math.ceil(len(pieces) / self.world_size)
        padded = F.pad(pieces, (0, 0, 0, 0, 0, share * self.world_size - len(pieces)))  # zeros stay zeros
        updates = torch.empty_like(padded, dtype=self.dtype)  # sent as they were computed: no bit is lost
        mine = orthogonalize(padded.split(share)[self.rank], self.dtype, ns_steps).to(self.dtype)
        dist.all_gather(list(updates.split(share)), mine.contiguous())
        return updates[: len(pieces)].float()


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of the blocks and AdamW for everything else, as one optimizer.

    Muon has no meaning for vectors and embeddings. The two are one object because they must step together, and after a
    float16 overflow skip the step together.
    """

    def __init__(
        self,
        matrices: list[Group],
        others: list[Group],
        betas: tuple[float, float],
        dtype: torch.dtype,
        rank: int = 0,
        world_size: int = 1,
    ):
        # Each part adopts the very dictionaries that stand in self.param_groups: a new "lr" there reaches it.
        super().__init__([*matrices, *others], {})
        self.parts = {
            "muon": Muon(matrices, dtype, rank, world_size),
            "adamw": AdamW(others, betas=betas, fused=True),
        }
        for part in self.parts.values():
            part.state = self.state  # one dictionary, by parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both parts."""
        for part in self.parts.values():
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's optimizers do; the parts adopt the new groups and the new state."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for part in self.parts.values():
            part.param_groups, part.state = [next(groups) for _ in part.param_groups], self.state
