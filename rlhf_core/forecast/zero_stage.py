"""The ZeRO stage where a recipe leaves it open: the lowest that fits. A higher one saves memory and sends more between GPUs. Torch-free.

The estimates are for bfloat16. Without a GPU, or a model whose size is told, it is the highest, which needs the least memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import DPO, KTO, PPO, Lora, RewardModel, Trainable
from rlhf_core.forecast.memory import GIB, ROOM, Training, bytes_of_weights, cards, roles, stage_peak, whole
from rlhf_core.forecast.passes import Pass, recipe_pass
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import Size, size_of
from rlhf_core.hub.model_files import ADAPTER_CONFIG
from rlhf_core.hub.snapshots import described, pinned_base
from rlhf_core.system.machine import MachineLacks


class Chosen(NamedTuple):
    """A ZeRO stage and, in words, why it was taken."""

    stage: int
    why: str

    def __str__(self) -> str:
        return f"zero_stage {self.stage}: {self.why}"


ALONE = Chosen(0, "one rank has nothing to share out")


def uses_deepspeed(config: PPO) -> bool:
    """Whether actor and critic need it, where the recipe does not say: several ranks of one, or Adam on the host. Without GPUs always."""
    if config.zero_stage != "auto":
        return config.zero_stage > 0
    ranks = [ranks for name, ranks in config.groups.items() if name in ("actor", "critic")]
    return bool(config.adam_offload) or any(group.world_size > 1 or not group.gpus for group in ranks)


def stage_of_ppo(config: PPO, sizes: Mapping[str, Size] | None, card_bytes: float) -> Chosen:
    """For actor and critic, beside all that shares their GPUs. `sizes`: of each group's model, None if unknown; `card_bytes`: 0: no GPU."""
    if config.zero_stage != "auto":
        return Chosen(config.zero_stage, "as the recipe says")
    if card_bytes and not uses_deepspeed(config):
        return ALONE
    if sizes is None or not card_bytes or config.dtype != "bfloat16":
        return _unknown(sizes, card_bytes, config.lora)
    known = sizes
    # What Adam on the host leaves on the GPU is known of stages 2 and 3.
    stages = (2, 3) if config.adam_offload else (1, 2, 3)
    return _lowest(stages, config, lambda stage: peak_of_ppo(config, known, stage, card_bytes), card_bytes)


def peak_of_ppo(config: PPO, sizes: Mapping[str, Size], stage: int, card_bytes: float) -> float:
    """Bytes of the fullest GPU of actor and critic under a ZeRO stage, with all that shares it."""
    held = roles(config.model_copy(update={"zero_stage": stage}), sizes, card_bytes)
    found = cards(config, arrange(config.placed, config.together), held)
    return max(held for names, held in found.values() if {"actor", "critic"} & set(names))


def stage_of_training(config: Trainable, size: Size | None, card_bytes: float) -> Chosen:
    """For SFT, reward model, DPO and KTO; as `stage_of_ppo`."""
    if config.zero_stage != "auto":
        return Chosen(config.zero_stage, "as the recipe says")
    if config.ranks.world_size == 1:
        return ALONE
    if size is None or not card_bytes or config.dtype != "bfloat16":
        return _unknown(size, card_bytes, config.lora)
    known = size
    return _lowest((1, 2, 3), config, lambda stage: peak_of_training(config, known, stage, card_bytes), card_bytes)


def peak_of_training(config: Trainable, size: Size, stage: int, card_bytes: float, what: Pass | None = None) -> float:
    """Bytes of a GPU of SFT, reward model, DPO or KTO under a ZeRO stage, with passes as the recipe has them or others."""
    tokens, recomputed = what or recipe_pass(config, config.ranks.world_size)
    adapters, weight = config.lora is not None, bytes_of_weights(config.lora)
    how = Training(config.ranks.world_size, stage, recomputed, tokens, False, adapters, card_bytes, weight)
    return stage_peak(size, config.ranks, how, isinstance(config, DPO | KTO), not isinstance(config, RewardModel))


def starts(config: PPO | Trainable, sizes: Mapping[str, Size]) -> dict[str, float]:
    """Bytes that each of `sizes`, the models that are trained by their roles, takes on every GPU of its ranks while it is loaded."""
    quantized = config.lora is not None and config.lora.quantize != "none"
    weight = 4.0 if config.dtype == "float32" and not quantized else bytes_of_weights(config.lora)
    without_head = isinstance(config, RewardModel)
    return {role: whole(size, role != "critic" and not without_head, weight) for role, size in sizes.items()}


def require_start(needed: Mapping[str, float], card_bytes: float) -> None:
    """Raises MachineLacks when a GPU of `card_bytes` (0: none is there) cannot hold a model of these (`starts`), before any is loaded."""
    role = max(needed, key=lambda role: needed[role], default="")
    if role and 0 < card_bytes < needed[role]:
        told = f"the smallest GPU here has {card_bytes / GIB:.1f}"
        raise MachineLacks(f"{role}: {whole_on_each(needed[role])}, and {told}: use GPUs with more memory or a smaller model")


def whole_on_each(needed: float) -> str:
    return f"at its start each GPU holds the whole model, {needed / GIB:.1f} GiB, whatever zero_stage is"


def doubt(held: float, card_bytes: float) -> str:
    """A line for the log where a GPU has less than what is estimated for it; estimates were up to 15 % off. Empty where it has not."""
    if held <= card_bytes:
        return ""
    memory = f"{card_bytes / GIB:.1f}"
    wanted = f"an estimated {held / GIB:.1f} GiB on a GPU of {memory}"
    return f"it may run out of memory: {wanted}; `alignflow plan RECIPE --card-memory {memory}` says what fits\n"


def size_at(place: str) -> Size | None:
    """As `size_of_folder`; None when its config.json does not tell, or cannot be had now."""
    try:
        return size_of_folder(place)
    except (ValueError, OSError):
        return None


def size_of_folder(place: str) -> Size:
    """The size of a model in a folder or on the Hub, of an adapter's base. Raises ValueError when its config.json does not tell."""
    if (adapter := Path(place) / ADAPTER_CONFIG).is_file():
        place = pinned_base(Path(place)) or str(json.loads(adapter.read_text()).get("base_model_name_or_path"))
    return size_of(str(described(place)) if is_remote(place) else place)


def _lowest(stages: Sequence[int], config: PPO | Trainable, peak: Callable[[int], float], card_bytes: float) -> Chosen:
    quantized = config.lora is not None and config.lora.quantize != "none"  # 4-bit weights are not cut into shards
    peaks = {stage: peak(stage) for stage in stages if not (stage == 3 and quantized)}
    stage = next((stage for stage, held in peaks.items() if held <= ROOM * card_bytes), max(peaks))
    fits = "the lowest that fits" if peaks[stage] <= ROOM * card_bytes else "none is estimated to fit"
    told = ", ".join(f"{held / GIB:.1f} GiB with {number}" for number, held in peaks.items() if number <= stage)
    return Chosen(stage, f"{fits} a GPU of {card_bytes / GIB:.1f} GiB ({told})")


def _unknown(sizes: object, card_bytes: float, lora: Lora | None) -> Chosen:
    stage = 2 if lora is not None and lora.quantize != "none" else 3
    unknown = "a model's config.json does not tell its size" if sizes is None else "it is not bfloat16"
    return Chosen(stage, f"memory cannot be foretold, as {unknown if card_bytes else 'there is no GPU'}")
