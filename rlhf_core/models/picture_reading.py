"""Prepares a policy or a scorer for data with images."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat.picture_rendering import PictureRenderer
from rlhf_core.data.survey import DataReport
from rlhf_core.models.load_model import keep_whole
from rlhf_core.models.multimodal.picture_tower import load_tower
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.objectives.collate import PictureReader


def reads_pictures(
    module: Policy | Scorer,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    sequence_parallel_size: int = 1,
) -> PictureReader:
    """Gives the module the frozen image encoder of the checkpoint `source`, which its exports will contain,
    and its `reader`, which is returned. `tokenizer`: of `source`. Raises ValueError if sequences are split
    over ranks, and if the checkpoint has no image encoder."""
    if sequence_parallel_size > 1:
        raise ValueError("the data has images, whose rows are not split: set sequence_parallel_size to 1")
    module.tower = load_tower(module.model, source, dtype)
    keep_whole(module.model, source)
    images = PictureRenderer(tokenizer)
    module.reader = PictureReader(images.token_id, images.tensors)
    return module.reader


def have_images(*reports: DataReport | None) -> bool:
    """Returns whether any of the data has images."""
    return any(report is not None and report.survey.images for report in reports)
