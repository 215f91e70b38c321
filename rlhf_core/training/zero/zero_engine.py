"""Implements the DeepSpeed engine: ZeRO stages 1 to 3, on NCCL or gloo. Only this file imports deepspeed.

DeepSpeed's schedulers, data loaders and accumulation counter are not used; the training loops replace them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.cluster.rank_environment import PATIENCE
from rlhf_core.config.training.optimised import HALF
from rlhf_core.forecast.memory import KEPT
from rlhf_core.models.kernels.feed_forward import is_split
from rlhf_core.models.weights.whole_weights import whole_size
from rlhf_core.system.gc_pause import uncollected
from rlhf_core.training.engine import AdamW, Scaling, adamw_optimizer, check_finite, set_rates
from rlhf_core.training.moving_average import MovingAverage
from rlhf_core.training.process_group import backend, join_ranks
from rlhf_core.training.state_files import WeightPart, read_parts, stored_steps
from rlhf_core.training.state_writer import StateWriter
from rlhf_core.training.zero.deepspeed_patches import forget_order, patch_library, reduce_beside_host
from rlhf_core.training.zero.loss_scale import LossScale
from rlhf_core.training.zero.zero_options import ZeroOptions, engine_config, require_known, unknown_options
from rlhf_core.training.zero.zero_parts import (
    drop_gradients,
    flat_weights,
    make_state,
    steps_of,
    to_weights,
    zero_parts,
)


def library() -> Any:
    """Imports and patches deepspeed, and returns the module."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with uncollected():
        import deepspeed

    patch_library(deepspeed)
    return deepspeed


def join_group() -> None:
    """Makes this process a rank of its group, as `join_ranks` does, and initialises DeepSpeed's
    communication."""
    join_ranks()
    # joins the ranks if the caller has not, as under torchrun
    library().init_distributed(dist_backend=backend(), timeout=PATIENCE, verbose=False)


def unknown(options: Mapping[str, Any]) -> list[str]:
    """Returns messages about options in the recipe's `deepspeed` field that the installed DeepSpeed does not
    know; empty if DeepSpeed is not installed."""
    try:
        return unknown_options(library(), options)
    except ImportError:
        return []


