"""Finds placements of a PPO stage on a number of GPUs, with the memory and time of each, and chooses one.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.forecast.by_phase import PhaseBytes, by_phase
from rlhf_core.forecast.fitting_passes import alternatives, fields_of
from rlhf_core.forecast.hardware import Gpu
from rlhf_core.forecast.memory import USABLE, gpu_peaks, lacking_for_engines, roles
from rlhf_core.forecast.placement_options import judges_apart, options_on
from rlhf_core.forecast.seconds import Range, phases, phases_as_range, shares_of_engine
from rlhf_core.forecast.zero_stage import stage_of_ppo
from rlhf_core.hub.model_config import Size


class Placement(NamedTuple):
    """A way to place the stage: the fields that produce it, the bytes of its fullest GPU, all GPUs with their
    groups, seconds by phase, the bytes that an engine's share of a GPU lacks for its weights (0 or less:
    none), and the number of missing GPUs."""

    name: str
    fields: dict[str, Any]
    peak: float
    gpus: dict[str, tuple[list[str], float]]
    seconds: dict[str, float]
    lacking: float
    beyond: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def fits(self, gpu: Gpu) -> bool:
        return self.peak <= USABLE * gpu.memory and self.lacking <= 0 and self.beyond <= 0


def forecast(
    name: str, config: PPO, fields: dict[str, Any], sizes: Mapping[str, Size], gpu: Gpu
) -> Placement:
    config = config.model_copy(update={"zero_stage": stage_of_ppo(config, sizes, gpu.memory).stage})
    layout = arrange(config.placed, config.together)
    found = gpu_peaks(config, layout, roles(config, sizes, gpu.memory))
    return Placement(
        name,
        fields,
        max(held for _, held in found.values()),
        found,
        phases(config, layout, sizes, gpu),
        lacking_for_engines(config, sizes, gpu.memory),
    )


class Details(NamedTuple):
    """The details of a placement: seconds by phase as a range, and memory by phase."""

    seconds: Range
    memory: dict[str, PhaseBytes]


def with_fields(config: PPO, placement: Placement) -> PPO:
    """Returns the recipe's stage with the fields of one of the `placements` applied."""
    return PPO.model_validate(config.model_dump() | placement.fields)


def details(config: PPO, placement: Placement, sizes: Mapping[str, Size], gpu: Gpu) -> Details:
    """Returns the details of one of the `placements`, which it simulates phase by phase."""
    changed = with_fields(config, placement)
    changed = changed.model_copy(update={"zero_stage": stage_of_ppo(changed, sizes, gpu.memory).stage})
    layout = arrange(changed.placed, changed.together)
    return Details(phases_as_range(changed, layout, sizes, gpu), by_phase(changed, layout, sizes, gpu))


def placements(config: PPO, count: int, sizes: Mapping[str, Size], gpu: Gpu) -> list[Placement]:
    """Returns the recipe's own placement first (with other passes if they fit or are faster), then the
    alternatives on `count` GPUs."""
    found = []
    if config.actor_ranks.gpus:
        taken = (
            f", zero_stage {stage_of_ppo(config, sizes, gpu.memory).stage}" if config.sharding is None else ""
        )
        beyond = max(0.0, _gpu_count(config) - count)
        found.append(forecast(f"as in the recipe{taken}", config, {}, sizes, gpu)._replace(beyond=beyond))
        other = _best(_with_other_passes("the recipe's placement", config, {}, sizes, gpu), gpu)
        found += [other._replace(beyond=beyond)] if other.fields else []
    left = count - judges_apart(config)
    options = options_on(config, left, sizes["actor"], gpu) if left > 0 else {}
    for name, fields in options.items():
        try:
            changed = PPO.model_validate(config.model_dump() | fields)
        except (
            ValidationError
        ):  # batch sizes that do not fit this many ranks, or engines that must run beside the models
            continue
        if _gpu_count(changed) > count:
            continue
        if changed.param_offload and any(placement.fits(gpu) for placement in found):
            continue  # its speed has not been measured, so only if nothing else fits
        tried = []
        for share in shares_of_engine(changed, sizes["actor"], gpu) if changed.colocate_all else [0.9]:
            changed = changed.model_copy(
                update={"engine": changed.engine.model_copy(update={"gpu_memory_utilization": share})}
            )
            tried += _with_other_passes(
                name, changed, fields | {"engine": changed.engine.model_dump()}, sizes, gpu
            )
        found.append(_best(tried, gpu))
    return found


def on_fewest(config: PPO, count: int, sizes: Mapping[str, Size], gpu: Gpu) -> tuple[int, list[Placement]]:
    """Returns a number of GPUs and the placements on them: `count`, or the smallest of its half, quarter, ...
    on which the best placement is as fast (within 5 %)."""
    fewest = count
    found = placements(config, count, sizes, gpu)
    fastest = choose(found, gpu)
    while fastest is not None and (count := count // 2):
        others = placements(config, count, sizes, gpu)
        best = choose(others, gpu)
        if best is not None and best.total <= 1.05 * fastest.total:
            fewest = count
            found = others
    return fewest, found


def _gpu_count(config: PPO) -> float:
    return sum(bundle.get("GPU", 0.0) for bundle in arrange(config.placed, config.together).bundles)


def _with_other_passes(
    name: str, config: PPO, fields: dict[str, Any], sizes: Mapping[str, Size], gpu: Gpu
) -> list[Placement]:
    """Returns a placement with the recipe's passes, and one placement with each alternative to these
    passes."""
    found = [forecast(name, config, fields, sizes, gpu)]
    for other in alternatives(config)[1:]:
        passes = fields_of(other, config)
        found.append(
            forecast(f"{name}; {other}", config.model_copy(update=passes), fields | passes, sizes, gpu)
        )
    return found


def _best(found: list[Placement], gpu: Gpu) -> Placement:
    """Returns the fastest placement that fits, the first among equals (within 1 %). If none fits, returns the
    one that needs the least memory."""
    fastest = min((placement.total for placement in found if placement.fits(gpu)), default=0.0)
    least = min(found, key=lambda placement: placement.peak)
    return next(
        (placement for placement in found if placement.fits(gpu) and placement.total <= 1.01 * fastest), least
    )


def choose(found: list[Placement], gpu: Gpu) -> Placement | None:
    """Returns the fastest placement that fits, or None when none fits. Among placements of equal speed
    (within 5 %), chooses the recipe's own, or the one with the most free memory if that makes a difference (5
    % of a GPU)."""
    fitting = [placement for placement in found if placement.fits(gpu)]
    fastest = min((placement.total for placement in fitting), default=0.0)
    equals = [placement for placement in fitting if placement.total <= 1.05 * fastest]
    return min(
        equals,
        key=lambda placement: round(20 * placement.peak / gpu.memory) if placement.fields else -1,
        default=None,
    )
