"""What an attention kernel is tried on before it is taken (`attention_kernels`): heads like the model's, beside plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Kernel = Callable[..., Tensor]
# Queries and keys of documents of a trial: more than a block of a kernel, and answers that go on from a prompt.
WHOLE, SHARED = ((5, 5), (301, 301)), ((3, 8), (140, 301))
CLOSE = 0.02  # mean difference over mean size; bf16 takes 0.002 to 0.004


class Heads(NamedTuple):
    """Heads of an attention: of queries for one of keys, and their size."""

    group: int
    size: int


def steady(kernel: Kernel, heads: Heads, window: int, device: torch.device) -> bool:
    """Whether documents have the same values, to the last bit, without gradients and in another order."""
    counts, dice = [301, 5, 140], torch.Generator().manual_seed(0)
    rows = [torch.randn(count, heads.group + 2, heads.size, generator=dice).to(device, torch.bfloat16) for count in counts]

    def attended(order: list[int], trains: bool) -> list[Tensor]:
        laid = torch.cat([rows[i] for i in order]).requires_grad_(trains)
        lengths = torch.tensor([counts[i] for i in order])
        edges = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(device)
        q, k, v = laid.split([heads.group, 1, 1], dim=1)
        found = kernel(q.contiguous(), k.contiguous(), v.contiguous(), edges, edges, 301, 301, scale=heads.size**-0.5, window=window)
        return [part for _, part in sorted(zip(order, found.detach().split(lengths.tolist()), strict=True), key=lambda pair: pair[0])]

    with torch.enable_grad():
        trained = attended([2, 0, 1], True)
    with torch.no_grad():
        scored = attended([0, 1, 2], False)
    return all(torch.equal(a, b) for a, b in zip(trained, scored, strict=True))


def difference(kernel: Kernel, heads: Heads, window: int, documents: tuple[tuple[int, int], ...], device: torch.device) -> float:
    """The largest over values and the gradients of queries, keys and values: mean difference over mean size."""
    scale, dice = heads.size**-0.5, torch.Generator().manual_seed(0)
    queries, keys = (torch.tensor([0, *counts]).cumsum(0) for counts in zip(*documents, strict=True))

    def drawn(rows: Tensor, number: int) -> Tensor:
        return torch.randn(int(rows[-1]), number, heads.size, generator=dice).to(device, torch.bfloat16).requires_grad_()

    with torch.enable_grad():
        q, k, v = drawn(queries, heads.group), drawn(keys, 1), drawn(keys, 1)
        upward = drawn(queries, heads.group).detach()
        edges = (queries.int().to(device), keys.int().to(device), *(max(counts) for counts in zip(*documents, strict=True)))
        attended = kernel(q, k, v, *edges, scale=scale, window=window)
        found = [attended, *torch.autograd.grad(attended, (q, k, v), upward)]
        parts = []
        for (first, last), (start, end) in zip(queries.unfold(0, 2, 1).tolist(), keys.unfold(0, 2, 1).tolist(), strict=True):
            back = torch.arange(end - start, device=device)
            back = back[-(last - first) :, None] - back  # queries are the last
            seen = (back >= 0) & ((back <= window) | (window < 0))
            alike = torch.einsum("qgd,kd->gqk", q[first:last].float(), k[start:end, 0].float()) * scale
            parts.append(torch.einsum("gqk,kd->qgd", alike.masked_fill(~seen, -torch.inf).softmax(-1), v[start:end, 0].float()))
        plain = torch.cat(parts)
        expected = [plain, *torch.autograd.grad(plain, (q, k, v), upward.float())]
    pairs = [(ours.detach().float(), theirs.detach()) for ours, theirs in zip(found, expected, strict=True)]
    ratios = [(ours - theirs).abs().mean() / theirs.abs().mean() for ours, theirs in pairs]
    return float(torch.stack(ratios).nan_to_num(torch.inf).max())
