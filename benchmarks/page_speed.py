"""Question: how soon does the page of look.py open, and how fast does it write?

Measured in Debian's Chromium, driven by Playwright: the seconds from the call that opens the file until the check has
passed and the whole passage is coloured, and the characters per second of the button that writes 500 of them, as the
page itself counts them. Each round opens the page in a new context, so nothing is cached; one round before the first
fills the file cache and is not counted. The figures are medians of five (--rounds).

    python benchmarks/page_speed.py [--snapshot URL] [--quick]

Unit: seconds of wall time, characters per second, MB.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from _common import PROJECT, Figures, measure_in_turns, print_table
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(PROJECT))
from page.making import make_page
from saving.finding import find_snapshot


def open_and_write(browser: Browser, file: Path) -> Figures:
    """One visit."""
    page = browser.new_context(viewport={"width": 1000, "height": 900}).new_page()
    begin = time.perf_counter()
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]", state="attached")
    seconds = time.perf_counter() - begin
    if not page.inner_text("#check").startswith("✓"):
        sys.exit(page.inner_text("#check"))
    page.click("#write")
    page.wait_for_selector("#step:not([disabled])", timeout=120_000)
    speed = float(page.inner_text("#speed").split()[0])
    page.context.close()
    return {"seconds to open": seconds, "characters per second": speed}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshot", help="default: the best of runs/shakespeare")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "look.html"
        page = make_page(*find_snapshot(arguments.snapshot))
        file.write_text(page, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        contestants = {"page": lambda: open_and_write(browser, file)}
        if not arguments.quick:
            measure_in_turns(contestants, rounds=1)
        medians = measure_in_turns(contestants, rounds=1 if arguments.quick else arguments.rounds)["page"]
        version = browser.version
        browser.close()
    print_table(
        ["size, MB", *medians], [[len(page) / 1e6, *medians.values()]], f"Chromium {version}, without a graphics card."
    )


if __name__ == "__main__":
    main()
