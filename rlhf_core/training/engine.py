"""Defines the interface of a training engine, and the plain-torch engine of a single rank.

`ZeroEngine` in `zero_engine.py` is the DeepSpeed implementation. Both engines expect losses already divided
by a denominator counted over the whole optimiser step and all ranks, so gradients are summed over
micro-batches and ranks, never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlhf_core.config.training.optimiser_fields import Decayed
from rlhf_core.models.weights.frozen_weights import embeddings_and_heads
from rlhf_core.models.weights.trained_encoder import trained_encoder_of
from rlhf_core.models.weights.whole_weights import whole_shape
from rlhf_core.training.moving_average import KIND as AVERAGE
from rlhf_core.training.moving_average import MovingAverage
from rlhf_core.training.muon import hidden_matrices, muon_optimizer
from rlhf_core.training.state_files import KINDS, WeightPart, read_parts, stored_steps
from rlhf_core.training.state_writer import StateWriter


class AdamW(NamedTuple):
    """The optimiser's constants; the learning rate is an argument of each step."""

    betas: tuple[float, float]
    weight_decay: float
    max_norm: float
    decay: Decayed = "matrices"
    average: float | None = None  # decay of the weights' moving average; None: no moving average
    muon: bool = False  # use Muon instead of AdamW for hidden matrices (`hidden_matrices`)
    encoder_rate: float = 1.0  # learning rate of a trained image encoder, as a share of each step's


class Scaling(NamedTuple):
    """The loss scale of float16 training, and the number of steps skipped because a gradient overflowed."""

    scale: float
    overflows: int


class Engine(Protocol):
    """One rank of one trained model. `module` is a `Policy` or a `Scorer`."""

    module: nn.Module
    rank: int
    world_size: int
    sharing: int  # neighbouring ranks that share each pass (`config.sequence_parallel_size`)
    device: torch.device

    def __call__(self, *inputs: Any) -> Any: ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulates the gradient, in fp32 if the step has several micro-batches. `last` marks the final one
        of an optimiser step."""

    def step(self, learning_rate: float) -> float | None:
        """Takes one optimiser step and returns the gradient norm before clipping.

        Returns None in float16 when the step is skipped because a gradient overflowed. Raises
        FloatingPointError when the norm is not finite. In both cases the weights and the optimiser stay
        unchanged and the gradient is dropped.
        """

    @property
    def scaling(self) -> Scaling | None:
        """Returns the loss scale and the number of skipped steps in float16, otherwise None."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` over all ranks."""

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
        """Gathers these parameters on every rank while the context is open. This is a collective
        operation."""

    def averaged(self) -> AbstractContextManager[None]:
        """Swaps in the moving average of the weights while the context is open. This is a collective
        operation."""

    def release(self) -> None:
        """Frees the allocator's cached memory."""

    def save_state(self, folder: Path) -> None:
        """Copies this rank's training state and writes it in the background (see `state_writer`). `step` and
        `finish_saving` raise the errors of that write."""

    def finish_saving(self) -> None:
        """Waits until the last state is written."""

    def load_state(self, folder: Path) -> None:
        """Reads a state written by any number of ranks. This is a collective operation. Raises ValueError if
        the state belongs to another model."""

    def barrier(self) -> None:
        """Waits for all ranks."""


