"""The ZeRO stage where a recipe leaves it open: the lowest that fits. A higher one saves memory and sends more between cards. Torch-free.

The estimates are for bfloat16. Without a GPU, or a model whose size is told, it is the highest, which needs the least memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import DPO, KTO, PPO, Lora, RewardModel, Trainable
from rlhf_core.forecast.memory import GIB, ROOM, Training, bytes_of_weights, cards, roles, stage_peak
from rlhf_core.forecast.passes import Pass, as_told
from rlhf_core.forecast.sizes import Size, size_of
from rlhf_core.lineage import is_remote
from rlhf_core.published import ADAPTER_CONFIG
from rlhf_core.snapshots import described, pinned_base


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
    # What Adam on the host leaves on the card is known of stages 2 and 3.
    stages = (2, 3) if config.adam_offload else (1, 2, 3)
    return _lowest(stages, config, lambda stage: peak_of_ppo(config, known, stage, card_bytes), card_bytes)


def peak_of_ppo(config: PPO, sizes: Mapping[str, Size], stage: int, card_bytes: float) -> float:
    """Bytes of the fullest card of actor and critic under a ZeRO stage, with all that shares it."""
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
    """Bytes of a card of SFT, reward model, DPO or KTO under a ZeRO stage, with passes as the recipe has them or others."""
    tokens, recomputed = what or as_told(config, config.ranks.world_size)
    adapters, weight = config.lora is not None, bytes_of_weights(config.lora)
    how = Training(config.ranks.world_size, stage, recomputed, tokens, False, adapters, card_bytes, weight)
    return stage_peak(size, config.ranks, how, isinstance(config, DPO | KTO), not isinstance(config, RewardModel))


def doubt(held: float, card_bytes: float) -> str:
    """A line for the log where a card has less than what is estimated for it; estimates were up to 15 % off. Empty where it has not."""
    if held <= card_bytes:
        return ""
    memory = f"{card_bytes / GIB:.1f}"
    wanted = f"an estimated {held / GIB:.1f} GiB on a GPU of {memory}"
    return f"it may run out of memory: {wanted}; `alignflow plan RECIPE --card-memory {memory}` says what fits\n"


def size_at(place: str) -> Size | None:
    """As `told_size`; None when its config.json does not tell, or cannot be had now."""
    try:
        return told_size(place)
    except (ValueError, OSError):
        return None


def told_size(place: str) -> Size:
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
