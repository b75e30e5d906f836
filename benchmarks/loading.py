"""Question: what does it cost to turn a text into batches, from 1 MB to 1 GB, and how much memory does it take?

Measured, each in a process of its own (so that the peak memory is its own), in turns:

* ours: collecting the vocabulary and encoding (`CharVocabulary.of`, then `encode_array`), timed apart; then the split,
  the first epoch's order (`WindowSampler`), and 1,000 batches of 32 windows of 64 characters (`CharDataset`).
* numpy: one copy of the text into bytes and one table look-up of them, `table[np.frombuffer(text.encode("latin-1"))]`:
  what encoding takes where the table is already known and nothing is checked.

The text is `data/sample.txt` (ASCII) repeated in memory; --characters "é" or "中" appends that to every repetition, to
see texts that Python keeps in 1, 2 or 4 bytes per character. Peak memory is the maximum resident set (getrusage) after
encoding minus that before it, when the text is already in memory, in bytes per character.

    python benchmarks/loading.py [--quick] [--large]

Units: seconds; bytes per character; microseconds per batch. --large adds 1 GB (a few GB of memory).
"""

import argparse
import functools
import resource
import sys
import time

import numpy as np
from _common import PROJECT, Figures, measure_in_turns, print_table, report, run_measurement

from char_dataset import CharDataset, CharVocabulary, DataConfig, WindowSampler, split_codes

BATCH_SIZE, BATCHES = 32, 1000


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def make_text(megabytes: int, characters: str) -> str:
    """About so many million characters of English, with others strewn in."""
    piece = (PROJECT / "data" / "sample.txt").read_text(encoding="utf-8") + characters
    return piece * (megabytes * 1_000_000 // len(piece))


def measure_ours(text: str) -> Figures:
    """Encode and fetch batches as a training run does."""
    peak, begin = peak_bytes(), time.perf_counter()
    vocabulary = CharVocabulary.of(text)
    collected = time.perf_counter()
    codes = vocabulary.encode_array(text)
    encoded = time.perf_counter()
    encoding_peak = peak_bytes()

    config = DataConfig(block_size=64)  # as in the recorded tables
    train_codes, _ = split_codes(codes, config)
    dataset = CharDataset(train_codes, config.block_size)
    sampler = WindowSampler(dataset, BATCH_SIZE, num_replicas=1, rank=0, seed=0)
    order = iter(sampler)
    starts = [next(order) for _ in range(BATCH_SIZE)]
    split = time.perf_counter()
    for _ in range(BATCHES):  # random windows again and again; short texts have fewer than 1,000 batches in an epoch
        dataset.__getitems__(starts)
        starts = [next(order, start) for start in starts]
    fetched = time.perf_counter()
    return {
        "seconds": encoded - begin,
        "vocabulary": collected - begin,
        "split": split - encoded,
        "batch_us": (fetched - split) / BATCHES * 1e6,
        "bytes": (encoding_peak - peak) / len(text),
        "bytes_all": (peak_bytes() - peak) / len(text),
    }


def measure_numpy(text: str) -> Figures:
    """The least that numpy needs to make codes of a text: a copy and a look-up."""
    table = np.zeros(0x110000, dtype=np.uint8)
    points = [ord(character) for character in sorted(set(text[:100_000]))]
    table[points] = np.arange(len(points))
    peak, begin = peak_bytes(), time.perf_counter()
    if max(points) < 256:
        table[:256][np.frombuffer(text.encode("latin-1"), dtype=np.uint8)]
    else:
        table[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]
    return {"seconds": time.perf_counter() - begin, "bytes": (peak_bytes() - peak) / len(text)}


def main() -> None:
    """Measure and print the table; with --measure, be one of the processes that do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 MB only, one round")
    parser.add_argument("--large", action="store_true", help="1 GB as well")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--characters", default="", help="other characters to strew in")
    parser.add_argument("--measure", choices=["ours", "numpy"], help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        text = make_text(arguments.megabytes, arguments.characters)
        report(measure_ours(text) if arguments.measure == "ours" else measure_numpy(text))
        return

    rows: list[list[object]] = []
    for megabytes in [1] if arguments.quick else [1, 100, 1000] if arguments.large else [1, 100]:
        options = ["--megabytes", megabytes, "--characters", arguments.characters]
        contestants = {
            name: functools.partial(run_measurement, __file__, "--measure", name, *options, threads=1)
            for name in ("ours", "numpy")
        }
        medians = measure_in_turns(contestants, rounds=1 if arguments.quick else arguments.rounds)
        ours, numpy = medians["ours"], medians["numpy"]
        rows.append(
            [
                *(f"{megabytes} MB", ours["seconds"], ours["vocabulary"], numpy["seconds"]),
                *(ours["seconds"] / numpy["seconds"], ours["bytes"], numpy["bytes"]),
                *(ours["split"], ours["batch_us"], ours["batch_us"] / BATCH_SIZE, ours["bytes_all"]),
            ]
        )
    print_table(
        [
            *("text", "vocabulary and encoding, s", "of it vocabulary, s", "numpy copy and look-up, s"),
            *("ratio", "peak, bytes per character", "numpy's peak"),
            *("split and order, s", "a batch, µs", "a window, µs", "peak with batches, bytes per character"),
        ],
        rows,
        f"1 thread; batches of {BATCH_SIZE} windows of 64 characters.",
    )


if __name__ == "__main__":
    main()
