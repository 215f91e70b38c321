"""Computes attention within each document of a packed row on a GPU, with a varlen kernel (see `choose.py`) in
transformers' models.

The kernel accepts concatenated rows and the bounds of the documents; it needs no padding and no mask.
transformers' own flash-attn path is not used, because in each pass it reads from the GPU whether rows are
packed, which makes the host wait. Without a GPU or in fp32, transformers' `sdpa` runs, whose block-diagonal
mask separates documents where positions restart (`document_leak` tests this). With sequence parallelism,
`PLAIN` runs, which accepts the same bounds as the kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MODEL_MAPPING, AttentionInterface, PretrainedConfig, PreTrainedModel

from rlhf_core.hub.model_config import STATEFUL_LAYERS
from rlhf_core.models.kernels import choose, state_layers
from rlhf_core.models.kernels.choose import attend_each, flash_kernel, kernel_for
from rlhf_core.models.kernels.self_test import HALF, MANY, AttentionKind, Heads, Kernel
from rlhf_core.models.kernels.sequence_ranks import SequenceRanks
from rlhf_core.objectives.collate import sent

FLASH = "flash_attention_2"
VARLEN = "varlen"
PLAIN = "varlen_plain"
WITHIN_DOCUMENTS = {"full_attention", "sliding_attention"}
LARGEST_HEAD = 256  # limit of all kernels
MASKED_ROW = 128  # tokens; attention with a mask computes complete rows, and short rows are padded more
MEASURED = ("dynamic", "longrope")  # values of `rope_type`


def attention_for(dtype: torch.dtype | str, config: PretrainedConfig) -> str:
    """Returns the `attn_implementation` for loading a model of this `dtype` and config."""
    if type(config) in MODEL_MAPPING and not MODEL_MAPPING[type(config)]._supports_sdpa:
        return "eager"
    return FLASH if dtype in HALF and torch.cuda.is_available() and flash_kernel() is not None else "sdpa"


def can_share(model: PreTrainedModel, device: torch.device) -> bool:
    """Returns whether documents may continue another document's prompt (see `collate.Batch`), which needs a
    kernel that aligns queries with the last keys."""
    loaded = model.config._attn_implementation
    return loaded == PLAIN or (
        loaded == VARLEN
        and not is_stateful(model)
        and choose.can_compute((kind._replace(shared=True) for kind in attention_kinds(model)), device)
    )


def attention_kinds(model: PreTrainedModel) -> list[AttentionKind]:
    """Returns the kinds of attention in the model's layers: without a window and, if the model has windows,
    with a window."""
    config = model.config.get_text_config()
    windows = getattr(config, "sliding_window", None) is not None
    dtype = model.dtype if model.dtype in HALF else torch.bfloat16
    return [
        AttentionKind(_heads(model), windowed, dtype=dtype, capped=_caps_scores(model))
        for windowed in sorted({False, windows})
    ]


def _heads(model: PreTrainedModel) -> Heads:
    config = model.config.get_text_config()
    queries = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    rope = getattr(config, "qk_rope_head_dim", None)
    if rope:  # MLA: its head_dim covers only part of the head
        size = max(config.qk_nope_head_dim + rope, config.v_head_dim)
        return Heads(1, -(-size // 8) * 8)
    return Heads(queries // (getattr(config, "num_key_value_heads", None) or queries), -(-size // 8) * 8)


class _Gathered(torch.autograd.Function):
    """Selects rows by `index`, possibly repeatedly, and sums their gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.count, *gradient.shape[1:], dtype=torch.float32, device=gradient.device)
        return total.index_add_(0, index, gradient.float()).to(gradient.dtype), None


