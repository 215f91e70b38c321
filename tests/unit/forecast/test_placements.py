"""Which placement is chosen, with which passes."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.forecast.fitting_passes import Pass, alternatives, fields_of, recipe_pass
from rlhf_core.forecast.hardware import GIB, GPUS, Gpu, on_nodes
from rlhf_core.forecast.memory import roles
from rlhf_core.forecast.placements import Placement, choose, forecast, on_fewest, placements, with_fields
from rlhf_core.hub.model_config import size_of_config
from tests.benchmarks.published import LLAMA, ROLES, SHAPES, recipe
from tests.support.measured import (
    ALL_FOUR,
    CHOSEN,
    H100,
    H200,
    LARGE_MODEL,
    LONG_PASSES,
    ONE,
    SMALL_MODEL,
    TWO_APART,
    TWO_TOGETHER,
    sizes,
)


def options(config: PPO, count: int, size: Any, gpu: Gpu) -> list[Placement]:
    """What could be had in place of the recipe's own placement."""
    return [
        found
        for found in placements(config, count, sizes(config, size), gpu)
        if "actor_ranks" in found.fields
    ]


def test_the_fastest_placement_that_fits_is_chosen() -> None:
    found = placements(ALL_FOUR, 4, sizes(ALL_FOUR, LARGE_MODEL), Gpu())
    chosen = choose(found, Gpu())
    assert chosen is not None and chosen.fits(Gpu())
    assert all(chosen.total <= 1.05 * other.total for other in found if other.fits(Gpu()))
    assert any(placement.fields.get("colocate_actor_ref") for placement in found), (
        "GPUs apart are looked at as well"
    )
    small = Gpu(memory=40 * GIB)
    assert choose(placements(ALL_FOUR, 4, sizes(ALL_FOUR, LARGE_MODEL), small), small) is None
    alone = Gpu(memory=80 * GIB)
    offloaded = choose(placements(ALL_FOUR, 4, sizes(ALL_FOUR, LARGE_MODEL), alone), alone)
    assert offloaded is not None and offloaded.peak <= 80 * GIB and offloaded.total >= chosen.total


def test_a_small_model_is_not_put_on_more_gpus_than_make_it_faster() -> None:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    tiny = size_of_config(shape | {"num_key_value_heads": 4, "model_type": "qwen2"})
    fewest, found = on_fewest(ALL_FOUR, 4, sizes(ALL_FOUR, tiny), Gpu())
    chosen = choose(found, Gpu())
    assert fewest == 1 and chosen is not None and chosen.fields["actor_ranks"]["num_ranks_per_node"] == 1
    assert on_fewest(ALL_FOUR, 4, sizes(ALL_FOUR, LARGE_MODEL), Gpu())[0] == 4


