"""Memory while models are loaded: what each ZeRO stage needs, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import Lora, Ranks
from rlhf_core.forecast.hardware import GIB
from rlhf_core.forecast.memory import FETCHED, roles
from rlhf_core.forecast.zero_stage import (
    peak_of_ppo,
    peak_of_training,
    require_start,
    stage_of_training,
    starts,
    starts_of_ppo,
)
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.start_fleet import start_fleet, zero_stage_of
from rlhf_core.system.machine import MachineLacks
from rlhf_core.training.ranks import with_zero_stage
from tests.support.stage_request import stage_request
from tests.unit.forecast.test_zero_stage import LARGE, ppo, sft

HOST = 4096 * 2**30


HOSTS: dict[str, Any] = {"nodes": ["here"], "free_hosts": lambda timeout: {"here": HOST}}


# 70 billion parameters in bf16, and CUDA's own memory
LARGE_STARTS = (2 * LARGE.parameters + 0.6 * GIB) / GIB


def test_zero_3_loads_a_share_and_lower_stages_all() -> None:
    many = sft(ranks=Ranks(num_ranks_per_node=32, gpus=1))
    assert LARGE_STARTS == pytest.approx(132, abs=0.1)
    share = (LARGE_STARTS - 0.6) / 32 + 0.6 + FETCHED / GIB
    assert starts(many, {"sft": LARGE})["sft"] / GIB == pytest.approx(share) and share < 10
    assert starts(many.model_copy(update={"zero_stage": 2}), {"sft": LARGE})["sft"] / GIB == pytest.approx(
        LARGE_STARTS
    )
    assert (
        peak_of_training(many, LARGE, 2, 80 * GIB) / GIB
        > LARGE_STARTS
        > 80
        > peak_of_training(many, LARGE, 3, 80 * GIB) / GIB
    )
    assert stage_of_training(many, LARGE, 80 * GIB).why.startswith("the lowest that fits")
    four_bits = sft(lora=Lora(quantize="nf4"))
    assert 30 * GIB < starts(four_bits, {"sft": LARGE})["sft"] < 40 * GIB, "4-bit weights are not cut"
    assert starts(sft(dtype="float32", zero_stage=2), {"sft": LARGE})["sft"] / GIB == pytest.approx(
        2 * LARGE_STARTS - 0.6
    )


def test_models_that_are_only_read_count_whole_beside_the_shares_of_others() -> None:
    roles = dict.fromkeys(
        ("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"),
        Ranks(num_ranks_per_node=32, gpus=1),
    )
    alone = ppo(**roles, micro_train_batch_size=1)
    models = dict.fromkeys(alone.groups, LARGE)
    assert peak_of_ppo(alone, models, 3, 80 * GIB) < 80 * GIB
    engines = {"num_engines": 32, "gpus": 1, "gpu_memory_utilization": 0.3, "sleep": True}
    together = ppo(**roles, micro_train_batch_size=1, colocate_all=True, engine=engines)
    whole = sum(2 * (LARGE.parameters - head) / GIB + 0.6 for head in (0, LARGE.head))
    assert 2 * whole > peak_of_ppo(together, models, 3, 80 * GIB) / GIB > whole


def test_models_that_are_only_read_may_be_cut_too() -> None:
    models = dict.fromkeys(ppo().groups, LARGE)
    config = ppo(colocate_actor_ref=True, zero_stage=3, ref_reward_shard=True)
    (needed,) = {needed for names, needed in starts_of_ppo(config, models) if names == ["actor", "reference"]}
    assert needed / GIB == pytest.approx(2 * ((LARGE_STARTS - 0.6) / 4 + 0.6 + FETCHED / GIB))
    held = roles(config, models, 80 * GIB)["reference"]
    assert held.still / GIB == pytest.approx((LARGE_STARTS - 0.6) / 4 + 0.6) and held.scoring > FETCHED


def test_a_gpu_that_cannot_load_the_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 128256}))
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    for config, needed, less in (
        (sft(), r"37\.2", 36),
        (sft(zero_stage=3), r"37\.2", 36),
        (sft(zero_stage=2), r"132\.0", 131),
    ):
        request = stage_request(config, tmp_path, name="tuned")
        with pytest.raises(
            MachineLacks, match=rf"^tuned: while .* takes {needed} GiB, .* smallest GPU here has {less}\.0:"
        ):
            with_zero_stage(request, run, config, less * GIB, HOST)
        assert with_zero_stage(request, run, config, 140 * GIB, HOST).config.zero_stage in (2, 3)  # type: ignore[union-attr]

    class Group:
        def gpu_bytes(self, timeout: float) -> float:
            return 80 * GIB

        def build(self, *_: object, **__: object) -> None:
            pytest.fail("something was loaded")

    config = ppo()
    groups: Any = dict.fromkeys(config.placed, Group())
    with pytest.raises(MachineLacks, match=r"^(reference|reward:rm): while the model .* takes 13\d\.\d GiB"):
        start_fleet(
            config,
            dict.fromkeys(config.groups, str(tmp_path)),
            SimpleNamespace(pad_token_id=0),
            0,
            groups,
            RolloutGroup(config, groups["sampler"], groups["actor"]),
            False,
        )  # type: ignore[arg-type]


ALL_LOADED = "actor, critic, reference, reward:rm, sampler: "


TOGETHER: dict[str, Any] = {
    "colocate_all": True,
    "engine": {"num_engines": 4, "gpus": 1, "gpu_memory_utilization": 0.3, "sleep": True},
}


@pytest.mark.parametrize(
    ("fields", "alone", "roles"),
    [
        ({"colocate_actor_ref": True}, 2, "actor, reference: "),
        ({"colocate_critic_reward": True}, 2, "critic, reward:rm: "),
        (
            {"colocate_critic_reward": True, "reward": ["rm", {"model": "rm", "name": "second"}]},
            3,
            "critic, reward:rm, reward:second: ",
        ),
        ({"colocate_actor_ref": True, "zero_stage": 3}, 1.28, "actor, reference: "),
        ({"colocate_actor_ref": True, "dtype": "float32"}, 4, "actor, reference: "),
        ({"colocate_actor_ref": True, "ref_reward_offload": True}, 1, ""),
        (
            {"colocate_actor_ref": True, "lora": Lora(quantize="nf4"), "reference": "other"},
            1.3,
            "actor, reference: ",
        ),
        (TOGETHER, 5, ALL_LOADED),
        (TOGETHER | {"ref_reward_offload": True}, 3, ALL_LOADED),
    ],
)
def test_models_that_share_a_gpu_are_refused_by_their_sum_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], alone: float, roles: str
) -> None:
    """`alone`: about as many times one model's bytes."""
    config = ppo(**{"zero_stage": 2, **fields})
    monkeypatch.setattr("rlhf_core.stages.ppo.start_fleet.size_at", lambda place: LARGE)
    needed = max(needed for _, needed in starts_of_ppo(config, dict.fromkeys(config.groups, LARGE))) / GIB
    assert needed == pytest.approx(alone * LARGE_STARTS, abs=0.02 * alone * LARGE_STARTS + 5)

    def start(memory: float) -> None:
        groups: Any = dict.fromkeys(
            config.placed, SimpleNamespace(gpu_bytes=lambda timeout: memory * GIB, **HOSTS)
        )
        zero_stage_of(config, dict.fromkeys(config.groups, "a/model"), groups, None)

    start(needed + 0.1)
    if roles:
        with pytest.raises(MachineLacks) as refused:
            start(needed - 0.1)
        together = f"at their start they take {needed:.1f} GiB of the same GPU together, and"
        assert str(refused.value).startswith(roles) and together in str(refused.value)
        assert f"the smallest GPU here has {needed - 0.1:.1f}: give them GPUs of their own, or use" in str(
            refused.value
        )


