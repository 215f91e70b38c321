"""Which placement `alignflow plan` chooses, with which passes, and what it says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen2Config

from flows.cli.app import main
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
    LARGE,
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


def test_the_command_names_every_stage_and_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, **LARGE
    ).save_pretrained(tmp_path / "base")
    (tmp_path / "recipe.yaml").write_text(
        f"name: big\nbase_model: {tmp_path / 'base'}\nstages:\n  sft: {{data: {{sources: a.jsonl}},"
        " zero_stage: 3, ranks: {num_ranks_per_node: 4, gpus: 1}, micro_train_tokens: 8192}\n "
        " reward_model: {data: {sources: b.jsonl}, zero_stage: 2}\n  ppo: {prompts: {sources:"
        " c.jsonl}, zero_stage: 3, micro_train_tokens: 8192, micro_train_batch_size: 1}\n"
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"sft: [\d.]+ GiB per GPU on 4", printed) and re.search(
        r"reward_model: 1\d\d\.\d GiB .* and a GPU has 140", printed
    )
    first = (
        "reward_model, ppo run on CPUs: the figures below are for GPUs, and hold only with `gpus: 1` in ranks"
        " and engines"
    )
    assert printed.startswith(f"{first}; there is no forecast for CPUs\n")
    assert (
        "choose all together" in printed
        and "actor and reference on 2, critic and reward on 1, vLLM on 1" in printed
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "ppo.engine.kind=transformers"]) == 0
    printed = capsys.readouterr().out
    assert "ppo: there is a forecast for engines of vLLM alone, and kind is transformers" in printed
    assert "choose" not in printed
    (tmp_path / "base" / "config.json").unlink()
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    shutil.rmtree(tmp_path / "base")
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    assert "base is no folder: name a local model folder" in " ".join(capsys.readouterr().err.split())


def test_a_recipe_for_cpus_is_told_so_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").mkdir()
    Qwen2Config(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1
    ).save_pretrained(tmp_path / "base")
    (tmp_path / "recipe.yaml").write_text(
        f"{{name: n, base_model: {tmp_path}/base, stages: {{sft: {{data: {{sources: a.jsonl}}}}}}}}"
    )
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 0
    assert capsys.readouterr().out.startswith("this recipe runs on CPUs: the figures below are for GPUs")


def test_a_model_that_no_gpu_can_load_is_said_with_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    shape = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    (tmp_path / "base" / "config.json").write_text(json.dumps({**shape, "vocab_size": 128256}))
    ranks = {"num_nodes": 4, "num_ranks_per_node": 8, "gpus": 1}
    common = {"dtype": "bfloat16", "micro_train_batch_size": 1, "gradient_checkpointing": 1, "zero_stage": 2}
    roles_ = dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), ranks)
    stages = {
        "sft": {"data": {"sources": "a.jsonl"}, "ranks": ranks, **common},
        "reward_model": {"data": {"sources": "b.jsonl"}, "ranks": ranks, **common},
        "ppo": {
            "prompts": {"sources": "c.jsonl"},
            "colocate_all": True,
            "engine": {"num_engines": 32, "gpus": 1},
            **roles_,
            **common,
        },
    }
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"name": "big", "base_model": str(tmp_path / "base"), "stages": stages})
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "32", "--gpu", "h100"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("estimates for"), "all of it runs on GPUs"
    assert re.search(
        r"sft: \d+\.\d GiB per GPU on 32 GPU\(s\) and a GPU has 79: with .*zero_stage: 3 it is \d\d\.\d", said
    )
    assert "choose all together, reference and reward sharded, Adam offloaded" in said, (
        "what the recipe does not say is tried"
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4", "--gpu", "h100"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    more = r"more ranks with zero_stage 3, GPUs with more memory, or a smaller model"
    together = (
        "at their start actor, critic, reference, reward:reward_model, sampler take 1[0-9][0-9].[0-9] GiB of"
        " the same GPU"
    )
    assert re.search(rf"none of these fits 79 GiB, {together}: {more}", said), (
        "of the placement that needs least, not of the recipe's ranks"
    )


def test_what_it_says_to_write_fits_when_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    shape = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    }
    Qwen2Config(**shape, tie_word_embeddings=True, **LARGE).save_pretrained(tmp_path / "base")
    common = {"micro_train_tokens": 65536, "micro_train_batch_size": 1, "dtype": "bfloat16"}
    stages: dict[str, Any] = {
        "sft": {"data": {"sources": "a.jsonl"}, "max_len": 2048, **common},
        "reward_model": {"data": {"sources": "b.jsonl"}},
        "ppo": {"prompts": {"sources": "c.jsonl"}, "colocate_critic_reward": True, **common},
    }

    def printed() -> str:
        recipe = {"name": "small", "base_model": str(tmp_path / "base"), "stages": stages}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "1", "--gpu", "h100"]) == 0
        said = capsys.readouterr().out
        assert (
            main(
                [
                    "plan",
                    str(tmp_path / "recipe.yaml"),
                    "--gpus",
                    "1",
                    "--gpu-memory",
                    "79.2",
                    "--bandwidth",
                    "3",
                ]
            )
            == 0
        )
        assert (
            capsys.readouterr().out == said
            and "\nestimates for 79 GiB, 770 TFLOP/s and 3.0 TB/s a GPU" in f"\n{said}"
        )
        return said

    before = printed()
    passes = re.search(
        r"sft: 1[78]\d\.\d GiB .* a GPU has 79: with (micro_train_tokens: \d+), (gradient_checkpointing: 0.0)"
        r" it is",
        before,
    )
    assert passes
    stages["sft"] |= yaml.safe_load("\n".join(passes.groups()))
    choice = yaml.safe_load(before.partition("In the recipe, under ppo:\n")[2])
    assert choice["colocate_critic_reward"] is False, (
        "what the recipe has and the placement has not is said as well"
    )
    stages["ppo"] |= choice
    after = printed()
    assert re.search(r"sft: [567]\d\.\d GiB per GPU on 1", after) and "a GPU has 79" not in after
    assert "choose as in the recipe" in after and "Leave it as it is" in after


EXPERTS = size_of_config(
    {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4,
     "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
)  # fmt: skip


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


@pytest.mark.parametrize(
    "wrong",
    [["--gpus", "-1"], ["--gpu-memory", "0"], ["--flops", "-3"], ["--bandwidth", "nan"], ["--network", "0"]],
)
def test_numbers_that_no_gpu_has_are_one_sentence(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "recipe.yaml", *wrong]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--gpus, --gpu-memory, --flops, --bandwidth, --nodes and --network are numbers above 0" in told


def test_the_recipes_own_placement_is_kept_where_it_is_as_good() -> None:
    chosen = choose(placements(CHOSEN, 1, sizes(CHOSEN, SMALL_MODEL), H100), H100)
    assert chosen is not None and chosen.fields == {}


def test_a_recipe_gets_the_other_changes_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").mkdir()
    shape = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    Qwen2Config(**shape, **LARGE).save_pretrained(tmp_path / "base")
    batches = ("rollout_batch_size", "train_batch_size")
    four = {"ranks": {"num_ranks_per_node": 4, "gpus": 1}, "data": {"sources": "a.jsonl"}}
    stages = {
        "sft": {**four, "zero_stage": 1, "dtype": "bfloat16"},
        "reward_model": {**four},
        "ppo": {
            "prompts": {"sources": "c.jsonl"},
            "reward": [{"model": "reward_model", "ranks": {"gpus": 1}}, {"function": "a.py:f"}],
        },
        "odd": {
            "stage": "ppo",
            "prompts": {"sources": "c.jsonl"},
            **dict.fromkeys(batches, 9),
            "micro_train_batch_size": 9,
        },
    }
    recipe = {"name": "small", "base_model": str(tmp_path / "base"), "stages": stages}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4", "--gpu-memory", "60"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"sft: .* a GPU has 60: with micro_train_batch_size: \d+, gradient_checkpointing: \d.\d, zero_stage:"
        r" 3 it is 5\d",
        said,
    )
    assert re.search(r"reward_model: .*with dtype: bfloat16, and the recipe has float32", said)
    assert "odd: no placement suits its batch sizes and switches" in said
    choice = yaml.safe_load(said.partition("In the recipe, under ppo:\n")[2].partition("odd:")[0])
    assert choice["dtype"] == "bfloat16" and choice["reward"] == [
        {"model": "reward_model"},
        {"function": "a.py:f"},
    ]


def test_documents_that_are_too_long_for_a_gpu_are_split_over_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    shape = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    Qwen2Config(**shape, **LARGE).save_pretrained(tmp_path / "base")
    long = {
        "max_len": 131072,
        "dtype": "bfloat16",
        "ranks": {"num_ranks_per_node": 4, "gpus": 1},
        "micro_train_batch_size": 1,
    }
    stages = {
        name: {**long, "stage": "sft", "data": {"sources": "a.jsonl"}, "gradient_checkpointing": True}
        for name in ("alone", "split")
    }
    stages["split"] |= {"sequence_parallel_size": 4}
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"name": "long", "base_model": str(tmp_path / "base"), "stages": stages})
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4", "--gpu", "h100"]) == 0
    said = capsys.readouterr().out
    tries = (
        "a larger sequence_parallel_size, adam_offload, param_offload, more ranks, lora or a smaller model"
    )
    assert re.search(rf"alone: .* a GPU has 79: no pass is short enough: {tries}\n", said)
    assert re.search(r"split: \d\d\.\d GiB per GPU on 4 GPU\(s\), zero_stage \d\n", said)


def test_what_takes_less_memory_is_named_unless_the_recipe_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    shape = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    Qwen2Config(**shape, **LARGE).save_pretrained(tmp_path / "base")
    on = {"num_nodes": 2, "num_ranks_per_node": 2, "gpus": 1}
    common = {
        "dtype": "bfloat16",
        "stage": "sft",
        "data": {"sources": "a.jsonl"},
        "ranks": on,
        "max_len": 65536,
        "train_batch_size": 4,
    }
    more = {
        "plain": {},
        "hpz": {"zero_hpz": True, "adam_offload": True},
        "lora": {"lora": {}, "param_offload": True},
    }
    stages = {name: common | {"micro_train_batch_size": 1} | fields for name, fields in more.items()}
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"name": "long", "base_model": str(tmp_path / "base"), "stages": stages})
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4", "--gpu-memory", "24"]) == 0
    said = dict(
        re.findall(r"(\w+): [\d.]+ GiB per GPU .*no pass is short enough: (.*)", capsys.readouterr().out)
    )
    split = "a larger sequence_parallel_size, "
    assert said == {
        "plain": f"{split}adam_offload, param_offload, more ranks, lora or a smaller model",
        "hpz": f"{split}no zero_hpz, param_offload, more ranks, lora or a smaller model",
        "lora": f"{split}more ranks or a smaller model",
    }


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


def test_what_no_placement_of_ppo_tries_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").mkdir()
    shape = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    Qwen2Config(**shape, **LARGE).save_pretrained(tmp_path / "base")
    stage = {
        "prompts": {"sources": "c.jsonl"},
        "actor": "base",
        "critic": "base",
        "reward": [{"function": "a.py:f"}],
        "dtype": "bfloat16",
    }
    stage |= {
        "generate_max_len": 131072,
        "micro_rollout_batch_size": 1,
        "micro_train_batch_size": 1,
        "train_batch_size": 8,
    }
    content = {
        "name": "long",
        "base_model": str(tmp_path / "base"),
        "stages": {"ppo": stage | {"rollout_batch_size": 8}},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4", "--gpu-memory", "48"]) == 0
    # host memory and shards are tried
    tries = "a larger sequence_parallel_size, more GPUs, lora or a smaller model"
    said = capsys.readouterr().out
    assert f"none of these fits 48 GiB, with shorter passes neither: {tries}\n" in said
    assert "ppo, all together, weights and Adam offloaded" in " ".join(said.split()), (
        "phases of what needs the least memory"
    )
