"""The report and the page of recorded answers in a real browser: from the report to an episode, colours, and
two iterations beside each other, without a script."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.report.run_page import write_report
from tests.support.finished_run import finish
from tests.support.recorded_answers import Words, answered, episode, write
from tests.unit.evaluation.report.test_answer_pages import HOSTILE

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
CLEAR = "rgba(0, 0, 0, 0)"


@pytest.fixture
def page() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        made = opened.new_page(viewport={"width": 1400, "height": 900})
        made.set_default_timeout(60_000)
        yield made
        opened.close()


def colour(token: Any) -> str:
    return str(token.evaluate("one => getComputedStyle(one).backgroundColor"))


def test_from_the_report_to_an_episode_and_two_iterations_beside_each_other(
    page: Any, tmp_path: Path
) -> None:
    ppo = finish(tmp_path, "ppo", lines=20)
    words = Words()
    for iteration, last in ((1, "bad"), (4, "so"), (9, "good")):
        rollouts = [
            answered(words, 1, f"{HOSTILE} {last}"),
            episode(words, 2, "call search", "found it", f"it is {last}"),
        ]
        write(ppo.run_dir, iteration, words, rollouts, [1.0, -1.0])
    report = write_report(tmp_path / "demo", "demo", [ppo])
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.goto(report.as_uri())
    page.click("text=Answers of ppo")
    page.wait_for_selector("text=6 answers of 3 iterations")
    page.locator("summary", has_text="Question 2?").click()
    prompt = page.locator("details.prompt", has_text="Question 2?")
    playwright.expect(prompt.locator("section:visible")).to_have_count(2)
    seen = prompt.locator("section:visible h4").all_inner_texts()
    assert "iteration 1" in seen[0] and "iteration 9" in seen[-1], "the first and the last"
    boxes = [prompt.locator("section:visible").nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    prompt.get_by_label("iteration 1", exact=True).uncheck()
    prompt.get_by_label("iteration 4", exact=True).check()
    seen = prompt.locator("section:visible h4").all_inner_texts()
    assert ["iteration 4" in seen[0], "iteration 9" in seen[-1]] == [True, True]
    assert "tool, not trained on" in prompt.locator("section:visible").first.inner_text()
    last = prompt.locator("section:visible").first.locator(".sampled i")
    by_advantage, by_gap = colour(last.first), colour(last.last)
    assert by_advantage != CLEAR
    page.check("#by-gap")
    assert colour(last.first) == CLEAR, "engine and trainer agree on the first token"
    assert colour(last.last) not in (CLEAR, by_gap)
    assert page.locator(".key-g").is_visible() and not page.locator(".key-a").is_visible()
    page.check("#by-none")
    assert {colour(last.first), colour(last.last)} == {CLEAR}
    assert "advantage -1" in last.first.get_attribute("title")
    assert page.locator(".special").first.inner_text() == "<end>" and "<|end|>" in prompt.inner_text()
    assert page.evaluate("document.images.length + document.scripts.length") == 0 and not errors


def test_long_prompts_and_narrow_windows_do_not_widen_the_page(page: Any, tmp_path: Path) -> None:
    ppo = finish(tmp_path, "ppo", lines=20)
    words = Words()
    write(ppo.run_dir, 1, words, [answered(words, 1, "x" * 3000)], [1.0])
    write_report(tmp_path / "demo", "demo", [ppo])
    page.set_viewport_size({"width": 500, "height": 800})
    page.goto((tmp_path / "demo" / "rollouts" / f"{ppo.run_dir.name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 500
