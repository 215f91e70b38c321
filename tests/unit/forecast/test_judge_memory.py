"""The memory of judges on engines of PPO: on GPUs of their own, and sleeping on those of the models."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.forecast.by_phase import PROCESS, by_phase
from rlhf_core.forecast.hardware import GIB
from rlhf_core.forecast.memory import CONTEXT, engine_needs, gpu_peaks, gpu_phases, lacking_for_engines, roles
from rlhf_core.forecast.placements import placements
from rlhf_core.forecast.zero_stage import starts_of_ppo
from tests.support.measured import H200, LARGE_MODEL, SMALL_MODEL, TWO_TOGETHER, sizes


def judged(engine: dict[str, Any]) -> PPO:
    judge = {"judge": {"kind": "vllm", "model": "grm", "engine": engine}, "rubric": "r"}
    return PPO.model_validate(TWO_TOGETHER.model_dump() | {"reward": ["rm", judge]})


def sizes_with_judge(config: PPO) -> dict[str, Any]:
    return sizes(config, SMALL_MODEL) | {"judge:grm": LARGE_MODEL}


APART = judged({"gpus": 1, "gpu_memory_utilization": 0.8})
SHARED = judged({"gpus": 1, "num_engines": 2, "sleep": True, "gpu_memory_utilization": 0.2})


def test_a_judge_on_its_own_gpu_takes_its_share_of_it() -> None:
    layout = arrange(APART.placed, APART.together)
    peaks = gpu_peaks(APART, layout, roles(APART, sizes_with_judge(APART), H200.memory))
    (held,) = (bytes_held for names, bytes_held in peaks.values() if names == ["judge:grm"])
    assert held == pytest.approx(CONTEXT + 0.8 * H200.memory)
    without = TWO_TOGETHER
    alone = gpu_peaks(
        without,
        arrange(without.placed, without.together),
        roles(without, sizes(without, SMALL_MODEL), H200.memory),
    )
    assert {names[0]: held for names, held in peaks.values() if "actor" in names} == {
        names[0]: held for names, held in alone.values()
    }


def test_a_judge_that_sleeps_takes_its_share_while_answers_are_scored() -> None:
    held = roles(SHARED, sizes_with_judge(SHARED), H200.memory)
    names = list(SHARED.placed)
    with_judge = gpu_phases([held[name] for name in names], True, True)
    without = gpu_phases([held[name] for name in names if name != "judge:grm"], True, True)
    more = {phase: with_judge[phase] - without[phase] for phase in with_judge}
    assert more.pop("score") == pytest.approx(1.0 * GIB + 0.2 * H200.memory)
    assert list(more.values()) == pytest.approx([1.0 * GIB] * len(more))
    found = by_phase(SHARED, arrange(SHARED.placed, SHARED.together), sizes_with_judge(SHARED), H200)
    before = by_phase(
        TWO_TOGETHER,
        arrange(TWO_TOGETHER.placed, TWO_TOGETHER.together),
        sizes(TWO_TOGETHER, SMALL_MODEL),
        H200,
    )
    asleep = 2 * LARGE_MODEL.parameters
    assert found["train"].host - before["train"].host == pytest.approx(2 * (PROCESS + asleep))


def test_a_share_that_cannot_hold_the_judge_is_told() -> None:
    tiny = judged({"gpus": 1, "gpu_memory_utilization": 0.05})
    lacking = lacking_for_engines(tiny, sizes_with_judge(tiny), H200.memory)
    assert lacking == pytest.approx(engine_needs(LARGE_MODEL, 1) - 0.05 * H200.memory) and lacking > 0
    assert not placements(tiny, 3, sizes_with_judge(tiny), H200)[0].fits(H200)
    unknown = sizes(tiny, SMALL_MODEL)
    assert lacking_for_engines(tiny, unknown, H200.memory) < 0, "a judge of unknown size is left out"


def test_what_loads_onto_the_gpus_of_the_models_leaves_out_a_judge_that_sleeps() -> None:
    (plain,) = {needed for _, needed in starts_of_ppo(TWO_TOGETHER, sizes(TWO_TOGETHER, SMALL_MODEL))}
    for config in (APART, SHARED):
        found = starts_of_ppo(config, sizes_with_judge(config))
        assert [needed for _, needed in found] == [plain] * 2


def test_other_placements_keep_the_judges_gpus_or_share_all() -> None:
    for config, count in ((APART, 5), (SHARED, 4)):
        others = [
            placement
            for placement in placements(config, count, sizes_with_judge(config), H200)
            if "actor_ranks" in placement.fields
        ]
        assert any("all together" in placement.name for placement in others)
        for placement in others:
            changed = PPO.model_validate(config.model_dump() | placement.fields)
            bundles = arrange(changed.placed, changed.together).bundles
            assert sum(bundle["GPU"] for bundle in bundles) == count, placement.name
