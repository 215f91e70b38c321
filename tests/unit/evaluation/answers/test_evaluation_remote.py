"""Models behind endpoints in an evaluation: as a contestant and as the baseline."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_core.config import Endpoint
from tests.support.chat_endpoint import Reply, completion, serving
from tests.support.evaluations import COUNT, Setting, evaluate


def test_a_remote_model_plays_like_any_other_and_is_asked_once(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote one knows every answer; the local baseline half of them. A second attempt asks it
    nothing."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def right(_: int, request: dict[str, Any]) -> Reply:
        return completion(request["messages"][-1]["content"].split()[-1][::-1])

    with serving(right) as server:
        remote = {"gpt": Endpoint(model="gpt-x", base_url=server.url, input_price=1.0, output_price=1.0)}
        changes: dict[str, Any] = {"models": ("gpt", "ppo"), "endpoints": remote, "temperature": 0.3}
        run, report, metrics = evaluate(setting, **changes)
        assert len(server.requests) == COUNT
        assert {(r["temperature"], r["max_tokens"]) for r in server.requests} == {(0.3, 24)}
        _, again, repeated = evaluate(setting, **changes)
        assert len(server.requests) == COUNT
    assert report.right == {"sft": 0.5, "gpt": 1.0, "ppo": 0.9} and report.against_parent == ()
    assert {rate.model: rate.win_rate for rate in report.win_rates} == {"gpt": 0.75, "ppo": 0.7}
    assert report.answering["gpt"].input_tokens == 10 * COUNT
    assert report.answering["gpt"].settings["temperature"] == 0.3
    assert metrics["answer_cost/gpt"] == pytest.approx(13 * COUNT / 1e6)
    assert metrics["answer_requests/gpt"] == COUNT
    assert repeated == metrics | {"answer_requests/gpt": 0.0} and again.win_rates == report.win_rates
    line = json.loads((run / "report" / "answers" / "gpt.jsonl").read_text().split("\n")[0])
    assert line["model"] == "gpt" and line["metadata"]["token_len"] == 3  # as the endpoint counts


def test_a_remote_baseline_needs_no_model_of_ours(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(lambda *_: completion("no idea")) as server:
        remote = {"gpt": Endpoint(model="gpt-x", base_url=server.url)}
        _, report, _ = evaluate(setting, models=("ppo",), baseline="gpt", endpoints=remote)
    assert report.right["gpt"] == 0.0 and report.win_rates[0].win_rate == 0.95