class ZeroEngine:
    """One rank of a DeepSpeed ZeRO group. RANK, WORLD_SIZE, LOCAL_RANK and the store's address must be
    set."""

    def __init__(
        self,
        module: nn.Module,
        adamw: AdamW,
        zero_stage: int,
        dtype: str,
        micro_batch_size: int,
        options: ZeroOptions = ZeroOptions(),  # noqa: B008 it is a tuple
    ):
        """Raises ValueError for options that the installed DeepSpeed does not know."""
        self._deepspeed = deepspeed = library()
        require_known(deepspeed, options.more)
        join_group()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.sharing = 1
        self.zero_stage = zero_stage
        self._writer = StateWriter(self.rank, self.world_size)
        self._trains = False
        self._frozen = not all(parameter.requires_grad for parameter in module.parameters())
        fetching = {}
        if zero_stage == 3:
            if self._frozen:
                require_input_gradients(module)
            set_leaves(deepspeed, module)
            small = not options.param_offload and _small(module)
            fetching = prepared(module, dtype, keep=not self._frozen and self._on_every_rank(small))
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=adamw_optimizer(module, trained, adamw),
            config=engine_config(
                adamw, zero_stage, dtype, micro_batch_size, options, torch.cuda.is_available(), fetching
            ),
        )
        if (
            zero_stage == 3
            and torch.cuda.is_available()
            and not (options.adam_offload or options.param_offload)
        ):
            reduce_beside_host(deepspeed, self._engine.optimizer)
        self._loss_scale = LossScale(self._engine.optimizer.loss_scaler) if dtype == "float16" else None
        self._average: MovingAverage | None = None
        if adamw.average:
            self._average = MovingAverage(flat_weights(self._engine.optimizer, zero_stage), adamw.average)
        self.module = module
        self.device = self._engine.device

    def __call__(self, *inputs: Any) -> Any:
        if self.zero_stage == 3 and not self._trains and torch.is_grad_enabled():
            self._trains = True
            forget_order(self._deepspeed, self._engine.optimizer)
        return self._engine(*inputs)

    def _on_every_rank(self, here: bool) -> bool:
        """Returns whether `here` is true on all ranks. GPUs may differ, but fetching is a collective, so all
        ranks must agree."""
        return int(self.all_reduce(torch.tensor(float(here), device=rank_device()))) == self.world_size

    def backward(self, loss: Tensor, last: bool) -> None:
        # DeepSpeed averages over ranks; our losses have global denominators, so the gradients must be summed.
        self._last_loss = loss.detach()
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    @property
    def scaling(self) -> Scaling | None:
        return None if self._loss_scale is None else self._loss_scale.scaling

    def step(self, learning_rate: float) -> float | None:
        self._writer.check()
        set_rates(self._engine.optimizer.param_groups, learning_rate)
        overflow = False
        if self._loss_scale is None:
            self._engine.step()
        else:
            overflow = self._loss_scale.step(self._engine.step, self._tainted)
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):  # DeepSpeed has skipped the step
            drop_gradients(self._engine.optimizer, self.zero_stage)
        if overflow:
            return None
        check_finite(norm, "the gradient norm")
        if self._average is not None:
            self._average.update()
        return norm

    def _tainted(self) -> bool:
        """Returns whether the loss of the step's last pass is not finite on any rank (see `accumulate`). This
        is a collective operation."""
        return bool(self.all_reduce((~self._last_loss.isfinite()).float()))

    def all_reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
        if self.zero_stage < 3:
            return nullcontext()
        # Weights prefetched for a backward pass that did not run cannot be gathered.
        self._engine.optimizer.empty_partition_cache()
        return self._deepspeed.zero.GatheredParameters(list(parameters))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        assert self._average is not None, "the recipe sets ema"
        self._swap(self._average)
        yield
        self._swap(self._average)

    def _swap(self, average: MovingAverage) -> None:
        average.swap()
        to_weights(self._engine.optimizer, self.zero_stage)

    def _parts(self) -> Iterator[WeightPart]:
        averages = [] if self._average is None else self._average.values
        return zero_parts(self._engine.optimizer, self.module, self.zero_stage, self.rank, averages)

    def release(self) -> None:
        """Frees weights kept for a backward pass, and the allocator's cached memory."""
        if self.zero_stage == 3:
            self._engine.optimizer.empty_partition_cache()
        torch.cuda.empty_cache()

    def save_state(self, folder: Path) -> None:
        optimizer = self._engine.optimizer
        if not optimizer.optimizer.state:  # no step was taken, as for an actor that is still frozen
            make_state(optimizer, self.zero_stage, 0.0)
        if self._loss_scale is not None and self.rank == 0:
            self._loss_scale.save(folder)
        self._writer.start(folder, steps_of(optimizer), self._parts())

    def finish_saving(self) -> None:
        self._writer.finish()

    def load_state(self, folder: Path) -> None:
        optimizer = self._engine.optimizer
        names = [name for name, weight in self.module.named_parameters() if weight.requires_grad]
        steps = stored_steps(folder)
        make_state(optimizer, self.zero_stage, steps)
        read_parts(folder, self._parts(), names)
        if self._average is not None:
            self._average.steps = int(steps)
        if self._loss_scale is not None:
            self._loss_scale.load(folder)
        to_weights(optimizer, self.zero_stage)

    def barrier(self) -> None:
        dist.barrier()


def set_leaves(deepspeed: Any, module: nn.Module) -> None:
    """Marks the modules whose weights are fetched as a unit.

    Layers are marked because DeepSpeed's Python work per inner module takes longer than the collectives. Two
    kinds of blocks are also marked, because fetching is a collective operation: blocks whose experts are
    modules, since ranks run different experts, and blocks that compute their tokens in parts, since the
    number of parts differs between ranks.
    """
    whole = {
        type(part) for part in module.modules() if isinstance(getattr(part, "experts", None), nn.ModuleList)
    }
    found = _layers(module)
    whole = whole | found
    if whole:
        deepspeed.utils.set_z3_leaf_modules(module, list(whole))
    for block in [] if found else split_blocks(module):
        deepspeed.utils.set_z3_leaf_module(block, True)


