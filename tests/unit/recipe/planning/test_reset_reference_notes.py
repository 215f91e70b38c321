"""Gates on a KL whose reference is reset."""

from __future__ import annotations

from typing import Any

from rlhf_core.recipe.gate_checks import reset_reference_notes
from rlhf_core.recipe.load_recipe import recipe_of
from rlhf_core.recipe.plan import plan


def notes(metric: str, **fields: Any) -> list[str]:
    ppo = {"actor": "base", "prompts": {"sources": "p.jsonl"}, "reward": "http://host", "critic": "base"}
    stages = {"ppo": ppo | fields | {"gates": [{"metric": metric, "max": 0.2}]}}
    recipe = recipe_of({"name": "x", "base_model": "org/base@" + "0" * 40, "stages": stages})
    return reset_reference_notes(plan(recipe))


def test_a_gate_on_the_kl_is_told_when_the_reference_is_reset() -> None:
    (told,) = notes("kl/mean", reset_reference_every=200)
    assert told.startswith("stages.ppo.gates: kl/mean is measured from the reference, which")
    assert "reset_reference_every=200" in told and "since the last reset" in told
    assert notes("kl/mean") == notes("reward/mean", reset_reference_every=200) == []