def test_two_large_models_on_one_gpu_of_an_h200() -> None:
    """Each alone would fit."""
    config = ppo(colocate_actor_ref=True, zero_stage=2)
    (needed,) = {
        needed
        for names, needed in starts_of_ppo(config, dict.fromkeys(config.groups, LARGE))
        if names == ["actor", "reference"]
    }
    assert needed / GIB == pytest.approx(2 * LARGE_STARTS) and LARGE_STARTS < 141
    with pytest.raises(MachineLacks, match=r"^actor, reference: .* take 264\.0 .* together, .* has 141\.0:"):
        require_start(["actor", "reference"], needed, 141 * GIB)
    held = roles(config, dict.fromkeys(config.groups, LARGE), 141 * GIB)
    # what `plan` counts, at most
    assert needed <= sum(held[name].still + held[name].starting for name in ("actor", "reference"))


def test_models_of_unknown_size_and_roles_on_their_own_gpus_add_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "rlhf_core.stages.ppo.start_fleet.size_at", lambda place: LARGE if place == "actor" else None
    )
    for config in (ppo(colocate_actor_ref=True), ppo()):
        group = SimpleNamespace(gpu_bytes=lambda timeout: 140 * GIB, **HOSTS)
        groups: Any = {"actor": group, "critic": group}
        assert zero_stage_of(config, {name: name for name in config.groups}, groups, None).stage == 3
