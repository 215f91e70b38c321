"""Computes log-probs of single tokens from hidden states, without a tensor of probabilities.

The head and the log-softmax form one autograd function. It is called once per pass as the head's forward,
regardless of the number of chunks, because under ZeRO-3 every rank must gather the head's weights equally
often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_core.models.logprobs.fp32_head import fp32_forward, fp32_product
from rlhf_core.models.logprobs.teacher_kl import (
    CellGradients,
    TopTokens,
    cell_logprobs,
    cells_kl,
    chunks_of,
    differentiable_cells,
)
from rlhf_core.models.weights.whole_weights import is_cut

Entropy = Literal["no", "value", "gradient"]  # as a metric, or as part of the loss


class Truncation(NamedTuple):
    """Keeps the `top_k` most probable tokens (0: all), and of these the most probable ones that together
    reach the probability `top_p`."""

    top_p: float = 1.0
    top_k: int = 0


WHOLE = Truncation()
# positions whose logits exist at once if they are not kept: 2048 x 150k vocabulary x 2 bytes = 0.6 GB
LOGITS_CHUNK = 2048


def token_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: Entropy,
    keep: bool,
    cap: float | None = None,
    top: Truncation = WHOLE,
    known: int | None = None,
    fp32: bool = False,
    teacher: TopTokens | None = None,
) -> tuple[Tensor, ...]:
    """Returns the log-probs of tokens and the entropies of their distributions, (N,) fp32. hidden: (N, H).
    targets: (N,). With a `teacher`, also returns the KL to it over its most probable tokens
    (`teacher_kl.py`), (N,).

    `top` truncates the distributions, but always keeps the target tokens; the choice of tokens has no
    gradient. `known`: the distributions cover only the first `known` rows of the head; None: all rows.

    `keep`: the logits stay in memory for the backward pass, N x V in the model's dtype. Otherwise they are
    recomputed in chunks. They are always recomputed with `fp32`, which computes them in fp32
    (`fp32_head.py`), and with a `cap`, which turns x into `cap * tanh(x / cap)` (Gemma 2, section 2). The
    entropies are 0 with "no", and carry no gradient with "value".
    """
    scale = 1 / temperature if temperature else 1.0
    if type(head) is not nn.Linear:  # for example, a head with adapters
        logprobs, entropies, *kl = _through(
            head, hidden, targets, scale, entropy != "no", cap, top, known, fp32, teacher
        )
    else:
        # On a CPU PyTorch allocates several tensors of a chunk's size.
        keep = (
            keep
            and cap is None
            and not fp32
            and torch.is_grad_enabled()
            and (hidden.is_cuda or len(hidden) <= LOGITS_CHUNK)
        )
        options = (targets, scale, entropy != "no", keep, cap, top, known, fp32, teacher)
        with replaced_forward(head, lambda rows: _HeadLogprobs.apply(rows, head.weight, head.bias, *options)):
            logprobs, entropies, *kl = head(hidden)
    return logprobs, entropies if entropy == "gradient" else entropies.detach(), *kl


def _through(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    scale: float,
    entropy: bool,
    cap: float | None,
    top: Truncation,
    known: int | None,
    fp32: bool,
    teacher: TopTokens | None,
) -> list[Tensor]:
    """Runs any head in chunks, which are checkpointed in training. A head that ZeRO-3 has sharded runs in one
    call, because ZeRO-3 counts calls."""

    def read(rows: Tensor, wanted: Tensor, teachers: TopTokens | None) -> tuple[Tensor, ...]:
        # here, because `checkpoint` runs this function again in the backward pass
        with replaced_forward(plain, partial(fp32_forward, plain)) if fp32 else nullcontext():
            logits = capped(head(rows)[:, :known].contiguous(), cap)
        logprobs, _, entropies = _read_with_torch(
            logits, wanted, scale, entropy, _floors(logits.detach(), wanted, scale, top)
        )
        if teachers is None:
            return logprobs, entropies
        own = differentiable_cells(logits, teachers.ids, scale)
        return logprobs, entropies, cells_kl(own, teachers.logprobs)

    plain: Any = getattr(head, "base_layer", head)
    cut = any(map(is_cut, head.parameters()))
    size = max(1, len(hidden)) if cut else LOGITS_CHUNK
    of_chunks = chunks_of(teacher, len(hidden), size)
    inputs = list(zip(hidden.split(size), targets.split(size), of_chunks, strict=True))
    if torch.is_grad_enabled() and len(inputs) > 1:
        parts = [checkpoint(read, *of_chunk, use_reentrant=False) for of_chunk in inputs]
    else:
        parts = [read(*of_chunk) for of_chunk in inputs]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


@contextmanager
def replaced_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Replaces the forward function of `module`, whose hooks still run."""
    own = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _HeadLogprobs(torch.autograd.Function):
    """Overwrites kept logits with their gradient `g (onehot - p) - g_H p (log p + H)`, in the logits'
    dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        entropy: bool,
        keep: bool,
        cap: float | None,
        top: Truncation,
        known: int | None,
        fp32: bool,
        teacher: TopTokens | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        size = max(1, len(hidden)) if keep else LOGITS_CHUNK
        product = fp32_product if fp32 else F.linear
        parts = []
        floors = []
        cells = []
        logits = hidden.new_empty(0)
        of_chunks = chunks_of(teacher, len(hidden), size)
        for rows, wanted, teachers in zip(hidden.split(size), targets.split(size), of_chunks, strict=True):
            logits = capped(product(rows, weight[:known], None if bias is None else bias[:known]), cap)
            floors.append(_floors(logits, wanted, scale, top))
            read = logit_functions(logits)[1]
            parts.append(read(logits, wanted, scale, entropy, floors[-1]))
            if teachers is not None:
                cells.append(cell_logprobs(logits, teachers.ids, parts[-1][1], scale, read))
        logprobs, sums, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        given = [part for part in floors if part is not None]
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            targets,
            sums,
            entropies,
            logits if keep else None,
            torch.cat(given) if given else None,
            logprobs if cells else None,
            torch.cat(cells) if cells else None,
            *([None, None] if teacher is None else [teacher.ids, teacher.logprobs]),
        )
        ctx.scale = scale
        ctx.size = size
        ctx.overwritten = False
        ctx.cap = cap
        ctx.known = known
        ctx.product = product
        kl = [] if teacher is None else [cells_kl(torch.cat(cells), teacher.logprobs)]
        return logprobs, entropies, *kl

    @staticmethod
    def backward(
        ctx: Any, grads: Tensor | None, entropy_grads: Tensor | None, kl_grads: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        hidden, whole, whole_bias, targets, sums, entropies, kept, floors, *of_kl = ctx.saved_tensors
        weight = whole[: ctx.known]
        bias = None if whole_bias is None else whole_bias[: ctx.known]
        if ctx.overwritten:
            raise RuntimeError(
                "the kept logits were overwritten by their gradient: only one backward pass is possible"
            )
        ctx.overwritten = kept is not None
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grads = torch.zeros_like(entropies) if grads is None else grads
        at_cells = None
        if kl_grads is not None:
            logprobs, own, ids, masses = of_kl
            top = TopTokens(ids, masses)
            at_cells = CellGradients(grads, entropy_grads, kl_grads, own, top, logprobs, entropies)
            grads = at_cells.of_rest()
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        weight_grad: Tensor | None = None
        bias_grad: Tensor | None = None
        for start in range(0, max(1, len(hidden)), ctx.size):
            part = slice(start, start + ctx.size)
            logits = capped(ctx.product(hidden[part], weight, bias), ctx.cap) if kept is None else kept
            # the cap's derivative, computed before `logits` is overwritten
            slope = None if ctx.cap is None else 1 - (logits / ctx.cap).square()
            more = None if entropy_grads is None else entropy_grads[part]
            least = None if floors is None else floors[part]
            logits = logit_functions(logits)[2](
                logits, targets[part], sums[part], entropies[part], grads[part], more, ctx.scale, least
            )
            if at_cells is not None:
                logits = at_cells.part(part).write(logits, targets[part], ctx.scale)
            if slope is not None:
                logits = logits.mul_(slope)
            logits = logits.to(hidden.dtype)  # with fp32 logits, only the gradient is rounded
            if hidden_grad is not None:
                torch.mm(logits, weight, out=hidden_grad[part])
            if for_weight:
                weight_grad = _with_product(weight_grad, logits, hidden[part], alone=len(hidden) <= ctx.size)
            if for_bias:
                column_sums = logits.sum(0, dtype=torch.promote_types(logits.dtype, torch.float32))
                bias_grad = column_sums if bias_grad is None else bias_grad + column_sums
            del logits, slope  # frees memory for the next chunk
        weight_grad = (
            None if weight_grad is None else _with_unknown_rows(weight_grad.to(whole.dtype), len(whole))
        )
        if bias_grad is not None and whole_bias is not None:
            bias_grad = _with_unknown_rows(bias_grad.to(whole_bias.dtype), len(whole_bias))
        return hidden_grad, weight_grad, bias_grad, *[None] * 9


def _with_unknown_rows(grad: Tensor, rows: int) -> Tensor:
    """Extends a gradient (K, ...) to (`rows`, ...) with zeros for the unused rows from K on."""
    if len(grad) == rows:
        return grad
    return torch.cat([grad, grad.new_zeros(rows - len(grad), *grad.shape[1:])])


def _with_product(total: Tensor | None, logits_grad: Tensor, hidden: Tensor, alone: bool) -> Tensor:
    """Adds a chunk's gradient of the weight, (N, V) x (N, H) -> (V, H), to the `total` of the earlier chunks.
    The sum is at least fp32, because bf16 would lose parts below 2^-8 of the total. `alone`: whether this is
    the only chunk, whose product is then the whole sum."""
    if total is not None and total.dtype == logits_grad.dtype:
        return total.addmm_(logits_grad.t(), hidden)
    product = torch.mm(logits_grad.t(), hidden)
    if total is not None:
        return total.add_(product)
    return product if alone else _at_least_fp32(product)


def logit_functions(logits: Tensor) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Returns the functions that find floors, read and differentiate logits on their device: kernels on a
    GPU, PyTorch elsewhere."""
    if logits.is_cuda:
        from rlhf_core.models.kernels import logprobs

        return logprobs.floors, logprobs.read, logprobs.differentiate
    return _floors_with_torch, _read_with_torch, _differentiate_with_torch


