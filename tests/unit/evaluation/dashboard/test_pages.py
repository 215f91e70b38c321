"""Every address of the dashboard: what it shows, hostile texts, and what it refuses."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest
from filelock import FileLock
from starlette.testclient import TestClient

from evaluation.dashboard import compare
from evaluation.dashboard import dashboard_app as app
from evaluation.dashboard.artifacts_folder import Folder
from evaluation.dashboard.dashboard_app import dashboard
from evaluation.dashboard.pages import Page, fill
from evaluation.report import iterations
from evaluation.report.iterations import rollouts
from rlhf_core.runs.approval_record import ask
from rlhf_core.runs.run_dir import LOCK, LOG, METRICS, REQUEST, RESULT, ROLLOUTS
from rlhf_core.system.pages.page_server import Protected
from tests.support.finished_run import DIGESTS
from tests.unit.evaluation.dashboard.conftest import STARTED, Artifacts

TOKEN = "a-token-of-thirty-two-characters"
HOSTILE = (
    "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7"
    " }}\x1b]0;title\x07\x1b[31mred\u202eevil \ud800"
)
PPO = f"/stage/ppo-{DIGESTS['ppo']}"
PAGES = [
    "/",
    "/run/demo/first",
    PPO,
    f"/compare?a=ppo-{DIGESTS['ppo']}&b=sft-{DIGESTS['sft']}",
    "/compare?a=demo/first&b=demo/first",
    f"/rollouts/ppo-{DIGESTS['ppo']}",
]
ROUTES = [
    *PAGES,
    "/report/demo",
    "/static/live.js",
    "/static/dashboard.css",
    "/events/",
    "/events/run/demo/first",
]


@pytest.fixture
def client(artifacts: Artifacts) -> Iterator[TestClient]:
    with TestClient(Protected(dashboard(artifacts.path), TOKEN), base_url="http://127.0.0.1:8000") as made:
        made.headers["authorization"] = f"Bearer {TOKEN}"
        yield made


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """Of a folder without runs, for requests that are refused before anything is read."""
    made = TestClient(
        Protected(dashboard(tmp_path_factory.mktemp("empty")), TOKEN), base_url="http://127.0.0.1:8000"
    )
    made.headers["authorization"] = f"Bearer {TOKEN}"
    return made


class Elements(HTMLParser):
    """The elements of a page and their attributes."""

    def __init__(self, html: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_answers_without_the_token(empty: TestClient, path: str) -> None:
    for given in ("", "Bearer ", "Bearer guessed"):
        assert empty.get(path, headers={"authorization": given}).status_code == 401
    assert empty.get(path, headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_only_reading_is_answered(empty: TestClient, path: str, method: str) -> None:
    assert empty.request(method, path, content="x").status_code == 405


@pytest.mark.parametrize("path", PAGES)
def test_every_link_of_a_page_leads_somewhere(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200 and "cannot be shown" not in answer.text
    elements = Elements(answer.text).found
    links = {attrs["href"] for tag, attrs in elements if "href" in attrs} | {
        attrs["src"] for tag, attrs in elements if "src" in attrs
    }
    assert len(links) > 3 and all(str(link).startswith(("/", "data:")) for link in links), (
        "nothing is loaded from elsewhere"
    )
    assert {client.get(str(link)).status_code for link in links if str(link).startswith("/")} == {200}
    assert "script-src" not in answer.headers["content-security-policy"]
    assert not re.search(r"<script[^>]*>[^<]", answer.text)
    assert not [attrs for _, attrs in elements if any(name.startswith("on") for name in attrs)]


def test_a_stage_that_nothing_has_started_is_no_link(client: TestClient, artifacts: Artifacts) -> None:
    shutil.rmtree(artifacts.stage("publication"))
    shown = client.get("/run/demo/first").text
    links = {
        str(attrs["href"]) for _, attrs in Elements(shown).found if str(attrs.get("href", "")).startswith("/")
    }
    assert "publication" in shown and {client.get(link).status_code for link in links} == {200}


def test_the_pages_show_what_the_run_did(client: TestClient) -> None:
    overview, run, stage = (client.get(path).text for path in PAGES[:3])
    assert "9 of 9" in overview and "No run is in progress" in overview and "/run/demo/first" in overview
    assert run.count("<rect") == 9 and "0 GPU-hours" in run and "reward/mean" in run
    for text in (
        "Reward of the answers",
        "times the floor",
        "Share in which a role waits",
        "generate",
        "used by",
        "evaluation-",
    ):
        assert text in stage, text
    assert stage.count("<polyline") == 0 and stage.count("<figure") > 9


def test_a_run_that_failed_before_its_first_stage_says_why(client: TestClient, artifacts: Artifacts) -> None:
    artifacts.record(
        "second", "failed", STARTED + 5, stages=[], why="the disk of artifacts is full; free some space"
    )
    assert "free some space" in client.get("/").text
    assert "free some space" in client.get("/run/demo/second").text


def test_a_run_in_progress_on_the_start_page(client: TestClient, artifacts: Artifacts) -> None:
    record = artifacts.record("second", status="not run")
    for name in ("ppo", "evaluation", "publication"):
        (artifacts.stage(name) / RESULT).unlink()
    with FileLock(record.with_suffix(".lock")), FileLock(artifacts.stage("ppo") / LOCK):
        now = client.get("/").text.partition("<h2>Runs")[0]
    assert "/run/demo/second" in now and "2 stages wait for others" in now
    assert PPO in now and "evaluation" not in now


def test_the_report_of_the_last_run(client: TestClient, artifacts: Artifacts, tmp_path: Path) -> None:
    assert client.get("/report/demo").status_code == 404
    assert "/report/" not in client.get("/run/demo/first").text
    (artifacts.path / "demo" / "report.html").write_text("<h1>evidence</h1>")
    assert 'href="/report/demo"' in client.get("/run/demo/first").text
    assert "evidence" in client.get("/report/demo").text
    (artifacts.path / "outside").symlink_to(tmp_path)
    (tmp_path / "report.html").write_text("secret")
    assert [
        client.get(f"/report/{name}").status_code
        for name in ("outside", "%2e%2e", "..%2f" + tmp_path.name, "stages")
    ] == [404] * 4


def test_two_runs_beside_each_other(client: TestClient, artifacts: Artifacts) -> None:
    views = [view for view in artifacts.views if view.name in ("sft", "ppo")]
    other = artifacts.path / "stages" / "sft-other"
    other.mkdir()
    request = json.loads((artifacts.stage("sft") / REQUEST).read_text())
    request["config"]["learning_rate"] = 0.125
    (other / REQUEST).write_text(json.dumps(request | {"digest": "other"}))
    (other / METRICS).write_text((artifacts.stage("sft") / METRICS).read_text())
    stages = [{"name": view.name, "run_dir": f"stages/{view.run_dir.name}"} for view in views]
    stages[0]["run_dir"] = "stages/sft-other"
    artifacts.record(
        "second", "done", STARTED + 5, stages=stages, config={"seed": 3, "store": "s3://me:secret@host/x"}
    )
    page = client.get("/compare?a=demo/first&b=demo/second").text
    for text in (
        "learning_rate",
        "0.125",
        "second training",
        "first training",
        "not there",
        "ppo",
        "no result after",
    ):
        assert text in page, text
    assert ":secret@" not in page


def test_lineage_can_be_clicked_also_of_a_copy_of_the_artifacts(
    client: TestClient, artifacts: Artifacts, tmp_path: Path
) -> None:
    moved = tmp_path / "copy"
    artifacts.path.rename(moved)
    with TestClient(dashboard(moved)) as other:
        page = other.get(PPO).text
    for name in ("sft", "reward_model", "iterative_dpo.round1.preferences", "evaluation"):
        assert (
            f'href="/stage/{name}-{DIGESTS[name]}"' in page or name == "iterative_dpo.round1.preferences"
        ), name
    assert "prompts.jsonl" in page and str(tmp_path) not in page.partition("Configuration")[0]


def test_hostile_texts_are_inert(client: TestClient, artifacts: Artifacts) -> None:
    ppo = artifacts.stage("ppo")
    (ppo / ROLLOUTS).mkdir()
    row = {
        "prompt": [{"role": HOSTILE, "content": HOSTILE}],
        "response": HOSTILE,
        "rewards": {HOSTILE: 1.0},
        "failure": HOSTILE,
    }
    (ppo / ROLLOUTS / "iteration3.jsonl").write_text(json.dumps(row))
    (ppo / LOG).write_bytes(HOSTILE.encode("utf-8", "surrogatepass"))
    with (ppo / METRICS).open("a") as file:
        for step in (21, 22):
            file.write(
                json.dumps(
                    {
                        "step": step,
                        HOSTILE: 1.0,
                        f"phase/{HOSTILE}": 1.0,
                        f"wait/{HOSTILE}": 1,
                        f"memory/{HOSTILE}": 1,
                    }
                )
                + "\n"
            )
    request = json.loads((ppo / REQUEST).read_text())
    request["config"] |= {"note": HOSTILE, "prompts": {"sources": [{"path": HOSTILE}]}}
    request["inputs"] |= {"odd": HOSTILE}
    (ppo / REQUEST).write_text(json.dumps(request))
    result = json.loads((ppo / RESULT).read_text())
    (ppo / RESULT).write_text(json.dumps(result | {"environment": {HOSTILE: HOSTILE}}))
    bad = HOSTILE.replace("\ud800", "")  # a record with an unpaired surrogate counts as damaged
    stages = [{"name": bad, "kind": bad, "parents": [bad], "run_dir": f"stages/{ppo.name}"}]
    stages += [
        {"name": "up", "run_dir": "stages/.."},
        {"name": "odd", "run_dir": f"stages/{bad.replace('/', '')}"},
    ]
    texts = dict.fromkeys(("recipe", "name", "host", "source"), bad)
    artifacts.record("second", bad, STARTED + 1, stages=stages, overrides=[bad], **texts)
    artifacts.record("third", HOSTILE, STARTED + 1, recipe=HOSTILE)
    artifacts.record("fourth", why=bad, status="not run")
    ask(ppo, bad, artifacts.path / bad.replace("/", ""), timedelta(hours=1))
    (artifacts.path / "demo" / "loop.json").write_text(
        json.dumps({"loop": HOSTILE, "rounds": [{"ended": HOSTILE, "win_rate": HOSTILE, "refused": HOSTILE}]})
    )
    for path in (
        "/",
        "/run/demo/second",
        PPO,
        f"{PAGES[3]}",
        "/compare?a=demo/first&b=demo/second",
        f"/stage/{quote(bad)}",
    ):
        answer = client.get(path)
        html = answer.text
        assert answer.status_code == (404 if quote(bad) in path else 200), path
        assert "cannot be shown" not in html, path
        assert "&lt;script&gt;alert" in html or answer.status_code == 404, path
        assert (
            "<script>" not in html and "<img" not in html and "\x1b" not in html and "\u202e" not in html
        ), path
        elements = Elements(html).found
        assert {tag for tag, _ in elements} <= ALLOWED, path
        assert not [a for _, a in elements if any(n.startswith("on") for n in a)], path


ALLOWED = set(
    "html head meta title link script body header a h1 h2 span main section div table tr th td b i p small"
    " code pre details summary figure figcaption svg g path rect text circle defs marker progress form input"
    " label select option button".split()
)
TRAVERSALS = [
    *(
        "/stage/%2e%2e",
        "/stage/..%2f..%2fetc",
        "/stage/sft",
        "/run/../first",
        "/run/demo/..%2ffirst",
        "/run/demo/absent",
    ),
    *(
        "/compare",
        "/compare?a=..&b=..",
        "/compare?a=../x/first&b=demo/first",
        f"/compare?a=demo/first&b=ppo-{DIGESTS['ppo']}",
    ),
    *("/static/..%2fapp.py", "/static/app.py", "/static/%2e%2e/app.py", "/static/"),
    *("/stages/x", "//etc/passwd", "/docs", "/openapi.json"),
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_addresses_of_nothing(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "Traceback" not in answer.text


def test_a_part_that_cannot_be_made_leaves_the_others(client: TestClient, artifacts: Artifacts) -> None:
    request = json.loads((artifacts.stage("ppo") / REQUEST).read_text())
    request["config"] = {"stage": "ppo", "prompts": {"sources": 3}}
    (artifacts.stage("ppo") / REQUEST).write_text(json.dumps(request | {"inputs": {"sft": ["?"]}}))
    assert "Reward of the answers" in client.get(PPO).text
    assert client.get("/run/demo/first").status_code == 200


def test_an_empty_folder_is_a_page(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        page = TestClient(dashboard(place)).get("/").text
        assert "No run is recorded" in page and "No run is in progress" in page


def test_a_log_of_a_part_that_cannot_be_made_has_no_control_characters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> str:
        raise ValueError("\x1b]0;why\x07")

    assert "ValueError" in Page("\x1b[31mtitle\nmore", {"part": make}, frozenset(), lambda: None).make("part")
    assert "title more" in caplog.text and "why" in caplog.text and not set(caplog.text) & set("\x1b\x07")


def test_a_command_to_copy_is_one_word_for_a_shell() -> None:
    question = {"folder": "stages/sft-1", "told": "asks", "recipe": "a; rm -rf $(x)'"}
    text = html.unescape(
        re.search(r"<code>(.*?)</code>", fill("overview.questions", questions=[question]))[1]
    )  # type: ignore[index]
    assert shlex.split(text) == ["alignflow", "approve", "ARTIFACTS/a; rm -rf $(x)'"]


def test_files_that_are_too_large_are_not_read(
    client: TestClient, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_REPORT", 100)
    (artifacts.path / "demo" / "report.html").write_text("x" * 100)
    assert client.get("/report/demo").text == "x" * 100
    (artifacts.path / "demo" / "report.html").write_text("x" * 101)
    answer = client.get("/report/demo")
    assert answer.status_code == 413 and "The report is larger than" in answer.text
    line = json.dumps({"prompt": [], "response": "r", "rewards": {}}) + "\n"
    (artifacts.stage("ppo") / ROLLOUTS).mkdir(exist_ok=True)
    (artifacts.stage("ppo") / ROLLOUTS / "iteration7.jsonl").write_text(line * 9)
    assert [(number, len(rows)) for number, rows in rollouts(artifacts.stage("ppo"))] == [(7, 4)]
    monkeypatch.setattr(iterations, "MAX_LINE", len(line) - 3)
    assert rollouts(artifacts.stage("ppo")) == []


def test_two_stages_of_which_one_has_a_huge_record(
    client: TestClient, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(artifacts.path)
    names = [f"ppo-{DIGESTS['ppo']}", f"sft-{DIGESTS['sft']}"]
    keys = {
        found.key for found in compare.differences(folder, *(compare.side(folder, name) for name in names))
    }
    request = artifacts.stage("sft") / REQUEST
    monkeypatch.setattr("evaluation.dashboard.artifacts_folder.MAX_JSON", request.stat().st_size - 1)
    folder = Folder(artifacts.path)
    sides = [compare.Side(name, "", {name: name}) for name in names]
    left = [found for found in compare.differences(folder, *sides) if found.part == "configuration"]
    assert keys and all(found.after in ("-", "null") for found in left)


def test_each_run_has_its_own_report(client: TestClient, artifacts: Artifacts) -> None:
    identity = "20260101-000000-aaaaaa"
    artifacts.record(identity, "done", STARTED + 600)
    home = artifacts.path / "demo"
    (home / "report.html").write_text("the newest")
    assert 'href="/report/demo"' in client.get(f"/run/demo/{identity}").text
    (home / "runs" / f"{identity}.html").write_text("its own")
    assert f'href="/report/demo/{identity}"' in client.get(f"/run/demo/{identity}").text
    assert client.get(f"/report/demo/{identity}").text == "its own"
    assert client.get("/report/demo").text == "the newest"
    assert client.get("/report/demo/..").status_code == 404