def _caps_scores(model: PreTrainedModel) -> bool:
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def set_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Sets the loaded model's attention to `varlen_attention` if it can run here. Otherwise sets it to
    `eager` if the model caps its scores, which `sdpa` would ignore, or to `sdpa` if flash-attn's kernel fails
    its self-test."""
    state_layers.set_state_layers(model)
    loaded = model.config._attn_implementation
    if loaded not in ("sdpa", FLASH):
        return model
    capped = _caps_scores(model)
    fits = model.dtype in HALF and _has_kernel() and _fits(model)
    if fits and (not capped or choose.can_compute(attention_kinds(model), _gpu())):
        model.set_attn_implementation(VARLEN)
    elif capped or (loaded == FLASH and not _flash_is_right(model)):
        mask_attention(model)
    return model


def mask_attention(model: PreTrainedModel) -> None:
    """Sets the model to attention with a mask: `sdpa`, or `eager` if the model does not support it or caps
    its scores, which `sdpa` would ignore."""
    able = model._supports_sdpa and not _caps_scores(model)
    model.set_attn_implementation("sdpa" if able else "eager")


def _flash_is_right(model: PreTrainedModel) -> bool:
    if _largest_head(model) > LARGEST_HEAD:
        return False
    try:
        kinds = attention_kinds(model)
    except (AttributeError, TypeError):  # code of its own may name its heads otherwise: nothing to test
        return False
    return choose.flash_computes(kinds, _gpu())


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def split_attention(model: PreTrainedModel, ranks: int) -> None:
    """Prepares the loaded model for sequence parallelism over `ranks` (`sequence_ranks.py`). Raises
    ValueError if the model does not allow it."""
    told = _cannot_be_split(model, ranks)
    if told:
        raise ValueError(f"{type(model).__name__} {told}")
    if model.config._attn_implementation != VARLEN:
        model.set_attn_implementation(PLAIN)


def _cannot_be_split(model: PreTrainedModel, ranks: int) -> str | None:
    config = model.config.get_text_config()
    alone = "set sequence_parallel_size to 1"
    rope = getattr(config, "rope_parameters", None) or {}
    # one for all layers, or one for each type of layer
    ropes = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if is_stateful(model):
        return f"has layers that carry state along a row, which cannot be split over ranks: {alone}"
    if config.num_attention_heads % ranks:
        return (
            f"has {config.num_attention_heads} attention heads, which {ranks} ranks cannot share equally:"
            f" {alone} or to a divisor"
        )
    if any(part.get("rope_type") in MEASURED for part in ropes):
        return (
            "rotates by angles that depend on the longest position of a pass, of which a rank has only a"
            f" part: {alone}"
        )
    if model.config._attn_implementation not in ("sdpa", FLASH, VARLEN, PLAIN) or not _fits(model):
        return (
            "has attention with more than documents, causality and a window, which is not computed in parts:"
            f" {alone}"
        )
    return None


def _has_kernel() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def _fits(model: PreTrainedModel) -> bool:
    """Returns whether the model's attention mask depends only on documents, causality and a window."""
    packs = state_layers.takes_edges(model)  # accepts other attention, though it does not say so
    plain = (
        packs
        if is_stateful(model)
        else model._supports_attention_backend and _kinds(model) <= WITHIN_DOCUMENTS
    )
    dropped = any(
        getattr(model.config, name, 0)
        for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    )
    causal = all(getattr(module, "is_causal", True) for module in model.modules())
    return (
        plain
        and model._supports_flash_attn
        and causal
        and _largest_head(model) <= LARGEST_HEAD
        and not dropped
    )


def _largest_head(model: PreTrainedModel) -> int:
    return max((int(getattr(module, "head_dim", 0) or 0) for module in model.modules()), default=0)


def _kinds(model: PreTrainedModel) -> set[str]:
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


def is_stateful(model: PreTrainedModel) -> bool:
    """Returns whether a layer, such as a convolution or a recurrent layer, carries state across the documents
    of a row."""
    return bool(model._is_stateful or _kinds(model) & STATEFUL_LAYERS)


def takes_varlen(model: PreTrainedModel) -> bool:
    """Returns whether the model accepts one row and document bounds instead of a mask. A stateful model does
    so only if `_fits` accepts it."""
    return model.config._attn_implementation in ((VARLEN,) if is_stateful(model) else (FLASH, VARLEN, PLAIN))


def row_width(model: PreTrainedModel) -> int | None:
    """Returns `Passes.width` for a model: None if it accepts document bounds."""
    return None if takes_varlen(model) else MASKED_ROW


