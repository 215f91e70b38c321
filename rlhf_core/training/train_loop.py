"""Runs the training loop of SFT, reward model, DPO and KTO: one function that runs on every rank of the
stage.

A stage supplies items (documents or pairs), micro-batches, a denominator and a loss; the loop adds the order
of items, the learning rate schedule, metrics and resuming. The items of step k depend only on the seed and k,
so a resumed run trains on the same items.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from rlhf_core.config import Trainable
from rlhf_core.config.training.optimised import FEW_STEPS
from rlhf_core.data.documents import Document
from rlhf_core.models.weights.whole_weights import whole_size
from rlhf_core.objectives.losses import Loss
from rlhf_core.runs import resume_state
from rlhf_core.runs.metrics_log import Tracker
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system import progress
from rlhf_core.training.engine import Engine, Scaling, at, check_finite, sum_metrics
from rlhf_core.training.learning_rate import learning_rate, tell_long_warmup
from rlhf_core.training.skipped_steps import SkippedSteps, StepRow

LAST_STEPS = 4  # final metrics average at least this many steps, since the last step may have few items


class Task(NamedTuple):
    """A stage's training task. `loss(engine, micro_batch, denominator)` returns sums divided by the global
    denominator; `text` returns an item's text for use in messages; `documents` returns the documents of a
    micro-batch, whose images are decoded before the micro-batch needs them."""

    items: Sequence[Any]
    micro_batches: Callable[[Sequence[Any]], list[Any]]
    denominator: Callable[[Sequence[Any]], Any]
    loss: Callable[[Engine, Any, Any], Loss]
    evaluate: Callable[[Engine], dict[str, float]] | None
    show: tuple[str, ...]
    text: Callable[[Any], str] = lambda item: ""
    documents: Callable[[Any], Iterable[Document]] = lambda micro: ()


def fit(engine: Engine, run: RunDir, task: Task, config: Trainable, seed: int) -> dict[str, float]:
    """Trains to the end of the schedule. Returns the metrics of the last tenth of the steps, averaged with
    each step weighted by its items, and the evaluation metrics.

    Raises ValueError when there is nothing to train on, RuntimeError when no step had a gradient, and
    FloatingPointError when the loss or gradient norm is not finite in more steps than may be skipped. Every
    rank raises at the same step.
    """
    steps_per_epoch = -(-len(task.items) // config.train_batch_size)
    total = config.steps(len(task.items))
    if total == 0:
        raise ValueError("the data left no row to train on: see the counts of dropped and truncated rows")
    resume = resume_state.latest(run)
    first = resume.step if resume else 0
    if total < FEW_STEPS and engine.rank == 0 and not resume:
        print(
            f"few optimiser steps ({total}) for {len(task.items)} items: lower train_batch_size or raise"
            " max_epochs",
            flush=True,
        )
    if engine.rank == 0 and not resume:
        tell_long_warmup(total, config)
    recent: list[tuple[int, dict[str, float]]] = []  # number of items and metrics of the latest steps
    evaluation: dict[str, float] = {}
    trained = False
    if resume:
        with progress.files(resume.folder):
            engine.load_state(resume.folder)
        recent = resume.loop["recent"]
        evaluation = resume.loop["evaluation"]
        trained = resume.loop["trained"]
        print(f"resumed after step {first} of {total}", flush=True)
    tracker = Tracker(run, total, first) if engine.rank == 0 else None
    trainable = sum(whole_size(weight) for weight in engine.module.parameters() if weight.requires_grad)
    cadence = resume_state.Cadence(
        config.save_steps, config.save_minutes, run.path, trainable, config.ema is not None
    )
    saving = Saving(engine, run, config.keep_checkpoints)
    before = resume.loop.get("skipped", 0) if resume else 0
    skipped = SkippedSteps(run, config.skip_nonfinite_steps, before, first, writes=engine.rank == 0)

    for step in range(first, total):
        places = places_of_step(len(task.items), step, steps_per_epoch, config.train_batch_size, seed)
        rate = learning_rate(step, total, config.learning_rate, config)
        done = step + 1
        with at(f"step {done} of {total}"):
            metrics = take_step(engine, task, places, rate, skipped, done)
        if "grad_norm" in metrics:
            trained = trained or metrics["grad_norm"] > 0
            recent = [*recent, (len(places), metrics)][-max(LAST_STEPS, total // 10) :]
        if task.evaluate and (done == total or (config.eval_steps and done % config.eval_steps == 0)):
            evaluation = task.evaluate(engine)
            check_finite(evaluation["eval/loss"], f"after step {done} of {total} the loss on eval_data")
            metrics = metrics | evaluation
        if skipped.allowed:
            metrics = metrics | {"skipped_steps": float(skipped.count)}
        if engine.scaling is not None:
            metrics = metrics | scaling_metrics(engine.scaling)
        if tracker and (done % config.logging_steps == 0 or done == total):
            tracker.log(done, metrics, show=task.show)
        if done < total and due(engine, cadence, done):
            loop = {
                "recent": recent,
                "evaluation": evaluation,
                "trained": trained,
                "layout": resume_state.layout_of(config),
            }
            loop |= {"skipped": skipped.count}
            saving.begin(done, loop)
            cadence.saved()
    saving.finish()
    if tracker:
        tracker.close()
    if not trained:
        raise RuntimeError(f"none of the {total} steps had a gradient: nothing was trained")
    counts = {"steps": float(total), "skipped_steps": float(skipped.count)}
    if engine.scaling is not None:
        counts |= scaling_metrics(engine.scaling)
    return weighted_means(recent) | evaluation | counts


def scaling_metrics(scaling: Scaling) -> dict[str, float]:
    return {"loss_scale": scaling.scale, "overflow_steps": float(scaling.overflows)}


def weighted_means(steps: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Returns the mean of each metric over the steps that report it, weighted by their number of items."""
    values = {
        name: [(count, metrics[name]) for count, metrics in steps if name in metrics]
        for name in dict.fromkeys(name for _, metrics in steps for name in metrics)
    }
    return {
        name: sum(count * value for count, value in found) / sum(count for count, _ in found)
        for name, found in values.items()
    }


