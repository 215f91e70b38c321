"""Loops, evaluations and publications of a plan as single stages, and their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import DPO, KTO, SFT, Evaluation, Preferences
from tests.support.text_rows import rows_of_text
from tests.support.tiny_plan import TEXT, Planned


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
    assert second.config.first_prompt == 100
    assert second.config.num_prompts == 100
    assert second.config.policy == "loop.round1.dpo"
    assert dpo.config.beta == 0.3
    assert dpo.config.policy == "loop.round1.dpo"
    assert dpo.config.pairs == "loop.round2.preferences"
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
    assert sampling.post_processor == post_processor
    assert sampling.policy == f"loop.round1.{kind}"
    assert sampling.first_prompt == 100
    assert (getattr(training, "model", None) or training.policy) == f"loop.round1.{kind}"  # type: ignore[union-attr]
    for field, value in {**told, "learning_rate": 1e-4, "template": "Q: {}"}.items():
        assert getattr(training, field) == value, field
    assert p["loop"].name == f"loop.round2.{kind}"
    rows = "pairs.jsonl" if post_processor == "dpo" else "answers.jsonl"
    assert p.inputs(p[f"loop.round2.{kind}"])["loop.round2.preferences"] == str(
        p["loop.round2.preferences"].run_dir / rows
    )


def test_the_rounds_of_a_loop_render_with_the_arguments_of_its_prompts(planned: Planned) -> None:
    found = planned("loop.prompts.template_args={effort: low}")
    sampling, training = (found[f"loop.round1.{part}"].config for part in ("preferences", "dpo"))
    assert isinstance(sampling, Preferences) and isinstance(training, DPO)
    assert sampling.prompts.template_args == training.template_args == {"effort": "low"}


@pytest.mark.parametrize(
    ("stages", "told"),
    rows_of_text("""
    again: {stage: sft, answers: made} | stages.again.answers: made has post_processor 'kto'; set it to rejection_sampling or cond
    again: {stage: dpo, pairs: made} | stages.again.pairs: made has post_processor 'kto'; set it to dpo
    again: {stage: kto, answers: ppo} | stages.again.answers: ppo is of kind ppo, but a stage of kind preferences is needed here
    again: {stage: kto} | a kto stage needs exactly one of data (files) and answers
    again: {stage: sft, answers: made, data: {sources: train.jsonl}} | an sft stage needs exactly one of data (files) and answers
    again: {stage: dpo, pairs: other, loss: simpo, reference: ppo} | loss 'simpo' uses no reference: leave reference out
    again: {stage: dpo, pairs: other, loss: orpo, beta: 0.2} | loss 'orpo' has no beta and its own NLL term:
    again: {stage: dpo, pairs: other, gamma: 0.5} | gamma applies only to loss 'simpo': leave it out for 'sigmoid'
    again: {stage: dpo, pairs: other, lambd: 0.5} | lambd applies only to loss 'orpo': leave it out for 'sigmoid'
    again: {stage: dpo, pairs: other, loss: ipo_sum, label_smoothing: 0.1} | set it to 0 for 'ipo_sum'
    again: {stage: iterative, post_processor: kto, packing: false, prompts: {sources: prompts.jsonl}} | packing applies only to
    again: {stage: iterative, post_processor: dpo, min_reward: 1, prompts: {sources: prompts.jsonl}} | min_reward applies only to
    again: {stage: iterative, post_processor: dpo, n_samples_per_prompt: 1, prompts: {sources: p.jsonl}} | compares the answers to one
    """),
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
    with pytest.raises(ValueError, match=r"stages.evaluation.parents: unknown .* 'ppa'; did you mean ppo\?"):
        planned("evaluation.parents={ppa: sft}")


def test_a_loop_trains_on_texts_as_long_as_those_it_samples(planned: Planned) -> None:
    def lengths(*overrides: str) -> set[int]:
        return {node.config.max_len for node in planned(*overrides).nodes if isinstance(node.config, DPO)}

    assert lengths() == {2048}
    assert lengths("loop.generate_max_len=100") == {1124}
    assert lengths("loop.max_len=512") == {512}


def test_a_loops_precision_is_that_of_its_sampling(planned: Planned) -> None:
    names = [("loop.round1.preferences", "loop.round1.dpo"), ("loop.round2.preferences",)]
    usual = planned()
    half = planned("loop.dtype=bfloat16")
    for preferences, *_ in names:
        assert isinstance(half[preferences].config, Preferences)
        assert half[preferences].config.dtype == "bfloat16"
        assert half[preferences].digest != usual[preferences].digest


def test_an_evaluation_has_one_engine(planned: Planned) -> None:
    with pytest.raises(ValueError, match="an evaluation uses one engine: leave"):
        planned("evaluation.engine.num_engines=2")
