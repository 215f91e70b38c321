"""What `alignflow plan` foretells, beside what runs on H200s took (tests/benchmarks/README.md)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Cohere2Config, Gemma3TextConfig, GemmaConfig, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from flows.cli import main
from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.forecast.memory import GIB, Held, Training, cards, peak, read, roles, trained
from rlhf_core.forecast.passes import Pass, alternatives, as_told, fields_of
from rlhf_core.forecast.placements import Placement, choose, forecast, placements
from rlhf_core.forecast.seconds import CARDS, Card, phases, seconds_of_pass
from rlhf_core.forecast.sizes import size_of, size_of_config

LARGE = {"num_hidden_layers": 28, "vocab_size": 151936}
SMALL_MODEL = size_of_config(
    {
        **LARGE,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
)
LARGE_MODEL = size_of_config(
    {**LARGE, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
)


def one_card(count: int) -> dict[str, Any]:
    return {"num_ranks_per_node": count, "gpus": 1}


def all_roles(ranks: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), ranks)


def ppo(**fields: Any) -> PPO:
    common = {"prompts": {"sources": "p.jsonl"}, "prompt_max_len": 256, "dtype": "bfloat16", "reward": "rm"}
    return PPO.model_validate({**common, **fields})


ONE = ppo(
    **all_roles({"gpus": 0.15}), vllm={"gpus": 0.3, "gpu_memory_utilization": 0.3}, zero_stage=2, rollout_batch_size=128,
    train_batch_size=128, generate_max_len=512, micro_train_tokens=24576, micro_rollout_tokens=24576, gradient_checkpointing=True,
    micro_train_batch_size=1,
)  # fmt: skip
ALL_ONE = ONE.model_copy(
    update={
        **{name: ONE.actor_ranks.model_copy(update={"gpus": 1.0}) for name in all_roles({})}, "colocate_all": True,
        "ref_reward_offload": True, "adam_offload": ("critic",),
        "vllm": ONE.vllm.model_copy(update={"gpus": 1.0, "gpu_memory_utilization": 0.45, "sleep": True}),
    }
)  # fmt: skip
ALL_RESIDENT = ALL_ONE.model_copy(update={"ref_reward_offload": False, "adam_offload": ()})
ADAM_OFFLOADED = ALL_RESIDENT.model_copy(update={"adam_offload": ("actor", "critic")})
TWO_APART = ONE.model_copy(
    update={
        **{name: ONE.actor_ranks.model_copy(update={"gpus": 0.25}) for name in all_roles({})},
        "vllm": ONE.vllm.model_copy(update={"gpus": 1.0, "gpu_memory_utilization": 0.9}),
    }
)  # fmt: skip
ONE_IN_TORCH = ONE.model_copy(update={"zero_stage": 0})
TWO_REWARDS = ppo(
    **all_roles({"gpus": 0.2}), reward=["rm", "other"], vllm={"gpus": 1}, zero_stage=0, rollout_batch_size=128, train_batch_size=128,
    generate_max_len=512, micro_train_tokens=24576, micro_rollout_tokens=24576, gradient_checkpointing=True, micro_train_batch_size=1,
)  # fmt: skip
HALVES = TWO_APART.model_copy(update={"vllm": ONE.vllm.model_copy(update={"gpus": 0.5, "gpu_memory_utilization": 0.35})})
ACTOR_BESIDE_REFERENCE = HALVES.model_copy(update={"colocate_actor_ref": True})
CRITIC_BESIDE_REWARD = HALVES.model_copy(update={"colocate_critic_reward": True})
TWO_TOGETHER = ppo(
    **all_roles(one_card(2)), colocate_all=True, zero_stage=3, rollout_batch_size=128, train_batch_size=128, generate_max_len=512,
    vllm={"num_engines": 2, "gpus": 1, "gpu_memory_utilization": 0.45, "sleep": True}, micro_train_tokens=24576,
    micro_rollout_tokens=24576, gradient_checkpointing=True, micro_train_batch_size=1,
)  # fmt: skip
ONE_ENGINE = TWO_TOGETHER.model_copy(
    update={"vllm": TWO_TOGETHER.vllm.model_copy(update={"num_engines": 1, "tensor_parallel_size": 2})}
)  # fmt: skip
SPLIT = ppo(
    actor_ranks=one_card(2), reference_ranks=one_card(2), critic_ranks=one_card(1), reward_ranks=one_card(1), colocate_actor_ref=True,
    colocate_critic_reward=True, vllm={"gpus": 1}, adam_offload=["critic"], zero_stage=3, rollout_batch_size=128, train_batch_size=128,
    generate_max_len=1024, micro_train_tokens=8192, micro_rollout_tokens=16384, gradient_checkpointing=0.5, micro_train_batch_size=1,
)  # fmt: skip
ALL_FOUR = ppo(
    **all_roles(one_card(4)), colocate_all=True, ref_reward_offload=True, zero_stage=3, rollout_batch_size=512, train_batch_size=128,
    vllm={"num_engines": 4, "gpus": 1, "gpu_memory_utilization": 0.3, "sleep": True}, generate_max_len=1024, micro_train_tokens=8192,
    micro_rollout_tokens=16384, gradient_checkpointing=0.5, micro_train_batch_size=1,
)  # fmt: skip
IN_TURN = ALL_FOUR.model_copy(update={"gradient_checkpointing": 0.0})
LONG_PROMPTS = IN_TURN.model_copy(
    update={"prompt_max_len": 1024, "rollout_batch_size": 1024, "vllm": ALL_FOUR.vllm.model_copy(update={"gpu_memory_utilization": 0.36})}
)


H200, H100 = CARDS["h200"], CARDS["h100"]
# What the plan chooses for a recipe that recomputes nothing on one H100, and the option beside it: Adam on the host, long passes.
LONG_PASSES = ONE_IN_TORCH.model_copy(update={"gradient_checkpointing": 0.0})
CHOSEN = ALL_RESIDENT.model_copy(
    update={
        "ref_reward_offload": True, "zero_stage": 0, "gradient_checkpointing": 0.0, "micro_train_tokens": 6144,
        "vllm": ALL_RESIDENT.vllm.model_copy(update={"gpu_memory_utilization": 0.15}),
    }
)  # fmt: skip
BESIDE_IT = CHOSEN.model_copy(update={"zero_stage": 2, "adam_offload": ("actor", "critic"), "micro_train_tokens": 24576})

# Nothing in the forecast was fitted to these: cards, GiB of each, seconds of the second step (of the last on the H100).
NOT_FITTED: list[tuple[PPO, Card, list[float], float]] = [
    (TWO_TOGETHER, H200, [104.2, 104.4], 6.8),
    (ACTOR_BESIDE_REFERENCE, H200, [49.6, 94.6], 7.2),
    (CRITIC_BESIDE_REWARD, H200, [45.7, 95.0], 5.8),
    (ONE_ENGINE, H200, [105.1, 105.7], 7.1),
    (TWO_APART, H200, [94.7, 126.6], 10.5),
    (ONE_IN_TORCH, H200, [111.2], 9.5),
    (ONE_IN_TORCH, H200, [114.0], 8.8),
    (TWO_REWARDS, H200, [77.7, 126.6], 9.5),
    (CHOSEN, H100, [65.8], 10.1),
    (BESIDE_IT, H100, [71.5], 12.7),
]
BEFORE_THEY_RAN = [(config, SMALL_MODEL, card, held) for config, card, held, _ in NOT_FITTED]


def sizes(config: PPO, size: Any) -> dict[str, Any]:
    return dict.fromkeys(config.groups, size)


def options(config: PPO, count: int, size: Any, card: Card) -> list[Placement]:
    """What could be had in place of the recipe's own placement."""
    return [found for found in placements(config, count, sizes(config, size), card) if "actor_ranks" in found.fields]


