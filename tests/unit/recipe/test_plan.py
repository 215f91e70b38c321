"""The plan: expansion, names, order, digests, and what a run would do and why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.cluster.rank_environment import LESS_MEMORY
from rlhf_core.config import DPO, KTO, PPO, SFT, Evaluation, Preferences
from rlhf_core.recipe.digest import deciding
from rlhf_core.recipe.dry_run import outlook
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Node, Plan, plan
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest, run_stage
from rlhf_core.system.files import ABSENT, Digests

Planned = Callable[..., Plan]
TEXT = """
name: tiny
base_model: base
stages:
  publication: {model: loop, evaluation: evaluation}
  sft: {data: {sources: train.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  ppo: {prompts: {sources: prompts.jsonl}}
  loop: {stage: iterative_dpo, policy: ppo, prompts: {sources: prompts.jsonl}, rounds: 2, prompts_per_round: 100, beta: 0.3}
  evaluation: {models: [ppo, loop], questions: {path: q.jsonl}, judges: [{kind: rule}, {kind: reward}]}
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    for name in ("train", "pairs", "prompts", "q"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"{name}": 1}}\n')
    return lambda *overrides: plan(load_recipe("recipe.yaml", overrides))


def finish(plan: Plan, node: Node, outputs: dict[str, str]) -> None:
    """Does a stage's work in this process: each output is a small file in a folder, or a file."""
    run = RunDir(node.run_dir)
    run.prepare(plan.request(node))

    def work(request: StageRequest, run: RunDir) -> Outcome:
        for path in outputs.values():
            (run / path).parent.mkdir(parents=True, exist_ok=True)
            (run / path).write_text(request.digest)
        return Outcome({"loss": 1.0}, outputs)

    run_stage(run.path, work)


def changed(before: Plan, after: Plan) -> set[str]:
    return {node.name for node in after.nodes if node.digest != before[node.name].digest}


def test_expansion_and_order(planned: Planned) -> None:
    p = planned()
    rounds = ["loop.round1.preferences", "loop.round1.dpo", "loop.round2.preferences", "loop.round2.dpo"]
    assert [node.name for node in p.nodes] == [
        "sft",
        "reward_model",
        "ppo",
        *rounds,
        "evaluation",
        "publication",
    ]
    second = p["loop.round2.preferences"]
    dpo = p["loop.round2.dpo"]
    assert isinstance(second.config, Preferences) and isinstance(dpo.config, DPO)
    assert (second.config.first_prompt, second.config.num_prompts, second.config.policy) == (
        100,
        100,
        "loop.round1.dpo",
    )
    assert (dpo.config.beta, dpo.config.policy, dpo.config.pairs) == (
        0.3,
        "loop.round1.dpo",
        "loop.round2.preferences",
    )
    assert second.parents == ("loop.round1.dpo", "reward_model")
    assert p["loop"] is dpo and p["loop.round1"] is p["loop.round1.dpo"]


@pytest.mark.parametrize(
    ("post_processor", "fields", "trains", "kind", "told"),
    [
        (
            "dpo",
            "beta: 0.3, loss: ipo",
            DPO,
            "dpo",
            {"beta": 0.3, "loss": "ipo", "pairs": "loop.round2.preferences"},
        ),
        (
            "kto",
            "beta: 0.3, w_undesirable: 1.5",
            KTO,
            "kto",
            {"beta": 0.3, "w_undesirable": 1.5, "answers": "loop.round2.preferences"},
        ),
        ("kto", "", KTO, "kto", {"beta": 0.1}),
        (
            "rejection_sampling",
            "min_reward: 0.5",
            SFT,
            "sft",
            {"condition": "none", "packing": True, "answers": "loop.round2.preferences"},
        ),
        (
            "conditional_sft",
            "packing: false, n_samples_per_prompt: 1",
            SFT,
            "sft",
            {"condition": "reward", "packing": False},
        ),
    ],
)
def test_a_loop_trains_as_its_post_processor_says(
    planned: Planned,
    tmp_path: Path,
    post_processor: str,
    fields: str,
    trains: type,
    kind: str,
    told: dict[str, object],
) -> None:
    loop = TEXT.replace(
        "stage: iterative_dpo", f"stage: iterative, post_processor: {post_processor}"
    ).replace("beta: 0.3", fields)
    (tmp_path / "recipe.yaml").write_text(loop)
    p = planned("loop.learning_rate=1e-4", "loop.prompts.template='Q: {}'")
    rounds = [f"loop.round{k}.{part}" for k in (1, 2) for part in ("preferences", kind)]
    assert [node.name for node in p.nodes][3:7] == rounds
    sampling = p["loop.round2.preferences"].config
    training = p[f"loop.round2.{kind}"].config
    assert isinstance(sampling, Preferences) and isinstance(training, trains)
    assert (sampling.post_processor, sampling.policy, sampling.first_prompt) == (
        post_processor,
        f"loop.round1.{kind}",
        100,
    )
    assert (getattr(training, "model", None) or training.policy) == f"loop.round1.{kind}"  # type: ignore[union-attr]
    for field, value in {**told, "learning_rate": 1e-4, "template": "Q: {}"}.items():
        assert getattr(training, field) == value, field
    assert p["loop"].name == f"loop.round2.{kind}"
    rows = "pairs.jsonl" if post_processor == "dpo" else "answers.jsonl"
    assert p.inputs(p[f"loop.round2.{kind}"])["loop.round2.preferences"] == str(
        p["loop.round2.preferences"].run_dir / rows
    )


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            "again: {stage: sft, answers: made}",
            "stages.again.answers: made has post_processor 'kto'; set it to rejection_sampling or cond",
        ),
        (
            "again: {stage: dpo, pairs: made}",
            "stages.again.pairs: made has post_processor 'kto'; set it to dpo",
        ),
        (
            "again: {stage: kto, answers: ppo}",
            "stages.again.answers: ppo is of kind ppo, but a stage of kind preferences is needed here",
        ),
        ("again: {stage: kto}", "a kto stage needs exactly one of data (files) and answers"),
        (
            "again: {stage: sft, answers: made, data: {sources: train.jsonl}}",
            "an sft stage needs exactly one of data (files) and answers",
        ),
        (
            "again: {stage: dpo, pairs: other, loss: simpo, reference: ppo}",
            "loss 'simpo' uses no reference: leave reference out",
        ),
        (
            "again: {stage: dpo, pairs: other, loss: orpo, beta: 0.2}",
            "loss 'orpo' has no beta, and an NLL term of its own",
        ),
        (
            "again: {stage: dpo, pairs: other, gamma: 0.5}",
            "gamma belongs to loss 'simpo': leave it out for 'sigmoid'",
        ),
        (
            "again: {stage: dpo, pairs: other, lambd: 0.5}",
            "lambd belongs to loss 'orpo': leave it out for 'sigmoid'",
        ),
        (
            "again: {stage: dpo, pairs: other, loss: ipo_sum, label_smoothing: 0.1}",
            "set it to 0 for 'ipo_sum'",
        ),
        (
            (
                "again: {stage: iterative, post_processor: kto, packing: false, prompts: {sources:"
                " prompts.jsonl}}"
            ),
            "packing belongs to",
        ),
        (
            (
                "again: {stage: iterative, post_processor: dpo, min_reward: 1, prompts: {sources:"
                " prompts.jsonl}}"
            ),
            "min_reward belongs to",
        ),
        (
            (
                "again: {stage: iterative, post_processor: dpo, n_samples_per_prompt: 1, prompts: {sources:"
                " p.jsonl}}"
            ),
            "compares answers to one",
        ),
    ],
)
def test_a_preference_stage_that_does_not_fit_is_one_sentence(
    planned: Planned, tmp_path: Path, stages: str, told: str
) -> None:
    made = "made: {stage: preferences, post_processor: kto, prompts: {sources: prompts.jsonl}}"
    other = made.replace("made", "other").replace("kto", "dpo")
    (tmp_path / "recipe.yaml").write_text(TEXT.rstrip() + f"\n  {made}\n  {other}\n  {stages}\n")
    with pytest.raises(ValueError) as caught:
        planned()
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_an_evaluation_judges_every_round_and_the_last_named_is_final(planned: Planned) -> None:
    config = planned()["evaluation"].config
    assert isinstance(config, Evaluation) and config.models == ("ppo", "loop.round1", "loop.round2")
    config = planned("evaluation.models=[loop, ppo, loop]")["evaluation"].config
    assert isinstance(config, Evaluation) and config.models == ("ppo", "loop.round1", "loop.round2")
    config = planned("evaluation.models=[loop, ppo]")["evaluation"].config
    assert isinstance(config, Evaluation) and config.models == ("loop.round1", "loop.round2", "ppo")


