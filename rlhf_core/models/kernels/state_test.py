"""Compares a kernel for the gated delta rule with the rule itself, per document, before the kernel is used
(see `state_layers.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

DocumentsOf = Callable[..., tuple[Tensor, Tensor | None]]
LENGTHS = (5, 70, 1, 130)  # shorter and longer than the 64 tokens of a kernel's chunk
HEADS = 2
CLOSE = 0.03  # mean difference divided by mean size; bf16 gives 0.01


def rejection_reason(kernel: DocumentsOf, key_size: int, value_size: int, device: torch.device) -> str | None:
    """Returns why the kernel cannot be used, or None. Compares the outputs and all gradients for packed
    documents with the results of `delta_rule` in fp32."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            worst = difference(kernel, key_size, value_size, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        return f"does not run here ({type(problem).__name__}: {str(problem).strip()[:200]})"
    return None if worst < CLOSE else f"computes something else (off by {worst:.2g})"


def difference(kernel: DocumentsOf, key_size: int, value_size: int, device: torch.device) -> float:
    """Returns the largest ratio of mean difference to mean size over all outputs and gradients."""
    dice = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, tokens, HEADS, *shape, generator=dice).to(device)

    with torch.enable_grad():
        inputs = [
            drawn(key_size),
            drawn(key_size),
            drawn(value_size),
            F.logsigmoid(drawn() + 2),
            drawn().sigmoid(),
        ]
        inputs = [
            part.to(torch.float32 if i == 3 else torch.bfloat16).requires_grad_()
            for i, part in enumerate(inputs)
        ]
        upward = drawn(value_size).bfloat16()
        q, k, v, decay, beta = inputs
        found, _ = kernel(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=edges)
        parts = [
            delta_rule(*(part[0].float() for part in split))
            for split in zip(*(i.split(LENGTHS, 1) for i in inputs), strict=True)
        ]
        expected = torch.cat(parts)[None]
        pairs = [
            (found, expected),
            *zip(
                *(torch.autograd.grad(x, inputs, upward.to(x.dtype)) for x in (found, expected)), strict=True
            ),
        ]
    gaps = [
        (ours.float() - theirs.float()).abs().mean() / theirs.float().abs().mean() for ours, theirs in pairs
    ]
    return float(torch.stack(gaps).detach().nan_to_num(torch.inf).max())


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Applies the gated delta rule, token by token (Yang et al. 2024, eq. 10), with normalised queries and
    keys.

    q, k: (T, heads, K); v: (T, heads, V); decay (its logarithm), beta: (T, heads). Returns (T, heads, V).
    """
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    state = torch.zeros(*k.shape[1:], v.shape[-1], device=q.device)
    found = []
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None, None]
        read = torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
        found.append(torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5)
    return torch.stack(found)
