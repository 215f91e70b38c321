"""Nothing is published past a failed gate, however the publication is started; gates that warn are on the
card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import flows.alignment
from rlhf_core.config.gates import Gate, Verdict
from rlhf_core.recipe.gate_checks import GateFailed, gates_behind, gates_of
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.stages.publication.dataset import data_card
from tests.support.chain import Chain, build
from tests.support.text_rows import rows_of_text
from tests.unit.stages.publication.test_card import the_card

TEXT = """
name: tiny
base_model: base/model
stages:
  sft: {data: {sources: train.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  ppo: {prompts: {sources: prompts.jsonl}}
  evaluation: {models: [ppo], questions: {path: q.jsonl}}
  other: {stage: dpo, data: {sources: pairs.jsonl}}
  publication: {model: ppo, evaluation: evaluation}
"""
METRICS = {"evaluation": {"win_rate/ppo": 0.4, "ci_low/ppo": 0.35}}
Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Plans of a recipe whose stages are all done but the publication; every loss is 1.5."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    first = plan(load_recipe("recipe.yaml"))
    for node in first.nodes:
        if node.kind != "publication":
            run = RunDir(node.run_dir)
            run.prepare(first.request(node))
            run.finish(first.request(node), Outcome(METRICS.get(node.name, {"loss": 1.5}), {}), 1.0)
    return lambda *overrides: plan(load_recipe("recipe.yaml", overrides))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StageRequest]:
    """What the flow starts; Prefect's logs and artifacts and the report are left out, the decisions are the
    flow's own."""
    requests: list[StageRequest] = []

    def start(request: StageRequest, run_dir: Path, store: object) -> str:
        done = RunDir(run_dir).result() is not None
        requests.extend([] if done else [request])
        return "skipped" if done else "done"

    @contextmanager
    def unreported(planned: Plan) -> Iterator[dict[str, str]]:
        yield {}

    monkeypatch.setattr(flows.alignment, "run_stage", start)
    monkeypatch.setattr(flows.alignment, "check_gates", gates_of)
    monkeypatch.setattr(flows.alignment, "reported", unreported)
    monkeypatch.setattr(flows.alignment, "require_here", lambda planned, nodes: None)
    return requests


def publish(planned: Plan, alone: bool) -> None:
    """As `alignflow stage publication` or `alignflow run` do."""
    nodes = planned.stages_of("publication") if alone else planned.nodes
    flows.alignment.require_parents(planned, nodes)
    flows.alignment.run_all(planned, nodes)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("on_fail", ["stop", "branch"])
@pytest.mark.parametrize(
    ("gated", "metric", "sentence"),
    rows_of_text(r"""
    sft | loss | ^stage sft: loss is 1\.5, and the gate requires at most 0\.3: what depends on it was not started\.
    reward_model | loss | ^stage reward_model: loss is 1\.5
    ppo | reward/mean | ^stage ppo: its result has no metric reward/mean, and the gate requires at most 0\.3
    evaluation | ci_low/ppo | ^stage evaluation: ci_low/ppo is 0\.35, and the gate requires at most 0\.3
    """),
)
def test_a_gate_added_after_its_stage_was_done_holds_the_publication_back(
    planned: Planned,
    started: list[StageRequest],
    gated: str,
    metric: str,
    sentence: str,
    on_fail: str,
    alone: bool,
) -> None:
    publish(planned(f"{gated}.gates=[{{metric: {metric}, max: 9, on_fail: warn}}]"), alone)
    assert [request.name for request in started] == ["publication"]
    started.clear()
    with pytest.raises(GateFailed, match=sentence):
        publish(planned(f"{gated}.gates=[{{metric: {metric}, max: 0.3, on_fail: {on_fail}}}]"), alone)
    assert not started


def test_a_gate_of_a_stage_it_does_not_depend_on_holds_nothing_back_that_is_started_alone(
    planned: Planned, started: list[StageRequest]
) -> None:
    found = planned("other.gates=[{metric: loss, max: 1}]")
    publish(found, alone=True)
    assert [request.name for request in started] == ["publication"] and started[0].gates == ()


@pytest.mark.parametrize("gone", ["sft", "reward_model"])
def test_a_gate_that_cannot_be_checked_any_more_is_no_passed_one(
    planned: Planned, started: list[StageRequest], gone: str
) -> None:
    found = planned(f"{gone}.gates=[{{metric: loss, max: 2}}]")
    publish(found, alone=True)
    (found[gone].run_dir / "result.json").unlink()
    with pytest.raises(
        ValueError,
        match=(
            f"^stage publication depends on {gone}, whose gates cannot be checked because its result is gone"
        ),
    ):
        publish(found, alone=True)
    publish(planned(), alone=True)
    assert len(started) == 2, "without gates nothing is missing"


def test_the_publication_hears_all_verdicts_and_no_digest_changes(
    planned: Planned, started: list[StageRequest]
) -> None:
    gates = (
        "sft.gates=[{metric: loss, max: 1, on_fail: warn}]",
        "evaluation.gates=[{metric: win_rate/ppo, min: 0.3}]",
    )
    found = planned(*gates, "other.gates=[{metric: loss, max: 1, on_fail: warn}]")
    publish(found, alone=False)
    assert [(v.stage, v.passed) for v in started[0].gates] == [("sft", False), ("evaluation", True)]
    assert started[0].gates == gates_behind(found, found["publication"])
    assert StageRequest.model_validate_json(started[0].model_dump_json()) == started[0]
    assert started[0].digest == planned()["publication"].digest


def verdict(stage: str, metric: str, value: float | None, passed: bool, meaning: str = "") -> Verdict:
    gate = Gate(metric=metric, min=0.5, on_fail="stop" if passed else "warn")
    return Verdict(stage=stage, gate=gate, value=value, passed=passed, meaning=meaning)


def test_cards_list_the_gates(tmp_path: Path) -> None:
    chain: Chain = build(tmp_path / "home")
    verdicts = (
        verdict("reward_model", "eval/accuracy", 0.71, True),
        verdict("ppo", "kl/mean", None, False, "PPO left its reference."),
    )
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"chosen": "a"}\n')
    cards = (
        the_card(chain, gates=verdicts),
        data_card(rows, {"data/pairs.jsonl": rows}, "pairs", "mit", gates=verdicts),
    )
    for card in cards:
        assert "| reward_model | eval/accuracy | 0.71 | at least 0.5 | passed |" in card
        assert "| ppo | kl/mean |  | at least 0.5 | **failed**: PPO left its reference. |" in card
    assert "## Gates" not in the_card(chain)
