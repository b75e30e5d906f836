"""Snapshot -> a page that shows the model at work: `python look.py "ROMEO:"`, then open look.html in a browser.

The page is one file that needs no server and no network: `page/making.py` puts it together. `export.py` comes next.
"""

from console import environment  # isort: skip, settles what torch reads when it is loaded

if __name__ == "__main__":
    environment.guard()

import argparse
import sys
from pathlib import Path

from console.errors import one_line_at_the_end
from page.making import make_page
from saving.finding import find_snapshot


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write one HTML page that shows a trained model at work.")
    parser.add_argument(
        "text", nargs="?", default="", help="what the model reads; default: a passage of evaluation text"
    )
    parser.add_argument("--snapshot", help="path or fsspec URL; default: the best of runs/shakespeare, else its latest")
    parser.add_argument("--out", default="look.html", metavar="FILE", help="the page to write (look.html)")
    parser.add_argument("--float32", action="store_true", help="store the weights exactly; the page is twice as large")
    return parser.parse_args()


def main() -> None:
    """Make the page, with one line and exit code 1 for what the user can mend."""
    arguments = parse_arguments()
    with one_line_at_the_end():
        snapshot, url = find_snapshot(arguments.snapshot)
        page = make_page(snapshot, url, arguments.text, arguments.float32)
        Path(arguments.out).write_text(page, encoding="utf-8", newline="\n")
        print(f"written: {arguments.out} ({len(page) / 1e6:.1f} MB); open it in a browser", file=sys.stderr)


if __name__ == "__main__":
    main()
