"""Trains with Kahneman-Tversky optimisation on unpaired answers (Ethayarajh et al. 2024).

The loss compares each answer's implicit reward with a KL that is one number for the whole optimiser step.
This KL is the mean of log pi - log ref over mismatched pairs. Each pair combines a prompt of the step with
the previous item's answer. A pass without gradient computes it over the whole step and all ranks, before the
first micro-batch. It therefore does not depend on the split into micro-batches and ranks. All reference
log-probs, including the log-probs of the mismatched pairs of all epochs, are computed once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import KTO, Data, Source
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.data_report import write_data_report
from rlhf_core.data.documents import Document, Labelled, Lazy, answered, joined, mapped
from rlhf_core.data.packing import Passes
from rlhf_core.data.sources import labelled_answers
from rlhf_core.data.survey import Loaded
from rlhf_core.hub.vocabulary import require_same_vocabulary
from rlhf_core.models.kernels.attention import row_width
from rlhf_core.models.picture_reading import have_images, reads_pictures, require_images
from rlhf_core.objectives.collate import sent
from rlhf_core.objectives.losses import Loss, kto_loss, with_balance
from rlhf_core.runs.run_dir import STATE, Outcome, RunDir, StageRequest
from rlhf_core.stages.reference_logprobs import (
    Model,
    answer_logprobs_and_balance,
    dealt_logprobs,
    module_of,
    reference_logprobs,
)
from rlhf_core.training.engine import Engine
from rlhf_core.training.ranks import (
    EXPORT_TRIAL,
    finish_training,
    make_engine,
    on_ranks,
    open_frozen,
    policy_to_train,
    try_export,
)
from rlhf_core.training.train_loop import Task, fit, held_out_metrics, items_of_step, replicas

Mismatch = tuple[int, int]  # indices of the items that provide the prompt and the answer


class KtoAnswer(NamedTuple):
    """Holds an answer, its index in the data (held-out answers follow the training data), and its log-prob
    under the reference."""

    place: int
    answer: Labelled
    ref: float


def length(item: KtoAnswer) -> int:
    """Returns the item's number of tokens."""
    return len(item.answer.document)


