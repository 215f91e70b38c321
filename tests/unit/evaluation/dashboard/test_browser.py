"""The live page in a real browser: it stays open while a run is killed, resumed and finished, and while the
dashboard itself is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.cluster.rank_environment import free_port
from tests.support import live_run
from tests.support.finished_run import finish
from tests.support.live_run import ROOT, STEPS, allow, stage_dir
from tests.support.micro import wait_until
from tests.support.recorded_answers import Words, answered, write
from tests.support.sockets import beyond_loopback

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


class Dashboard:
    """The command, as a process."""

    def __init__(self, artifacts: Path, home: Path):
        self.home = home
        self.port = free_port("127.0.0.1")
        self._command = [
            sys.executable,
            "-m",
            "flows.cli",
            "dashboard",
            str(artifacts),
            "--port",
            str(self.port),
            "--home",
            str(home),
        ]
        self.begin()

    def begin(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            self._command, cwd=self.home.parent, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.told = self.process.stdout.readline()
        assert f"http://127.0.0.1:{self.port}/" in self.told, self.told

    @property
    def address(self) -> str:
        """With the token, which the command does not print to a pipe."""
        token = (self.home / "dashboard-token").read_text().strip()
        assert token not in self.told and str(self.home / "dashboard-token") in self.told
        return f"http://127.0.0.1:{self.port}/?token={token}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(100)


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    (tmp_path / "artifacts").mkdir()
    allow(tmp_path / "artifacts", 0)
    return tmp_path / "artifacts"


@pytest.fixture
def shown(artifacts: Path, tmp_path: Path) -> Iterator[Dashboard]:
    made = Dashboard(artifacts, tmp_path / "home")
    yield made
    made.kill()


@pytest.fixture
def browser() -> Iterator[playwright.BrowserContext]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = opened.new_context()
        context.set_default_timeout(180_000)
        yield context
        opened.close()


def points(page: playwright.Page) -> int:
    """Returns how many points the curve of the loss has."""
    path = page.locator("figure", has_text="Loss").first.locator("path[stroke='#2563a8']").get_attribute("d")
    return len(re.findall("[ML]", path or ""))


def wait_for(page: playwright.Page, part: str, *texts: str) -> None:
    for text in texts:
        page.wait_for_function(
            "([part, text]) => document.getElementById(part)?.innerText.includes(text)",
            arg=[f"part-{part}", text],
        )


def test_a_page_stays_open_over_a_killed_and_resumed_run(
    shown: Dashboard, artifacts: Path, browser: playwright.BrowserContext
) -> None:
    errors: list[str] = []
    overview = browser.new_page()
    overview.on("pageerror", lambda error: errors.append(str(error)))
    overview.goto(shown.address)
    assert "token" not in overview.url
    wait_for(overview, "runs", "No run is recorded")
    overview.evaluate("window.kept = true")

    run = live_run.start(artifacts, "first")
    allow(artifacts, 3)
    wait_for(overview, "now", "night", "running", "step 3 of 8")
    wait_for(overview, "runs", "running", "0 of 1")
    stage = browser.new_page()
    stage.on("pageerror", lambda error: errors.append(str(error)))
    stage.goto(f"http://127.0.0.1:{shown.port}/stage/{stage_dir(artifacts).name}")
    wait_for(stage, "state", "running", "step 3 of 8")
    wait_until(lambda: points(stage) == 3, "the curve")  # it may come after the state
    stage.evaluate("window.kept = true")
    stage.locator("summary", has_text="Last values").click()
    allow(artifacts, 4)
    wait_for(stage, "state", "step 4 of 8")
    wait_for(stage, "log", "step 4/8")
    allow(artifacts, 5)
    wait_for(stage, "state", "step 5 of 8")
    wait_until(lambda: points(stage) == 5, "the curve")
    # what was opened stays open
    assert stage.locator("details[data-key=last]").get_attribute("open") is not None

    os.kill(run.pid, signal.SIGKILL)  # the reaper ends the stage's process
    run.wait()
    wait_for(stage, "state", "killed", "its process is gone")
    wait_for(overview, "runs", "killed", "0 of 1")
    wait_for(overview, "now", "No run is in progress")

    again = live_run.start(artifacts, "second")
    wait_for(stage, "state", "running", "Started 2 times")
    wait_for(overview, "now", "second")
    stage.wait_for_function(
        "document.querySelector('figure path[stroke=\"#2563a8\"]').getAttribute('d').split(/[ML]/).length - 1"
        " == 5"
    )
    # Steps 1 to 4 are kept, 5 is made again.
    wait_until(lambda: len((stage_dir(artifacts) / "metrics.jsonl").read_text().splitlines()) == 5, "step 5")
    assert not beyond_loopback(shown.process.pid)

    shown.kill()
    stage.wait_for_selector("#live.off")
    allow(artifacts, 6)
    shown.begin()
    stage.wait_for_selector("#live.on")
    wait_for(stage, "state", "step 6 of 8")

    allow(artifacts, STEPS)
    wait_for(stage, "state", "done", "took")
    assert again.wait(180) == 0
    wait_for(overview, "runs", "done", "killed", "1 of 1")
    wait_until(lambda: points(stage) == STEPS, "the curve")
    assert stage.evaluate("window.kept") and overview.evaluate("window.kept"), "no page was loaded again"
    assert not errors


def test_a_page_without_the_token_shows_nothing(
    shown: Dashboard, artifacts: Path, browser: playwright.BrowserContext
) -> None:
    page = browser.new_page()
    assert page.goto(f"http://127.0.0.1:{shown.port}/").status == 401
    assert "alignflow" not in page.title()
    page.fill("input[name=token]", "not the token")
    page.click("button")
    page.wait_for_selector("text=That is not the token")
    page.fill("input[name=token]", (shown.home / "dashboard-token").read_text().strip())
    page.click("button")
    wait_for(page, "runs", "No run is recorded")
    assert page.url == f"http://127.0.0.1:{shown.port}/"


TYPE = """text => {
  const box = document.getElementById("filter")
  box.focus()
  box.value = text
  box.dispatchEvent(new Event("input", {bubbles: true}))
  return Object.fromEntries([...document.querySelectorAll("tr[data-text]")].map(row => [row.cells[1].textContent, row.hidden]))
}"""  # returns which runs are hidden


def test_the_filter_of_runs(shown: Dashboard, artifacts: Path, browser: playwright.BrowserContext) -> None:
    folder = artifacts / "demo" / "runs"
    folder.mkdir(parents=True)
    for identity, state in (("first", "done"), ("second", "failed")):
        (folder / f"{identity}.json").write_text(
            json.dumps({"recipe": "demo", "state": state, "started": 1.79e9, "ended": 1.79e9 + 9})
        )
    errors: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(shown.address)
    rows = page.locator("tr[data-text]")
    assert page.evaluate(TYPE, "DEMO fail") == {
        "first": True,
        "second": False,
    }, "at once, by the script alone"
    playwright.expect(rows).to_have_count(1)  # the server's answer
    assert page.url.endswith("/?filter=DEMO+fail") and page.evaluate("document.activeElement.id") == "filter"
    page.reload()
    assert page.input_value("#filter") == "DEMO fail" and rows.count() == 1
    page.fill("#filter", "")
    playwright.expect(rows).to_have_count(2)
    assert page.url.endswith("/") and not errors, "nor does the security policy refuse anything"


def test_recorded_answers_are_read_while_iterations_follow(
    shown: Dashboard, artifacts: Path, browser: playwright.BrowserContext
) -> None:
    ppo = finish(artifacts, "ppo", lines=20)
    words = Words()
    write(ppo.run_dir, 1, words, [answered(words, 1, "the first")], [-1.0])
    errors: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(shown.address)
    page.goto(f"http://127.0.0.1:{shown.port}/stage/{ppo.run_dir.name}")
    page.click("text=All recorded answers, token by token")
    wait_for(page, "answers", "Question 1?", "the first", "1 recorded")
    page.check("#by-gap")
    write(ppo.run_dir, 7, words, [answered(words, 1, "the second one")], [1.0])
    wait_for(page, "answers", "iteration 7", "the second one")
    assert page.is_checked("#by-gap"), "the chosen colour stays"
    page.click('p:has-text("Beside iteration") a')
    playwright.expect(page.locator(".columns > section")).to_have_count(2)
    words_of = page.locator(".columns > section").all_inner_texts()
    assert ["the first" in words_of[0], "the second one" in words_of[1]] == [True, True]
    token = page.locator(".columns > section").last.locator(".sampled i").first
    background = "one => getComputedStyle(one).backgroundColor"
    assert token.evaluate(background) == "rgb(98, 159, 219)", "the policy lets the page's style apply"
    assert not errors
