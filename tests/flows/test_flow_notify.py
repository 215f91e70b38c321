"""Webhook messages of a flow: each state, stage and gate once, also a drift beyond its gate's bound; a hanging
receiver does not delay it."""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.runner import Runner

import flows.alignment
import tasks.notify
from flows.alignment import alignment, stage
from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.config import Recipe
from rlhf_core.recipe.gate_checks import GateFailed
from tests.support.webhook import TOKEN, receiving
from tests.support.writing_stages import ORDER, STAGE, TEXT, artifacts, attempts, statuses

pytestmark = pytest.mark.usefixtures("prefect")


def test_a_webhook_gets_states_stages_and_gates(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notify = "notify={url_env: HOOK}"
    gate = "sft.gates=[{metric: loss, max: 2}]"
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        alignment(recipe(notify, gate))
        sender = tasks.notify._senders[receiver.url]
        assert sender.flush(60)
        assert receiver.events == ["running", "stage", "gate", *["stage"] * (len(ORDER) - 1), "completed"]
        assert [message["stage"] for message in receiver.got if message["event"] == "stage"] == ORDER
        passed = receiver.got[2]
        assert passed["stage"] == "sft"
        assert passed["metric"] == "loss"
        assert passed["value"] == 1.5
        assert passed["passed"] is True
        assert len({message["run_id"] for message in receiver.got}) == 1 and receiver.got[0]["run_id"]

        receiver.got.clear()
        with pytest.raises(GateFailed):
            alignment("recipe.yaml", (notify, "sft.gates=[{metric: loss, max: 1}]"))
        assert sender.flush(60) and receiver.events == ["running", "gate", "failed"]

        receiver.got.clear()
        monkeypatch.setattr(flows.alignment, "run_stage", lambda *_: (_ for _ in ()).throw(SystemExit(1)))
        with pytest.raises(SystemExit):
            stage(recipe(notify, "sft.max_len=100"), "sft")
        assert sender.flush(60) and receiver.events == ["running", "crashed"]
    told = "".join(
        path.read_text(errors="replace") for path in Path("artifacts").rglob("*") if path.is_file()
    )
    assert TOKEN not in told + caplog.text + str(artifacts())


def test_a_bad_receiver_delays_no_flow(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow ends while its first message is still being sent: to a hanging receiver, and to a closed port
    with many attempts."""
    monkeypatch.setattr(tasks.notify, "ATTEMPTS", 1000)
    with receiving() as receiver:
        receiver.hang = True
        for url in (receiver.url, f"http://127.0.0.1:{free_port()}/"):
            monkeypatch.setenv("HOOK", url)
            alignment(recipe("notify={url_env: HOOK, timeout: 280}"))
            sender = tasks.notify._senders.pop(url)
            assert not sender.flush(0)
            atexit.unregister(sender._end)


@pytest.mark.long
def test_a_scheduled_run_sends_each_state_once(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment(recipe())  # so that the run below skips all stages
    root = Path(flows.alignment.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{Path('modules').absolute()}{os.pathsep}{root}")
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        deployment = alignment.to_deployment(
            "night", parameters={"recipe": "recipe.yaml", "overrides": ["notify={url_env: HOOK}"]}
        )
        deployment.entrypoint = "flows.alignment.alignment"
        identity = deployment.apply()
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(identity)
        asyncio.run(Runner().execute_flow_run(run.id))
        assert receiver.events == ["scheduled", "running", "completed"]
        assert {message["run_id"] for message in receiver.got} == {str(run.id)}


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
    ) and "prompts differ from those" in alarm["meaning"]
    assert (quiet["metric"], quiet["passed"]) == ("refusals/rise_p", True)
    assert set(attempts()) == {*ORDER, "drift", "publication"} and set(statuses().values()) == {"done"}
