"""Patches private parts of DeepSpeed, for speed and memory, and to test float16 on CPUs.

- `patch_library`: disables shared-memory CPU collectives, which need a compiler and take a minute to start;
  removes profiler marks, of which each pass has thousands; lists a module's parameters once instead of
  several times per pass. With bf16 gradients summed in fp32, ZeRO-1 uses the same optimiser as with other
  settings, which frees the gradients after each step; DeepSpeed would use `BF16_Optimizer`, which permanently
  holds 4 bytes per parameter on every rank. float16 is also allowed on CPUs that lack instructions for it,
  since PyTorch can compute it there.
- `forget_order`: makes ZeRO-3 decide again which weights to keep after a module.
- `reduce_beside_host`: at the end of a pass, makes the GPU rather than the host wait for ZeRO-3's gradients.

Made for the releases in MADE_FOR; with any other release no patch is applied. Results are then the same, but
training is slower and takes more memory, and DeepSpeed rejects float16 on some CPUs.
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
    """Returns whether this release of DeepSpeed is one for which the patches were made."""
    return str(deepspeed.__version__).startswith(MADE_FOR)


def patch_library(deepspeed: Any) -> None:
    """Patches the parts that all engines in the process share."""
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
    """Clears a ZeRO-3 optimiser's recorded order of weights.

    DeepSpeed never revises which weights it keeps after a module, so after passes without gradient it would
    keep none for a backward pass. The record belongs to the `param_coordinator`, which is replaced by a copy.
    """
    if applies(deepspeed):
        offload = optimizer.parameter_offload
        offload.empty_partition_cache()
        offload.param_coordinator = copy.copy(offload.param_coordinator)
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()


def reduce_beside_host(deepspeed: Any, optimizer: Any) -> None:
    """Lets the host launch the next pass while a ZeRO-3 optimiser reduces gradients. Unsuitable for offloaded
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
