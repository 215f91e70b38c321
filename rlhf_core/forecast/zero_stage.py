"""Chooses the ZeRO stage for `zero_stage: auto`: the lowest stage that fits, because a higher stage saves
memory but sends more data between GPUs. Torch-free.

The estimates are for bfloat16. Without a GPU, or for a model of unknown size, the highest stage is chosen,
because it needs the least memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import KINDS, PPO, Optimised, Trainable
from rlhf_core.config.ppo.model_placement import gives_logprobs
from rlhf_core.config.training.optimised import HALF, SHARDINGS
from rlhf_core.config.training.sharding import TORCH
from rlhf_core.forecast.fitting_passes import Pass
from rlhf_core.forecast.hardware import GIB
from rlhf_core.forecast.memory import (
    USABLE,
    ProcessBytes,
    bytes_of_weights,
    copies,
    engine_needs,
    engine_sizes,
    gpu_peaks,
    loaded,
    roles,
    training_phases,
)
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import Size, size_of
from rlhf_core.hub.model_files import ADAPTER_CONFIG
from rlhf_core.hub.snapshots import described, pinned_base
from rlhf_core.system.machine import MachineLacks

T = TypeVar("T")


class Chosen(NamedTuple):
    """A ZeRO stage, and the reason for choosing it in words."""

    stage: int
    why: str

    def __str__(self) -> str:
        return f"zero_stage {self.stage}: {self.why}"


def uses_deepspeed(config: PPO) -> bool:
    """Returns whether the actor and critic use DeepSpeed. `zero_stage` determines this. With `auto` they use
    DeepSpeed if either has several ranks or no GPUs, or if the recipe offloads them to the host or has
    DeepSpeed options."""
    if config.sharding is not None:
        return config.sharding is not TORCH
    return not config.alone or not all(ranks.gpus for ranks in config.trained_ranks.values())


def stage_of_ppo(config: PPO, sizes: Mapping[str, Size] | None, gpu_bytes: float) -> Chosen:
    """Returns the ZeRO stage for the actor and critic, considering everything that shares their GPUs.
    `sizes`: the size of each group's model, None if unknown; `gpu_bytes`: the memory of a GPU (0: no GPU)."""
    alone = bool(gpu_bytes) and not uses_deepspeed(config)
    return _choose(
        config, alone, sizes, lambda known, stage: peak_of_ppo(config, known, stage, gpu_bytes), gpu_bytes
    )


def stage_of_state(config: Optimised, kept: int) -> Chosen:
    """Returns the ZeRO stage of a resume state, with the fields of the recipe that have no effect under
    it."""
    sharding = SHARDINGS[kept]
    ignored = [] if sharding.weights else config.needing_shards
    if config.offloaded("adam") and not sharding.state:
        ignored = ["adam_offload", *ignored]
    later = (
        f", so {' and '.join(ignored)} {'count' if ignored[1:] else 'counts'} from the next start without one"
        if ignored
        else ""
    )
    return Chosen(kept, f"as its resume state{later}")


def peak_of_ppo(config: PPO, sizes: Mapping[str, Size], stage: int, gpu_bytes: float) -> float:
    """Returns the bytes on the fullest GPU of the actor and critic under a ZeRO stage, including everything
    that shares it."""
    held = roles(config.model_copy(update={"zero_stage": stage}), sizes, gpu_bytes)
    found = gpu_peaks(config, arrange(config.placed, config.together), held)
    return max(held for names, held in found.values() if {"actor", "critic"} & set(names))


def stage_of_training(config: Trainable, size: Size | None, gpu_bytes: float) -> Chosen:
    """Works like `stage_of_ppo`, but for a training stage."""
    return _choose(
        config,
        config.alone,
        size,
        lambda known, stage: peak_of_training(config, known, stage, gpu_bytes),
        gpu_bytes,
    )


def peak_of_training(
    config: Trainable, size: Size, stage: int, gpu_bytes: float, what: Pass | None = None
) -> float:
    """Returns the bytes on a training stage's GPU under a ZeRO stage, with the passes of the recipe or of
    `what`."""
    return max(training_phases(config, size, stage, gpu_bytes, what).values())


def starts(config: Optimised, sizes: Mapping[str, Size]) -> dict[str, float]:
    """Returns the bytes that each trained model in `sizes`, by role, takes on every GPU of its ranks while it
    is loaded. Under `auto`, assumes the ZeRO stage that takes the least."""
    weight = 4.0 if config.dtype == "float32" and not config.quantized else bytes_of_weights(config.lora)
    sharding = config.sharding or config.shardings[-1]
    found = {}
    for role, size in sizes.items():
        group = config.groups[role] if isinstance(config, PPO) else next(iter(config.trained_ranks.values()))
        cut = sharding.weights and copies(config, group) == 1
        on_host = cut and (role if isinstance(config, PPO) else "model") in config.offloaded("param")
        head = role != "critic" and KINDS[config.stage].has_vocabulary
        found[role] = loaded(size, head, weight, group.world_size if cut else 1, on_host)
    return found