def test_an_evaluation_knows_the_parent_of_each_model(planned: Planned) -> None:
    """Under the name it is judged by; the baseline is played anyway, and a parent that is not judged is asked
    to answer too."""
    node = planned()["evaluation"]
    assert isinstance(node.config, Evaluation) and node.config.parents == {
        "loop.round1": "ppo",
        "loop.round2": "loop.round1",
    }
    alone = planned("evaluation.models=[loop.round2]")
    config = alone["evaluation"].config
    assert isinstance(config, Evaluation) and config.parents == {"loop.round2": "loop.round1.dpo"}
    assert {"loop.round2", "loop.round1.dpo"} <= alone.inputs(alone["evaluation"]).keys()
    config = planned("evaluation.baseline=ppo")["evaluation"].config
    assert isinstance(config, Evaluation) and config.parents == {"loop.round2": "loop.round1"}
    config = planned("evaluation.parents={}")["evaluation"].config
    assert isinstance(config, Evaluation) and config.parents == {}
    config = planned("evaluation.parents={ppo: base}")["evaluation"].config
    assert isinstance(config, Evaluation) and config.parents == {"ppo": "base"}
    with pytest.raises(
        ValueError, match=r"stages.evaluation.parents: unknown judged model 'ppa'; did you mean ppo\?"
    ):
        planned("evaluation.parents={ppa: sft}")