@pytest.mark.parametrize(
    ("seconds", "fewest"),
    [({4: 1.0, 2: 1.04, 1: 1.08}, 2), ({4: 1.0, 2: 1.06, 1: 1.04}, 1), ({4: 1.0, 2: 2, 1: 4}, 4)],
)
def test_each_number_of_gpus_is_compared_with_all(
    seconds: dict[int, float], fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(_config: PPO, count: int, *_: Any) -> list[Placement]:
        return [Placement(str(count), {}, 0.0, {}, {"train": seconds[count]}, 0.0)]

    monkeypatch.setattr("rlhf_core.forecast.placements.placements", found)
    assert on_fewest(ALL_FOUR, 4, {}, Gpu())[0] == fewest


def test_an_engine_whose_share_is_too_small_for_its_weights_is_not_chosen() -> None:
    tight = Gpu(memory=79.6 * GIB)
    larger = LARGE_MODEL._replace(parameters=14.8e9, active=14.8e9)
    as_it_is = placements(ALL_FOUR, 4, sizes(ALL_FOUR, larger), tight)[0]
    assert as_it_is.lacking > 0 and not as_it_is.fits(tight), "24 GiB for 27.6 of weights"
    assert (others := options(ALL_FOUR, 4, larger, tight)) and all(option.lacking <= 0 for option in others)
    over_two = ALL_FOUR.model_copy(
        update={"engine": ALL_FOUR.engine.model_copy(update={"tensor_parallel_size": 2, "num_engines": 2})}
    )
    engines = [option.fields["engine"] for option in options(over_two, 4, LARGE_MODEL, Gpu())]
    assert {(engine["num_engines"], engine["tensor_parallel_size"]) for engine in engines} == {(2, 2), (1, 1)}


def test_an_engine_that_a_node_cannot_hold_gets_pipeline_stages_on_several() -> None:
    found = {}
    for per_node in (8, 2):
        engines = [
            option.fields["engine"]
            for option in options(ALL_FOUR, 8, LARGE_MODEL._replace(parameters=70e9), Gpu(per_node=per_node))
        ]
        found[per_node] = {
            (e["num_engines"], e["tensor_parallel_size"], e["pipeline_parallel_size"])
            for e in engines
            if e["sleep"]
        }
    assert found == {8: {(2, 4, 1)}, 2: {(2, 2, 2)}}


def test_on_one_gpu_plain_torch_is_proposed() -> None:
    stages = {
        count: [option.fields["zero_stage"] for option in options(ONE, count, SMALL_MODEL, H200)]
        for count in (1, 2, 3)
    }
    assert stages == {
        1: [0, 0, 2],
        2: [2, 3, 3, 3, 3],
        3: [2, 3, 3, 3, 3, 0, 2],
    }, "with Adam on the host DeepSpeed is needed"


def test_what_ran_on_a_smaller_gpu_is_what_is_chosen_for_it() -> None:
    chosen = choose(placements(LONG_PASSES, 1, sizes(LONG_PASSES, SMALL_MODEL), H100), H100)
    assert chosen is not None
    assert PPO.model_validate(LONG_PASSES.model_dump() | chosen.fields) == CHOSEN


@pytest.mark.parametrize(
    ("memory", "expected"), [(139.8, (24576, 0.0)), (79.2, (6144, 0.0)), (40, (12288, 0.5)), (20, None)]
)
def test_passes_are_the_fastest_that_fit(memory: float, expected: tuple[int, float] | None) -> None:
    """Of a recipe that recomputes every layer. Long passes, fewer layers recomputed, Adam on the GPU: what is
    short goes last."""
    gpu = Gpu(memory=memory * GIB)
    models = sizes(ONE, SMALL_MODEL)
    found = choose(placements(ONE, 1, models, gpu), gpu)
    assert (
        found and (found.fields["micro_train_tokens"], found.fields["gradient_checkpointing"])
    ) == expected
    if found:
        changed = PPO.model_validate(ONE.model_dump() | found.fields)
        others = [
            forecast("", changed.model_copy(update=fields_of(each, ONE)), {}, models, gpu)
            for each in alternatives(ONE)
        ]
        assert all(found.total <= 1.01 * other.total for other in others if other.fits(gpu))


@pytest.mark.parametrize(
    "reward",
    [["rm"], ["rm", "other"], [{"function": "f.py:f"}], [{"model": "rm", "ranks": {"gpus": 1}}, "other"]],
)
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_options_need_no_more_gpus_than_there_are(estimator: str, reward: list[Any]) -> None:
    given = {
        "reward": reward,
        "advantage_estimator": estimator,
        "n_samples_per_prompt": 2,
        "critic": "rm" if estimator == "gae" else None,
    }
    config = PPO.model_validate(
        ALL_FOUR.model_dump() | {"colocate_all": False, "ref_reward_offload": False} | given
    )
    found = options(config, 4, LARGE_MODEL, Gpu())
    assert any("all together" in option.name for option in found)
    # actor and reference on 2, each reward model on 1: none for an engine
    full = estimator == "grpo" and len(config.reward_models) == 2
    assert any("vLLM on" in option.name for option in found) != full
    for option in found:
        changed = PPO.model_validate(config.model_dump() | option.fields)
        reserved = sum(bundle["GPU"] for bundle in arrange(changed.placed, changed.together).bundles)
        assert reserved == 4, option.name
        assert config.has_critic or "critic" not in f"{option.name} {option.fields}".replace(
            "colocate_critic_reward", ""
        )


def test_no_pass_is_longer_than_an_optimiser_step_or_shorter_than_a_document() -> None:
    # 4 documents of 768 tokens on each of two ranks
    small_steps = TWO_TOGETHER.model_copy(update={"train_batch_size": 8})
    assert recipe_pass(small_steps, 2) == Pass(4 * 768, 1.0)
    held, reserved = ({**roles(config, sizes(config, SMALL_MODEL), H200.memory)} for config in (
        small_steps, small_steps.model_copy(update={"micro_train_tokens": 4 * 768})))  # fmt: skip
    assert held == reserved and {each.tokens for each in alternatives(small_steps)} == {4 * 768, 2 * 768, 768}
    assert recipe_pass(ONE.model_copy(update={"micro_train_tokens": 100}), 1).tokens == 768
    odd = {each.tokens for each in alternatives(ONE.model_copy(update={"micro_train_tokens": 5000}))}
    assert min(odd) == 768 and 40000 in odd and max(odd) <= 128 * 768


def test_longer_passes_are_found_where_the_recipe_has_single_documents() -> None:
    single = LONG_PASSES.model_copy(update={"micro_train_tokens": None})
    chosen = choose(placements(single, 1, sizes(single, SMALL_MODEL), H200), H200)
    planned = forecast("", single, {}, sizes(single, SMALL_MODEL), H200)
    assert chosen is not None and chosen.seconds["train"] < 0.6 * planned.seconds["train"]
    assert chosen.fields["micro_train_batch_size"] >= 8 and "micro_train_tokens" not in chosen.fields, (
        "documents stay documents"
    )


def test_the_recipes_own_placement_is_tried_with_other_passes() -> None:
    ahead = TWO_APART.model_copy(
        update={
            "max_staleness": 1,
            "micro_train_tokens": 98304,
            "zero_stage": 0,
            "gradient_checkpointing": 0.0,
        }
    )
    own, changed, *_ = placements(ahead, 2, sizes(ahead, SMALL_MODEL), H100)
    assert (
        not own.fits(H100)
        and changed.fits(H100)
        and changed.fields.keys() == {"micro_train_tokens", "gradient_checkpointing"}
    )
    assert choose(placements(ahead, 1, sizes(ahead, SMALL_MODEL), H100)[:2], H100) is None, (
        "it needs two GPUs"
    )


def test_nothing_is_offloaded_for_memory_that_makes_no_difference() -> None:
    tiny = SMALL_MODEL._replace(
        parameters=1e6, active=1e6, layers=2, hidden=64, kept=2000, passing=1000, kv=256, vocabulary=500
    )
    plain, offloaded, _ = found = options(ONE, 1, tiny, H200)
    assert offloaded.peak < plain.peak and choose(found, H200) is plain
    plain, offloaded, _ = found = options(LONG_PASSES, 1, SMALL_MODEL, H100)
    assert offloaded.peak < plain.peak and choose(found, H100) is offloaded


def test_engines_take_their_answers_in_turns_where_that_lets_the_models_fit() -> None:
    many = LONG_PASSES.model_copy(
        update={"rollout_batch_size": 512, "prompt_max_len": 1024, "generate_max_len": 1024}
    )
    roomy, tight = (
        next(
            option
            for option in options(many, 1, SMALL_MODEL, gpu)
            if option.name.startswith("all together, reference")
        )
        for gpu in (H200, H100)
    )
    assert roomy.fits(H200) and tight.fits(H100)
    all_at_once, in_turns = (option.fields["engine"]["gpu_memory_utilization"] for option in (roomy, tight))
    assert (
        in_turns * H100.memory < all_at_once * H200.memory
        and tight.seconds["generate"] > 1.2 * roomy.seconds["generate"]
    )
    assert 30 * GIB < all_at_once * H200.memory, (
        "512 answers of 2,048 tokens, 28 KiB each, and 6 GiB of weights and batches"
    )


def test_the_recipes_own_placement_is_kept_where_it_is_as_good() -> None:
    chosen = choose(placements(CHOSEN, 1, sizes(CHOSEN, SMALL_MODEL), H100), H100)
    assert chosen is not None and chosen.fields == {}


@pytest.mark.parametrize(
    "fields",
    [{"ref_reward_shard": True}, {"zero_hpz": True}, {"param_offload": True}, {"adam_offload": True}],
)
def test_switches_of_a_recipe_hide_no_placement(fields: dict[str, Any]) -> None:
    plain = PPO.model_validate(recipe().model_dump() | {name: {"num_nodes": 2, "gpus": 1} for name in ROLES})
    switched = PPO.model_validate(plain.model_dump() | fields)
    gpu = on_nodes(GPUS["h100"], 16, 2, None)
    size = size_of_config(LLAMA | SHAPES["7B"])
    names = [
        [found.name.partition(";")[0] for found in options(config, 16, size, gpu)]
        for config in (plain, switched)
    ]
    assert names[0] == names[1] and len(names[0]) == 9 == len(set(names[0]))
    assert all(found.fields["param_offload"] is False for found in options(switched, 16, size, gpu)), (
        "slower, and all fits without"
    )


def test_weights_in_host_memory_are_tried_where_nothing_else_fits() -> None:
    size = size_of_config(LLAMA | SHAPES["13B"])
    last = "all together, weights and Adam offloaded"
    for memory, alone in ((100, False), (80, True)):
        gpu = Gpu(memory=memory * GIB)
        found = placements(ALL_FOUR, 4, sizes(ALL_FOUR, size), gpu)
        chosen = choose(found, gpu)
        assert chosen is not None and chosen.name.startswith(last) is alone
        assert any(placement.name.startswith(last) for placement in found) is alone
        changed = with_fields(ALL_FOUR, chosen)
        assert changed.param_offload == (("actor", "critic") if alone else ()) and changed.zero_stage == 3


def test_options_of_deepspeed_are_not_put_into_plain_torch() -> None:
    block = ONE.model_copy(update={"deepspeed": {"wall_clock_breakdown": True}, "zero_stage": 2})
    assert [found.fields["zero_stage"] for found in options(block, 1, SMALL_MODEL, H200)] == [1, 1, 2]


def test_a_teachers_own_processes_hide_no_placement() -> None:
    alone = ALL_FOUR.model_dump() | {"colocate_all": False, "ref_reward_offload": False}
    teachers = [{"math": {"model": "rm"}}, {"math": {"model": "rm", "ranks": {"gpus": 1}}}]
    plain, placed = (PPO.model_validate(alone | {"teachers": each}) for each in teachers)
    names = [{option.name for option in options(config, 4, LARGE_MODEL, Gpu())} for config in (plain, placed)]
    assert names[0] and names[0] == names[1]
