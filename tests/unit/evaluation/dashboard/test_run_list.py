"""The dashboard's list of runs: win rate, champion and filter."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser

import pytest
from starlette.testclient import TestClient

from evaluation.dashboard import pages
from evaluation.dashboard.artifacts_folder import Folder
from evaluation.dashboard.dashboard_app import dashboard
from evaluation.dashboard.pages import page_of
from rlhf_core.runs.run_dir import REQUEST, RESULT
from tests.support.finished_run import DIGESTS
from tests.unit.evaluation.dashboard.conftest import STARTED, Artifacts

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}\x1b]0;title\x07\u202eevil"


@pytest.fixture
def client(artifacts: Artifacts) -> TestClient:
    return TestClient(dashboard(artifacts.path))


class Elements(HTMLParser):
    """The elements of a page and their attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def rates(artifacts: Artifacts, metrics: dict[str, float]) -> None:
    """Gives the evaluation these metrics."""
    file = artifacts.stage("evaluation") / RESULT
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metrics": metrics}))


def crown(artifacts: Artifacts, *reigns: object) -> None:
    """Writes the record of the recipe's champions."""
    (artifacts.path / "demo" / "champion.json").write_text(json.dumps({"reigns": reigns}))


def rows(page: str) -> dict[str, str]:
    """Returns the rows of the list of runs by the run's id."""
    return {
        found[1]: found[0]
        for found in re.finditer(r'<tr data-text=.*?<td class="mono">(.*?)</td>.*?</tr>', page)
    }


def cells(row: str) -> list[str]:
    return [html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall("<td.*?</td>", row)]


def test_the_list_has_the_win_rate_of_the_last_model_with_its_interval(
    client: TestClient, artifacts: Artifacts
) -> None:
    last = "iterative_dpo.round2"
    full = {"win_rate/ppo": 0.7, "ci_low/ppo": 0.6, "ci_high/ppo": 0.8, "win_rate/sft": 0.5}
    shown = {
        f"{last} 61.2 % (55.0–67.1 %)": (
            full | {f"win_rate/{last}": 0.6123, f"ci_low/{last}": 0.55, f"ci_high/{last}": 0.671}
        ),
        f"{last} 61.2 %": full | {f"win_rate/{last}": 0.6123},  # a result without an interval
        # the last model is the baseline
        "ppo 70.0 % (60.0–80.0 %)": {name: full[name] for name in list(full)[:3]},
        "–": {"win_rate": 0.5, "reward/mean": 1.0},
    }
    for text, metrics in shown.items():
        rates(artifacts, metrics)
        assert cells(rows(client.get("/").text)["first"])[6] == text
    (artifacts.stage("evaluation") / RESULT).write_text("{")
    assert cells(rows(client.get("/").text)["first"])[6] == "–"


def test_the_list_says_which_run_published_the_champion(client: TestClient, artifacts: Artifacts) -> None:
    other = artifacts.record("other", "done", STARTED + 600)
    record = json.loads(other.read_text())
    other.write_text(json.dumps(record | {"stages": record["stages"][:-1]}))
    published = {"run": f"publication-{DIGESTS['publication']}", "model": "the-best"}
    for reigns, champion in (
        ([], "–"),
        ([published], "the-best"),
        ([{"run": "publication-0", "model": "the-first"}, published], "the-best"),
        ([published, {"run": "publication-1", "model": "the-next"}], "–"),
        ([published, 7], "–"),
    ):
        crown(artifacts, *reigns)
        found = rows(client.get("/").text)
        assert (cells(found["first"])[7], cells(found["other"])[7]) == (champion, "–")
    (artifacts.path / "demo" / "champion.json").write_text("{")
    assert cells(rows(client.get("/").text)["first"])[7] == "–"


def test_the_filter_needs_no_script(
    client: TestClient, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts.record("second", "gate failed", STARTED + 700, name="nightly")
    artifacts.record("third", "failed", STARTED + 700, why="no such model")
    crown(artifacts, {"run": f"publication-{DIGESTS['publication']}", "model": "Best"})

    def named(words: str) -> set[str]:
        return {cells(row)[1] for row in rows(client.get("/", params={"filter": words}).text).values()}

    everything = {"first", "nightly (second)", "third"}
    assert named("") == named("  ") == named("demo") == named("BEST") == everything
    assert named("Nightly") == named("gate demo") == {"nightly (second)"}
    assert named("such MODEL") == {"third"} and named("nightly first") == set()
    page = client.get("/", params={"filter": HOSTILE}).text
    assert "No run has all of these words" in page and "No run is recorded" not in page
    # that of the page alone
    assert [tag for tag, _ in Elements(page).found if tag in ("img", "script")] == ["script"]
    boxes = [
        attributes
        for tag, attributes in Elements(client.get("/", params={"filter": 'a "b" <c>'}).text).found
        if tag == "input"
    ]
    assert boxes[0]["name"] == "filter" and boxes[0]["value"] == 'a "b" <c>'
    monkeypatch.setattr(pages, "MAX_RUNS", 1)
    page = client.get("/", params={"filter": "first"}).text
    # the filter looks at the runs that are left out, too
    assert list(rows(page)) == ["first"] and "older ones" not in page
    assert "and 2 older ones" in client.get("/").text


def test_hostile_models_and_words_are_inert(client: TestClient, artifacts: Artifacts) -> None:
    crown(artifacts, {"run": f"publication-{DIGESTS['publication']}", "model": HOSTILE + "\ud800"})
    request = artifacts.stage("evaluation") / REQUEST
    config = json.loads(request.read_text())
    config["config"]["models"] = [HOSTILE]
    request.write_text(json.dumps(config))
    rates(artifacts, {f"win_rate/{HOSTILE}": 0.5, f"ci_low/{HOSTILE}": 0.4, f"ci_high/{HOSTILE}": 0.6})
    page = client.get("/", params={"filter": "champion"}).text
    assert page.count("&lt;script&gt;alert") == 3, "the text of the row, win rate and champion"
    # that of the page alone
    assert [tag for tag, _ in Elements(page).found if tag in ("img", "script")] == ["script"]
    assert "\x1b" not in page and "\u202e" not in page
    for models in ([], None, {}, [["x"]]):
        request.write_text(json.dumps(config | {"config": config["config"] | {"models": models}}))
        assert "cannot be shown" not in client.get("/").text


def test_an_open_page_gets_the_runs_of_its_filter(artifacts: Artifacts) -> None:
    artifacts.record("second", "failed", STARTED + 700)
    page = page_of(Folder(artifacts.path), "/", {"filter": "failed"})
    before = page.watched()
    assert list(rows(page.make("runs"))) == ["second"]
    crown(artifacts, {"run": "publication-1", "model": "m"})
    assert page.watched() != before, "another champion is seen"
