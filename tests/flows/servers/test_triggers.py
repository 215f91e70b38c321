"""`alignflow serve --on-feedback --trigger-port`: posted feedback and requests start runs, once, also when
serve is killed in between."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.parse import feedback_of
from rlhf_core.recipe.loops.loop_record import FILE, Record
from tests.support import micro
from tests.support.micro import Serve, ask, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECIPE = """
name: micro
base_model: org/model
stages:
  sft: {data: {sources: train.jsonl}}
  loop: {stage: iterative_feedback, method: dpo, feedback: {sources: chat.inbox}, min_new_rows: 3, rounds: 1}
"""
FINAL = ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]


def post(url: str, token: str, body: object = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"authorization": f"Bearer {token}", "content-type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def endpoint(serve: Serve, kind: str, name: str) -> str:
    """Waits until an endpoint of `serve` answers. Returns its address."""
    found = re.search(rf"{kind}: POST (http://\S+?)/(?:FLOW/)?NAME", (serve.folder / "serve.txt").read_text())
    assert found is not None, serve.told()

    def answers() -> bool:
        try:
            return post(f"{found[1]}/{name}", "wrong")[0] == 401
        except OSError:
            return False

    wait_until(answers, f"the endpoint for {kind}", told=serve.told)
    return f"{found[1]}/{name}"


def row(number: int) -> dict[str, str]:
    return {"prompt": f"question {number}", "chosen": "good", "rejected": "bad"}


def runs(api: str, deployment: str) -> list[dict[str, Any]]:
    flow, name = deployment.split("/")
    identity = ask(api, f"/deployments/name/{flow}/{name}")["id"]
    found = ask(
        api,
        "/flow_runs/filter",
        {"flow_runs": {"deployment_id": {"any_": [identity]}}, "sort": "START_TIME_ASC", "limit": 200},
    )
    return list(found)


def rounds(folder: Path) -> list[int]:
    """Returns the number of the newest row of each finished round."""
    file = folder / "artifacts/micro" / FILE
    record = Record.model_validate_json(file.read_text()) if file.exists() else Record(loop="loop")
    return [next(iter(done.taken.values())) for done in record.rounds]


def kill(serve: Serve) -> None:
    serve.process.kill()
    serve.process.wait(timeout=60)
    wait_until(
        lambda: not micro.left(serve.folder),
        "all processes to end",
        told=lambda: str(micro.left(serve.folder)),
    )


def test_new_feedback_starts_one_round_at_a_time_and_none_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    environment = micro.build(folder, RECIPE)
    (folder / "slow.json").write_text('{"until": "go"}')
    options = ("--no-schedule", "--on-feedback", "--feedback-port", "0")
    inbox = Inbox(folder / "chat.inbox")
    serve = Serve(folder, environment, *options)
    try:
        api = serve.ready()
        url = endpoint(serve, "feedback", "chat")
        token = (folder / "home/feedback-token").read_text().strip()
        assert post(url, token, [row(0), row(1)])[0] == 200
        assert post(url, token, row(2))[0] == 200
        wait_until(lambda: "sft" in micro.begun(folder), "the third row to start a run", told=serve.told)
        with ThreadPoolExecutor(8) as pool:  # while the run waits for the file `go`
            codes = list(pool.map(lambda number: post(url, token, row(number))[0], range(3, 1003)))
        assert codes == [200] * 1000
        assert len(runs(api, "loop/micro-feedback")) == 1
        (folder / "go").touch()
        wait_until(
            lambda: len(rounds(folder)) == 2,
            "the rows that came meanwhile to be a second round",
            told=serve.told,
        )
        assert rounds(folder) == [3, 1003], "each row in one round"
        wait_until(
            lambda: {run["state_type"] for run in runs(api, "loop/micro-feedback")} == {"COMPLETED"},
            "both runs to end",
        )
        assert len(runs(api, "loop/micro-feedback")) == 2
        assert post(url, token, [row(1003), row(1004)])[0] == 200
    finally:
        kill(serve)
    (folder / "go").unlink()
    inbox.add([feedback_of(row(1005))])  # while there is no serve
    serve = Serve(folder, environment, *options)
    try:
        api = serve.ready()
        wait_until(
            lambda: "loop.round3.dpo" in micro.begun(folder),
            "rows from before the start to start a run",
            told=serve.told,
        )
    finally:
        kill(serve)
    inbox.add([feedback_of(row(1006))])
    (folder / "go").touch()
    serve = Serve(folder, environment, *options)
    try:
        api = serve.ready()
        wait_until(lambda: len(rounds(folder)) == 3, "the round that was cut off to go on", told=serve.told)
        wait_until(
            lambda: all(run["state_type"] in FINAL for run in runs(api, "loop/micro-feedback")),
            "the runs to end",
        )
        assert rounds(folder) == [3, 1003, 1006], "it goes up to its first beginning"
        states = [run["state_type"] for run in runs(api, "loop/micro-feedback")]
        assert sorted(states) == ["COMPLETED"] * 3 + ["CRASHED"], "one run for each beginning"
    finally:
        assert serve.stop() == 130
    trained = [(name, digest) for name, digest, _ in micro.attempts(folder) if name.startswith("loop.")]
    assert len(set(trained)) == 3 and len(trained) == 4, trained


def test_requests_start_one_run_and_few_in_an_hour(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    environment = micro.build(folder)
    (folder / "slow.json").write_text('{"until": "go"}')
    options = ("--no-schedule", "--trigger-port", "0", "--starts-an-hour", "2")
    serve = Serve(folder, environment, *options)
    try:
        api = serve.ready()
        url = endpoint(serve, "triggers", "loop/micro")
        token = (folder / "home/trigger-token").read_text().strip()
        asked = {"recipe": "other.yaml", "parameters": {"overrides": ["loop.beta=0.9"]}}
        code, first = post(f"{url}?overrides=loop.beta=0.9", token, asked)
        assert code == 202 and first["started"]
        with ThreadPoolExecutor(16) as pool:
            flood = list(pool.map(lambda _: post(url, token), range(100)))
        assert {answer["run"] for code, answer in flood if code == 200} == {first["run"]}
        assert {code for code, _ in flood} <= {200, 429}
        for wrong in ("", "x", micro.AUTH[api], micro.AUTH[api].partition(":")[2]):
            assert post(url, wrong)[0] == 401
        assert post(url.replace("loop/micro", "loop/other"), token)[0] == 404
        assert [run["id"] for run in runs(api, "loop/micro")] == [first["run"]]
        assert ask(api, f"/flow_runs/{first['run']}")["parameters"] == {
            "recipe": "recipe.yaml",
            "overrides": [],
        }
        (folder / "go").touch()
        serve.reaches(api, first["run"], "COMPLETED")
        code, second = post(url, token)
        assert code == 202 and second["run"] != first["run"]
        serve.reaches(api, second["run"], "COMPLETED")
        assert post(url, token)[0] == 429
    finally:
        assert serve.stop() == 130
    serve = Serve(folder, environment, *options)
    try:
        api = serve.ready()
        # the server knows how many there were
        assert post(endpoint(serve, "triggers", "loop/micro"), token)[0] == 429
        assert len(runs(api, "loop/micro")) == 2
    finally:
        serve.stop()
    wait_until(lambda: not micro.left(folder), "all processes to end", told=lambda: str(micro.left(folder)))