def take_step(
    engine: Engine, task: Task, places: Sequence[int], rate: float, skipped: SkippedSteps, number: int
) -> dict[str, float]:
    """Takes optimiser step `number` on the items at `places` and returns its metrics: for a skipped step only
    the learning rate, and for a float16 overflow everything but the gradient norm.

    Raises FloatingPointError, naming the rows, when the loss or the gradient norm is not finite and no more
    steps may be skipped.
    """
    items = [task.items[place] for place in places]
    try:
        metrics = optimiser_step_gradients(engine, task, items, tainted=skipped.allowed > 0)
        norm = _stepped(engine, rate, metrics)
        metrics |= {"learning_rate": rate} | ({} if norm is None else {"grad_norm": norm})
    except FloatingPointError as error:
        rows = [StepRow(place, task.text(item)) for place, item in zip(places, items, strict=True)]
        skipped.add(number, error, rows)
        return {"learning_rate": rate}
    return metrics


def _stepped(engine: Engine, rate: float, metrics: Mapping[str, float]) -> float | None:
    """Takes the engine's step and returns the gradient norm, as `Engine.step` does. If neither the loss nor
    the norm is finite, the error names the loss."""
    try:
        norm = engine.step(rate)
    except FloatingPointError:
        check_losses(metrics)
        raise
    if norm is None:
        check_losses(metrics)
        return None
    assert all(math.isfinite(metrics[name]) for name in losses_of(metrics)), (
        "a loss that is not finite had a finite gradient"
    )
    return norm


def optimiser_step_gradients(
    engine: Engine, task: Task, items: Sequence[Any], tainted: bool = False
) -> dict[str, float]:
    """Accumulates the gradient of one optimiser step and returns its metrics. `tainted`: as in
    `accumulate`."""
    denominator = task.denominator(items)
    return accumulate(
        engine,
        task.micro_batches(items),
        lambda micro: task.loss(engine, micro, denominator),
        tainted,
        task.documents,
    )


def items_of_step(items: Sequence[Any], step: int, steps_per_epoch: int, batch: int, seed: int) -> list[Any]:
    """Returns the items of one optimiser step (see `places_of_step`)."""
    return [items[place] for place in places_of_step(len(items), step, steps_per_epoch, batch, seed)]


def places_of_step(count: int, step: int, steps_per_epoch: int, batch: int, seed: int) -> Sequence[int]:
    """Returns the indices of an optimiser step's items, out of `count`. Each epoch is one seeded shuffle,
    split into batches, the last of which may be smaller."""
    epoch, position = divmod(step, steps_per_epoch)
    return order_of_epoch(count, epoch, seed)[position * batch : (position + 1) * batch]


@lru_cache(maxsize=2)
def order_of_epoch(count: int, epoch: int, seed: int) -> array[int]:
    """Returns a seeded permutation of `range(count)`, at 8 bytes per index. The result is cached, so do not
    modify it."""
    order = array("q", range(count))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return order