def test_reward_models_on_trial_are_parents_and_their_pairs_decide(planned: Planned) -> None:
    trial = planned("evaluation.reward_evaluation={data: {sources: pairs.jsonl}}")
    assert trial["evaluation"].stages["reward_model"] == "reward_model"
    assert trial["evaluation"].digest != planned()["evaluation"].digest
    with pytest.raises(
        ValueError, match=r"reward_evaluation.models.0: sft is of kind sft, but a reward model is needed"
    ):
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


def test_digests_change_with_what_decides_the_result_and_with_nothing_else(
    planned: Planned, tmp_path: Path
) -> None:
    p = planned()
    everything = {node.name for node in p.nodes}
    below_ppo = everything - {"sft", "reward_model"}
    assert changed(p, planned()) == set()
    assert changed(p, planned("ppo.gamma=0.9")) == below_ppo
    assert changed(p, planned("seed=1")) == everything
    for free in (
        "ppo.logging_steps=7",
        "ppo.save_steps=2",
        "ppo.keep_checkpoints=3",
        "ppo.timeout=9",
        "artifacts=elsewhere",
        "name=other",
    ):
        assert changed(p, planned(free)) == set(), free
    for free in (
        "ppo.zero_stage=3",
        "sft.zero_stage=0",
        "sft.ranks.num_ranks_per_node=2",
        "ppo.actor_ranks.num_ranks_per_node=2",
    ):
        assert changed(p, planned(free)) == set(), free
    assert changed(p, planned("ppo.max_staleness=0")) == set() != changed(p, planned("ppo.max_staleness=1"))
    judged = planned("evaluation.judges=[{kind: openai, model: m}]")
    for free in (
        "requests_per_minute: 9",
        "input_price: 1.5",
        "output_price: 2",
        "verdict_cache: verdicts",
        "concurrency: 2",
    ):
        assert changed(judged, planned(f"evaluation.judges=[{{kind: openai, model: m, {free}}}]")) == set(), (
            free
        )
    assert changed(judged, planned("evaluation.judges=[{kind: openai, model: m, interval_width: 0.1}]")) == {
        "evaluation",
        "publication",
    }
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "pairs.jsonl").read_bytes())
    assert changed(p, planned("reward_model.data={sources: moved.jsonl}")) == set()
    (tmp_path / "q.jsonl").write_text("other\n")
    assert changed(p, planned()) == {"evaluation", "publication"}
    (tmp_path / "base" / "config.json").write_text('{"a": 1}')
    assert changed(p, planned()) == everything


