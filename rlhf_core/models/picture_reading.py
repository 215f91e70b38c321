"""Prepares a policy for data with images."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat.picture_rendering import PictureRenderer
from rlhf_core.models.multimodal.picture_tower import load_tower
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import PictureReader


def reads_pictures(
    policy: Policy, source: str, tokenizer: PreTrainedTokenizerBase, dtype: str, sequence_parallel_size: int
) -> PictureReader:
    """Gives the policy the frozen image encoder of the checkpoint `source`, and returns how images are read.
    Raises ValueError if sequences are split over ranks."""
    if sequence_parallel_size > 1:
        raise ValueError("the data has images, whose rows are not split: set sequence_parallel_size to 1")
    policy.tower = load_tower(policy.model, source, dtype)
    images = PictureRenderer(tokenizer)
    return PictureReader(images.token_id, images.tensors)