class Step(NamedTuple):
    """Holds the values of a whole optimiser step that a loss needs: its counts, and the KL to the reference,
    clamped to 0 or more."""

    answers: float
    desirable: float
    undesirable: float
    kl: float


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Trains `config.policy` on labelled answers and writes the output `checkpoint`."""
    return on_ranks(train, request, run)


def train(request: StageRequest, run: RunDir) -> Outcome:
    """Runs one rank of the stage."""
    config = cast(KTO, request.config)
    source = request.inputs[config.policy]
    reference = request.inputs[config.reference or config.policy]
    tokenizer = load_tokenizer(source, request.trust_remote_code)
    require_same_vocabulary(source, [reference], request.trust_remote_code)
    pad = tokenizer.pad_token_id
    data = load_answers(request, config, tokenizer, config.data, run / STATE)
    held_out = (
        load_answers(request, config, tokenizer, config.eval_data, run / STATE) if config.eval_data else None
    )
    answers = KtoAnswers(config, data.items, held_out.items if held_out else [], request.seed)
    require_images(config.image_encoder, have_images(data.report))
    trained = policy_to_train(request, config, source)
    has_images = have_images(data.report, held_out.report if held_out else None)
    if has_images:
        reads_pictures(
            trained, source, tokenizer, config.dtype, config.sequence_parallel_size, config.image_encoder
        )
    engine = make_engine(trained, config)
    try_export(engine, run / EXPORT_TRIAL, source, config.lora, request.trust_remote_code)
    passes = Passes(
        *config.train_pass,
        apart=bool(trained.document_leak),
        width=row_width(trained.model),
    )
    if engine.rank == 0:
        write_data_report(
            run, request.name, data=data.report, eval_data=held_out.report if held_out else None
        )

    def open_reference() -> Model:
        if not config.reference:
            return engine
        model = open_frozen(reference, config, request.trust_remote_code, engine.device)
        if has_images:
            own = load_tokenizer(reference, request.trust_remote_code)
            reads_pictures(module_of(model), reference, own, config.dtype)
        return model

    refs = reference_logprobs(
        engine, run, open_reference, reference, answers.micro_batches(passes), passes, pad, mean=False
    )
    losses = KtoLosses(config, engine, answers, refs, passes, pad)
    held_out_items = answers.held_out(refs)
    task = Task(
        answers.training(refs),
        lambda items: passes._replace(ranks=replicas(engine)).split(items, length),
        losses.step_of,
        losses.loss,
        (lambda _: losses.evaluate(held_out_items)) if held_out_items else None,
        show=("loss", "accuracy", "margin", "kl"),
        text=lambda item: tokenizer.decode(item.answer.document.tokens),
        documents=lambda items: [item.answer.document for item in items],
    )
    metrics = fit(engine, run, task, config, request.seed) | data.report.metrics("data")
    metrics["data/desirable"] = float(sum(item.desirable for item in data.items))
    return finish_training(engine, request, run, source, config.lora, metrics)


def load_answers(
    request: StageRequest, config: KTO, tokenizer: PreTrainedTokenizerBase, data: Data | None, folder: Path
) -> Loaded[Labelled]:
    """Loads the answers of a file mixture. Without a mixture (no `data`), loads the answers of a preferences
    stage."""
    own = data or Data(
        sources=(Source(path=request.inputs[config.answers or ""]),),
        template=config.template,
        template_args=config.template_args,
    )
    renderer = Renderer(tokenizer, own.template, verbatim=data is None, template_args=own.template_args)
    return labelled_answers(own, renderer, config.max_len, request.seed, folder)


class KtoAnswers:
    """Holds the answers to train on, followed by the held-out answers, and the mismatched pairs of both."""

    def __init__(self, config: KTO, training: Sequence[Labelled], held_out: Sequence[Labelled], seed: int):
        self._all = joined(training, held_out) if held_out else training
        self._count = len(training)
        self._documents = mapped(self._all, lambda item: item.document)
        self._max_len = config.max_len
        self._mismatches = all_mismatches(
            len(training), len(held_out), config.train_batch_size, config.max_epochs, seed
        )

    def mismatched(self, pair: Mismatch) -> Document:
        """Returns the document of a mismatched pair."""
        return mismatch(self._documents[pair[0]], self._documents[pair[1]], self._max_len)

    def micro_batches(self, passes: Passes) -> Sequence[Sequence[Document]]:
        """Returns the documents of all answers, then of all mismatched pairs, grouped by forward pass."""
        return joined(
            passes.in_order(self._documents, len),
            passes.in_order(mapped(self._mismatches, self.mismatched), len),
        )

    def place_of(self, pair: Mismatch) -> int:
        """Returns the place of a mismatched pair in the order of `micro_batches`."""
        return len(self._all) + self._mismatches.index(pair)

    def training(self, refs: Sequence[float]) -> Sequence[KtoAnswer]:
        """Returns the answers to train on. `refs` holds log-probs in the order of `micro_batches`."""
        return Lazy(self._count, lambda index: KtoAnswer(index, self._all[index], refs[index]))

    def held_out(self, refs: Sequence[float]) -> list[KtoAnswer]:
        """Returns the held-out answers. `refs` holds log-probs in the order of `micro_batches`."""
        return [
            KtoAnswer(index, self._all[index], refs[index]) for index in range(self._count, len(self._all))
        ]


class KtoLosses:
    """Computes the values that a whole step needs, then the losses of its micro-batches. `refs` holds the
    reference's log-probs in the order of `answers.micro_batches`."""

    def __init__(
        self,
        config: KTO,
        engine: Engine,
        answers: KtoAnswers,
        refs: Sequence[float],
        passes: Passes,
        pad_token_id: int,
    ):
        self._config = config
        self._engine = engine
        self._answers = answers
        self._refs = refs
        self._passes = passes
        self._pad = pad_token_id

    def step_of(self, items: Sequence[KtoAnswer]) -> Step:
        """Returns the values of an optimiser step. Computes the log-probs of its mismatched pairs on all
        ranks."""
        pairs = mismatches_of([item.place for item in items])
        logprobs = dealt_logprobs(
            self._engine,
            self._engine,
            self._passes.in_order([self._answers.mismatched(pair) for pair in pairs], len),
            self._passes,
            self._pad,
            mean=False,
        )
        gap = sum(logprobs.tolist()) - sum(self._refs[self._answers.place_of(pair)] for pair in pairs)
        desirable = sum(item.answer.desirable for item in items)
        return Step(
            float(len(items)),
            float(desirable),
            float(len(items) - desirable),
            max(0.0, gap / max(1, len(pairs))),
        )

    def loss(self, engine: Engine, items: list[KtoAnswer], step: Step) -> Loss:
        """Returns the loss of a micro-batch."""
        config = self._config
        documents = [item.answer.document for item in items]
        logprobs, balance = answer_logprobs_and_balance(
            engine, documents, self._pad, False, engine.device, self._passes
        )
        ref = sent(torch.tensor([item.ref for item in items]), engine.device)
        desirable = sent(torch.tensor([item.answer.desirable for item in items]), engine.device)
        result = kto_loss(
            logprobs,
            ref,
            desirable,
            step.kl,
            config.beta,
            config.w_desirable,
            config.w_undesirable,
            step.answers,
        )
        result = with_balance(result, balance, config.router_aux_coef, step.answers)
        rewards = config.beta * (logprobs - ref).detach()
        shown = {"kl": rewards.new_tensor(step.kl * len(items) / step.answers)}
        if step.desirable:
            shown["rewards/desirable"] = torch.where(desirable, rewards, 0).sum() / step.desirable
        if step.undesirable:
            shown["rewards/undesirable"] = torch.where(desirable, 0, rewards).sum() / step.undesirable
        return Loss(result.loss, result.metrics | shown)

    def evaluate(self, items: Sequence[KtoAnswer]) -> dict[str, float]:
        """Returns the metrics of held-out answers, which are treated as one step."""
        step = self.step_of(items)
        return held_out_metrics(
            self._engine,
            self._passes.in_order(items, length),
            lambda part: self.loss(self._engine, part, step),
        )


