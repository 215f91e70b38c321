"""Inputs of a plan: parents, models and files, their names, and what a run would do and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.dry_run import outlook
from rlhf_core.config import Preferences
from rlhf_core.runs.run_dir import RunDir
from tests.support.text_rows import rows_of_text
from tests.support.tiny_plan import Planned, changed, finish


def test_reward_models_on_trial_are_parents_and_their_pairs_decide(planned: Planned) -> None:
    trial = planned("evaluation.reward_evaluation={data: {sources: pairs.jsonl}}")
    assert trial["evaluation"].stages["reward_model"] == "reward_model"
    assert trial["evaluation"].digest != planned()["evaluation"].digest
    with pytest.raises(ValueError, match=r"reward_evaluation.models.0: sft is of kind sft, but .* is needed"):
        planned("evaluation.reward_evaluation={models: [sft], data: {sources: pairs.jsonl}}")


def test_inputs_are_places(planned: Planned, tmp_path: Path) -> None:
    p = planned()
    assert p.inputs(p["sft"]) == {"base": str(tmp_path / "base")}
    assert p.inputs(p["loop.round1.dpo"]) == {
        "ppo": str(p["ppo"].run_dir / "checkpoint"),
        "loop.round1.preferences": str(p["loop.round1.preferences"].run_dir / "pairs.jsonl"),
    }
    assert p.inputs(p["publication"]) == {
        "loop": str(p["loop.round2.dpo"].run_dir / "checkpoint"),
        "evaluation": str(p["evaluation"].run_dir / "report"),
    }
    assert set(p.inputs(p["evaluation"])) == {"ppo", "loop.round1", "loop.round2", "sft", "reward_model"}
    assert p.inputs(planned("sft.model=org/model")["sft"]) == {"org/model": "org/model"}
    assert p["sft"].run_dir == tmp_path / "artifacts" / "stages" / f"sft-{p['sft'].digest}"


def test_inputs_follow_what_a_stage_really_left(planned: Planned) -> None:
    p = planned()
    finish(p, p["loop.round1.preferences"], {"pairs": "data/best-worst.jsonl"})
    place = p.inputs(p["loop.round1.dpo"])["loop.round1.preferences"]
    assert place == str(p["loop.round1.preferences"].run_dir / "data" / "best-worst.jsonl")


def test_reward_models_of_a_list_are_parents_and_models(planned: Planned) -> None:
    p = planned("ppo.reward=[reward_model, {model: org/rm}, a.py:f, 'http://host']")
    assert "reward_model" in p["ppo"].parents and p["ppo"].models["org/rm"] == "org/rm"
    assert not any("a.py" in name or "host" in name for name in p.inputs(p["ppo"]))


def test_a_loop_takes_rewards_of_every_kind(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(responses): return [0]\n")
    p = planned(
        "loop.reward=[reward_model, {model: org/rm}, a.py:f, 'http://host']", "loop.max_failed_rewards=0.5"
    )
    for k in (1, 2):
        node = p[f"loop.round{k}.preferences"]
        assert isinstance(node.config, Preferences) and node.config.max_failed_rewards == 0.5
        assert "reward_model" in node.parents and node.models["org/rm"] == "org/rm"
        assert [source.title for source in node.config.reward] == ["reward_model", "rm", "f", "host"]
    (tmp_path / "a.py").write_text("def f(responses): return [1]\n")
    again = planned(
        "loop.reward=[reward_model, {model: org/rm}, a.py:f, 'http://host']", "loop.max_failed_rewards=0.1"
    )
    assert changed(p, again) >= {"loop.round1.preferences", "loop.round2.dpo"}
    assert "ppo" not in changed(p, again)


def test_a_plan_needs_no_files(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").unlink()
    p = planned("base_model=no/such/folder", "loop.prompts={sources: there/is/none.jsonl}")
    assert len(p.nodes) == 9 and not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    rows_of_text("""
    ppo.actor=sfft | stages.ppo.actor: unknown name 'sfft'; did you mean sft?
    ppo.reward=sft | stages.ppo.reward: sft is of kind sft, but a reward model is needed here
    ppo.reward=base | a reward model is needed here
    ppo.reward=[reward_model, rm] | stages.ppo.reward.1: unknown name 'rm'
    sft.model=reward_model | stages.sft.model: reward_model is of kind reward_model, but a stage of kind sft or dpo or kto or ppo or select is needed here
    publication.evaluation=evaluatio | stages.publication.evaluation: unknown stage 'evaluatio'; did you mean evaluation?
    evaluation.judges.1.reward=rm | stages.evaluation.judges.1.reward: unknown name 'rm'
    sft.model=sft | stages need each other: sft -> sft
    ppo.actor=loop | stages need each other: loop.round2.dpo -> loop.round1.dpo -> ppo -> loop.round2.dpo
    """),
)
def test_wrong_references_are_one_sentence(planned: Planned, override: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        planned(override)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_stages_of_a_name(planned: Planned) -> None:
    p = planned()
    assert [node.name for node in p.stages_of("loop.round1")] == [
        "loop.round1.preferences",
        "loop.round1.dpo",
    ]
    assert len(p.stages_of("loop")) == 4 and [node.name for node in p.stages_of("ppo")] == ["ppo"]
    with pytest.raises(ValueError, match="unknown stage 'pppo'; did you mean ppo"):
        p.stages_of("pppo")


def test_outlook_says_why(planned: Planned) -> None:
    p = planned()
    finish(p, p["sft"], {"checkpoint": "checkpoint/weights"})
    RunDir(p["reward_model"].run_dir).prepare(p.request(p["reward_model"]))
    lines = {line.node.name: line for line in outlook(p)}
    assert lines["sft"].action == "skip"
    assert lines["reward_model"].action == "resume"
    assert lines["ppo"].why == "never run"
    after = {line.node.name: line for line in outlook(planned("sft.learning_rate=1e-4", "seed=2"))}
    assert after["sft"] == (after["sft"].node, "run", "changed: learning_rate 1e-05 -> 0.0001, seed 0 -> 2")
    (p["sft"].run_dir / "checkpoint" / "weights").unlink()
    assert outlook(p)[0].action == "run" and "missing" in outlook(p)[0].why


def test_unfinished_work_takes_the_new_cadence(planned: Planned) -> None:
    p = planned()
    run = RunDir(p["sft"].run_dir)
    run.prepare(p.request(p["sft"]))
    q = planned("sft.save_steps=5")
    assert q["sft"].run_dir == run.path
    run.prepare(q.request(q["sft"]))
    assert getattr(run.request().config, "save_steps") == 5  # noqa: B009 (the union has no such field)
    finish(q, q["sft"], {"checkpoint": "checkpoint/weights"})
    run.prepare(p.request(p["sft"]))
    assert getattr(run.request().config, "save_steps") == 5  # noqa: B009


JUDGE = "judge: {kind: vllm, model: sft}, rubric: r"


def test_a_judge_of_the_recipe_is_a_parent_and_its_digest_decides(planned: Planned) -> None:
    p = planned(f"ppo.reward=[reward_model, {{{JUDGE}}}]", f"loop.reward={{{JUDGE}}}", "loop.policy=base")
    assert p["ppo"].stages["sft"] == "sft" and "sft" in p["loop.round2.preferences"].parents
    assert p.inputs(p["loop.round1.preferences"])["sft"] == str(p["sft"].run_dir / "checkpoint")
    other = planned(
        f"ppo.reward=[reward_model, {{{JUDGE}}}]",
        f"loop.reward={{{JUDGE}}}",
        "loop.policy=base",
        "sft.learning_rate=1e-3",
    )
    assert {"ppo", "loop.round1.preferences"} <= changed(p, other)
    for free in ("engine: {cpus: 2}", "engine: {num_engines: 2}", "engine: {options: {max_num_seqs: 8}}"):
        override = f"ppo.reward=[reward_model, {{judge: {{kind: vllm, model: sft, {free}}}, rubric: r}}]"
        again = planned(override, f"loop.reward={{{JUDGE}}}", "loop.policy=base")
        assert changed(p, again) == set(), free
    elsewhere = planned("ppo.reward={judge: {kind: vllm, model: org/judge}, rubric: r}", "ppo.critic=sft")
    assert elsewhere["ppo"].models["org/judge"] == "org/judge"
    with pytest.raises(
        ValueError, match=r"stages.ppo.reward.judge.model: reward_model is of kind reward_model"
    ):
        planned("ppo.reward={judge: {kind: vllm, model: reward_model}, rubric: r}", "ppo.critic=sft")


def test_the_folder_of_a_judge_decides_and_its_path_does_not(planned: Planned, tmp_path: Path) -> None:
    def with_judge(place: str) -> str:
        return f"ppo.reward=[reward_model, {{judge: {{kind: vllm, model: {place}}}, rubric: r}}]"

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    p = planned(with_judge(f"{tmp_path}/one"))
    assert changed(p, planned(with_judge(f"{tmp_path}/two"))) == set()
    (tmp_path / "two" / "config.json").write_text('{"a": 1}')
    assert "ppo" in changed(p, planned(with_judge(f"{tmp_path}/two")))


def test_the_kind_of_a_judge_behind_an_endpoint_is_in_no_digest(planned: Planned) -> None:
    reward = "ppo.reward=[reward_model, {judge: {model: m}, rubric: r}]"
    named = "ppo.reward=[reward_model, {judge: {kind: openai, model: m}, rubric: r}]"
    assert changed(planned(reward), planned(named)) == set()
    digests = {planned(reward)["ppo"].digest}
    assert planned(f"ppo.reward=[reward_model, {{{JUDGE}}}]")["ppo"].digest not in digests
