"""Defines image processors for families whose own class in transformers 5.19 requires torchvision. They
compute the tokens of an image and the tensors for its encoder; transformers' Pillow classes resize the
pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase


class Mistral3Pictures:
    """Processes images for Mistral 3: an image token for each square of merged patches, a break token between
    rows, and an end token (Pixtral 12B, arXiv:2410.07073, section 2). `stored` is the content of
    processor_config.json."""

    def __init__(
        self,
        config: PretrainedConfig,
        image_processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        stored: Mapping[str, Any],
    ):
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.image_token = str(stored.get("image_token", "[IMG]"))
        self._break = str(stored.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(stored.get("image_end_token", "[IMG_END]"))
        self._side = config.vision_config.patch_size * config.spatial_merge_size  # pixels of a token
        self.picture_options = {"patch_size": self._side}

    def replace_image_token(self, features: Mapping[str, Any], index: int) -> str:
        """Returns the text that represents the image with this index in `features`."""
        height, width = features["image_sizes"][index]
        row = self.image_token * int(width // self._side)
        rows = [row] * int(height // self._side)
        return self._break.join(rows) + self._end

    def picture_tensors(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the pixels of one image in one dimension, because the sizes of images differ, and its
        height and width, (1, 2)."""
        return {
            "pixel_values": np.asarray(features["pixel_values"]).reshape(-1),
            "image_sizes": np.asarray(features["image_sizes"]),
        }


class Gemma4Pictures:
    """Processes images for Gemma 4: an image token for each square of pooled patches, between a begin token
    and an end token. `stored` is not used."""

    def __init__(
        self,
        config: PretrainedConfig,
        image_processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        stored: Mapping[str, Any],
    ):
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        begin, own, end = (
            str(tokenizer.convert_ids_to_tokens(number))
            for number in (config.boi_token_id, config.image_token_id, config.eoi_token_id)
        )
        self.image_token = own
        self._begin = begin
        self._end = end
        self.picture_options = {"do_convert_rgb": True}

    def replace_image_token(self, features: Mapping[str, Any], index: int) -> str:
        """Returns the text that represents the image with this index in `features`."""
        count = int(features["num_soft_tokens_per_image"][index])
        return self._begin + self.image_token * count + self._end

    def picture_tensors(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the patches of one image, (1, patches, values), and their columns and rows in the image,
        (1, patches, 2). Columns and rows are -1 for padding."""
        return {name: np.asarray(features[name]) for name in ("pixel_values", "image_position_ids")}


# Keyed by the family's `model_type`.
OWN_PROCESSORS = {"gemma4": Gemma4Pictures, "mistral3": Mistral3Pictures}
