"""Takes the picture of docs/how-to/labelling.md: `python -m tests.support.label_screenshot
docs/images/labelling.png`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.support.labelling import Served, write_rows

CHROMIUM = "/usr/bin/chromium"
QUESTION = (
    "My bread does not rise. I used water from the kettle, a spoon of salt and a sachet of dry yeast. What"
    " went wrong?"
)
SHORT = (
    "The water was too hot. Yeast dies above about 55 °C, and water from the kettle is far hotter.\n\n"
    "Use water that feels just warm to your hand, and mix the salt into the flour first."
)
LONG = (
    "There are many reasons why bread may not rise:\n\n1. The yeast may be old.\n2. There may be too much"
    " salt.\n3. The kitchen may be too cold.\n4. The flour may lack gluten.\n\nPlease try again with new"
    " ingredients!"
)


def main(target: Path) -> None:
    """Labels a few pairs of one question, and photographs the next."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        rows = [{"uid": f"q{n}", "prompt": QUESTION, "answer_a": SHORT, "answer_b": LONG} for n in range(40)]
        write_rows(folder / "rows.jsonl", rows)
        served = Served(folder, "rows.jsonl", "--out", "labels.jsonl")
        try:
            browser = driver.chromium.launch(executable_path=CHROMIUM)
            page = browser.new_page(viewport={"width": 1180, "height": 560})
            page.goto(served.page("Ann"))
            for _ in range(12):
                before = page.wait_for_selector("body[data-task]").get_attribute("data-task")
                page.keyboard.press("2")
                page.wait_for_function("before => document.body.dataset.task !== before", arg=before)
            page.keyboard.press("n")
            page.keyboard.type("only one of them looked at the kettle")
            page.keyboard.press("Enter")
            page.screenshot(path=target)
            browser.close()
        finally:
            served.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
