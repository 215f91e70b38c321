"""The dashboard's page of recorded answers: all iterations, on demand, and two of them beside each other."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from evaluation.dashboard import recorded_answers
from evaluation.dashboard.dashboard_app import dashboard
from evaluation.report.rollouts import answer_rows
from tests.support.finished_run import DIGESTS
from tests.support.recorded_answers import Words, answered, episode, write
from tests.unit.evaluation.dashboard.conftest import Artifacts
from tests.unit.evaluation.dashboard.test_pages import HOSTILE, Elements

NAME = f"ppo-{DIGESTS['ppo']}"


@pytest.fixture
def client(artifacts: Artifacts) -> TestClient:
    return TestClient(dashboard(artifacts.path), base_url="http://127.0.0.1:8000")


def record(run_dir: Path, iterations: tuple[int, ...] = (1, 4, 9), text: str = "yes") -> None:
    words = Words()
    for iteration in iterations:
        rollouts = [
            answered(words, 1, f"{text} {iteration}"),
            answered(words, iteration + 100, "alone"),
            episode(words, 2, "call search", "found it", f"so it is {iteration}"),
        ]
        write(run_dir, iteration, words, rollouts, [0.5, 1.0, -2.0])


def links(page: str) -> list[str]:
    return [str(attrs["href"]) for tag, attrs in Elements(page).found if tag == "a"]


def test_from_the_stage_to_each_iteration_and_two_beside_each_other(
    client: TestClient, artifacts: Artifacts
) -> None:
    record(artifacts.stage("ppo"))
    assert f"/rollouts/{NAME}" in links(client.get(f"/stage/{NAME}").text)
    last = client.get(f"/rollouts/{NAME}").text
    assert last.count("<article") == 3 and "Answers 1 to 3 of 3 recorded" in last
    assert "−2 to +2" in last and "0 to 8 updates behind" in last and "tool, not trained on" in last
    assert "cannot be shown" not in last
    found = links(last)
    assert {f"/rollouts/{NAME}?iteration={number}" for number in (1, 4)} <= set(found)
    beside = [link for link in found if "beside=4" in link]
    assert len(beside) == 2, "two prompts were answered in iteration 4, too"
    assert all(client.get(link).status_code == 200 for link in found)
    one = client.get(beside[0]).text
    assert one.count("<section") - one.count('id="part-') == 2 and one.count("<article") == 2
    assert one.index("<small>iteration 4") < one.index("<small>iteration 9"), "the earlier one at the left"
    assert "Answers 1 to 1 of 1 recorded for this prompt" in one
    assert "all of iteration 9</a> Range of advantages" in " ".join(one.split())
    first = client.get(f"/rollouts/{NAME}?iteration=1").text
    assert "0 updates behind" in first and "so " in first


def test_a_report_leads_to_the_same_page(client: TestClient, artifacts: Artifacts) -> None:
    record(artifacts.stage("ppo"))
    answer = client.get(f"/report/rollouts/{NAME}.html", follow_redirects=False)
    assert answer.headers["location"] == f"/rollouts/{NAME}"
    validated = client.get(f"/report/rollouts/{NAME}.validation.html", follow_redirects=False)
    assert validated.headers["location"] == f"/rollouts/{NAME}?of=validation"
    odd = client.get("/report/rollouts/%5C%5Cevil.example%0A.html", follow_redirects=False)
    assert odd.headers["location"] == "/rollouts/%5C%5Cevil.example%0A"


def test_iterations_that_are_not_recorded_are_missing(client: TestClient, artifacts: Artifacts) -> None:
    assert "No answers are recorded" in client.get(f"/rollouts/{NAME}").text
    record(artifacts.stage("ppo"))
    for wrong in ("iteration=2", "beside=3", "iteration=999999999"):
        assert client.get(f"/rollouts/{NAME}?{wrong}").status_code == 404
    for odd in ("iteration=²", "iteration=-1", "iteration=" + "9" * 5000, "from=0", "from=77", "from=x"):
        assert client.get(f"/rollouts/{NAME}?{odd}").text.count("<article") in (1, 3), odd
    assert "No answer that can be shown" in client.get(f"/rollouts/{NAME}?prompt=abc").text
    assert client.get("/rollouts/none-such").status_code == 404


def test_many_answers_are_shown_in_parts(
    client: TestClient, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(artifacts.stage("ppo"))
    monkeypatch.setattr(recorded_answers, "MAX_ANSWERS", 2)
    first = client.get(f"/rollouts/{NAME}?iteration=4").text
    assert first.count("<article") == 2 and "Answers 1 to 2 of 3" in first
    later = next(link for link in links(first) if "from=" in link)
    rest = client.get(html.unescape(later)).text
    assert rest.count("<article") == 1 and "Answers 3 to 3 of 3" in rest
    assert f"/rollouts/{NAME}?iteration=4&from=1" in links(rest)


def test_long_answers_are_shown_in_parts(
    client: TestClient, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(artifacts.stage("ppo"))
    monkeypatch.setattr(recorded_answers, "MAX_TOKENS", 1)
    first = client.get(f"/rollouts/{NAME}?iteration=4").text
    assert first.count("<article") == 1 and "Answers 1 to 1 of 3" in first
    later = next(link for link in links(first) if "from=" in link)
    assert "Answers 2 to 2 of 3" in client.get(html.unescape(later)).text


def test_large_files_are_not_searched_for_other_iterations(
    client: TestClient, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = artifacts.stage("ppo")
    record(run_dir)
    size = sum((run_dir / "rollouts" / f"iteration{number}.jsonl").stat().st_size for number in (1, 4))
    monkeypatch.setattr(recorded_answers, "INDEX_BYTES", size)
    page = client.get(f"/rollouts/{NAME}").text
    assert "not looked for in 1 iterations" in page and "beside=4" in html.unescape(page)
    monkeypatch.setattr(answer_rows, "MAX_LINE", 200)
    assert "No answer that can be shown" in client.get(f"/rollouts/{NAME}").text


def test_hostile_answers_are_inert(client: TestClient, artifacts: Artifacts) -> None:
    record(artifacts.stage("ppo"), (1, 4), text=HOSTILE)
    for path in ("", "?iteration=1", f"?prompt={'<script>'}&beside=1"):
        page = client.get(f"/rollouts/{NAME}{path}").text
        assert "cannot be shown (" not in page
        elements = Elements(page).found
        assert [tag for tag, _ in elements].count("script") == 1, "the page's own"
        assert "img" not in {tag for tag, _ in elements} and not re.search(r"[\x1b\u202e]", page)
        assert not [name for _, attrs in elements for name in attrs if name.startswith("on")]


def test_answers_of_validations_are_another_page(client: TestClient, artifacts: Artifacts) -> None:
    run_dir = artifacts.stage("ppo")
    record(run_dir)
    assert "of=validation" not in client.get(f"/rollouts/{NAME}").text
    (run_dir / "validation").mkdir()
    row = {"prompt": [{"role": "user", "content": "held out?"}], "response": "yes", "rewards": {"rm": 1.0}}
    for iteration in (0, 9):
        (run_dir / "validation" / f"iteration{iteration}.jsonl").write_text(json.dumps(row))
    assert f"/rollouts/{NAME}?of=validation" in links(client.get(f"/rollouts/{NAME}").text)
    page = client.get(f"/rollouts/{NAME}?of=validation").text
    assert "held out?" in page and "Its tokens are not recorded." in page and "Question" not in page
    beside = next(link for link in links(page) if "beside=0" in link)
    one = client.get(beside).text
    assert one.count("<article") == 2 and "<small>iteration 0" in one and "<small>iteration 9" in one
    assert "Question 1?" in client.get(f"/rollouts/{NAME}?of=../rollouts").text, "no other folder is read"
