"""Computes the matrix products of linear layers in FP8 (e4m3; Micikevicius et al. 2022, arXiv:2209.05433),
with each row of a factor scaled by its largest value.

Outputs and the gradients of inputs are products of FP8 numbers, which Hopper GPUs accumulate with 14 bits;
the gradients of weights stay in the training dtype, as in torchao's recipe `rowwise_with_gw_hp`. The weights'
scales are multiplied into the gradient before it is rounded, so that both passes use the same rounded
weights. torchao's own modules need `torch.compile`, and keep the weights that ZeRO-3 gathers until the
backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from rlhf_core.models.weights.whole_weights import whole_shape

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SINCE = (8, 9)  # minimum compute capability
MULTIPLE = 16  # sides of a product's matrices, in elements, must be multiples of this
# N K / (N + K) of a layer: FP8 saves time in proportion to N K, and rounding reads and writes N + K per token
PAYS_FROM = 1024


def use_float8(model: PreTrainedModel, required: bool = True) -> int:
    """Makes the model's large linear layers, except the head, multiply in FP8, and returns their number.
    Raises ValueError if there are no such layers although FP8 is `required`, and RuntimeError on a GPU
    without FP8."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < SINCE:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise RuntimeError(
            f"float8 needs a GPU of compute capability 8.9 or later, and this one has {found}: leave"
            " float8 out"
        )
    head = model.get_output_embeddings()
    layers = [
        part
        for part in model.modules()
        if type(part) is nn.Linear and part is not head and pays(*whole_shape(part.weight))
    ]
    if not layers and required:
        raise ValueError(
            f"{type(model).__name__} has no linear layer that is large enough for FP8 to be faster: leave"
            " float8 out"
        )
    if not torch.cuda.is_available():
        print("float8: this machine has no GPU: products are rounded as on one, and take longer", flush=True)
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer)
    return len(layers)


def pays(outputs: int, inputs: int) -> bool:
    """Returns whether FP8 products save more time in a layer than rounding to FP8 takes."""
    return outputs % MULTIPLE == inputs % MULTIPLE == 0 and outputs * inputs >= PAYS_FROM * (outputs + inputs)


def _forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Computes (..., K) -> (..., N)."""
    product = _Product.apply(hidden.flatten(0, -2), layer.weight)
    product = product if layer.bias is None else product + layer.bias
    return product.unflatten(0, hidden.shape[:-1])


class _Product(torch.autograd.Function):
    """Computes (T, K), weight (N, K) -> (T, N)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight = weight  # ZeRO-3 gathers it again
        rounded, scales = rounded_rows(weight.detach())
        return multiply(*rounded_rows(hidden), rounded, scales, hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (hidden,), weight, of_hidden = ctx.saved_tensors, ctx.weight, None
        if ctx.needs_input_grad[0]:
            rounded, scales = rounded_rows(weight.detach())
            ones = hidden.new_ones(hidden.shape[1], dtype=torch.float32)
            of_hidden = multiply(*rounded_rows(grad, scales), transposed(rounded), ones, grad.dtype)
        return of_hidden, grad.t() @ hidden if ctx.needs_input_grad[1] else None


def rounded_rows(matrix: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the product of each column of (T, K) and its factor in `columns` (K,), rounded to FP8 (T, K)
    with fp32 scales (T,)."""
    if matrix.is_cuda:
        from rlhf_core.models.kernels.round_rows import round_rows

        return round_rows(matrix, columns, FP8)
    values = matrix.float() if columns is None else matrix.float() * columns
    scales = values.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return (values / scales[:, None]).clamp(-LARGEST, LARGEST).to(FP8), scales


def transposed(matrix: Tensor) -> Tensor:
    """Returns a copy (K, N) of FP8 (N, K)."""
    if matrix.is_cuda:
        from rlhf_core.models.kernels.round_rows import transpose

        return transpose(matrix)
    return matrix.view(torch.uint8).t().contiguous().view(FP8)


def multiply(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns the product (T, N), in `dtype`, of FP8 (T, K) and (N, K), each with a scale for each row.
    Without a GPU it accumulates in fp32."""
    if left.is_cuda:
        scales = left_scales[:, None], right_scales[None]
        return torch._scaled_mm(left, right.t(), *scales, out_dtype=dtype, use_fast_accum=True)
    return (F.linear(left.float(), right.float()) * left_scales[:, None] * right_scales).to(dtype)
