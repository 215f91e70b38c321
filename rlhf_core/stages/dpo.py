"""Trains with direct preference optimisation and its variants. Computes reference log-probs once, before
training.

SimPO and ORPO load no reference model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import DPO, REFERENCE_FREE, Data, Source
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.data_report import write_data_report
from rlhf_core.data.documents import Document, Lazy, Pair, joined, mapped
from rlhf_core.data.packing import Parts, Passes
from rlhf_core.data.sources import preference_pairs
from rlhf_core.data.survey import Loaded
from rlhf_core.hub.vocabulary import require_same_vocabulary
from rlhf_core.models.kernels.attention import can_share, row_width
from rlhf_core.models.picture_reading import have_images, reads_pictures, require_images
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.objectives.collate import collate, sent
from rlhf_core.objectives.losses import MEAN_LOGPROBS, Loss, preference_loss, sft_loss, with_balance
from rlhf_core.objectives.masked import document_mean, document_sum
from rlhf_core.runs.run_dir import STATE, Outcome, RunDir, StageRequest
from rlhf_core.stages.reference_logprobs import Model, module_of, reference_logprobs
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
from rlhf_core.training.train_loop import Task, fit, held_out_metrics, replicas


class PairWithReference(NamedTuple):
    """Holds a pair with the reference's log-probs of its two responses: sums, or means for IPO. They are 0 if
    the loss uses no reference."""

    pair: Pair
    ref_chosen: float
    ref_rejected: float


class PairLogprobs(NamedTuple):
    """Holds log-probs of the responses, (2, N), chosen then rejected; the inputs of the NLL term, (B, T); and
    the experts' balance over all documents."""

    responses: torch.Tensor
    tokens: torch.Tensor
    chosen_mask: torch.Tensor
    balance: torch.Tensor | None