def document_bounds(positions: Tensor, device: torch.device) -> dict[str, Any]:
    """Returns the document bounds of concatenated rows, computed once per pass instead of once per layer.

    `positions` (any shape) restart at 0 with each document. For a document that continues a shared prompt
    (`collate.Batch`) they start above 0, and `keys` contains the rows to which queries attend. Positions in
    host memory are read without waiting for `device` and without PyTorch's threads (see `next_token_pairs`).
    """
    at = positions.flatten().cpu().numpy()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(at) != 1) + 1])
    edges = np.append(starts, at.size)
    longest = int(np.diff(edges).max())
    on_device = _int32(edges, device)
    found = {
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    # Number of tokens of the shared prompt before each document.
    before = at[starts]
    if not before.any():
        return found
    lengths = np.diff(edges) + before
    key_edges = np.append(0, lengths.cumsum())
    trunks = np.maximum.accumulate(np.where(before == 0, starts, 0))
    document = np.repeat(np.arange(len(starts)), lengths)
    within = np.arange(len(document)) - key_edges[document]
    keys = within + np.where(within < before[document], trunks[document], starts[document] - before[document])
    sent_keys = sent(torch.from_numpy(keys), device)
    return found | {
        "cu_seq_lens_k": _int32(key_edges, device),
        "max_length_k": int(lengths.max()),
        "keys": sent_keys,
    }


def _int32(values: np.ndarray, device: torch.device) -> Tensor:
    return sent(torch.from_numpy(values.astype(np.int32)), device)


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    keys: Tensor | None = None,
    position_ids: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sequence: SequenceRanks | None = None,
    kernel: Kernel | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns causal attention (1, T, heads, D) for `query` (1, heads, T, D) and `key` and `value` (1, kv
    heads, T, D), and None, as transformers expects.

    A window includes the token itself: token t attends to tokens > t - `sliding_window`. fp32 inputs (from
    adapters) are cast to the model's dtype. `keys`: the rows of `key` and `value` to use; a document then has
    more keys than queries, and its queries are the last ones. Heads are padded with zeros to a multiple of 8,
    and to a common size if keys and values differ in size (MLA). `sequence`: the ranks that share the pass;
    this rank has T tokens, while bounds and `keys` cover the whole pass. `kernel`: used instead of the
    fastest kernel on this GPU.
    """
    if s_aux is not None:
        raise ValueError(
            f"attention of {type(module).__name__} has sinks, which are not computed here: take dtype float32"
        )
    if cu_seq_lens_q is None:  # the model passes on nothing but positions
        found = document_bounds(cast(Tensor, position_ids), query.device)
        cu_seq_lens_q = found["cu_seq_lens_q"]
        cu_seq_lens_k = found["cu_seq_lens_k"]
        keys = found.get("keys")
        max_length_q = found["max_length_q"]
        max_length_k = found["max_length_k"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (part.to(module.config.dtype) for part in (query, key, value))
    if sequence is not None:
        query, key, value = sequence.with_all_tokens(query, key, value)
    wide = max(query.shape[-1], value.shape[-1])
    size = value.shape[-1]
    # Not part[0], whose gradient would be copied into zeros with another layout.
    q, k, v = (_filled(part.squeeze(0).transpose(0, 1), -(-wide // 8) * 8) for part in (query, key, value))
    window = -1 if sliding_window is None else sliding_window - 1
    if keys is not None:
        k = _Gathered.apply(k, keys)
        v = _Gathered.apply(v, keys)
    heads = Heads(q.shape[1] // k.shape[1], q.shape[-1])
    many = len(cu_seq_lens_q) > MANY + 1
    kind = AttentionKind(heads, window >= 0, keys is not None, many, query.dtype, bool(softcap))
    kernel = kernel or kernel_for(kind, query.device)
    attended = kernel(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scale,
        window=window,
        cap=softcap or 0.0,
    )
    attended = attended[..., :size].unsqueeze(0)
    return attended if sequence is None else sequence.with_all_heads(attended), None


def _filled(heads: Tensor, size: int) -> Tensor:
    """Pads the last dimension with zeros to `size`."""
    return heads if heads.shape[-1] == size else F.pad(heads, (0, size - heads.shape[-1]))


AttentionInterface.register(VARLEN, varlen_attention)
AttentionInterface.register(PLAIN, partial(varlen_attention, kernel=attend_each))