def test_what_decides_speed_and_memory_alone_makes_nothing_anew(planned: Planned) -> None:
    """So a stage that ran out of memory goes on where it was when its user follows the advice, which names
    these fields."""
    p = planned()
    passes = {"micro_train_tokens": 4096, "micro_train_batch_size": 1, "gradient_checkpointing": True}
    ppo = passes | {
        "micro_rollout_tokens": 4096,
        "micro_rollout_batch_size": 2,
        "ref_reward_offload": True,
        "adam_offload": True,
    }
    for field in (
        "micro_train_tokens",
        "micro_train_batch_size",
        "gradient_checkpointing",
        "adam_offload",
        "ref_reward_offload",
    ):
        assert field in LESS_MEMORY and field in ppo
    cards = [f"ppo.{role}_ranks.gpus=0.2" for role in ("actor", "critic", "reference", "reward")] + [
        "ppo.engine.gpus=0.2"
    ]
    on_gpus = planned(*cards)
    for stage in ("sft", "reward_model", "loop"):
        for field, value in passes.items():
            assert changed(p, planned(f"{stage}.{field}={value}")) == set(), (stage, field)
    for field, value in ppo.items():
        assert changed(on_gpus, planned(*cards, f"ppo.{field}={value}")) == set(), field
    for field, value in {
        "gpu_memory_utilization": 0.3,
        "num_engines": 2,
        "kv_cache_gib": 0.5,
        "cpus": 0.5,
        "sleep": True,
    }.items():
        assert changed(on_gpus, planned(*cards, f"ppo.engine.{field}={value}")) == set(), field
    for free in (
        "loop.engine.num_engines=2",
        "loop.micro_rollout_batch_size=1",
        "ppo.stream_batch_size=64",
        "ppo.actor_ranks.cpus=2",
    ):
        assert changed(p, planned(free)) == set(), free
    assert "ppo" in changed(p, planned("ppo.rollout_batch_size=256")) and "sft" in changed(
        p, planned("sft.train_batch_size=64")
    )


def test_marked_fields_are_in_no_digest(tmp_path: Path) -> None:
    config = PPO.model_validate(
        {"prompts": {"sources": "p.jsonl"}, "micro_train_batch_size": 2, "engine": {"num_engines": 3}}
    )
    found = deciding(config, Digests(tmp_path))
    assert (
        not {"micro_train_batch_size", "micro_train_tokens", "actor_ranks", "gates", "timeout", "zero_stage"}
        & found.keys()
    )
    assert not {"num_engines", "gpu_memory_utilization"} & found["engine"].keys() and "gamma" in found


def test_a_digest_covers_the_code_of_a_reward_function(planned: Planned, tmp_path: Path) -> None:
    rewards = "ppo.reward=[reward_model, {function: 'a.py:f', timeout: 9}]"
    (tmp_path / "a.py").write_text("def f(responses): return [0]\n")
    p = planned(rewards)
    (tmp_path / "b.py").write_text((tmp_path / "a.py").read_text())
    assert changed(p, planned(rewards.replace("9", "60"))) == set()
    assert "ppo" in changed(p, planned(rewards.replace("a.py:f", "a.py:g")))
    (tmp_path / "a.py").write_text("def f(responses): return [1]\n")
    assert "ppo" in changed(p, planned(rewards)) and "sft" not in changed(p, planned(rewards))


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
    assert changed(p, again) >= {"loop.round1.preferences", "loop.round2.dpo"} and "ppo" not in changed(
        p, again
    )


