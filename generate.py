"""Snapshot -> text: `python generate.py "ROMEO:"`.

The last module to read. It needs nothing but a snapshot: the model's configuration, its weights and its vocabulary are
all in there.
"""

import environment  # isort: skip, before torch is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import os
import re
import sys
from pathlib import Path

import torch

from char_dataset import CharVocabulary
from model import GPT, GPTConfig
from sampling import check_sampling
from snapshot import DamagedSnapshotError, best_url, load_snapshot, previous_url
from snapshot_contents import check_model

DEFAULT_SNAPSHOT = str(Path(__file__).resolve().parent / "runs" / "shakespeare" / "gpt_snapshot.pt")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Continue a text with a trained model.")
    parser.add_argument("prompt", nargs="?", default="", help="how the text begins; - reads it from standard input")
    parser.add_argument("--snapshot", help="path or fsspec URL; default: the best of runs/shakespeare, else its latest")
    parser.add_argument("--max-new-tokens", type=int, default=500, metavar="N", help="characters to add (500)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy, above 1 wild (0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest characters only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that together have P, 0 to 1")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts to write (1)")
    parser.add_argument("--seed", type=int, metavar="S", help="makes the text repeatable; default: another every time")
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda, mps, ... (cpu)")
    return parser.parse_args()


def load_model(url: str | None, device: torch.device) -> tuple[GPT, CharVocabulary]:
    """Build model and vocabulary from a snapshot alone.

    Args:
        url: path or fsspec URL; None: the default run's best snapshot, else its latest, else the one before.
        device: where the model shall compute.

    Raises:
        ValueError, OSError: there is no usable snapshot; the message says where it was looked for.
    """
    latest = DEFAULT_SNAPSHOT
    for candidate in [url] if url else [best_url(latest), latest, previous_url(latest)]:
        try:
            snapshot = load_snapshot(candidate)
            check_model(snapshot, candidate)
        except FileNotFoundError:
            continue
        except DamagedSnapshotError as error:
            if url:
                raise
            print(error, file=sys.stderr)
            continue
        model = GPT(GPTConfig(**snapshot["model_config"]))
        model.load_state_dict(snapshot["model"])
        return model.to(device).eval(), CharVocabulary(snapshot["vocabulary"])
    raise ValueError(
        f"there is no snapshot at {url or latest}; train one first with torchrun --standalone main.py, "
        "or name another with --snapshot"
    )


def generate(arguments: argparse.Namespace) -> None:
    """Write the text to standard output, everything else to standard error.

    Raises:
        ValueError, OSError: an argument is wrong, or the snapshot can't be used.
    """
    check_sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    for name, least in (("max_new_tokens", 0), ("num_samples", 1)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(arguments, name)}: must be at least {least}")
    try:
        device = torch.device(arguments.device)
        random = torch.Generator(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device={arguments.device} can't be had with this machine and this PyTorch; use --device=cpu"
        ) from error
    if arguments.seed is not None and not 0 <= arguments.seed < 2**64:
        raise ValueError(f"--seed={arguments.seed}: must be at least 0 and below 2^64 = {2**64}")
    random.seed() if arguments.seed is None else random.manual_seed(arguments.seed)

    prompt = arguments.prompt
    if prompt == "-":
        prompt = re.sub(r"\r?\n\Z", "", sys.stdin.read())  # the shell's newline
    model, vocabulary = load_model(arguments.snapshot, device)
    if not prompt:
        prompt = vocabulary.start
        print(f"empty prompt: starting from {prompt!r}", file=sys.stderr)
    idx = vocabulary.encode(prompt).to(device).expand(arguments.num_samples, -1)  # (B, T)
    settings = (arguments.max_new_tokens, arguments.temperature, True, arguments.top_k, arguments.top_p, random)
    if arguments.num_samples == 1:
        sys.stdout.write(prompt)
        for token in model.stream(idx, *settings):
            sys.stdout.write(vocabulary.decode(token[0]))
            sys.stdout.flush()  # the reader sees each character as it is made
        sys.stdout.write("\n")
        return
    out = model.generate(idx, *settings)  # (B, T + max_new_tokens)
    print("\n\n---\n\n".join(vocabulary.decode(row) for row in out))


def main() -> None:
    """`generate`, with one line and exit code 1 for what the user can mend."""
    try:
        generate(parse_arguments())
    except BrokenPipeError:  # the reader has seen enough, as in `| head`; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
