"""DistributedSampler repeats items to give all ranks equally many (TUTORIAL.md, chapter 8).

Harmless in training, but not in an evaluation: ten windows on four ranks are scored as twelve.
"""

import torch
from _shared import fit, is_quick, print_table, read_parts, small_model
from torch.utils.data import DistributedSampler, Subset

from char_dataset import CharDataset, evaluation_batches

WINDOWS, RANKS = 10, 4

if __name__ == "__main__":
    quick = is_quick(__doc__)
    T = 32
    train, evaluation, vocab_size = read_parts(T, quick)
    model = small_model(vocab_size, T)
    fit(model, train, steps=60 if quick else 300)
    evaluation = evaluation[: WINDOWS * T + 1]  # ten windows that touch, and the last target
    dataset = CharDataset(evaluation, T)
    dataset_of_ten = Subset(dataset, range(0, WINDOWS * T, T))

    wrong, right = [], []  # loss of each target, over all ranks
    with torch.no_grad():
        for rank in range(RANKS):
            # THE MISTAKE: 3 windows for every rank, and so two of them twice
            share: DistributedSampler = DistributedSampler(dataset_of_ten, RANKS, rank, shuffle=False)
            for window in share:
                x, y = dataset.__getitems__([window * T])
                wrong += [float(model(x, y)[1])] * T
            for x, y in evaluation_batches(evaluation, T, 1, rank, RANKS):
                right += [float(model(x, y)[1])] * int((y != -1).sum())
        x, y = dataset.__getitems__([window * T for window in range(WINDOWS)])
        one_rank = float(model(x, y)[1])
    print_table(
        ["windows scored", "targets scored", "mean loss", "error"],
        [
            (
                name,
                [
                    len(losses) / T,
                    len(losses),
                    f"{sum(losses) / len(losses):.6f}",
                    f"{abs(sum(losses) / len(losses) - one_rank):.1e}",
                ],
            )
            for name, losses in (("wrong: DistributedSampler", wrong), ("right: evaluation_batches", right))
        ],
    )