def test_sizes_are_those_of_the_models() -> None:
    assert SMALL_MODEL.parameters == pytest.approx(1.54e9, rel=0.01) and LARGE_MODEL.parameters == pytest.approx(7.62e9, rel=0.01)


@pytest.mark.parametrize("config", [
    Qwen2Config(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2),
    Qwen3MoeConfig(vocab_size=500, hidden_size=64, moe_intermediate_size=32, num_experts=8, num_hidden_layers=3, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=32, intermediate_size=96, decoder_sparse_step=1, mlp_only_layers=[]),
])  # fmt: skip
def test_parameters_are_counted_as_transformers_does(config: Any, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    config.save_pretrained(tmp_path)
    real = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert size_of(str(tmp_path)).parameters == pytest.approx(real, rel=0.01)  # biases and the norms of heads are left out


@pytest.mark.parametrize("config", [GemmaConfig, Gemma3TextConfig, Cohere2Config, LlamaConfig, Qwen2Config, MixtralConfig])
def test_where_config_json_is_silent_embeddings_are_tied_as_transformers_has_it(config: Any) -> None:
    told = config().to_dict()
    silent = {name: value for name, value in told.items() if name != "tie_word_embeddings"}
    assert size_of_config(silent) == size_of_config(told)


@pytest.mark.parametrize(
    ("config", "size", "card", "measured"),
    [
        (ONE, SMALL_MODEL, H200, [139.0]),
        (ONE, SMALL_MODEL, H200, [135.6]),
        (ONE, SMALL_MODEL, H200, [134.3]),
        (ONE, SMALL_MODEL, H200, [132.9]),
        (ALL_ONE, SMALL_MODEL, H200, [88.1]),
        (ALL_RESIDENT, SMALL_MODEL, H200, [121.7]),
        (ALL_RESIDENT.model_copy(update={"ref_reward_offload": True}), SMALL_MODEL, H200, [119.0]),
        (ADAM_OFFLOADED, SMALL_MODEL, H200, [87.2]),
        (TWO_APART, SMALL_MODEL, H200, [93.5, 128.0]),
        (TWO_TOGETHER, SMALL_MODEL, H200, [96.8, 96.8]),
        *BEFORE_THEY_RAN,
        (SPLIT, LARGE_MODEL, H200, [56.9, 114.6, 116.0, 130.3]),
        (IN_TURN, LARGE_MODEL, H200, [126.8, 127.9, 128.4, 130.4]),
        (LONG_PROMPTS, LARGE_MODEL, H200, [134.3, 134.7, 135.0, 136.3]),
    ],
)
def test_peak_memory_is_foretold_within_15_percent(config: PPO, size: Any, card: Card, measured: list[float]) -> None:
    layout = arrange(config.placed, config.together)
    found = cards(config, layout, roles(config, sizes(config, size), card.memory))
    assert sorted(bytes_ / GIB for _, bytes_ in found.values()) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("config", "size", "measured"),
    [
        (ALL_ONE, SMALL_MODEL, {"score": 2.65, "train": 6.29}),
        (ONE, SMALL_MODEL, {"score": 2.6, "train": 4.92}),
        (ONE, SMALL_MODEL, {"generate": 2.8, "score": 2.27, "train": 4.57}),
        (TWO_APART, SMALL_MODEL, {"generate": 2.5, "score": 2.27, "train": 4.55}),
        (TWO_TOGETHER, SMALL_MODEL, {"generate": 2.55, "score": 1.27, "train": 2.9}),
        (SPLIT, LARGE_MODEL, {"generate": 9.42, "score": 7.87, "train": 26.77}),
        (ONE, SMALL_MODEL, {"generate": 2.11, "score": 2.22, "train": 4.45}),
        (ALL_RESIDENT, SMALL_MODEL, {"generate": 2.01, "score": 2.23, "train": 4.27, "sleep and wake": 0.21}),
        (
            ADAM_OFFLOADED,
            SMALL_MODEL,
            {"generate": 2.4, "score": 2.24, "train": 6.9},
        ),
        (ALL_FOUR, LARGE_MODEL, {"generate": 11.24, "score": 19.67, "train": 49.31}),
        (ALL_FOUR, LARGE_MODEL, {"generate": 11.10, "score": 17.93, "train": 42.41}),
        (ONE, SMALL_MODEL, {"generate": 2.74, "score": 2.22, "train": 4.50}),
        (IN_TURN, LARGE_MODEL, {"generate": 8.47, "score": 17.93, "train": 30.19}),
        (LONG_PROMPTS, LARGE_MODEL, {"generate": 20.32, "score": 56.71, "train": 90.93}),
    ],
)
def test_phases_are_foretold_within_25_percent(config: PPO, size: Any, measured: dict[str, float]) -> None:
    found = phases(config, arrange(config.placed, config.together), sizes(config, size), Card())
    assert {name: found[name] for name in measured} == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("config", "card", "seconds"), [(config, card, seconds) for config, card, _, seconds in NOT_FITTED])
