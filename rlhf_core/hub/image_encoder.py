"""Reads the size of a model's image encoder from its config.json. Torch-free.

The estimates are for an encoder that runs alongside the language model (see
`models/multimodal/picture_tower.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

BF16 = 2  # bytes
ENCODER_WEIGHT = re.compile(r"(^|\.)(visual|vision_tower|multi_modal_projector|embed_vision)\.")
GATED = (
    "gemma4_vision",
    "pixtral",
    "qwen2_5_vl",
    "qwen2_5_vl_vision",
)  # feed-forward parts with three matrices
UNROTATED = ("siglip_vision_model",)
# The others rotate queries and keys in fp32, which takes the most memory of a layer: this many times the
# width in bf16, from the measured peak of Qwen3-VL's encoder.
ROTATION = 28
# Values of a patch, in widths, that a layer keeps for its backward pass in addition to those of its
# feed-forward part: measured for Qwen3-VL's encoder.
KEPT = 11


class ImageEncoder(NamedTuple):
    """Per token of an image: `operations` of the forward pass (2 for each weight applied to a patch), the
    bytes that the pass holds at once (`passing`), and the bytes of the features that the language model reads
    (`features`). If it is trained, also the bytes that all layers keep for the backward pass (`kept`), and
    the bytes that they keep if they are recomputed (`inputs`). `parameters`: number of parameters of the
    encoder and its projector together; `projector`: of the projector alone."""

    parameters: float
    operations: float
    passing: float
    features: float
    projector: float = 0.0
    kept: float = 0.0
    inputs: float = 0.0


def encoder_of_config(config: Mapping[str, Any], hidden: int) -> ImageEncoder | None:
    """Returns the image encoder that a config.json describes, None if it has no `vision_config`. `hidden`:
    the width of the language model.

    Raises KeyError for a missing number, and TypeError or similar for values that are not numbers.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    # Qwen2-VL: its `hidden_size` is the width of the language model
    width = vision["embed_dim"] if "embed_dim" in vision else vision["hidden_size"]
    inner = vision["mlp_ratio"] * width if "mlp_ratio" in vision else vision["intermediate_size"]
    layers = vision["depth"] if "depth" in vision else vision["num_hidden_layers"]
    # releases of Qwen2.5-VL name only the whole
    kind = str(vision.get("model_type") or config.get("model_type"))
    values = 3 * vision["patch_size"] ** 2 * vision.get("temporal_patch_size", 1)  # of a patch
    patches = patches_of_token(config, vision)
    block = 4 * width * width + (3 if kind in GATED else 2) * width * inner
    merged = width * patches if "spatial_merge_size" in {*config, *vision} else width
    deep = len(vision.get("deepstack_visual_indexes") or ())
    # of each merger: two matrices, the first of which is square in the families that merge patches
    merger = merged * hidden + (merged * merged if "depth" in vision else 0)
    if kind == "pixtral":
        merger = merged * width + width * hidden + hidden * hidden
    positions = vision.get("num_position_embeddings") or 0
    per_patch = layers * block + values * width
    rotation = 0 if kind in UNROTATED else ROTATION * width
    return ImageEncoder(
        parameters=per_patch + (1 + deep) * merger + positions * width,
        operations=2 * (patches * per_patch + (1 + deep) * merger),
        passing=patches * (BF16 * (6 * width + max(3 * inner, rotation)) + 4 * values),
        features=BF16 * hidden * (1 + deep),
        projector=(1 + deep) * merger,
        kept=patches * layers * BF16 * (KEPT * width + (3 if kind in GATED else 2) * inner),
        inputs=patches * layers * BF16 * width,
    )


def patches_of_token(config: Mapping[str, Any], vision: Mapping[str, Any]) -> float:
    """Returns how many patches one image token represents."""
    merge = vision.get("spatial_merge_size") or config.get("spatial_merge_size")
    merge = merge or vision.get("pooling_kernel_size")
    if merge:
        return float(merge**2)
    tokens = config.get("mm_tokens_per_image")
    return (vision["image_size"] // vision["patch_size"]) ** 2 / tokens if tokens else 1.0


def is_encoder_weight(name: str) -> bool:
    """Returns whether a weight of a checkpoint belongs to the image encoder or projects its output."""
    return ENCODER_WEIGHT.search(name) is not None