def starts_of_ppo(config: PPO, sizes: Mapping[str, Size]) -> list[tuple[list[str], float]]:
    """Returns the roles on each GPU that has models, and the bytes that they take there together, since all
    of them load at the same time. This includes engines, except the engines of judges that sleep. `sizes`:
    sizes of the known models; others are left out."""
    held = starts(config, {role: size for role, size in sizes.items() if role in ("actor", "critic")})
    weight = 4.0 if config.dtype == "float32" else 2.0
    if config.ref_reward_offload:
        weight = 0.0
    over = {role: ranks.world_size if config.ref_reward_shard else 1 for role, ranks in config.groups.items()}
    held |= {
        role: loaded(sizes[role], gives_logprobs(role), weight, ranks)
        for role, ranks in over.items()
        if role in sizes and role not in held
    }
    asleep = {judge.group for judge in config.own_judges if judge.model.engine.sleep}
    held |= {
        role: engine_needs(size, engine.processes)
        for role, (engine, size) in engine_sizes(config, sizes).items()
        if role not in asleep
    }
    found = gpu_peaks(
        config,
        arrange(config.placed, config.together),
        {role: ProcessBytes(held.get(role, 0.0)) for role in config.placed},
    )
    return [(names, needed) for names, needed in found.values() if set(names) & set(config.groups)]


def require_start(names: Sequence[str], needed: float, gpu_bytes: float) -> None:
    """Raises MachineLacks, before any model is loaded, when a GPU with `gpu_bytes` (0: no GPU) cannot hold
    the `needed` bytes of the models that these roles load onto it (see `starts`)."""
    if 0 < gpu_bytes < needed:
        told = at_start(needed)
        instead = "use more ranks with zero_stage 3, GPUs with more memory or a smaller model"
        if len(names) > 1:
            told = f"at their start they take {needed / GIB:.1f} GiB of the same GPU together"
            instead = f"give them GPUs of their own, or {instead}"
        raise MachineLacks(
            f"{', '.join(names)}: {told}, and the smallest GPU here has {gpu_bytes / GIB:.1f}: {instead}"
        )


def at_start(needed: float) -> str:
    return f"while the model is loaded each GPU takes {needed / GIB:.1f} GiB"


def doubt(held: float, gpu_bytes: float) -> str:
    """Returns a line for the log if a GPU has less memory than estimated; otherwise ''. Estimates have been
    up to 15 % off."""
    if held <= gpu_bytes:
        return ""
    memory = f"{gpu_bytes / GIB:.1f}"
    wanted = f"an estimated {held / GIB:.1f} GiB on a GPU of {memory}"
    return (
        f"it may run out of memory: {wanted}; `alignflow plan RECIPE --gpu-memory {memory}` says what fits\n"
    )


def size_at(place: str) -> Size | None:
    """Works like `size_of_folder`, but returns None when the model's config.json has no sizes or cannot be
    read."""
    try:
        return size_of_folder(place)
    except (ValueError, OSError):
        return None


def size_of_folder(place: str) -> Size:
    """Returns the size of a model in a folder or on the Hub, or of an adapter's base model. Raises ValueError
    when its config.json has no sizes."""
    if (adapter := Path(place) / ADAPTER_CONFIG).is_file():
        place = pinned_base(Path(place)) or str(
            json.loads(adapter.read_text()).get("base_model_name_or_path")
        )
    return size_of(str(described(place)) if is_remote(place) else place)


def _choose(
    config: Optimised, alone: bool, known: T | None, peak: Callable[[T, int], float], gpu_bytes: float
) -> Chosen:
    """Returns the recipe's stage if it sets one, 0 for a single rank (`alone`), and otherwise the lowest
    stage that fits. Considers the stages that support what the recipe requires; `peak` returns their bytes,
    given the `known` sizes."""
    if config.sharding is not None:
        return Chosen(config.sharding.stage, "as the recipe says")
    if alone:
        return Chosen(TORCH.stage, "one rank has nothing to share out")
    most = config.shardings[-1].stage
    if config.needing_shards:
        return Chosen(most, f"{config.needing_shards[0]} is for weights that are sharded")
    if known is None or not gpu_bytes or config.dtype not in HALF:
        unknown = "a model's config.json has no sizes" if known is None else "it is not bfloat16"
        return Chosen(most, f"memory cannot be estimated, as {unknown if gpu_bytes else 'there is no GPU'}")
    # With Adam on the host, the memory left on the GPU is known only where gradients are sharded.
    offloaded = config.offloaded("adam")
    wanted = [each for each in config.shardings if (each.gradients if offloaded else each.state)]
    peaks = {each.stage: peak(known, each.stage) for each in wanted}
    stage = next((stage for stage, held in peaks.items() if held <= USABLE * gpu_bytes), max(peaks))
    fits = "the lowest that fits" if peaks[stage] <= USABLE * gpu_bytes else "none is estimated to fit"
    tried = ", ".join(
        f"{held / GIB:.1f} GiB with {number}" for number, held in peaks.items() if number <= stage
    )
    return Chosen(stage, f"{fits} a GPU of {gpu_bytes / GIB:.1f} GiB ({tried})")
