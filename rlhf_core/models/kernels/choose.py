"""Chooses a kernel for causal attention within the documents of packed rows, on GPUs. A kernel is used only
if it passes its self-test.

The candidates are FlashAttention-4 (package flash-attn-4, whose kernels for Hopper and Blackwell are compiled
on first call), FlashAttention-2 (flash-attn; Dao 2023) and PyTorch's own. The first installed kernel that
passes is used. Some builds silently ignore features they lack (windows, head sizes, gradients), so each
candidate is tested first (see `self_test.py`). `attend_each` has the same signature and runs anywhere.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from rlhf_core.models.kernels.self_test import AttentionKind, Kernel, rejection_reason

# PyTorch 2.11 groups heads without this option
_HAS_GQA_OPTION = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
_GROUPED: dict[str, Any] = {"enable_gqa": True} if _HAS_GQA_OPTION else {}
LONG = 256  # tokens; longer than a block of a kernel


@cache
def flash_kernel() -> Kernel | None:
    """Returns flash-attn's kernel; None if the package is missing or was built for another PyTorch."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return cast(Kernel, flash_attn_varlen_func)


@cache
def flash4_kernel() -> Kernel | None:
    """Returns flash-attn-4's kernel; None if the package is missing or cannot be imported. Compiled kernels
    are cached on disk."""
    try:
        importlib.metadata.version("flash-attn-4")  # flash-attn 2 contains an early form of this folder
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        major, minor = torch.cuda.get_device_capability()  # not part of the package's cache keys
        caches = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "flash-attn-4"
            / f"sm{major}{minor}"
        )
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        # its default is /tmp, where other users can write
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(caches))
        from flash_attn.cute import flash_attn_varlen_func
    except Exception as problem:  # with other releases of its dependencies it fails in many ways
        print(
            f"flash-attn-4 cannot be imported ({type(problem).__name__}: {problem}): another kernel runs",
            flush=True,
        )
        return None
    return cast(Kernel, flash_attn_varlen_func)


def _flash4(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float,
    window: int,
    cap: float = 0.0,
) -> Tensor:
    # Longer than a block, because shorter documents would compile other kernels.
    bounds = {"max_seqlen_q": max(longest, LONG), "max_seqlen_k": max(longest_key, LONG)}
    edges = {"cu_seqlens_q": starts, "cu_seqlens_k": key_starts, **bounds}
    size = (None, None) if window < 0 else (window, 0)
    more = {"softcap": cap} if cap else {}
    # With return_lse the kernel is the same with and without gradients.
    attended: Any = kernel(
        q, k, v, **edges, **more, softmax_scale=scale, causal=window < 0, window_size=size, return_lse=True
    )
    return cast(Tensor, attended[0])


def _flash(kernel: Kernel, *rows: Any, scale: float, window: int, cap: float = 0.0) -> Tensor:
    more = {"softcap": cap} if cap else {}
    return kernel(*rows, softmax_scale=scale, causal=True, window_size=(window, 0), **more)


def _pytorch(kernel: Kernel, *rows: Any, scale: float, window: int, cap: float = 0.0) -> Tensor:
    if cap:
        raise ValueError("it cannot cap scores")
    return kernel(*rows, scale=scale, window_size=(window, 0), **_GROUPED)


_CALLS: dict[str, Kernel] = {"flash-attn-4": _flash4, "flash-attn": _flash, "PyTorch": _pytorch}


def kernel_for(kind: AttentionKind, device: torch.device) -> Kernel:
    """Returns a kernel. Its arguments are queries, keys and values (T, heads, size), their bounds and largest
    lengths, the scale, the window (how many earlier tokens a token attends to; -1: all), and the cap of the
    scores (0: none). Raises RuntimeError if no kernel can compute this kind of attention."""
    for name, kernel in _installed(device):
        tried = _tried(name, kernel, kind, device)
        if tried:
            return tried
    raise RuntimeError(
        f"no attention kernel here computes {kind} (reasons are printed above): take dtype float32"
    )


def can_compute(kinds: Iterable[AttentionKind], device: torch.device) -> bool:
    """Returns whether `kernel_for` finds a kernel for each kind."""
    return all(any(_tried(*kernel, kind, device) for kernel in _installed(device)) for kind in kinds)


def flash_computes(kinds: Iterable[AttentionKind], device: torch.device) -> bool:
    """Returns whether flash-attn's kernel, which transformers calls for its own `flash_attention_2`, passes
    the self-test of each kind."""
    kernel = flash_kernel()
    return kernel is not None and all(_tried("flash-attn", kernel, kind, device) for kind in kinds)


def _installed(device: torch.device) -> Iterator[tuple[str, Kernel]]:
    """Yields the installed kernels, fastest first."""
    if _at_least_hopper(device) and (flash4 := flash4_kernel()):
        yield "flash-attn-4", flash4
    flash = flash_kernel()
    if flash:
        yield "flash-attn", flash
    yield "PyTorch", cast(Kernel, varlen.varlen_attn)


def _at_least_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _tried(name: str, kernel: Kernel, kind: AttentionKind, device: torch.device) -> Kernel | None:
    """Returns the kernel if its values and gradients match plain attention, otherwise None."""
    call = partial(_CALLS[name], kernel)
    try:
        found = rejection_reason(call, kind, device, must_be_deterministic=name == "flash-attn-4")
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        found = f"does not run here ({type(problem).__name__}: {str(problem).strip()[:200]})"
    if found:
        print(f"{name}'s attention for {kind} {found}: another kernel is tried", flush=True)
    return None if found else call


def attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float,
    window: int,
    cap: float = 0.0,
) -> Tensor:
    """Returns causal attention (T, heads, D) of queries (T, heads, D), keys and values (S, kv heads, D). The
    queries of a document correspond to its last keys. `window`: how many earlier tokens a token attends to
    (-1: all).

    Uses PyTorch's `scaled_dot_product_attention`, on any device and in any dtype. Used where the kernels
    above do not run and there is no mask (sequence parallelism in fp32 or without a GPU). It cannot cap
    scores, and raises ValueError for a `cap`.
    """
    if cap:
        raise ValueError("attention in parts does not cap scores: set sequence_parallel_size to 1")
    attended = []
    for (start, end), (first, last) in zip(
        pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True
    ):
        query, key, value = (
            rows.transpose(0, 1).unsqueeze(0) for rows in (q[start:end], k[first:last], v[first:last])
        )
        places = torch.arange(last - first, device=q.device)
        back = places[len(places) - (end - start) :, None] - places  # how far each key is before each query
        seen = None
        if window >= 0 or end - start != last - first:
            seen = (back >= 0) & ((back <= window) | (window < 0))
        found = F.scaled_dot_product_attention(
            query, key, value, seen, is_causal=seen is None, scale=scale, enable_gqa=True
        )
        attended.append(found.squeeze(0).transpose(0, 1))
    return torch.cat(attended)
