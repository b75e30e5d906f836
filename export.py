"""Snapshot -> a directory that Hugging Face's transformers loads: `python export.py --to DIR`.

`hugging_face/writing.py` makes it. `report.py` comes next.
"""

from console import environment  # isort: skip, settles what torch reads when it is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import signal
import sys

from console.errors import one_line_at_the_end
from hugging_face.writing import export


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Write a trained model as a directory for Hugging Face's transformers."
    )
    parser.add_argument("--snapshot", help="path or fsspec URL; default: the best of runs/shakespeare, else its latest")
    parser.add_argument("--to", required=True, metavar="DIR", help="the directory to make")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load it with transformers and compare (default)",
    )
    return parser.parse_args()


def main() -> None:
    """`export`, with one line and exit code 1 for what the user can mend."""
    arguments = parse_arguments()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on, a half-written directory must go
    try:
        with one_line_at_the_end():
            print(f"written: {export(arguments.snapshot, arguments.to, arguments.check)}", file=sys.stderr)
    except KeyboardInterrupt:
        environment.remove_directories()
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