def accumulate(
    engine: Engine,
    micro_batches: Sequence[Any],
    loss: Callable[[Any], Loss],
    tainted: bool = False,
    documents: Callable[[Any], Iterable[Document]] = lambda micro: (),
) -> dict[str, float]:
    """Runs forward and backward over the micro-batches of one optimiser step and returns its metrics, summed
    over all ranks. Raises FloatingPointError on every rank when a loss in them is not finite; with `tainted`,
    the gradient becomes NaN on all ranks instead, so that the engine's step rejects and drops it.

    Micro-batches are dealt to the ranks round-robin. If the last round is incomplete, the remaining ranks
    repeat the last micro-batch with weight 0, so that every rank runs the same ZeRO-3 collectives. Ranks that
    share a pass each add the gradient of their part of it. The images of the next pass (`documents`) are
    decoded while a pass is computed.
    """
    mine = passes_of_rank(len(micro_batches), engine)
    reader = getattr(engine.module, "reader", None)

    def request_images(number: int) -> None:
        if reader is not None and number < len(mine):
            reader.request(documents(micro_batches[mine[number].place]))

    request_images(0)
    sums: dict[str, torch.Tensor] = {}
    total = torch.zeros((), device=engine.device)
    for number, own in enumerate(mine, 1):
        request_images(number)
        result = loss(micro_batches[own.place])
        weighted = result.loss * own.weight
        last = number == len(mine)
        if tainted:
            total = total + result.loss.detach().float()
        if tainted and last:
            weighted = weighted * torch.where(engine.all_reduce(total).isfinite(), 1.0, math.nan)
        engine.backward(weighted, last=last)
        progress.made()
        for name, value in result.metrics.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach() * own.counted
    metrics = sum_metrics(engine, sums)
    if not tainted:
        check_losses(metrics)
    return metrics


def losses_of(metrics: Mapping[str, float]) -> list[str]:
    """Returns the names of the metrics that are losses."""
    return [name for name in metrics if name.rpartition("/")[2] == "loss"]


def check_losses(metrics: Mapping[str, float]) -> None:
    """Raises FloatingPointError when a loss is not finite."""
    for name in losses_of(metrics):
        check_finite(metrics[name], "the loss")


class RankPass(NamedTuple):
    """One pass of this rank: the index of its micro-batch, the micro-batch's weight in the loss, and its
    weight in sums over all ranks."""

    place: int
    weight: float
    counted: float


class Holder(Protocol):
    """One rank of a model, either a training engine or a model that is not trained."""

    rank: int
    world_size: int
    sharing: int


def passes_of_rank(count: int, holder: Holder) -> list[RankPass]:
    """Returns the passes of this rank over `count` micro-batches. Ranks that share passes get the same list;
    only the first of them counts the results."""
    first = holder.rank % holder.sharing == 0
    dealt = deal(count, holder.rank // holder.sharing, replicas(holder))
    return [RankPass(index, weight, weight * first) for index, weight in dealt]


def replicas(holder: Holder) -> int:
    """Returns how many passes the ranks compute at the same time."""
    return holder.world_size // holder.sharing


def deal(count: int, rank: int, world_size: int) -> list[tuple[int, float]]:
    """Returns this rank's (index, weight) pairs out of `count` items. Every rank gets the same number of
    pairs; surplus pairs have weight 0."""
    turns = -(-count // world_size)
    indices = [turn * world_size + rank for turn in range(turns)]
    return [(index, 1.0) if index < count else (count - 1, 0.0) for index in indices]


def due(engine: Engine, cadence: resume_state.Cadence, done: int) -> bool:
    """Returns whether it is time for all ranks to save, by rank 0's clock."""
    if not cadence.by_clock or engine.world_size == 1:
        return cadence.due(done)
    here = engine.rank == 0 and cadence.due(done)
    return bool(engine.all_reduce(torch.tensor(float(here), device=engine.device)))


def held_out_metrics(
    engine: Engine, micro_batches: Sequence[Any], loss: Callable[[Any], Loss]
) -> dict[str, float]:
    """Returns the summed metrics of all micro-batches, computed without gradients and prefixed with `eval/`.
    Each rank computes its share; every rank gets the totals."""
    engine.module.eval()
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for own in passes_of_rank(len(micro_batches), engine):
            for name, value in loss(micro_batches[own.place]).metrics.items():
                sums[name] = (
                    sums.get(name, torch.zeros((), dtype=torch.float64, device=value.device))
                    + value.double() * own.counted
                )
            progress.made()
    engine.module.train()
    return {f"eval/{name}": value for name, value in sum_metrics(engine, sums).items()}


class Saving:
    """Saves the states of a training stage while it trains, on every rank. Rank 0 publishes a state once all
    ranks have written their parts."""

    def __init__(self, engine: Engine, run: RunDir, keep: int):
        self._engine = engine
        self._run = run
        self._keep = keep
        self._commit: resume_state.StateCommit | None = None

    def begin(self, step: int, loop: dict[str, Any]) -> None:
        """Starts saving a state. This is a collective operation. Returns once this rank has copied its part.
        Raises the error that stopped the previous save, such as OSError."""
        self.finish()
        engine = self._engine
        run = self._run
        if engine.rank == 0:
            resume_state.open_state(run, step, clear=True)
        engine.barrier()
        engine.save_state(resume_state.open_state(run, step, clear=False))
        if engine.rank == 0:
            files = [resume_state.rank_file(rank) for rank in range(engine.world_size)]
            self._commit = resume_state.StateCommit(run, step, self._keep, loop, files)

    def finish(self) -> None:
        """Waits until the last state is saved."""
        self._engine.finish_saving()
        if self._commit:
            self._commit.wait()