def rank_device() -> torch.device:
    """Returns the device on which this rank computes."""
    return (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def prepared(module: nn.Module, dtype: str, keep: bool) -> dict[str, Any]:
    """Returns DeepSpeed's prefetch settings (see `_fetching`). For a model that may have been sharded as it
    was loaded, also does the work that DeepSpeed then skips: it moves tensors that are still whole to the
    device, and casts weights to the dtype of the sharded weights. Without `keep`, also stops matrix products
    from holding on to fetched weights."""
    if not keep:
        library().zero.Init(module=nn.Module(), mem_efficient_linear=True)
    for tensor in [*module.parameters(), *module.buffers()]:
        if not hasattr(tensor, "ds_id"):
            narrow = dtype in HALF and tensor.is_floating_point() and isinstance(tensor, nn.Parameter)
            tensor.data = tensor.data.to(rank_device(), getattr(torch, dtype) if narrow else tensor.dtype)
    return _fetching(module, keep)


def require_input_gradients(module: nn.Module) -> None:
    """Makes the layers' inputs require a gradient when gradients are enabled. For a layer that is fetched as
    a unit, DeepSpeed reduces gradients when the gradient of its input is computed; with frozen embeddings,
    the first layer's input would have no gradient."""

    def require(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = inputs[0] if inputs else named.get("hidden_states")
        if (
            torch.is_grad_enabled()
            and isinstance(hidden, Tensor)
            and hidden.is_floating_point()
            and not hidden.requires_grad
        ):
            hidden.requires_grad_()

    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer):
            part.register_forward_pre_hook(require, with_kwargs=True)


def _small(module: nn.Module) -> bool:
    """Returns whether all weights together take at most the fraction `KEPT` of the GPU's memory."""
    memory = (
        torch.cuda.get_device_properties(rank_device()).total_memory if torch.cuda.is_available() else 2**37
    )
    return sum(whole_size(weight) * weight.itemsize for weight in module.parameters()) <= KEPT * memory


def _fetching(module: nn.Module, keep: bool) -> dict[str, Any]:
    """Returns DeepSpeed's prefetch settings. With `keep`, fetched weights are kept until they are needed
    again. Without it, DeepSpeed keeps up to 1e9 weights that a rank will soon need again on GPUs, and none on
    CPUs, where ranks share the host's memory."""
    layers = (part for part in module.modules() if isinstance(part, GradientCheckpointingLayer))
    largest = max((sum(whole_size(weight) for weight in layer.parameters()) for layer in layers), default=0)
    one_layer = max(50_000_000 if torch.cuda.is_available() else 1, largest)  # fits the next layer
    fetching: dict[str, Any] = {
        "stage3_prefetch_bucket_size": one_layer,
        "reduce_bucket_size": min(500_000_000, one_layer),
    }
    if keep:
        fetching |= {
            "stage3_max_live_parameters": 10**12,
            "stage3_max_reuse_distance": 10**12,
            "memory_efficient_linear": False,
        }
    elif not torch.cuda.is_available():
        fetching |= {"stage3_max_live_parameters": 2 * one_layer, "stage3_max_reuse_distance": 0}
    return fetching


def _layers(module: nn.Module) -> set[type[nn.Module]]:
    """Returns the classes of the layers, or none if layers share weights, since the gradients of shared
    weights are complete only after the last layer."""
    layers = [
        part
        for _, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, GradientCheckpointingLayer)
    ]
    return set() if _share_weights(layers) else {type(layer) for layer in layers}


def split_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks that compute their tokens in parts. Raises ValueError if they share weights, which
    `_layers` does not allow either."""
    blocks = [part for _, part in module.named_modules(remove_duplicate=False) if is_split(part)]
    if _share_weights(blocks):
        raise ValueError(
            "mlp_tokens: feed-forward blocks that share weights cannot be computed in parts with"
            " zero_stage=3: leave it out"
        )
    return blocks


def _share_weights(parts: Sequence[nn.Module]) -> bool:
    weights = [id(weight) for part in parts for weight in part.parameters()]
    return len(weights) > len(set(weights))
