"""Fused kernels for the parts of a layer that only move memory: norms, rotary embeddings, gated activations."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from rlhf_core.models.experts import num_experts

# The log-probs are chunked by our own `Policy`, so Liger's losses stay out.
PARTS = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}
# For these activations Liger takes kernels of its own for experts, and compiles more than a hundred of them when they are first called, to
# choose one. transformers has one product for all experts.
WITH_EXPERTS = {"swiglu": False, "geglu": False}


def fuse(model: PreTrainedModel) -> PreTrainedModel:
    """Liger Kernel (Hsu et al. 2024, arXiv:2410.10989) in a bf16 model on a GPU, where that package is installed and knows the model."""
    if not torch.cuda.is_available() or model.dtype != torch.bfloat16 or importlib.util.find_spec("liger_kernel") is None:
        return model
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it tells which of its back ends are for other hardware
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known

    with suppress(ImportError):  # earlier releases have no choice
        from liger_kernel.backends import set_impl

        # Beside nvidia-cutlass-dsl, which vLLM brings, Liger 0.8.5 turns long rows by another kernel where they have gradients, which
        # rounds otherwise: PPO would not train what it scored (1.5B, H200: a mean first ratio of 1.0003 where it had been 1).
        set_impl("nvidia-triton")
    apply = known.get(model.config.model_type)
    if apply is not None:
        parts = PARTS | (WITH_EXPERTS if num_experts(model.config) else {})
        apply(**{part: wanted for part, wanted in parts.items() if part in inspect.signature(apply).parameters}, model=model)
    return model
