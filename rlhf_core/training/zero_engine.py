"""The DeepSpeed engine: ZeRO stages 1 to 3, on NCCL or gloo. The only file that imports deepspeed.

DeepSpeed's schedulers, data loaders and accumulation counter are not used: the training loops do this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.forecast.memory import KEPT
from rlhf_core.system.gc_pause import uncollected
from rlhf_core.training.deepspeed_patches import forget_order, patch_library, reduce_beside_host
from rlhf_core.training.engine import AdamW, adamw_optimizer, check_finite
from rlhf_core.training.process_group import PATIENCE, backend, join_ranks


def library() -> Any:
    """Imports and patches deepspeed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with uncollected():
        import deepspeed

    patch_library(deepspeed)
    return deepspeed


class ZeroEngine:
    """One rank of a DeepSpeed ZeRO group. RANK, WORLD_SIZE, LOCAL_RANK and the store's address must be set."""

    def __init__(self, module: nn.Module, adamw: AdamW, zero_stage: int, dtype: str, micro_batch_size: int, offload: bool = False):
        """`offload`: the optimiser's state is in pinned host memory and its step runs on the CPU (ZeRO-Offload, Ren et al. 2021)."""
        self._deepspeed = deepspeed = library()
        join_ranks()
        deepspeed.init_distributed(dist_backend=backend(), timeout=PATIENCE, verbose=False)  # under torchrun it joins them
        self.rank, self.world_size, self.sharing = dist.get_rank(), dist.get_world_size(), 1
        self.zero_stage = zero_stage
        self._trains = False
        self._frozen = not all(parameter.requires_grad for parameter in module.parameters())
        fetching = {}
        if zero_stage == 3:
            # A leaf's gradients are reduced when its input's gradient is computed; below frozen embeddings the first layer has none.
            _set_leaves(deepspeed, module, layers=not self._frozen)
            fetching = _fetching(module, keep=not self._frozen and self._on_every_rank(_small(module)))
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=adamw_optimizer([p for p in module.parameters() if p.requires_grad], adamw),
            config={
                "train_micro_batch_size_per_gpu": micro_batch_size,
                "gradient_accumulation_steps": 1,  # the loop marks the boundary itself
                "gradient_clipping": adamw.max_norm,
                "bf16": {"enabled": dtype == "bfloat16"},
                "zero_optimization": {"stage": zero_stage, "overlap_comm": torch.cuda.is_available(), "contiguous_gradients": True}
                | fetching
                | ({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offload else {}),
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the CPU too and needs no compiler
                "steps_per_print": 10**9,
            },
        )
        if zero_stage == 3 and torch.cuda.is_available() and not offload:
            reduce_beside_host(deepspeed, self._engine.optimizer)
        self.module, self.device = module, self._engine.device

    def __call__(self, *inputs: Any) -> Any:
        if self.zero_stage == 3 and not self._trains and torch.is_grad_enabled():
            self._trains = True
            forget_order(self._deepspeed, self._engine.optimizer)
        return self._engine(*inputs)

    def _on_every_rank(self, here: bool) -> bool:
        """Whether `here` is true on all ranks: GPUs may differ, and fetching is a collective."""
        return int(self.all_reduce(torch.tensor(float(here), device=_device()))) == self.world_size

    def backward(self, loss: Tensor, last: bool) -> None:
        # DeepSpeed averages over ranks; our losses have global denominators and need the sum.
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        check_finite(norm, "the gradient norm")
        return norm

    def all_reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
        if self.zero_stage < 3:
            return nullcontext()
        # Weights prefetched for a backward pass that did not run cannot be gathered.
        self._engine.optimizer.empty_partition_cache()
        return self._deepspeed.zero.GatheredParameters(list(parameters))

    def release(self) -> None:
        """Frees weights kept for a backward pass, and cached memory of the allocator."""
        if self.zero_stage == 3:
            self._engine.optimizer.empty_partition_cache()
        torch.cuda.empty_cache()

    def save_state(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="zero", save_latest=False, exclude_frozen_parameters=self._frozen)

    def load_state(self, folder: Path) -> None:
        loaded, _ = self._engine.load_checkpoint(
            str(folder), tag="zero", load_lr_scheduler_states=False, load_module_strict=not self._frozen
        )
        if loaded is None:
            raise ValueError(f"{folder} holds no DeepSpeed state: delete the folder to start the stage over")

    def barrier(self) -> None:
        dist.barrier()


def _set_leaves(deepspeed: Any, module: nn.Module, layers: bool) -> None:
    """Marks modules that are fetched as one. Layers: DeepSpeed's Python work per inner module takes longer than the collectives. Blocks
    with experts as modules: which experts run differs by rank, and fetching is a collective."""
    whole = {type(part) for part in module.modules() if isinstance(getattr(part, "experts", None), nn.ModuleList)}
    if layers:
        whole |= _layers(module)
    if whole:
        deepspeed.utils.set_z3_leaf_modules(module, list(whole))


def _device() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def _small(module: nn.Module) -> bool:
    """Whether all weights take at most `KEPT` of the GPU's memory."""
    memory = torch.cuda.get_device_properties(_device()).total_memory if torch.cuda.is_available() else 2**37
    return sum(weight.nbytes for weight in module.parameters()) <= KEPT * memory


def _fetching(module: nn.Module, keep: bool) -> dict[str, Any]:
    """Returns DeepSpeed's prefetch settings; with `keep`, fetched weights are kept until they are needed again."""
    layers = (part for part in module.modules() if isinstance(part, GradientCheckpointingLayer))
    largest = max((sum(weight.numel() for weight in layer.parameters()) for layer in layers), default=0)
    fetching: dict[str, Any] = {"stage3_prefetch_bucket_size": max(50_000_000, largest)}  # prefetches the next layer
    if keep:
        fetching |= {"stage3_max_live_parameters": 10**12, "stage3_max_reuse_distance": 10**12, "memory_efficient_linear": False}
    return fetching


def _layers(module: nn.Module) -> set[type[nn.Module]]:
    """Returns the layers' classes; none where layers share weights, whose gradients are complete only after the last layer."""
    layers = [part for _, part in module.named_modules(remove_duplicate=False) if isinstance(part, GradientCheckpointingLayer)]
    weights = [id(weight) for layer in layers for weight in layer.parameters()]
    return {type(layer) for layer in layers} if len(weights) == len(set(weights)) else set()