def test_steps_it_was_not_fitted_to_are_foretold_within_25_percent(config: PPO, card: Card, seconds: float) -> None:
    found = forecast("", config, {}, sizes(config, SMALL_MODEL), card)
    assert found.total == pytest.approx(seconds, rel=0.25)


def test_generation_beside_training_costs_what_is_left_of_it() -> None:
    layout, models = arrange(SPLIT.placed, SPLIT.together), sizes(SPLIT, LARGE_MODEL)
    few_and_long = SPLIT.model_copy(update={"rollout_batch_size": 4, "generate_max_len": 16384})
    for config, covered in ((SPLIT, True), (few_and_long, False)):
        turns, ahead = (phases(config.model_copy(update={"one_step_off_policy": on}), layout, models, Card()) for on in (False, True))
        assert {name: ahead[name] for name in ahead if name != "generate"} == {name: turns[name] for name in turns if name != "generate"}
        left = turns["generate"] - turns["score"] - turns["train"]
        assert (left <= 0) is covered and ahead["generate"] == max(0.0, left)


def test_what_trains_in_turn_does_not_add_up() -> None:
    one, other, engine = Held(1.0, scoring=2.0, training=10.0), Held(1.0, scoring=3.0, training=7.0), Held(1.0, generating=6.0)
    assert peak([one, other, engine], released=True) == 3 + 17
    assert peak([one, other, engine], released=True, in_turn=True) == 3 + 10
    assert peak([one, other, engine], released=False) == 3 + 10 + 7 + 6
    host = {"adam_offload": ("actor", "critic"), "colocate_all": True}
    beside, turn = (ALL_FOUR.model_copy(update=host | {"colocate_all": together}) for together in (False, True))
    plain = phases(ALL_FOUR, layout := arrange(ALL_FOUR.placed, ALL_FOUR.together), sizes(ALL_FOUR, LARGE_MODEL), Card())["train"]
    slower = [phases(config, layout, sizes(ALL_FOUR, LARGE_MODEL), Card())["train"] - plain for config in (beside, turn)]
    assert slower[1] == pytest.approx(slower[0] * (1 + (LARGE_MODEL.parameters - LARGE_MODEL.head) / LARGE_MODEL.parameters))


