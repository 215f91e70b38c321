"""A drift beyond its gate's bound sends a webhook message, and with `warn` the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tasks.notify
from flows.alignment import alignment
from rlhf_core.config import Recipe
from tests.support.webhook import receiving
from tests.support.writing_stages import ORDER, STAGE, TEXT, attempts, statuses

pytestmark = pytest.mark.usefixtures("prefect")

DRIFT = """
  drift:
    model: loop
    prompts: {sources: today.jsonl}
    past_prompts: {sources: prompts.jsonl}
    gates:
      - {metric: prompts/divergence_p, min: 0.01, on_fail: warn}
      - {metric: refusals/rise_p, min: 0.01, on_fail: warn}
  publication: {model: loop, evaluation: evaluation}
"""
FOUND = 'return Outcome({"loss": 1.5, "prompts/divergence_p": 0.001, "refusals/rise_p": 0.6}'


def test_a_drift_is_an_alarm_and_the_run_goes_on(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 'return Outcome({"loss": 1.5}' in STAGE
    Path("modules/stage_for_flows.py").write_text(STAGE.replace('return Outcome({"loss": 1.5}', FOUND))
    Path("recipe.yaml").write_text(TEXT + DRIFT)
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        alignment(recipe("notify={url_env: HOOK, events: [gate, completed]}"))
        assert tasks.notify._senders[receiver.url].flush(10)
        assert receiver.events == ["gate", "gate", "completed"]
        alarm, quiet = receiver.got[:2]
    assert (
        alarm["text"]
        == "tiny: gate failed (warn): stage drift: prompts/divergence_p is 0.001, and the gate requires at"
        " least 0.01"
    )
    assert (alarm["stage"], alarm["passed"], alarm["value"]) == (
        "drift",
        False,
        0.001,
    ) and "Users ask otherwise" in alarm["meaning"]
    assert (quiet["metric"], quiet["passed"]) == ("refusals/rise_p", True)
    assert set(attempts()) == {*ORDER, "drift", "publication"} and set(statuses().values()) == {"done"}