def test_one_plain_reward_model_counts_by_its_name(planned: Planned) -> None:
    p = planned("loop.reward=reward_model")
    assert changed(p, planned("loop.reward=[{model: reward_model}]", "loop.max_failed_rewards=0.3")) == set()
    for told in ("weight: 0.5", "normalize: running", "name: judge"):
        assert "loop.round1.preferences" in changed(
            p, planned(f"loop.reward=[{{model: reward_model, {told}}}]")
        ), told


def test_a_plan_needs_no_files(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").unlink()
    p = planned("base_model=no/such/folder", "loop.prompts={sources: there/is/none.jsonl}")
    assert len(p.nodes) == 9 and not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("ppo.actor=sfft", "stages.ppo.actor: unknown name 'sfft'; did you mean sft?"),
        ("ppo.reward=sft", "stages.ppo.reward: sft is of kind sft, but a reward model is needed here"),
        ("ppo.reward=base", "a reward model is needed here"),
        ("ppo.reward=[reward_model, rm]", "stages.ppo.reward.1: unknown name 'rm'"),
        (
            "sft.model=reward_model",
            (
                "stages.sft.model: reward_model is of kind reward_model, but a stage of kind sft or dpo or"
                " kto or ppo or select is needed here"
            ),
        ),
        (
            "publication.evaluation=evaluatio",
            "stages.publication.evaluation: unknown stage 'evaluatio'; did you mean evaluation?",
        ),
        ("evaluation.judges.1.reward=rm", "stages.evaluation.judges.1.reward: unknown name 'rm'"),
        ("sft.model=sft", "stages need each other: sft -> sft"),
        (
            "ppo.actor=loop",
            "stages need each other: loop.round2.dpo -> loop.round1.dpo -> ppo -> loop.round2.dpo",
        ),
    ],
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
    assert (
        lines["sft"].action == "skip"
        and lines["reward_model"].action == "resume"
        and lines["ppo"].why == "never run"
    )
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


def test_digests_are_remembered_and_a_change_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("one")
    os.utime(file, (1, 1))
    first = Digests(tmp_path)
    before = first.of(file)
    first.save()
    monkeypatch.setattr("rlhf_core.system.files.file_digest", lambda path: "read")
    assert Digests(tmp_path).of(file) == before
    file.write_text("two")
    assert Digests(tmp_path).of(file) == "read"
    assert Digests(tmp_path).of(tmp_path / "none") == ABSENT
    (tmp_path / ".digests.json").write_text("[broken")
    assert Digests(tmp_path).of(file) == "read"


def test_a_loop_trains_on_texts_as_long_as_those_it_samples(planned: Planned) -> None:
    def lengths(*overrides: str) -> set[int]:
        return {node.config.max_len for node in planned(*overrides).nodes if isinstance(node.config, DPO)}

    assert (
        lengths() == {2048}
        and lengths("loop.generate_max_len=100") == {1124}
        and lengths("loop.max_len=512") == {512}
    )


def test_a_loops_precision_is_that_of_its_sampling(planned: Planned) -> None:
    names = [("loop.round1.preferences", "loop.round1.dpo"), ("loop.round2.preferences",)]
    usual = planned()
    half = planned("loop.dtype=bfloat16")
    for preferences, *_ in names:
        assert (
            isinstance(half[preferences].config, Preferences) and half[preferences].config.dtype == "bfloat16"
        )
        assert half[preferences].digest != usual[preferences].digest


def test_an_evaluation_has_one_engine(planned: Planned) -> None:
    with pytest.raises(ValueError, match="an evaluation answers with one engine: leave"):
        planned("evaluation.engine.num_engines=2")
