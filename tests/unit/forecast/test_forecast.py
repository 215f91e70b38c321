"""What `alignflow plan` foretells, beside what runs on GPUs took (tests/benchmarks/README.md)."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Cohere2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.config.training.optimised import SHARDINGS
from rlhf_core.config.training.sharding import Training
from rlhf_core.forecast.fitting_passes import Pass
from rlhf_core.forecast.hardware import GIB, Gpu
from rlhf_core.forecast.memory import ProcessBytes, gpu_peaks, peak, read, roles, trained
from rlhf_core.forecast.placements import forecast
from rlhf_core.forecast.seconds import forward_operations, phases, phases_as_range, seconds_of_pass
from rlhf_core.hub.model_config import size_of, size_of_config
from tests.support.measured import (
    ADAM_OFFLOADED,
    ALL_FOUR,
    ALL_ONE,
    ALL_RESIDENT,
    BEFORE_THEY_RAN,
    CALIBRATION,
    GRPO,
    H200,
    HELD_OUT,
    IN_TURN,
    LARGE_MODEL,
    LONG_PROMPTS,
    NOT_FITTED,
    ONE,
    SMALL_MODEL,
    SPLIT,
    TWO_APART,
    TWO_TOGETHER,
    all_roles,
    sizes,
    with_bf16_sums,
)


def test_sizes_are_those_of_the_models() -> None:
    assert SMALL_MODEL.parameters == pytest.approx(
        1.54e9, rel=0.01
    ) and LARGE_MODEL.parameters == pytest.approx(7.62e9, rel=0.01)


@pytest.mark.parametrize("config", [
    Qwen2Config(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2),
    Qwen3MoeConfig(vocab_size=500, hidden_size=64, moe_intermediate_size=32, num_experts=8, num_hidden_layers=3, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=32, intermediate_size=96, decoder_sparse_step=1, mlp_only_layers=[]),
])  # fmt: skip
def test_parameters_are_counted_as_transformers_does(config: Any, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    config.save_pretrained(tmp_path)
    real = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    # biases and the norms of heads are left out
    assert size_of(str(tmp_path)).parameters == pytest.approx(real, rel=0.01)


def test_stored_weights_are_counted_where_they_are_fewer(tmp_path: Any) -> None:
    """A feed-forward without a gate has two matrices, and config.json does not say so."""
    config = GPTNeoXConfig(
        vocab_size=500, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    stated = size_of_config(config.to_dict())
    model = GPTNeoXForCausalLM(config)
    model.save_pretrained(tmp_path)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert size_of(str(tmp_path)).parameters == real < 0.85 * stated.parameters
    (tmp_path / "more.safetensors").write_bytes(b"\xff" * 64)
    assert size_of(str(tmp_path)) == stated, "of weights that cannot be read nothing is counted"


@pytest.mark.parametrize(
    "config", [GemmaConfig, Gemma3TextConfig, Cohere2Config, LlamaConfig, Qwen2Config, MixtralConfig]
)
def test_where_config_json_is_silent_embeddings_are_tied_as_transformers_has_it(config: Any) -> None:
    stated = config().to_dict()
    silent = {name: value for name, value in stated.items() if name != "tie_word_embeddings"}
    assert size_of_config(silent) == size_of_config(stated)


@pytest.mark.parametrize(
    ("config", "size", "gpu", "measured"),
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
def test_peak_memory_is_estimated_within_15_percent(
    config: PPO, size: Any, gpu: Gpu, measured: list[float]
) -> None:
    layout = arrange(config.placed, config.together)
    found = gpu_peaks(config, layout, roles(with_bf16_sums(config), sizes(config, size), gpu.memory))
    assert sorted(bytes_ / GIB for _, bytes_ in found.values()) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("config", "size", "gpu", "measured"), CALIBRATION)
def test_runs_that_rates_are_taken_from_are_within_the_range(
    config: PPO, size: Any, gpu: Gpu, measured: dict[str, float]
) -> None:
    """Rates have three digits. Of Adam's steps on the host, and of engines that sleep, no rate is taken from
    these runs."""
    found = phases_as_range(config, arrange(config.placed, config.together), sizes(config, size), gpu)
    others = {"sleep and wake"} | ({"train"} if config.adam_offload else set())
    for phase, seconds in measured.items():
        if phase in others:
            assert found.typical[phase] == pytest.approx(seconds, rel=0.15), phase
        else:
            assert 0.998 * found.fast[phase] <= seconds <= 1.002 * found.slow[phase], phase


@pytest.mark.parametrize(("config", "size", "gpu", "measured"), HELD_OUT)
def test_phases_of_other_runs_are_estimated_within_25_percent(
    config: PPO, size: Any, gpu: Gpu, measured: dict[str, float]
) -> None:
    found = phases(config, arrange(config.placed, config.together), sizes(config, size), gpu)
    long = {name: seconds for name, seconds in measured.items() if seconds >= 0.5}
    assert {name: found[name] for name in long} == pytest.approx(long, rel=0.25)
    short = {name: seconds for name, seconds in measured.items() if seconds < 0.5}
    assert {name: found[name] for name in short} == pytest.approx(short, abs=0.065)


@pytest.mark.parametrize(
    ("config", "gpu", "seconds"), [(config, gpu, seconds) for config, gpu, _, seconds in NOT_FITTED]
)
def test_steps_it_was_not_fitted_to_are_estimated_within_25_percent(
    config: PPO, gpu: Gpu, seconds: float
) -> None:
    found = forecast("", config, {}, sizes(config, SMALL_MODEL), gpu)
    assert found.total == pytest.approx(seconds, rel=0.25)


def test_float8_makes_passes_shorter_and_nothing_else() -> None:
    """As GRPO of 7.6 billion parameters on two H200s (grpo-step-7.6b-2h200 and -fp8-2h200): its training took
    24.4 s and with float8 21.5 s."""
    layout = arrange(GRPO.placed, GRPO.together)
    plain, faster = (
        phases(GRPO.model_copy(update={"float8": on}), layout, sizes(GRPO, LARGE_MODEL), H200)
        for on in (False, True)
    )
    assert plain["score"] / faster["score"] == pytest.approx(1.33)
    assert plain["train"] / faster["train"] == pytest.approx(24.38 / 21.54, rel=0.02)
    left = plain.keys() - {"score", "train"}
    assert {name: plain[name] for name in left} == {name: faster[name] for name in left}


def test_a_head_in_fp32_keeps_no_logits_and_computes_them_twice() -> None:
    layout = arrange(GRPO.placed, GRPO.together)
    half = GRPO.model_copy(update={"dtype": "bfloat16"})
    plain, again = (
        phases(half.model_copy(update={"fp32_head": on}), layout, sizes(GRPO, LARGE_MODEL), H200)
        for on in (False, True)
    )
    head = 2 * LARGE_MODEL.vocabulary * LARGE_MODEL.hidden
    whole = 3 * forward_operations(LARGE_MODEL, True, GRPO.longest)
    assert again["train"] / plain["train"] == pytest.approx(1 + head / whole, rel=0.01)
    assert {**again, "train": 0.0} == {**plain, "train": 0.0}
    kept, chunks = (
        trained(LARGE_MODEL, Training(1, SHARDINGS[2], 0.0, 65536, fp32_head=on), True, 8192).training
        for on in (False, True)
    )
    assert kept - chunks == pytest.approx((65536 * 2 - 2048 * 10) * LARGE_MODEL.vocabulary)
    critic = Training(1, SHARDINGS[2], 0.0, 65536)
    assert trained(LARGE_MODEL, critic, False, 0) == trained(
        LARGE_MODEL, critic._replace(fp32_head=True), False, 0
    )


def test_generation_beside_training_costs_what_is_left_of_it() -> None:
    layout = arrange(SPLIT.placed, SPLIT.together)
    models = sizes(SPLIT, LARGE_MODEL)
    few_and_long = SPLIT.model_copy(update={"rollout_batch_size": 4, "generate_max_len": 16384})
    for config, covered in ((SPLIT, True), (few_and_long, False)):
        turns, ahead = (
            phases(config.model_copy(update={"max_staleness": on}), layout, models, Gpu()) for on in (0, 1)
        )
        assert {name: ahead[name] for name in ahead if name != "generate"} == {
            name: turns[name] for name in turns if name != "generate"
        }
        left = turns["generate"] - turns["score"] - turns["train"]
        assert (left <= 0) is covered and ahead["generate"] == max(0.0, left)


def test_what_trains_in_turn_does_not_add_up() -> None:
    one = ProcessBytes(1.0, scoring=2.0, training=10.0)
    other = ProcessBytes(1.0, scoring=3.0, training=7.0)
    engine = ProcessBytes(1.0, generating=6.0)
    assert peak([one, other, engine], released=True) == 3 + 17
    assert peak([one, other, engine], released=True, in_turn=True) == 3 + 10
    assert peak([one, other, engine], released=False) == 3 + 10 + 7 + 6
    host = {"adam_offload": ("actor", "critic"), "colocate_all": True}
    beside, turn = (
        ALL_FOUR.model_copy(update=host | {"colocate_all": together}) for together in (False, True)
    )
    plain = phases(
        ALL_FOUR, layout := arrange(ALL_FOUR.placed, ALL_FOUR.together), sizes(ALL_FOUR, LARGE_MODEL), Gpu()
    )["train"]
    slower = [
        phases(config, layout, sizes(ALL_FOUR, LARGE_MODEL), Gpu())["train"] - plain
        for config in (beside, turn)
    ]
    assert slower[1] == pytest.approx(
        slower[0] * (1 + (LARGE_MODEL.parameters - LARGE_MODEL.head) / LARGE_MODEL.parameters)
    )


@pytest.mark.parametrize(("gpu", "whole"), [(24 * GIB, 0.0), (80 * GIB, 2.0)])
def test_a_small_model_stays_whole_on_a_large_gpu(gpu: int, whole: float) -> None:
    known, unknown = (
        trained(SMALL_MODEL, Training(4, SHARDINGS[3], 1.0, 8192, gpu_bytes=size), True, 8192).training
        for size in (gpu, 0)
    )
    assert (known - unknown) / SMALL_MODEL.parameters == whole


def test_logits_of_a_large_pass_count_where_they_are_kept() -> None:
    kept, recomputed = (
        trained(SMALL_MODEL, Training(1, SHARDINGS[2], share, 32768), True, 0).training
        for share in (0.0, 0.01)
    )
    assert kept - recomputed > 2 * (32768 - 10240) * SMALL_MODEL.vocabulary


def test_what_saves_memory_does() -> None:
    plain = trained(LARGE_MODEL, Training(1, SHARDINGS[2], 0.0, 8192), True, 8192)
    for other in (
        Training(1, SHARDINGS[2], 1.0, 8192),
        Training(4, SHARDINGS[2], 0.0, 8192),
        Training(1, SHARDINGS[2], 0.0, 4096),
        Training(1, SHARDINGS[2], 0.0, 8192, offload=True),
    ):
        held = trained(LARGE_MODEL, other, True, 8192)
        assert held.still + held.training < plain.still + plain.training, other
    assert read(LARGE_MODEL, 1000, True, offload=True).still < read(LARGE_MODEL, 1000, True).still
    awake, asleep = (peak([plain, read(LARGE_MODEL, 1000, True)], released) for released in (False, True))
    assert asleep <= awake


EXPERTS = size_of_config(
    {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4,
     "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
)  # fmt: skip


def test_operations_are_those_of_the_experts_that_a_token_meets() -> None:
    assert EXPERTS.parameters == pytest.approx(30.5e9, rel=0.01) and EXPERTS.active == pytest.approx(
        3.35e9, rel=0.01
    )
    assert SMALL_MODEL.active == SMALL_MODEL.parameters
    layout = arrange(ALL_FOUR.placed, ALL_FOUR.together)
    long = ALL_FOUR.model_copy(update={"micro_train_tokens": 32768})
    all_met = phases(long, layout, sizes(long, EXPERTS._replace(active=EXPERTS.parameters)), Gpu())
    some_met = phases(long, layout, sizes(long, EXPERTS), Gpu())
    assert (
        all_met["train"] / some_met["train"] == pytest.approx(10, rel=0.01)
        and some_met["generate"] < all_met["generate"]
    )


def test_groups_in_fractions_fill_one_gpu_after_the_other() -> None:
    halves = ONE.model_copy(
        update={name: ONE.actor_ranks.model_copy(update={"gpus": 0.5}) for name in all_roles({})}
    )
    found = gpu_peaks(halves, arrange(halves.placed), roles(halves, sizes(halves, SMALL_MODEL), Gpu().memory))
    assert [names for names, _ in found.values()] == [
        ["actor", "critic"],
        ["reference", "reward:rm"],
        ["sampler"],
    ]


def test_passes_as_short_as_a_document_wait_for_the_host() -> None:
    tokens = (1024, 2048, 8192, 16384)
    found = {n: seconds_of_pass(SMALL_MODEL, Pass(n, 0.0), 0, True, H200, 600) for n in tokens}
    # on an H200; tests/benchmarks/README.md
    measured = {1024: 0.0954, 2048: 0.0981, 8192: 0.158, 16384: 0.295}
    assert found == pytest.approx(measured, rel=0.05)
    assert seconds_of_pass(SMALL_MODEL, Pass(16384, 1.0), 0, True, H200, 600) == pytest.approx(
        4 / 3 * found[16384]
    )


def test_answers_that_an_engine_has_no_room_for_come_after_the_others() -> None:
    def seconds(prompts: int) -> float:
        config = ALL_FOUR.model_copy(update={"rollout_batch_size": prompts})
        return phases(config, arrange(config.placed, config.together), sizes(config, LARGE_MODEL), Gpu())[
            "generate"
        ]

    fitting = seconds(4 * 256)  # an engine's 24 GiB hold the keys and values of 360 answers of 1,280 tokens
    assert seconds(4 * 1024) > 2.5 * fitting > 2.5 * seconds(512)
    large = ALL_FOUR.model_copy(
        update={
            "engine": ALL_FOUR.engine.model_copy(update={"gpu_memory_utilization": 0.6}),
            "rollout_batch_size": 4 * 1024,
        }
    )
    assert phases(large, arrange(large.placed, large.together), sizes(large, LARGE_MODEL), Gpu())[
        "generate"
    ] < seconds(4 * 1024)


def test_an_actor_without_its_adapters_scores_in_place_of_a_reference() -> None:
    def score(**fields: Any) -> float:
        config = PPO.model_validate(
            ALL_FOUR.model_dump() | {"lora": {}, "ref_reward_offload": False} | fields
        )
        return phases(
            config, arrange(config.placed, config.together), dict.fromkeys(config.groups, LARGE_MODEL), Gpu()
        )["score"]

    assert score() == pytest.approx(score(reference="other")), "as many passes, by another group"
    assert score(init_kl_coef=0.0) < score()
