"""Reads the precision in which a checkpoint is stored, and loads quantised weights (MXFP4, FP8 in blocks) in
the training dtype.

`scale_ragged_blocks` patches a private part of transformers, for the releases in MADE_FOR. FP8 is an error
with any other release.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.integrations import finegrained_fp8
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from rlhf_core.hub.model_config import cannot_train_quantised, quantised_by
from rlhf_core.models.lora import base_of

MADE_FOR = ("5.17.", "5.18.", "5.19.")
FORMATS = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}


def stored_dtype(config: PretrainedConfig) -> str:
    """Returns the dtype in a checkpoint's config; float32 if there is none."""
    return str(config.dtype or "float32").removeprefix("torch.")


def dtype_of(path: str, dtype: str, trust_remote_code: bool = False) -> str:
    """Returns `dtype` or, for auto, the dtype of the checkpoint (for an adapter, of its base)."""
    if dtype != "auto":
        return dtype
    return stored_dtype(
        AutoConfig.from_pretrained(base_of(path) or path, trust_remote_code=trust_remote_code)
    )


def unquantised(path: str, config: PretrainedConfig, asked: object = None) -> dict[str, Any]:
    """Returns the options with which transformers dequantises quantised weights as it loads them; {} for a
    checkpoint without quantised weights.

    Raises ValueError for a format or a multimodal checkpoint that cannot be trained this way, or if 4-bit
    weights are requested (`asked`).
    """
    values = config.to_dict()
    method = quantised_by(values)
    if method is None:
        return {}
    told = cannot_train_quantised(path, values)
    if told or asked is not None:
        raise ValueError(
            told
            or f"{path} has weights quantised as {method}: set lora.quantize to none, or name its"
            " checkpoint in bfloat16"
        )
    if method == "fp8":
        scale_ragged_blocks(path)
    return {"quantization_config": FORMATS[method](dequantize=True)}


def as_if_stored(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Makes a model that was loaded with `unquantised` look like a model from a checkpoint in `dtype`:
    transformers leaves some weights in bfloat16, and would export names of quantised weights."""
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:  # others are in `dtype`, or kept in fp32 by their family
            parameter.data = parameter.data.to(dtype)
    del model._weight_conversions


def scale_ragged_blocks(path: str) -> None:
    """Makes transformers scale the blocks of FP8 weights correctly if the last block in a dimension is
    smaller (DeepSeek-V3's 576 rows in blocks of 128); by default it assumes equally large blocks. Raises
    ValueError for releases other than MADE_FOR."""
    own = finegrained_fp8.Fp8Dequantize._dequantize_one
    if not transformers.__version__.startswith(MADE_FOR):
        raise ValueError(
            f"{path} has weights in FP8, which transformers {transformers.__version__} may scale wrongly:"
            " name its checkpoint in bfloat16, or install the version that the requirements name"
        )
    if own.__name__ == "in_blocks":
        return

    def in_blocks(
        self: Any, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        size = getattr(self.hf_quantizer.quantization_config, "weight_block_size", None)
        sides = list(zip(quantized.shape[-2:], size or (), strict=False))
        grid = [-(-side // block) for side, block in sides]
        if (
            not quantized.is_floating_point()
            or list(scales.shape[-2:]) != grid
            or not any(side % block for side, block in sides)
        ):
            return own(self, quantized, scales, output_dtype)
        whole = scales.float()
        for dim, (side, block) in zip((-2, -1), sides, strict=True):
            whole = whole.repeat_interleave(block, dim).narrow(dim, 0, side)
        return (quantized.float() * whole).to(output_dtype or torch.bfloat16)

    finegrained_fp8.Fp8Dequantize._dequantize_one = in_blocks