def _floors(logits: Tensor, targets: Tensor, scale: float, top: Truncation) -> Tensor | None:
    """Returns the lowest scaled logit of each row's truncated distribution, which is at most the target's
    logit, (N,) fp32; None if the distribution is not truncated."""
    return None if top == WHOLE else logit_functions(logits)[0](logits, targets, scale, *top)


def _floors_with_torch(logits: Tensor, targets: Tensor, scale: float, top_p: float, top_k: int) -> Tensor:
    scaled = _at_least_fp32(logits) * scale
    order = scaled.sort(-1, descending=True).values
    if top_k:
        order = order[:, :top_k]
    lowest = order[:, -1:]
    if top_p < 1:
        p = order.softmax(-1)
        # the tokens before each of these have less than top_p together
        lowest = order.gather(-1, (p.cumsum(-1) - p < top_p).sum(-1, keepdim=True) - 1)
    return torch.minimum(lowest, scaled.gather(-1, targets[:, None])).squeeze(-1)


def _kept(scaled: Tensor, floors: Tensor | None) -> Tensor:
    return scaled if floors is None else scaled.masked_fill(scaled < floors[:, None], float("-inf"))


def _differentiate_with_torch(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    entropies: Tensor,
    grads: Tensor,
    entropy_grads: Tensor | None,
    scale: float,
    floors: Tensor | None = None,
) -> Tensor:
    logp = _kept(_at_least_fp32(logits) * scale, floors) - sums[:, :1] - sums[:, 1:]
    p = logp.exp()
    likely = (1 - p.gather(-1, targets[:, None])) * grads[:, None]  # in fp32: 1 - p loses digits near p = 1
    result = (-grads[:, None] * p).scatter_(-1, targets[:, None], likely)
    if entropy_grads is not None:
        result -= entropy_grads[:, None] * p * torch.where(p > 0, logp + entropies[:, None], 0)
    return (result * scale).to(logits.dtype)


def _read_with_torch(
    logits: Tensor, targets: Tensor, scale: float, entropy: bool, floors: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs of the targets (N,), each row's maximum and its log-sum-exp relative to the maximum
    (N, 2), and entropies (N,), all differentiable and in fp32.

    The maximum and the log-sum-exp are separate, because their sum would lose the digits of 1 - p near p = 1.
    """
    scaled = _kept(_at_least_fp32(logits) * scale, floors)
    maxima = scaled.detach().amax(-1, keepdim=True)
    below = scaled - maxima
    logs = below.exp().sum(-1, keepdim=True).log()
    table = below - logs
    logprobs = table.gather(-1, targets[:, None]).squeeze(-1)
    # -inf times a probability of 0 would be NaN
    finite = table if floors is None else table.masked_fill(table == float("-inf"), 0)
    entropies = -(table.exp() * finite).sum(-1) if entropy else torch.zeros_like(logprobs)
    return logprobs, torch.cat([maxima, logs], -1), entropies


def _at_least_fp32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