@pytest.mark.parametrize(("card", "whole"), [(24 * GIB, 0.0), (80 * GIB, 2.0)])
def test_a_small_model_stays_whole_on_a_large_card(card: int, whole: float) -> None:
    known, unknown = (trained(SMALL_MODEL, Training(4, 3, 1.0, 8192, card=size), True, 8192).training for size in (card, 0))
    assert (known - unknown) / SMALL_MODEL.parameters == whole


def test_logits_of_a_large_pass_count_where_they_are_kept() -> None:
    kept, recomputed = (trained(SMALL_MODEL, Training(1, 2, share, 32768), True, 0).training for share in (0.0, 0.01))
    assert kept - recomputed > 2 * (32768 - 10240) * SMALL_MODEL.vocabulary


def test_what_saves_memory_does() -> None:
    plain = trained(LARGE_MODEL, Training(1, 2, 0.0, 8192), True, 8192)
    for other in (Training(1, 2, 1.0, 8192), Training(4, 2, 0.0, 8192), Training(1, 2, 0.0, 4096), Training(1, 2, 0.0, 8192, offload=True)):
        held = trained(LARGE_MODEL, other, True, 8192)
        assert held.still + held.training < plain.still + plain.training, other
    assert read(LARGE_MODEL, 1000, True, offload=True).still < read(LARGE_MODEL, 1000, True).still
    awake, asleep = (peak([plain, read(LARGE_MODEL, 1000, True)], released) for released in (False, True))
    assert asleep <= awake


