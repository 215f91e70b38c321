"""Compares an attention kernel with plain attention on heads of the model's sizes, before the kernel is used
(see `choose.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Kernel = Callable[..., Tensor]
Documents = tuple[tuple[int, int], ...]
# Queries and keys of the test's documents: some longer than a kernel's block; answers that continue a shared
# prompt; more than 256 documents, beyond which FlashAttention-4 finds documents differently.
WHOLE = ((5, 5), (301, 301))
SHARED = ((3, 8), (140, 301))
MANY = 256
HALF = (torch.bfloat16, torch.float16)
CLOSE = 0.02  # mean difference divided by mean size; bf16 gives 0.002 to 0.004
CAP = 1.0  # of scores with a standard deviation of 1, so that it changes most of them
NEAR = 0.25  # largest difference of a number, divided by its own size plus the mean size


class Heads(NamedTuple):
    """The number of query heads per key head, and the size of a head."""

    group: int
    size: int


class AttentionKind(NamedTuple):
    """A kind of attention on 16-bit numbers of `dtype`: whether there are windows, documents with more keys
    than queries (`shared`; the queries come last), more documents than `MANY`, and a cap on the scores
    (`capped`; Gemma 2, section 2)."""

    heads: Heads
    windowed: bool = False
    shared: bool = False
    many: bool = False
    dtype: torch.dtype = torch.bfloat16
    capped: bool = False

    def __str__(self) -> str:
        options = {
            "in windows": self.windowed,
            "after shared prompts": self.shared,
            f"of more than {MANY} documents": self.many,
            "with a cap on the scores": self.capped,
        }
        return " ".join(
            [f"heads of {self.heads.size}", *(name for name, wanted in options.items() if wanted)]
        )


def rejection_reason(
    kernel: Kernel, kind: AttentionKind, device: torch.device, must_be_deterministic: bool
) -> str | None:
    """Returns why the kernel cannot be used, or None. May run inside a layer that is being recomputed in the
    backward pass."""
    window = 2 if kind.windowed else -1
    cap = CAP if kind.capped else 0.0
    documents: Documents = SHARED if kind.shared else WHOLE
    if kind.many:
        documents = ((2, 7) if kind.shared else (4, 4),) * (MANY + 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        mean, largest = difference(kernel, kind.heads, window, documents, device, kind.dtype, cap)
        if not (mean < CLOSE and largest < NEAR):
            return f"computes something else (off by {mean:.2g}, a number by {largest:.2g})"
        if must_be_deterministic and not is_deterministic(
            kernel, kind.heads, window, device, kind.dtype, cap
        ):
            return "gives other bits with gradients or beside other rows, and PPO is to train what it scored"
    return None


def is_deterministic(
    kernel: Kernel,
    heads: Heads,
    window: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    cap: float = 0.0,
) -> bool:
    """Returns whether documents get bitwise equal values when gradients are off and when their order
    changes."""
    counts = [301, 5, 140]
    dice = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(count, heads.group + 2, heads.size, generator=dice).to(device, dtype) for count in counts
    ]

    def attended(order: list[int], trains: bool) -> list[Tensor]:
        packed = torch.cat([rows[i] for i in order]).requires_grad_(trains)
        lengths = torch.tensor([counts[i] for i in order])
        edges = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(device)
        q, k, v = packed.split([heads.group, 1, 1], dim=1)
        found = kernel(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            edges,
            edges,
            301,
            301,
            scale=heads.size**-0.5,
            window=window,
            cap=cap,
        )
        return [
            part
            for _, part in sorted(
                zip(order, found.detach().split(lengths.tolist()), strict=True), key=lambda pair: pair[0]
            )
        ]

    with torch.enable_grad():
        trained = attended([2, 0, 1], True)
    with torch.no_grad():
        scored = attended([0, 1, 2], False)
    return all(torch.equal(a, b) for a, b in zip(trained, scored, strict=True))


def difference(
    kernel: Kernel,
    heads: Heads,
    window: int,
    documents: Documents,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    cap: float = 0.0,
) -> tuple[float, float]:
    """Compares the kernel with plain attention. Unless `cap` is 0, scores x become `cap * tanh(x / cap)`.

    Returns two numbers, each the largest over outputs and gradients (queries, keys, values): the mean
    difference divided by the mean size, and the largest difference of a number divided by its own size plus
    the mean size.
    """
    scale = heads.size**-0.5
    dice = torch.Generator().manual_seed(0)
    queries, keys = (torch.tensor([0, *counts]).cumsum(0) for counts in zip(*documents, strict=True))

    def drawn(rows: Tensor, number: int) -> Tensor:
        return (
            torch.randn(int(rows[-1]), number, heads.size, generator=dice).to(device, dtype).requires_grad_()
        )

    with torch.enable_grad():
        q = drawn(queries, heads.group)
        k = drawn(keys, 1)
        v = drawn(keys, 1)
        upward = drawn(queries, heads.group).detach()
        edges = (
            queries.int().to(device),
            keys.int().to(device),
            *(max(counts) for counts in zip(*documents, strict=True)),
        )
        attended = kernel(q, k, v, *edges, scale=scale, window=window, cap=cap)
        found = [attended, *torch.autograd.grad(attended, (q, k, v), upward)]
        parts = []
        for (first, last), (start, end) in zip(
            queries.unfold(0, 2, 1).tolist(), keys.unfold(0, 2, 1).tolist(), strict=True
        ):
            back = torch.arange(end - start, device=device)
            back = back[-(last - first) :, None] - back  # queries come last
            visible = (back >= 0) & ((back <= window) | (window < 0))
            scores = torch.einsum("qgd,kd->gqk", q[first:last].float(), k[start:end, 0].float()) * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            parts.append(
                torch.einsum(
                    "gqk,kd->qgd",
                    scores.masked_fill(~visible, -torch.inf).softmax(-1),
                    v[start:end, 0].float(),
                )
            )
        plain = torch.cat(parts)
        expected = [plain, *torch.autograd.grad(plain, (q, k, v), upward.float())]
    pairs = [(ours.detach().float(), theirs.detach()) for ours, theirs in zip(found, expected, strict=True)]
    means = [(ours - theirs).abs().mean() / theirs.abs().mean() for ours, theirs in pairs]
    largest = [((ours - theirs).abs() / (theirs.abs() + theirs.abs().mean())).max() for ours, theirs in pairs]
    mean_of_worst, worst = (
        float(torch.stack(found).nan_to_num(torch.inf).max()) for found in (means, largest)
    )
    return mean_of_worst, worst
