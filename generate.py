"""Snapshot -> text: `python generate.py "ROMEO:"`, or one prompt after the other: `python generate.py`.

It needs nothing but a snapshot: the model's configuration, its weights and its vocabulary are all in there. `look.py`
comes next.
"""

from console import environment  # isort: skip, settles what torch reads when it is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from char_dataset import CharVocabulary, evaluation_batches
from console.errors import one_line_at_the_end
from console.prompts import converse, unescape
from model import GPT, sum_losses
from sampling import Sampling
from saving.finding import load_model


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
    parser.add_argument("--stop", default="", metavar="TEXT", help=r"end before this string; \n is a newline")
    parser.add_argument("--score", action="store_true", help="generate nothing; print the mean loss on the prompt")
    parser.add_argument(
        "--interactive", action="store_true", help="one prompt after the other; default on a terminal without a prompt"
    )
    return parser.parse_args()


def generate(arguments: argparse.Namespace) -> None:
    """Write the text to standard output, everything else to standard error.

    Raises:
        ValueError, OSError: an argument is wrong, or the snapshot can't be used.
    """
    sampling_of(arguments)  # raises, before anything is loaded
    for name, least in (("max_new_tokens", 0), ("num_samples", 1)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(arguments, name)}: must be at least {least}")
    try:
        device = torch.device(arguments.device)
        random = torch.Generator(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device={arguments.device} isn't available on this machine with this PyTorch; use --device=cpu"
        ) from error
    if arguments.seed is not None and not 0 <= arguments.seed < 2**64:
        raise ValueError(f"--seed={arguments.seed}: must be at least 0 and below 2^64 = {2**64}")
    random.seed() if arguments.seed is None else random.manual_seed(arguments.seed)

    prompt, arguments.stop = arguments.prompt, unescape(arguments.stop)
    if prompt == "-":
        prompt = re.sub(r"\r?\n\Z", "", sys.stdin.read())  # the shell's newline
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    is_talk = not arguments.score and (arguments.interactive or (not prompt and on_terminal))
    if is_talk and arguments.num_samples > 1:
        raise ValueError(
            f"--num-samples={arguments.num_samples}: one prompt after the other gets one text each; for several, give "
            "the prompt on the command line"
        )
    model, vocabulary = load_model(arguments.snapshot, device)
    if arguments.score:
        print(score(model, vocabulary, prompt))
        return
    if is_talk:
        converse(vocabulary, arguments, random, functools.partial(write, model, vocabulary))
        return
    if not prompt:
        prompt = vocabulary.start
        print(f"empty prompt: starting from {prompt!r}", file=sys.stderr)
    if arguments.num_samples == 1:
        write(model, vocabulary, prompt, arguments, random)
        return
    idx = vocabulary.encode(prompt).to(device).expand(arguments.num_samples, -1)  # (B, T)
    new = [*model.stream(idx, arguments.max_new_tokens, sampling_of(arguments), random)]  # (B, 1) each
    rows = torch.cat([idx[:, :0], *new], dim=1)  # (B, max_new_tokens)
    texts = ("".join(until(arguments.stop, vocabulary.decode(row))) for row in rows)
    print("\n\n---\n\n".join(prompt + text for text in texts))


def write(
    model: GPT,
    vocabulary: CharVocabulary,
    prompt: str,
    arguments: argparse.Namespace,
    random: torch.Generator,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Write one text to standard output, each character as soon as it is made, until it is stopped."""
    idx = vocabulary.encode(prompt)[None].to(random.device)  # (1, T)
    sys.stdout.write(prompt)
    tokens = model.stream(idx, arguments.max_new_tokens, sampling_of(arguments), random)
    for character in until(arguments.stop, (vocabulary.decode(token[0]) for token in tokens)):
        sys.stdout.write(character)
        sys.stdout.flush()
        if is_stopped():
            break
    sys.stdout.write("\n")


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """How the command line wants a character to be chosen. Raises ValueError if it is out of range."""
    return Sampling(arguments.temperature, True, arguments.top_k, arguments.top_p)


def until(stop: str, characters: Iterable[str]) -> Iterator[str]:
    """Yield characters until a string appears, without it; what could be its beginning is held back."""
    waiting = ""
    for character in characters:
        waiting += character
        if stop and waiting.endswith(stop):
            yield from waiting[: -len(stop)]
            return
        while waiting and not (stop and stop.startswith(waiting)):
            yield waiting[0]
            waiting = waiting[1:]
    yield from waiting


def score(model: GPT, vocabulary: CharVocabulary, text: str) -> str:
    """How well a model predicts a text, in words: its mean loss, as an evaluation while training would find it.

    Raises:
        ValueError: there are fewer than two characters, or unknown ones.
    """
    codes = vocabulary.encode_array(text)
    if len(codes) < 2:
        raise ValueError(f"--score: got {len(codes)} characters; the first one is given, so at least 2 are needed")
    total, count = sum_losses(model, evaluation_batches(codes, model.config.block_size, 16, 0, 1))
    loss = total / count
    return f"loss {loss:.4f} nats per character ({loss / math.log(2):.4f} bits), over {count:,} characters"


def main() -> None:
    """`generate`, with one line and exit code 1 for what the user can mend."""
    arguments = parse_arguments()
    with one_line_at_the_end():
        generate(arguments)


if __name__ == "__main__":
    main()
