"""Fuses the parts of a layer whose speed depends only on memory: norms, rotary embeddings, gated
activations."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from rlhf_core.hub.model_config import num_experts
from rlhf_core.models.kernels.self_test import HALF

# `Policy` computes log-probs in chunks, so Liger's losses are off.
PARTS = {
    "rope": True,
    "rms_norm": True,
    "swiglu": True,
    "geglu": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}
# For these activations Liger autotunes its own expert kernels, with over a hundred compilations. transformers
# computes one product for all experts.
WITH_EXPERTS = {"swiglu": False, "geglu": False}
# Liger does not know the class of their language model with its head, which is ours.
BY_BASE = ("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text")


def fuse(model: PreTrainedModel) -> PreTrainedModel:
    """Patches a 16-bit model on a GPU with Liger Kernel (Hsu et al. 2024, arXiv:2410.10989), if the package
    supports its model type."""
    if (
        not torch.cuda.is_available()
        or model.dtype not in HALF
        or importlib.util.find_spec("liger_kernel") is None
    ):
        return model
    # Silence warnings about back ends for other hardware.
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known

    with suppress(ImportError):  # earlier releases offer no choice of back end
        from liger_kernel.backends import set_impl

        # With nvidia-cutlass-dsl (a dependency of vLLM) installed, Liger 0.8.5 uses another rotary kernel for
        # long rows with gradients. It rounds differently, so PPO's first ratio is not 1 (1.5B, H200: 1.0003
        # on average).
        set_impl("nvidia-triton")
    apply = known.get(model.config.model_type)
    if apply is not None:
        parts = PARTS | (WITH_EXPERTS if num_experts(model.config) else {})
        wanted = {part: on for part, on in parts.items() if part in inspect.signature(apply).parameters}
        known_to_liger = model.base_model if model.config.model_type in BY_BASE else model
        try:
            try:
                apply(**wanted, model=known_to_liger)
            except NotImplementedError:  # Qwen3.5 and Qwen3-Next rotate only part of each head
                apply(**wanted | {"rope": False}, model=known_to_liger)
        except TypeError as error:  # some functions accept only policies
            print(
                f"Liger Kernel does not take {type(model).__name__} ({error}): its layers stay"
                " transformers' own",
                flush=True,
            )
    return model