class Denominator(NamedTuple):
    """Counts over a whole optimiser step: pairs for the preference loss, and chosen response tokens for the
    NLL term."""

    pairs: float
    chosen_tokens: float


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Trains `config.policy` on pairs and writes the output `checkpoint`."""
    return on_ranks(train, request, run)


def train(request: StageRequest, run: RunDir) -> Outcome:
    """Runs one rank of the stage."""
    config = cast(DPO, request.config)
    source = request.inputs[config.policy]
    reference = request.inputs[config.reference or config.policy]
    tokenizer = load_tokenizer(source, request.trust_remote_code)
    require_same_vocabulary(source, [reference], request.trust_remote_code)
    pad = tokenizer.pad_token_id
    mean = config.loss in MEAN_LOGPROBS
    data = load_pairs(request, config, tokenizer, config.data, run / STATE)
    held_out = (
        load_pairs(request, config, tokenizer, config.eval_data, run / STATE) if config.eval_data else None
    )
    held_out_pairs = held_out.items if held_out else []
    require_images(config.image_encoder, have_images(data.report))
    trained = policy_to_train(request, config, source)
    has_images = have_images(data.report, held_out.report if held_out else None)
    if has_images:
        reads_pictures(
            trained, source, tokenizer, config.dtype, config.sequence_parallel_size, config.image_encoder
        )
    engine = make_engine(trained, config)
    try_export(engine, run / EXPORT_TRIAL, source, config.lora, request.trust_remote_code)
    share = can_share(trained.model, engine.device) and not trained.balanced
    passes = Passes(
        *config.train_pass,
        share=share,
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

    # The attention of another reference model may not support shared prompts.
    length = len if config.reference and not passes.apart else passes.row_tokens
    parts = passes.in_order(data.items, length)
    held_out_parts = passes.in_order(held_out_pairs, length)
    refs: Sequence[float] = []
    if config.loss not in REFERENCE_FREE:
        documents = joined(mapped(parts, both), mapped(held_out_parts, both))
        refs = reference_logprobs(engine, run, open_reference, reference, documents, passes, pad, mean)
    items = with_reference(data.items, refs, 0)
    held_out_items = with_reference(held_out_pairs, refs, 2 * len(data.items))

    losses = PairLosses(config, passes, pad)
    held_out_passes = Parts(held_out_items, held_out_parts.starts)

    def micro_batches(items: Sequence[PairWithReference]) -> list[list[PairWithReference]]:
        return passes._replace(ranks=replicas(engine)).split(items, lambda item: passes.row_tokens(item.pair))

    task = Task(
        items,
        micro_batches,
        count,
        losses.loss,
        (lambda engine: losses.evaluate(engine, held_out_items, held_out_passes)) if held_out_items else None,
        show=("loss", "accuracy", "margin"),
        text=lambda item: tokenizer.decode(item.pair.chosen.tokens),
        documents=lambda items: [item.pair.chosen for item in items],
    )
    metrics = fit(engine, run, task, config, request.seed) | data.report.metrics("data")
    return finish_training(engine, request, run, source, config.lora, metrics)


class PairLosses:
    """Computes losses of pairs. `passes` defines the layout of a micro-batch."""

    def __init__(self, config: DPO, passes: Passes, pad_token_id: int):
        self._config = config
        self._passes = passes
        self._pad = pad_token_id

    def loss(self, engine: Engine, items: list[PairWithReference], denominator: Denominator) -> Loss:
        """Returns the loss of a micro-batch."""
        config = self._config
        mean = config.loss in MEAN_LOGPROBS
        logprobs = pair_logprobs(engine, [item.pair for item in items], self._pad, mean, self._passes)
        chosen, rejected = logprobs.responses
        ref_chosen, ref_rejected = sent(torch.tensor([item[1:] for item in items]), engine.device).unbind(1)
        result = preference_loss(config, chosen, rejected, ref_chosen, ref_rejected, denominator.pairs)
        result = with_balance(result, logprobs.balance, config.router_aux_coef, 2 * denominator.pairs)
        if config.nll_coef == 0:
            return result
        nll = sft_loss(logprobs.tokens, logprobs.chosen_mask, denominator.chosen_tokens)
        return Loss(result.loss + config.nll_coef * nll.loss, result.metrics | {"nll": nll.metrics["loss"]})

    def evaluate(
        self,
        engine: Engine,
        items: Sequence[PairWithReference],
        micro_batches: Sequence[list[PairWithReference]],
    ) -> dict[str, float]:
        """Returns the metrics of held-out pairs."""
        whole = count(items)
        return held_out_metrics(engine, micro_batches, lambda part: self.loss(engine, part, whole))


def count(items: Sequence[PairWithReference]) -> Denominator:
    return Denominator(
        float(len(items)), float(max(1, sum(sum(item.pair.chosen.mask[1:]) for item in items)))
    )


def load_pairs(
    request: StageRequest, config: DPO, tokenizer: PreTrainedTokenizerBase, data: Data | None, folder: Path
) -> Loaded[Pair]:
    """Loads the pairs of a file mixture. Without a mixture (no `data`), loads the pairs of a preferences
    stage, which are always chat messages."""
    own = data or Data(
        sources=(Source(path=request.inputs[config.pairs or ""], margin_key=None),),
        template=config.template,
        template_args=config.template_args,
    )
    renderer = Renderer(tokenizer, own.template, verbatim=data is None, template_args=own.template_args)
    return preference_pairs(own, renderer, config.max_len, request.seed, folder)


def both(pairs: Sequence[Pair]) -> list[Document]:
    """Returns each chosen document followed by its rejected one, so that a micro-batch is one forward pass
    over all of them."""
    return [document for pair in pairs for document in (pair.chosen, pair.rejected)]


def with_reference(pairs: Sequence[Pair], refs: Sequence[float], start: int) -> Sequence[PairWithReference]:
    """Returns pairs with their reference log-probs, which begin at index `start` of `refs` and are in the
    order of `both`. The log-probs are 0 if `refs` is empty."""

    def get(index: int) -> PairWithReference:
        chosen = start + 2 * index
        return (
            PairWithReference(pairs[index], refs[chosen], refs[chosen + 1])
            if refs
            else PairWithReference(pairs[index], 0.0, 0.0)
        )

    return Lazy(len(pairs), get)


def pair_logprobs(
    policy: Engine, pairs: Sequence[Pair], pad_token_id: int, mean: bool, passes: Passes
) -> PairLogprobs:
    """Returns the log-probs of both responses of each pair from one forward pass, summed or averaged over
    tokens."""
    documents = both(pairs)
    reader = module_of(policy).reader
    batch = collate(passes.rows_of(documents), pad_token_id, reader=reader).to(policy.device)
    out = masked_logprobs(policy, batch)
    logprobs = out.logprobs  # (B, T)
    reduce = document_mean if mean else document_sum
    responses = reduce(logprobs, batch.mask, batch.documents, len(documents)).view(len(pairs), 2).T
    return PairLogprobs(responses, logprobs, batch.mask & (batch.documents % 2 == 0), out.balance)
