"""torch.load doesn't look at checksums: a flipped bit in a weight passes (TUTORIAL.md, chapter 10)."""

import tempfile
from pathlib import Path

import torch
from _shared import batch_of, fit, is_quick, print_table, read_parts, small_model

from snapshot import DamagedSnapshotError, load_snapshot, save_snapshot

if __name__ == "__main__":
    quick = is_quick(__doc__)
    T = 32
    codes, evaluation, vocab_size = read_parts(T, quick)
    model = small_model(vocab_size, T)
    fit(model, codes, steps=40 if quick else 300)
    batch = batch_of(evaluation, T, 50, seed=0)
    with torch.no_grad():
        loss_before = float(model(*batch)[1])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt_snapshot.pt"
        save_snapshot({"model": model.state_dict()}, str(path))
        content = bytearray(path.read_bytes())
        weights = model.ln_f.weight.detach().numpy().tobytes()
        highest = content.index(weights) + 3  # the byte of the first weight that holds its sign
        content[highest] ^= 0b1000_0000  # one bit out of millions
        path.write_bytes(content)

        model.load_state_dict(torch.load(path, weights_only=True)["model"])  # THE MISTAKE: no word of complaint
        with torch.no_grad():
            loss_after = float(model(*batch)[1])
        verdict = "loaded"
        try:
            load_snapshot(str(path))
        except DamagedSnapshotError as error:
            verdict = "refused: " + str(error).split(": ", 1)[1].rstrip(")")
    print_table(
        ["loss before", "loss after", "verdict"],
        [
            ("wrong: torch.load alone", [loss_before, loss_after, "loaded"]),
            ("right: load_snapshot", [loss_before, "", verdict]),
        ],
    )