class TorchEngine:
    """Trains on one process and one device with AdamW, or with Muon and AdamW, keeping fp32 master weights
    for bf16 weights (Micikevicius et al. 2018, section 3.1).

    A typical update is smaller than the spacing of bf16 numbers and would be lost in bf16. The gradient of
    one pass would likewise be lost in a bf16 sum over many passes, so gradients of bf16 weights are added to
    the fp32 gradients of the master weights and then freed.
    """

    def __init__(self, module: nn.Module, adamw: AdamW):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module = module.to(self.device)
        self.rank = 0
        self.world_size = 1
        self.sharing = 1
        self.scaling: Scaling | None = None  # float16 only, which requires DeepSpeed
        self._adamw = adamw
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimised = {
            name: p.detach().float() if p.dtype.itemsize < 4 else p for name, p in self._weights.items()
        }
        self._optimizers = optimizers_of(module, self._optimised, adamw)
        self._in_bf16 = [
            name for name, weight in self._weights.items() if weight is not self._optimised[name]
        ]
        self._average = MovingAverage([*self._optimised.values()], adamw.average) if adamw.average else None
        self._several_passes = False  # whether the current step has more than one pass
        for name in self._in_bf16:
            self._weights[name].register_post_accumulate_grad_hook(self._hand_over_of(name))
        self._writer = StateWriter(0, 1)

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._several_passes = self._several_passes or not last
        loss.backward()

    def _hand_over_of(self, name: str) -> Callable[[Tensor], None]:
        """Returns the hook that autograd calls once a bf16 weight's gradient from a pass is complete."""

        def hand_over(_: Tensor) -> None:
            if self._several_passes:
                self._hand_over(name)

        return hand_over

    def _hand_over(self, name: str) -> None:
        """Adds a bf16 weight's gradient to the gradient of its master weight, and frees the former."""
        weight = self._weights[name]
        master = self._optimised[name]
        if weight.grad is None:
            return
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    def step(self, learning_rate: float) -> float:
        self._writer.check()
        for name in self._in_bf16:
            self._hand_over(name)  # for a step with one pass; otherwise the hooks have done it
        self._several_passes = False
        norm = float(nn.utils.clip_grad_norm_(self._optimised.values(), self._adamw.max_norm))
        if not math.isfinite(norm):
            self._drop_gradients()
        check_finite(norm, "the gradient norm")
        for optimizer in self._optimizers:
            set_rates(optimizer.param_groups, learning_rate)
            optimizer.step()
        self._drop_gradients()
        if self._average is not None:
            self._average.update()
        self._round()
        return norm

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _round(self) -> None:
        """Rounds the fp32 master weights into the bf16 weights."""
        if self._in_bf16:
            masters = [self._optimised[name] for name in self._in_bf16]
            torch._foreach_copy_([self._weights[name] for name in self._in_bf16], masters)

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        assert self._average is not None, "the recipe sets ema"
        self._average.swap()
        self._round()
        yield
        self._average.swap()
        self._round()

    def release(self) -> None:
        torch.cuda.empty_cache()

    def save_state(self, folder: Path) -> None:
        counted = [float(state["step"]) for state in self._states().values() if "step" in state]
        # empty if no step was taken, as for an actor that is still frozen
        steps = max(counted, default=0.0)
        self._make_state(0.0)
        self._writer.start(folder, steps, self._parts())

    def finish_saving(self) -> None:
        self._writer.finish()

    def load_state(self, folder: Path) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()
        steps = stored_steps(folder)
        self._make_state(steps)
        read_parts(folder, self._parts(), self._weights)
        if self._average is not None:
            self._average.steps = int(steps)
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._optimised[name])

    def _states(self) -> dict[Tensor, dict[str, Tensor]]:
        """Returns the state of every weight that has one."""
        return {weight: state for optimizer in self._optimizers for weight, state in optimizer.state.items()}

    def _make_state(self, steps: float) -> None:
        """Creates a zero state for weights that no step has updated."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    if weight not in optimizer.state:
                        optimizer.state[weight] = first_state(optimizer, weight, steps)

    def _parts(self) -> Iterator[WeightPart]:
        states = self._states()
        for place, (name, weight) in enumerate(self._optimised.items()):
            tensors = {"weight": weight.detach()}
            tensors |= {kind: value for kind, value in states[weight].items() if kind != "step"}
            if self._average is not None:
                tensors[AVERAGE] = self._average.values[place]
            yield WeightPart(name, 0, tensors)

    def barrier(self) -> None:
        """Does nothing, because there is only one rank."""


def optimizers_of(
    module: nn.Module, trained: Mapping[str, Tensor], adamw: AdamW
) -> list[torch.optim.Optimizer]:
    """Returns the optimisers that together train `trained`: AdamW, preceded by Muon for the hidden matrices
    if `adamw.muon` is set. `trained`: as in `adamw_optimizer`."""
    if not adamw.muon:
        return [adamw_optimizer(module, trained, adamw)]
    hidden = hidden_matrices(module)
    names = {name for name, weight in module.named_parameters() if weight in hidden}
    muon = muon_optimizer([trained[name] for name in trained if name in names], adamw.weight_decay)
    others = {name: weight for name, weight in trained.items() if name not in names}
    return [muon, adamw_optimizer(module, others, adamw)] if others else [muon]


def first_state(optimizer: torch.optim.Optimizer, weight: Tensor, steps: float) -> dict[str, Tensor]:
    """Returns a zero state for a weight, as `optimizer` would create in its first step, with AdamW's step
    count set to `steps`."""
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": torch.zeros_like(weight)}
    place = weight.device if optimizer.defaults["fused"] else torch.device("cpu")
    step = torch.tensor(steps, dtype=torch.float32, device=place)
    return {"step": step} | {kind: torch.zeros_like(weight) for kind in KINDS[1:]}


def adamw_optimizer(module: nn.Module, trained: Mapping[str, Tensor], adamw: AdamW) -> torch.optim.AdamW:
    """Returns fused AdamW. `trained`: the weights to optimise, or their fp32 copies, by their names in
    `module`. `adamw.decay` determines which of these weights decay, and `adamw.encoder_rate` how fast an
    image encoder learns."""
    outer = embeddings_and_heads(module) if adamw.decay == "hidden" else set()
    encoder = trained_encoder_of(module) if adamw.encoder_rate != 1 else None
    of_encoder = set() if encoder is None else set(encoder.parameters())
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for name, weight in module.named_parameters():
        if name in trained:
            is_matrix = len(whole_shape(weight)) >= 2
            decays = adamw.decay == "all" or (is_matrix and weight not in outer)
            rate = adamw.encoder_rate if weight in of_encoder else 1.0
            groups.setdefault((rate, decays), []).append(trained[name])
    by_decay = [
        {
            "params": groups[rate, decays],
            "weight_decay": adamw.weight_decay if decays else 0.0,
            "rate": rate,
        }
        for rate, decays in sorted(groups, reverse=True)
    ]
    return torch.optim.AdamW(
        by_decay,
        lr=0.0,
        betas=adamw.betas,
        eps=1e-8,
        fused=True,
    )


def set_rates(groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
    """Sets the learning rate of each parameter group to its share of a step's rate (see
    `adamw_optimizer`)."""
    for group in groups:
        group["lr"] = learning_rate * group.get("rate", 1.0)


def check_finite(value: float, what: str) -> None:
    """Raises FloatingPointError when `value` is infinite or NaN; `what` names it in the message."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"{what} is {value}, and training ends here: lower the learning rate, or check the data and the"
            " model it starts from"
        )


