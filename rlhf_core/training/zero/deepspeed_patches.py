"""Patches private parts of DeepSpeed, for speed and memory, and to test float16 on CPUs.

- `patch_library`: no shared-memory CPU collectives, which need a compiler and a minute at start; no profiler
  marks, thousands per pass; the parameters of a module are listed once, not several times per pass. ZeRO-1
  with bf16 gradients summed in fp32 keeps the optimiser of other settings, which frees them after a step;
  DeepSpeed would use `BF16_Optimizer`, which permanently holds 4 bytes per parameter on every rank.
  float16 is not refused on CPUs without instructions for it, where PyTorch computes it, too.
- `forget_order`: ZeRO-3 records again which weights to keep after a module.
- `reduce_beside_host`: at the end of a pass the GPU waits for ZeRO-3's gradients, not the host.

Made for the releases in MADE_FOR. With any other release no patch is applied: results are the same, but
slower and with more memory, and DeepSpeed refuses float16 on some CPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

MADE_FOR = ("0.19.",)

_PARAMETERS: tuple[WeakKeyDictionary[nn.Module, list[Any]], ...] = WeakKeyDictionary(), WeakKeyDictionary()


def applies(deepspeed: Any) -> bool:
    """Returns whether the patches were made for this release of DeepSpeed."""
    return str(deepspeed.__version__).startswith(MADE_FOR)


def patch_library(deepspeed: Any) -> None:
    """Patches the parts that all engines of the process share."""
    if applies(deepspeed):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.nvtx.enable_nvtx = False
        if not torch.cuda.is_available():
            type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = _true
        deepspeed.runtime.zero.partitioned_param_coordinator.get_all_parameters = _cached_parameters
        deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check = _zero_optimizer


def _true(_: Any) -> bool:
    return True


def _zero_optimizer(engine: Any, basic_optimizer: Any) -> str:
    """Returns DeepSpeed's name for the optimiser of all ZeRO stages, which wraps `basic_optimizer`."""
    return "zero_optimization"


def forget_order(deepspeed: Any, optimizer: Any) -> None:
    """Clears a ZeRO-3 optimiser's trace of the order of weights.

    DeepSpeed never revises which weights to keep after a module, so after passes without gradient it would
    keep none for a backward pass. The trace belongs to the `param_coordinator`, which is replaced by a copy.
    """
    if applies(deepspeed):
        offload = optimizer.parameter_offload
        offload.empty_partition_cache()
        offload.param_coordinator = copy.copy(offload.param_coordinator)
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()


def reduce_beside_host(deepspeed: Any, optimizer: Any) -> None:
    """Lets the host launch the next pass while a ZeRO-3 optimiser reduces gradients. Not for offloaded
    optimisers, whose gradients the host reads."""
    if applies(deepspeed):
        optimizer.reduce_and_partition_stream = _GradientStream()


class _GradientStream(torch.cuda.Stream):
    def synchronize(self) -> None:
        torch.cuda.current_stream().wait_stream(self)


def _cached_parameters(module: Any, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    known = _PARAMETERS[recurse]
    if module not in known:
        known[module] = list(module.named_parameters(recurse=recurse))
    return chain(known[module], module.ds_external_parameters())
