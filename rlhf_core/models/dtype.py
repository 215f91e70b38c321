"""The precision that a checkpoint was stored in. Torch-free."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig

from rlhf_core.models.lora import base_of


def stored_dtype(config: PretrainedConfig) -> str:
    """Returns the dtype in a checkpoint's config; float32 when it has none."""
    return str(config.dtype or "float32").removeprefix("torch.")


def dtype_of(path: str, dtype: str, trust_remote_code: bool = False) -> str:
    """Returns `dtype`; for auto that of the checkpoint, for an adapter that of its base."""
    if dtype != "auto":
        return dtype
    return stored_dtype(AutoConfig.from_pretrained(base_of(path) or path, trust_remote_code=trust_remote_code))
