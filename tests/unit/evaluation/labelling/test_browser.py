"""The labelling page in a real browser, by keyboard only: two annotators, 200 pairs each, a server that is
killed on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.labelling.label_records import LABELS, HumanLabel, in_force
from evaluation.labelling.label_store import read_labels
from tests.support.labelling import Served, write_rows

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")]
COUNT = 200
KILLS = ((70, "Ann"), (130, "Bob"))  # at which pair of whom the server is killed
KEYS = ("1", "ArrowLeft", "3", "4", "Shift+ArrowRight")  # by place in LABELS, of the sides on the page


def verdict(one: str, other: str) -> int:
    """The place in LABELS that an annotator of these tests gives to two answers: they end with their marks, 0
    to 9."""
    gap = int(one.split()[-1]) - int(other.split()[-1])
    return 0 if gap > 4 else 1 if gap > 0 else 2 if gap == 0 else 3 if gap >= -4 else 4


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM))
        yield chromium
        chromium.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    marks = [((7 * n) % 10, (3 * n + n // 10) % 10) for n in range(COUNT)]
    rows = [
        {
            "prompt": f"Question {n}?",
            "answer_a": f"first answer to {n}: {a}",
            "answer_b": f"other answer to {n}: {b}",
            "uid": f"q{n}",
        }
        for n, (a, b) in enumerate(marks)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


def serve(folder: Path, *options: str, port: int = 0) -> Served:
    return Served(folder, "rows.jsonl", "--out", "labels.jsonl", *options, port=port)


def opened(browser: Any, served: Served, annotator: str) -> Any:
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.set_default_timeout(180_000)
    page.goto(served.page(annotator))
    page.wait_for_selector("body[data-task]")
    return page


def task(page: Any) -> str:
    return str(page.evaluate("document.body.dataset.task"))


def press(page: Any, key: str) -> None:
    """Presses a key, and waits until another pair is shown."""
    before = task(page)
    page.keyboard.press(key)
    page.wait_for_function("before => document.body.dataset.task !== before", arg=before)


def judged(page: Any) -> int:
    return verdict(page.inner_text("#left"), page.inner_text("#right"))


def test_two_annotators_label_200_pairs_by_keyboard_over_a_kill(browser: Any, folder: Path) -> None:
    served = serve(folder, "--repeat", "0")
    pressed = dict[str, Counter[int]]()
    count = 0
    pages = {name: opened(browser, served, name) for name in ("Ann", "Bob")}
    for number in range(COUNT):
        for name, page in pages.items():
            place = judged(page)
            pressed.setdefault(name, Counter())[place] += 1
            if (number, name) in KILLS:  # with a verdict on the way
                acknowledged = read_labels(folder / "labels.jsonl")
                before = task(page)
                page.keyboard.press(KEYS[place])
                served.end()
                served = serve(folder, "--repeat", "0", port=served.port)
                page.wait_for_function("before => document.body.dataset.task !== before", arg=before)
                assert read_labels(folder / "labels.jsonl")[:count] == acknowledged
                assert len(acknowledged) == count
            else:
                press(page, KEYS[place])
            count += 1
    for page in pages.values():
        assert page.is_visible("#done")
        assert page.inner_text("#counts") == f"{COUNT} labelled, 0 skipped, 0 left"
    labels = read_labels(folder / "labels.jsonl")
    assert len(labels) == 2 * COUNT and served.end() == -9
    for name in pages:
        mine = [label for label in labels if label.annotator == name]
        assert len({label.uid for label in mine}) == len(mine) == COUNT, "none lost, none twice"
        assert [label.verdict for label in mine] == [
            LABELS[verdict(label.answer_a, label.answer_b)] for label in mine
        ]
        assert 70 <= sum(label.shown_first == "a" for label in mine) <= 130
        assert set(pressed[name]) == set(range(5)), "all keys were used"
        sided = Counter(
            place if label.shown_first == "a" else 4 - place for label in mine for place in [label.strength]
        )
        assert sided == pressed[name], "what was pressed is what is in the file, seen from the page's sides"
        assert all(label.seconds < 120 for label in mine)


def test_skip_undo_note_help_and_keys_that_are_held(browser: Any, folder: Path) -> None:
    served = serve(folder)
    page = opened(browser, served, "Ann")
    keyboard = page.keyboard
    first = task(page)

    def lines() -> list[HumanLabel]:
        return read_labels(folder / "labels.jsonl")

    keyboard.press("?")
    assert page.is_visible("#help")
    keyboard.press("Escape")
    assert not page.is_visible("#help")
    for key in ("x", "Control+1", "Alt+2", "Enter", "PageDown"):
        keyboard.press(key)
    keyboard.press("n")
    keyboard.type("1 is wrong? so unsure")
    assert task(page) == first and lines() == [], "keys in a note are text"
    keyboard.press("Enter")
    place = judged(page)
    press(page, KEYS[place])
    press(page, "s")
    noted, skipped = lines()
    assert noted.note == "1 is wrong? so unsure"
    assert noted.verdict == LABELS[verdict(noted.answer_a, noted.answer_b)]
    assert skipped.verdict is None and page.input_value("#note") == ""
    press(page, "u")
    press(page, "u")
    assert task(page) == first and page.input_value("#note") == noted.note
    assert page.get_attribute("button.before", "data-choice") == str(place), "the choice that was taken back"
    keyboard.press("u")
    page.wait_for_selector("#status:not([hidden])")
    assert "nothing to undo" in page.inner_text("#status") and in_force(lines()) == []
    keyboard.down("3")
    page.wait_for_function("before => document.body.dataset.task !== before", arg=first)
    for _ in range(20):
        keyboard.down("3")  # what a keyboard sends while a key is held
    keyboard.up("3")
    press(page, "3")
    assert [label.verdict for label in in_force(lines())] == ["A=B", "A=B"]
    other = opened(browser, served, "Ann")  # a second tab
    shown = task(other)
    press(page, "1")
    press(other, "5")
    assert "Not counted" in other.inner_text("#status") and task(other) == task(page) != shown
    assert len(in_force(lines())) == 3
    served.end()


HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n  two "
    " spaces\n\n{{ 7 * 7 }} &amp; \u202eabc"
)
HEBREW = "שלום עולם, זו תשובה מימין לשמאל."


def test_hostile_long_and_right_to_left_texts(browser: Any, folder: Path, tmp_path: Path) -> None:
    long = "0123456789 " * 10_000
    rows = [
        {"prompt": HOSTILE, "answer_a": HOSTILE, "answer_b": long},
        {"prompt": HEBREW, "answer_a": HEBREW, "answer_b": "left to right"},
    ]
    write_rows(folder / "rows.jsonl", rows)
    answers = folder / "run/report/answers"  # a model's answer may end with half a character
    for model, text in (("sft", "cut \ud83d"), ("ppo", "whole \U0001f600")):
        chat = [{"role": "user", "content": "Smile"}, {"role": "assistant", "content": {"answer": text}}]
        write_rows(
            answers / f"{model}.jsonl", [{"uid": "q0", "model": model, "messages": chat, "metadata": {}}]
        )
    served = serve(folder)
    page = opened(browser, served, "Ann")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    seen = {}
    for _ in rows:
        sides = {page.text_content(f"#{side}"): side for side in ("left", "right")}
        for text, side in sides.items():
            seen[text] = page.evaluate(
                "e => getComputedStyle(e).direction + ' ' + getComputedStyle(e).whiteSpace",
                page.query_selector(f"#{side}"),
            )
        assert page.text_content("#prompt .text") in (HOSTILE, HEBREW)
        # long texts are broken
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        press(page, "3")
    assert seen[HEBREW].startswith("rtl")
    assert seen[HOSTILE].startswith("ltr")
    assert seen[long]
    assert "pre-wrap" in seen[HOSTILE]
    assert page.title() == "label pairs"
    assert page.query_selector("main img") is None
    assert all(url.startswith(served.root) for url in asked)
    served.end()
    other = Served(folder, "run", "--models", "sft,ppo", "--out", "other.jsonl")
    page = opened(browser, other, "Ann")
    assert {page.text_content("#left"), page.text_content("#right")} == {"cut \ufffd", "whole \U0001f600"}
    press(page, "1")
    other.end()
    (label,) = read_labels(folder / "other.jsonl")
    assert (label.model_a, label.model_b, label.answer_a) == ("sft", "ppo", "cut \ufffd")
    assert json.loads((folder / "other.jsonl").read_text())["uid"] == "q0"


def test_names_pages_and_agreement(browser: Any, folder: Path) -> None:
    served = serve(folder, "--repeat", "0")
    page = browser.new_context().new_page()
    page.goto(f"{served.root}/?token={served.token}")
    page.wait_for_selector("input:focus")  # the name can be typed at once
    page.keyboard.type("Zoë <b>")
    page.keyboard.press("Enter")
    page.wait_for_selector("body[data-task]")
    assert page.inner_text("#annotator") == "Zoë <b>" and served.token not in page.url
    others = [page, opened(browser, served, "Bob")]
    for _ in range(12):
        for one in others:
            press(one, KEYS[judged(one)])
    page.goto(f"{served.root}/agreement")
    text = page.inner_text("main")
    assert "12 pairs have a verdict, 12 of them by two or more annotators" in text
    assert "Bob, Zoë <b>" in text
    assert "winner 1.00" in text
    page.goto(served.root)
    assert page.inner_text("tr:nth-child(3)").split() == ["Zoë", "<b>", "12", "0", "188"]
    served.end()
