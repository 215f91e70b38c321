"""Prepares a policy or a scorer for data with images."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rlhf_core.config.training.optimiser_fields import ImageEncoder
from rlhf_core.data.chat.picture_rendering import PictureRenderer
from rlhf_core.data.prompt_rows import UNUSED_ENCODER
from rlhf_core.data.survey import DataReport
from rlhf_core.models.load_model import keep_whole, without_dropout
from rlhf_core.models.multimodal.picture_tower import load_tower
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.objectives.picture_reader import PictureReader


def reads_pictures(
    module: Policy | Scorer,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    sequence_parallel_size: int = 1,
    image_encoder: ImageEncoder = "frozen",
) -> PictureReader:
    """Adds to the module the image encoder of the checkpoint `source`, which its exports will contain, and a
    reader of images. Returns the reader. `tokenizer`: the tokenizer of `source`. `image_encoder`: which of
    the encoder's weights become a part of the module. Raises ValueError if sequences are split over ranks,
    and if the checkpoint has no image encoder."""
    if sequence_parallel_size > 1:
        raise ValueError("the data has images, whose rows are not split: set sequence_parallel_size to 1")
    module.tower = load_tower(module.model, source, dtype)
    keep_whole(module.model, source)
    if image_encoder != "frozen":
        for part in module.tower.parts:
            without_dropout(part)
        module.image_encoder = module.tower.train(projector_only=image_encoder == "projector")
    images = PictureRenderer(tokenizer)
    module.reader = PictureReader(images.token_id, images.tensors)
    return module.reader


def require_images(image_encoder: ImageEncoder, has_images: bool) -> None:
    """Raises ValueError if an image encoder is to be trained on data without images."""
    if image_encoder != "frozen" and not has_images:
        raise ValueError(UNUSED_ENCODER.format(image_encoder))


def have_images(*reports: DataReport | None) -> bool:
    """Returns whether any of the data has images."""
    return any(report is not None and report.survey.images for report in reports)