@contextmanager
def at(step: str) -> Iterator[None]:
    """Adds `step` to the message of any FloatingPointError raised in the block."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{step}: {error}") from None


def sum_metrics(engine: Engine, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns metrics summed over all ranks, in one collective operation and one transfer."""
    values = engine.all_reduce(
        torch.stack([value.detach().double().to(engine.device) for value in sums.values()])
    )
    return dict(zip(sums, values.tolist(), strict=True))


def on_cpu(engine: Engine, weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies `weights`, as returned by `checkpoint_weights`, to rank 0's host memory. This is a collective
    operation. Raises FloatingPointError when any of them is not finite."""
    return {
        name: weight.to("cpu", copy=True).contiguous() for name, weight in finite(weights) if engine.rank == 0
    }


def finite(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields `weights`, then raises FloatingPointError if any of them was not finite. It raises the error
    only after the last weight, so that no other rank is left waiting in a gather."""
    largest: dict[str, float] = {}
    for name, weight in weights:
        if weight.is_floating_point() and weight.itemsize > 1 and weight.numel():
            # makes no copy; propagates NaN
            largest[name] = float(torch.linalg.vector_norm(weight, float("inf")))
        yield name, weight
    for name, value in largest.items():
        check_finite(value, f"the largest value of the trained weight {name}")