def mismatches_of(indices: Sequence[int]) -> list[Mismatch]:
    """Pairs each item's prompt with the previous item's answer, and the first prompt with the last answer.
    Returns no pairs if there is only one item."""
    return [(index, indices[i - 1]) for i, index in enumerate(indices)] if len(indices) > 1 else []


class Mismatches(Lazy[Mismatch]):
    """Holds the mismatched pairs, each once, in order of first appearance. Takes about 24 bytes per pair."""

    def __init__(self, steps: Iterable[Sequence[int]], count: int):
        codes = array("q", (a * count + b for step in steps for a, b in mismatches_of(step)))
        self._sorted, first = np.unique(np.frombuffer(codes, dtype=np.int64), return_index=True)
        self._place = np.argsort(np.argsort(first))  # each sorted pair's place in the order of the pairs
        order = self._sorted[np.argsort(first)]
        self._items = count
        super().__init__(len(order), lambda index: divmod(int(order[index]), count))

    def index(self, pair: Mismatch, *_: int) -> int:
        """Returns the place of a pair, which must exist."""
        return int(self._place[np.searchsorted(self._sorted, pair[0] * self._items + pair[1])])


def all_mismatches(count: int, held_out: int, batch: int, epochs: int, seed: int) -> Mismatches:
    """Returns the mismatched pairs of every optimiser step, which depend on the seed, and of the held-out
    items, each pair once."""
    steps_per_epoch = -(-count // batch)
    steps = (
        items_of_step(range(count), step, steps_per_epoch, batch, seed)
        for step in range(steps_per_epoch * epochs)
    )
    return Mismatches(chain(steps, [range(count, count + held_out)]), count + held_out)


def mismatch(prompt_of: Document, answer_of: Document, max_len: int) -> Document:
    """Returns the prompt of one document, including its images, joined with the answer of another document,
    up to `max_len` tokens."""
    prompt = list(prompt_of.tokens[: prompt_of.answer_start])
    answer = list(answer_of.tokens[answer_of.answer_start :])
    return answered(prompt, answer, prompt_of.pictures).cut(max_len)
