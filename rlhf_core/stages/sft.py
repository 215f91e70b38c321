"""Runs supervised fine-tuning with the token-mean NLL over assistant tokens. Documents are packed evenly
into passes of equal numbers of tokens or, with `micro_train_batch_size`, into rows of `max_len`.

Packing happens within an optimiser step. A step holds the same documents whether packed or padded, so the
loss curve is the same. Conditional SFT is this stage with `condition: reward` (`data.condition`); rejection
sampling is this stage on the best answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from rlhf_core.config import SFT, Data, Source
from rlhf_core.config.training.optimiser_fields import EMA
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.data_report import write_data_report
from rlhf_core.data.documents import Document, store_suffix
from rlhf_core.data.packing import Passes, best_fit
from rlhf_core.data.sources import AnswerDocuments, SuffixOf, answer_documents, sft_documents
from rlhf_core.models.kernels.attention import row_width
from rlhf_core.models.picture_reading import have_images, reads_pictures, require_images
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.losses import Loss, sft_loss, with_balance
from rlhf_core.runs.run_dir import EXPORTS, STATE, Outcome, RunDir, StageRequest
from rlhf_core.training.engine import Engine
from rlhf_core.training.ranks import (
    EXPORT_TRIAL,
    finish_training,
    make_engine,
    on_ranks,
    policy_to_train,
    try_export,
)
from rlhf_core.training.train_loop import Task, fit, held_out_metrics, replicas

Row = list[Document]


class LossCounts(NamedTuple):
    """Counts the loss tokens and the documents of a whole optimiser step."""

    tokens: float
    documents: float


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Trains `config.model` on `config.data` and writes the output `checkpoint`."""
    return on_ranks(train, request, run)


def train(request: StageRequest, run: RunDir) -> Outcome:
    """Runs one rank of the stage."""
    config = cast(SFT, request.config)
    source = request.inputs[config.model]
    tokenizer = load_tokenizer(source, request.trust_remote_code)
    data, best_suffix, suffix_of = load_documents(request, config, tokenizer, config.data, run / STATE)
    held_out = None
    if config.eval_data:
        held_out = load_documents(
            request, config, tokenizer, config.eval_data, run / STATE, suffix_of
        ).documents
    require_images(config.image_encoder, have_images(data.report))
    policy = policy_to_train(request, config, source)
    reader = None
    if have_images(data.report, held_out.report if held_out else None):
        reader = reads_pictures(
            policy, source, tokenizer, config.dtype, config.sequence_parallel_size, config.image_encoder
        )
    engine = make_engine(policy, config, packed=config.packs)
    try_export(engine, run / EXPORT_TRIAL, source, config.lora, request.trust_remote_code)
    if engine.rank == 0:
        write_data_report(
            run, request.name, data=data.report, eval_data=held_out.report if held_out else None
        )

    def micro_batches(documents: Sequence[Document]) -> list[list[Row]]:
        apart = bool(policy.document_leak) or not config.packs
        rows, tokens = config.train_pass
        if tokens is not None:
            width = row_width(policy.model)
            passes = Passes(rows, tokens, replicas(engine), apart=apart, width=width)
            return [passes.rows_of(part) for part in passes.split(documents, len)]
        return rows_to_micro_batches(documents, 0 if apart else config.max_len, rows)

    def loss(engine: Engine, rows: list[Row], counted: LossCounts) -> Loss:
        batch = collate(rows, tokenizer.pad_token_id, reader=reader).to(engine.device)
        out = masked_logprobs(engine, batch)
        return with_balance(
            sft_loss(out.logprobs, batch.mask, counted.tokens),
            out.balance,
            config.router_aux_coef,
            counted.documents,
        )

    def evaluate(engine: Engine) -> dict[str, float]:
        assert held_out is not None
        counted = count(held_out.items)
        found = held_out_metrics(
            engine, micro_batches(held_out.items), lambda rows: loss(engine, rows, counted)
        )
        return {"eval/loss": found["eval/loss"]}

    task = Task(
        data.items,
        micro_batches,
        count,
        loss,
        evaluate if held_out else None,
        show=("loss", "eval/loss", "grad_norm"),
        text=lambda document: tokenizer.decode(document.tokens),
        documents=chain.from_iterable,
    )
    metrics = fit(engine, run, task, config, request.seed) | data.report.metrics("data")
    outcome = finish_training(engine, request, run, source, config.lora, metrics)
    if engine.rank == 0 and best_suffix:
        store_suffix(run / "checkpoint", best_suffix)
        if config.ema is not None:
            store_suffix(run / EXPORTS / EMA, best_suffix)
    return outcome


def load_documents(
    request: StageRequest,
    config: SFT,
    tokenizer: PreTrainedTokenizerBase,
    data: Data | None,
    folder: Path,
    suffix_of: SuffixOf | None = None,
) -> AnswerDocuments:
    """Loads conversations of a file mixture, or answers with the mask only on the answer. Answers come from a
    preferences stage (no `data`) or are scored answers. Held-out scored answers are conditioned like the
    training data (`suffix_of`)."""
    own = data or Data(
        sources=(Source(path=request.inputs[config.answers or ""]),),
        template=config.template,
        template_args=config.template_args,
    )
    renderer = Renderer(tokenizer, own.template, verbatim=data is None, template_args=own.template_args)
    if data is None or config.condition == "reward":
        return answer_documents(
            own, renderer, config.max_len, request.seed, config.condition, folder, suffix_of
        )
    return AnswerDocuments(sft_documents(own, renderer, config.max_len, request.seed, folder))


def rows_to_micro_batches(documents: Sequence[Document], capacity: int, micro: int) -> list[list[Row]]:
    """Returns micro-batches of `micro` rows, long rows first. Rows have at most `capacity` tokens (best fit).
    With a capacity of 0, each row has one document."""
    if capacity:
        rows = [[documents[i] for i in row] for row in best_fit([len(d.tokens) for d in documents], capacity)]
    else:
        rows = [[document] for document in documents]
    rows.sort(key=lambda row: -sum(len(document.tokens) for document in row))
    return [rows[i : i + micro] for i in range(0, len(rows), micro)]


def count(documents: Sequence[Document]) -> LossCounts:
    """Counts the loss tokens and the documents. A document's first token has no log-prob, so it never
    counts."""
    return LossCounts(
        float(max(1, sum(sum(document.mask[1:]) for document in documents))), float(len(documents))
    )