def test_the_fastest_placement_that_fits_is_chosen() -> None:
    found = placements(ALL_FOUR, 4, sizes(ALL_FOUR, LARGE_MODEL), Card())
    chosen = choose(found, Card())
    assert chosen is not None and chosen.fits(Card())
    assert all(chosen.total <= 1.05 * other.total for other in found if other.fits(Card()))
    assert any(placement.fields.get("colocate_actor_ref") for placement in found), "cards apart are looked at as well"
    small = Card(memory=40 * GIB)
    assert choose(placements(ALL_FOUR, 4, sizes(ALL_FOUR, LARGE_MODEL), small), small) is None
    alone = Card(memory=80 * GIB)
    offloaded = choose(placements(ALL_FOUR, 4, sizes(ALL_FOUR, LARGE_MODEL), alone), alone)
    assert offloaded is not None and offloaded.peak <= 80 * GIB and offloaded.total >= chosen.total


def test_the_command_names_every_stage_and_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").mkdir()
    Qwen2Config(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, **LARGE).save_pretrained(
        tmp_path / "base"
    )
    (tmp_path / "recipe.yaml").write_text(
        f"name: big\nbase_model: {tmp_path / 'base'}\nstages:\n"
        "  sft: {data: {sources: a.jsonl}, zero_stage: 3, ranks: {num_ranks_per_node: 4, gpus: 1}, "
        "micro_train_tokens: 8192}\n  reward_model: {data: {sources: b.jsonl}, zero_stage: 2}\n"
        "  ppo: {prompts: {sources: c.jsonl}, zero_stage: 3, micro_train_tokens: 8192, micro_train_batch_size: 1}\n"
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"sft: [\d.]+ GiB a card on 4", told) and re.search(r"reward_model: 1\d\d\.\d GiB .* and a card has 140", told)
    assert "choose all together" in told and "actor and reference on 2, critic and reward on 1, vLLM on 1" in told
    (tmp_path / "base" / "config.json").unlink()
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    shutil.rmtree(tmp_path / "base")
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    assert "base has no readable config.json: name a local model folder" in " ".join(capsys.readouterr().err.split())


def test_what_it_says_to_write_fits_when_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").mkdir()
    shape = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    Qwen2Config(**shape, tie_word_embeddings=True, **LARGE).save_pretrained(tmp_path / "base")
    common = {"micro_train_tokens": 65536, "micro_train_batch_size": 1, "dtype": "bfloat16"}
    stages: dict[str, Any] = {
        "sft": {"data": {"sources": "a.jsonl"}, "max_len": 2048, **common},
        "reward_model": {"data": {"sources": "b.jsonl"}},
        "ppo": {"prompts": {"sources": "c.jsonl"}, "colocate_critic_reward": True, **common},
    }

    def told() -> str:
        recipe = {"name": "small", "base_model": str(tmp_path / "base"), "stages": stages}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "1", "--card", "h100"]) == 0
        said = capsys.readouterr().out
        assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "1", "--card-memory", "79.2", "--bandwidth", "3"]) == 0
        assert capsys.readouterr().out == said and said.startswith("estimates for 79 GiB, 770 TFLOP/s and 3.0 TB/s a card")
        return said

    before = told()
    passes = re.search(r"sft: 17\d\.\d GiB .* a card has 79: with (micro_train_tokens: \d+), (gradient_checkpointing: 0.0) it is", before)
    assert passes
    stages["sft"] |= yaml.safe_load("\n".join(passes.groups()))
    choice = yaml.safe_load(before.partition("In the recipe, under ppo:\n")[2])
    assert choice["colocate_critic_reward"] is False, "what the recipe has and the placement has not is said as well"
    stages["ppo"] |= choice
    after = told()
    assert re.search(r"sft: [567]\d\.\d GiB a card on 1", after) and "a card has 79" not in after
    assert "choose as in the recipe" in after and "Leave it as it is" in after


