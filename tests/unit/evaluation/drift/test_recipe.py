"""A drift stage in a recipe: its models, its inputs, what decides its digest, and what is refused before any
work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.config.kinds import has_metric
from rlhf_core.preflight.question_checks import question_problems
from tests.support.text_rows import rows_of_text
from tests.support.tiny_plan import Planned

TEXT = """
name: tiny
base_model: base/model
stages:
  sft: {data: {sources: train.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  loop: {stage: iterative_dpo, prompts: {sources: prompts.jsonl}, rounds: 2}
  more: {stage: dpo, policy: sft, data: {sources: pairs.jsonl}}
  evaluation: {models: [loop], questions: {path: q.jsonl}, temperature: 1}
  drift:
    model: loop
    kl: true
    prompts: {sources: today.jsonl}
    past_prompts: {sources: prompts.jsonl}
    anchors: {pairs: {path: anchors.jsonl}, judge: {kind: reward}}
"""


def test_it_depends_on_the_last_round_its_evaluation_and_the_judge_of_anchors(
    planned: Planned,
) -> None:
    found = planned()
    drift = found["drift"]
    last = found["loop.round2.dpo"]
    assert drift.parents == (last.name, "sft", "evaluation", "reward_model")
    assert found.inputs(drift)["loop"] == str(last.run_dir / "checkpoint")
    assert found.inputs(drift)["evaluation"] == str(found["evaluation"].run_dir / "report")
    assert has_metric(drift.config, "anchors/changed_low") and has_metric(drift.config, "kl/change")
    assert not has_metric(planned("drift.kl=false")["drift"].config, "kl")


def test_prompts_and_anchors_decide_the_digest(planned: Planned) -> None:
    digests = [planned()["drift"].digest]
    for file in ("today.jsonl", "prompts.jsonl", "anchors.jsonl"):
        Path(file).write_text("{}\n")
        digests.append(planned()["drift"].digest)
    digests.append(planned("drift.anchors.days=1")["drift"].digest)
    assert len(set(digests)) == 5
    assert planned("drift.prompt_max_len=9", "drift.anchors.days=1")["drift"].digest == digests[-1]


@pytest.mark.parametrize(
    ("override", "sentence"),
    rows_of_text(r"""
    drift.model=more | stages\.drift\.model: more does not answer in evaluation: add it to that stage's models
    drift.reference=base | stages\.drift\.reference: base does not answer in evaluation
    drift.reference=loop | stages\.drift: loop is both model and reference, so there is no drift to measure: name another
    evaluation.temperature=0 | stages\.drift\.kl needs samples of the model: set temperature of evaluation to 1, or leave kl out
    drift.evaluation=sft | stages\.drift\.evaluation: sft is of kind sft, but a stage of kind evaluation is needed here
    drift.anchors.judge.reward=sft | stages\.drift\.anchors\.judge\.reward: sft is of kind sft, but a reward model is needed here
    drift.anchors.pairs.path=chat.inbox | stages\.drift\.anchors: chat\.inbox is an inbox, but anchors are a fixed set of pairs: name a file
    drift.gates=[{metric: prompts/kl, max: 1}] | stages\.drift\.gates\.0\.metric: unknown metric 'prompts/kl'
    drift.anchors.judge={kind: openai, model: x, verdict_cache: shared} | stages\.drift\.anchors: anchors need new verdicts, but verdict_cache returns old ones: leave it out
    """),
)
def test_a_wrong_drift_stage_is_one_sentence(planned: Planned, override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        planned(override)


@pytest.mark.parametrize(
    ("row", "judge", "told"),
    rows_of_text(
        """
    null | '{kind: reward}' | anchors.jsonl
    {prompt: x, answer_a: '1', answer_b: '2', verdict: b} | '{kind: reward}' | A, B or tie, and here it is 'b'
    {prompt: x, answer_a: '1', answer_b: '2', verdict: B} | '{kind: rule}' | there is no column 'answer'
    {prompt: x, answer_a: '1', answer_b: '2', verdict: B} | '{kind: reward}' | ''
    """,
        yaml_columns={0, 1, 2},
    ),
)
def test_wrong_anchors_are_found_before_the_run(
    planned: Planned, row: dict[str, str] | None, judge: str, told: str
) -> None:
    if row:
        Path("anchors.jsonl").write_text(json.dumps(row) + "\n")
    found = question_problems(planned(f"drift.anchors.judge={judge}")["drift"], 0)
    assert [problem.startswith("stages.drift.anchors.pairs: ") and told in problem for problem in found] == [
        True
    ] * bool(told)