EXPERTS = size_of_config(
    {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4,
     "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
)  # fmt: skip


def test_operations_are_those_of_the_experts_that_a_token_meets() -> None:
    assert EXPERTS.parameters == pytest.approx(30.5e9, rel=0.01) and EXPERTS.active == pytest.approx(3.35e9, rel=0.01)
    assert SMALL_MODEL.active == SMALL_MODEL.parameters
    layout, long = arrange(ALL_FOUR.placed, ALL_FOUR.together), ALL_FOUR.model_copy(update={"micro_train_tokens": 32768})
    all_met = phases(long, layout, sizes(long, EXPERTS._replace(active=EXPERTS.parameters)), Card())
    some_met = phases(long, layout, sizes(long, EXPERTS), Card())
    assert all_met["train"] / some_met["train"] == pytest.approx(9, rel=0.1) and some_met["generate"] < all_met["generate"]


def test_groups_in_fractions_fill_one_card_after_the_other() -> None:
    halves = ONE.model_copy(update={name: ONE.actor_ranks.model_copy(update={"gpus": 0.5}) for name in all_roles({})})
    found = cards(halves, arrange(halves.placed), roles(halves, sizes(halves, SMALL_MODEL), Card().memory))
    assert [names for names, _ in found.values()] == [["actor", "critic"], ["reference", "reward:rm"], ["sampler"]]


def test_an_engine_whose_share_is_too_small_for_its_weights_is_not_chosen() -> None:
    tight = Card(memory=79.6 * GIB)
    larger = LARGE_MODEL._replace(parameters=14.8e9, active=14.8e9)
    as_it_is = placements(ALL_FOUR, 4, sizes(ALL_FOUR, larger), tight)[0]
    assert as_it_is.lacking > 0 and not as_it_is.fits(tight), "24 GiB for 27.6 of weights"
    assert (others := options(ALL_FOUR, 4, larger, tight)) and all(option.lacking <= 0 for option in others)
    over_two = ALL_FOUR.model_copy(update={"vllm": ALL_FOUR.vllm.model_copy(update={"tensor_parallel_size": 2, "num_engines": 2})})
    engines = [option.fields["vllm"] for option in options(over_two, 4, LARGE_MODEL, Card())]
    assert {(engine["num_engines"], engine["tensor_parallel_size"]) for engine in engines} == {(2, 2), (1, 1)}


def test_on_one_card_plain_torch_is_proposed() -> None:
    stages = {count: [option.fields["zero_stage"] for option in options(ONE, count, SMALL_MODEL, H200)] for count in (1, 2, 3)}
    assert stages == {1: [0, 0, 2], 2: [2, 3, 3], 3: [0, 2]}, "with Adam on the host DeepSpeed is needed; 128 answers are not for 3 ranks"


def test_what_ran_on_a_smaller_card_is_what_is_chosen_for_it() -> None:
    chosen = choose(placements(LONG_PASSES, 1, sizes(LONG_PASSES, SMALL_MODEL), H100), H100)
    assert chosen is not None
    assert PPO.model_validate(LONG_PASSES.model_dump() | chosen.fields) == CHOSEN


@pytest.mark.parametrize(("memory", "expected"), [(139.8, (24576, 0.0)), (79.2, (6144, 0.0)), (40, (12288, 0.5)), (20, None)])
def test_passes_are_the_fastest_that_fit(memory: float, expected: tuple[int, float] | None) -> None:
    """Of a recipe that recomputes every layer. Long passes, fewer layers recomputed, Adam on the GPU: what is short goes last."""
    card, models = Card(memory=memory * GIB), sizes(ONE, SMALL_MODEL)
    found = choose(placements(ONE, 1, models, card), card)
    assert (found and (found.fields["micro_train_tokens"], found.fields["gradient_checkpointing"])) == expected
    if found:
        changed = PPO.model_validate(ONE.model_dump() | found.fields)
        others = [forecast("", changed.model_copy(update=fields_of(each, ONE)), {}, models, card) for each in alternatives(ONE)]
        assert all(found.total <= 1.01 * other.total for other in others if other.fits(card))


def test_passes_as_short_as_a_document_wait_for_the_host() -> None:
    a_pass = {tokens: seconds_of_pass(SMALL_MODEL, Pass(tokens, 0.0), 0, True, H200) for tokens in (1024, 2048, 8192, 16384)}
    measured = {1024: 0.0954, 2048: 0.0981, 8192: 0.158, 16384: 0.295}  # on an H200; tests/benchmarks/README.md
    assert a_pass == pytest.approx(measured, rel=0.1)
    assert seconds_of_pass(SMALL_MODEL, Pass(16384, 1.0), 0, True, H200) == pytest.approx(4 / 3 * a_pass[16384])


@pytest.mark.parametrize("reward", [["rm"], ["rm", "other"], [{"function": "f.py:f"}], [{"model": "rm", "ranks": {"gpus": 1}}, "other"]])
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_options_ask_for_no_more_cards_than_there_are(estimator: str, reward: list[Any]) -> None:
    given = {"reward": reward, "advantage_estimator": estimator, "n_samples_per_prompt": 2, "critic": "rm" if estimator == "gae" else None}
    config = PPO.model_validate(ALL_FOUR.model_dump() | {"colocate_all": False, "ref_reward_offload": False} | given)
    found = options(config, 4, LARGE_MODEL, Card())
    assert any("all together" in option.name for option in found)
    full = estimator == "grpo" and len(config.reward_models) == 2  # actor and reference on 2, each reward model on 1: none for an engine
    assert any("vLLM on" in option.name for option in found) != full
    for option in found:
        changed = PPO.model_validate(config.model_dump() | option.fields)
        asked = sum(bundle["GPU"] for bundle in arrange(changed.placed, changed.together).bundles)
        assert asked == 4, option.name
        assert config.has_critic or "critic" not in f"{option.name} {option.fields}".replace("colocate_critic_reward", "")


def test_answers_that_an_engine_has_no_room_for_come_after_the_others() -> None:
    def seconds(prompts: int) -> float:
        config = ALL_FOUR.model_copy(update={"rollout_batch_size": prompts})
        return phases(config, arrange(config.placed, config.together), sizes(config, LARGE_MODEL), Card())["generate"]

    fitting = seconds(4 * 256)  # an engine's 24 GiB hold the keys and values of 360 answers of 1,280 tokens
    assert seconds(4 * 1024) > 2.5 * fitting > 2.5 * seconds(512)
    large = ALL_FOUR.model_copy(
        update={"vllm": ALL_FOUR.vllm.model_copy(update={"gpu_memory_utilization": 0.6}), "rollout_batch_size": 4 * 1024}
    )
    assert phases(large, arrange(large.placed, large.together), sizes(large, LARGE_MODEL), Card())["generate"] < seconds(4 * 1024)


def test_no_pass_is_longer_than_an_optimiser_step_or_shorter_than_a_document() -> None:
    small_steps = TWO_TOGETHER.model_copy(update={"train_batch_size": 8})  # 4 documents of 768 tokens on each of two ranks
    assert as_told(small_steps, 2) == Pass(4 * 768, 1.0)
    held, asked = ({**roles(config, sizes(config, SMALL_MODEL), H200.memory)} for config in (
        small_steps, small_steps.model_copy(update={"micro_train_tokens": 4 * 768})))  # fmt: skip
    assert held == asked and {each.tokens for each in alternatives(small_steps)} == {4 * 768, 2 * 768, 768}
    assert as_told(ONE.model_copy(update={"micro_train_tokens": 100}), 1).tokens == 768
    odd = {each.tokens for each in alternatives(ONE.model_copy(update={"micro_train_tokens": 5000}))}
    assert min(odd) == 768 and 40000 in odd and max(odd) <= 128 * 768


def test_longer_passes_are_found_where_the_recipe_has_single_documents() -> None:
    single = LONG_PASSES.model_copy(update={"micro_train_tokens": None})
    chosen = choose(placements(single, 1, sizes(single, SMALL_MODEL), H200), H200)
    told = forecast("", single, {}, sizes(single, SMALL_MODEL), H200)
    assert chosen is not None and chosen.seconds["train"] < 0.6 * told.seconds["train"]
    assert chosen.fields["micro_train_batch_size"] >= 8 and "micro_train_tokens" not in chosen.fields, "documents stay documents"


def test_the_recipes_own_placement_is_tried_with_other_passes() -> None:
    ahead = TWO_APART.model_copy(
        update={"one_step_off_policy": True, "micro_train_tokens": 98304, "zero_stage": 0, "gradient_checkpointing": 0.0}
    )
    own, changed, *_ = placements(ahead, 2, sizes(ahead, SMALL_MODEL), H100)
    assert not own.fits(H100) and changed.fits(H100) and changed.fields.keys() == {"micro_train_tokens", "gradient_checkpointing"}
    assert choose(placements(ahead, 1, sizes(ahead, SMALL_MODEL), H100)[:2], H100) is None, "it needs two cards"


def test_nothing_is_offloaded_for_memory_that_makes_no_difference() -> None:
    tiny = SMALL_MODEL._replace(parameters=1e6, active=1e6, layers=2, hidden=64, kept=2000, passing=1000, kv=256, vocabulary=500)
    plain, offloaded, _ = found = options(ONE, 1, tiny, H200)
    assert offloaded.peak < plain.peak and choose(found, H200) is plain
    plain, offloaded, _ = found = options(LONG_PASSES, 1, SMALL_MODEL, H100)
    assert offloaded.peak < plain.peak and choose(found, H100) is offloaded


def test_the_recipes_own_placement_is_kept_where_it_is_as_good() -> None:
    chosen = choose(placements(CHOSEN, 1, sizes(CHOSEN, SMALL_MODEL), H100), H100)
    assert chosen is not None and chosen.fields == {}


def test_a_recipe_is_told_what_else_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").mkdir()
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    Qwen2Config(**shape, **LARGE).save_pretrained(tmp_path / "base")
    batches = ("rollout_batch_size", "train_batch_size")
    four = {"ranks": {"num_ranks_per_node": 4, "gpus": 1}, "data": {"sources": "a.jsonl"}}
    stages = {
        "sft": {**four, "zero_stage": 1, "dtype": "bfloat16"},
        "reward_model": {**four},
        "ppo": {"prompts": {"sources": "c.jsonl"}, "reward": [{"model": "reward_model", "ranks": {"gpus": 1}}, {"function": "a.py:f"}]},
        "odd": {"stage": "ppo", "prompts": {"sources": "c.jsonl"}, **dict.fromkeys(batches, 9), "micro_train_batch_size": 9},
    }
    recipe = {"name": "small", "base_model": str(tmp_path / "base"), "stages": stages}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4", "--card-memory", "60"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"sft: .* a card has 60: with micro_train_batch_size: \d+, gradient_checkpointing: \d.\d, zero_stage: 3 it is 5\d", said
    )
    assert re.search(r"reward_model: .*with dtype: bfloat16, and the recipe says float32", said)
    assert "odd: no placement suits its batch sizes and switches" in said
    choice = yaml.safe_load(said.partition("In the recipe, under ppo:\n")[2].partition("odd:")[0])
    assert choice["dtype"] == "bfloat16" and choice["reward"] == [{"model": "reward_model"}, {"function": "a.py:f"}]
