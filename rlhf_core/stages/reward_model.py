"""Trains a reward model: Bradley-Terry on pairs, with the score at the last token. Stores the mean and
standard deviation of its scores in the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from rlhf_core.config import Data, RewardModel
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.data_report import write_data_report
from rlhf_core.data.documents import Pair
from rlhf_core.data.packing import Passes
from rlhf_core.data.sources import preference_pairs
from rlhf_core.data.survey import Loaded
from rlhf_core.models.kernels.attention import can_share, row_width
from rlhf_core.models.load_model import trained_scorer
from rlhf_core.models.picture_reading import have_images, reads_pictures, require_images
from rlhf_core.models.policy import Scorer, token_scores
from rlhf_core.models.reward_scoring import STATISTICS
from rlhf_core.objectives.collate import collate, sent
from rlhf_core.objectives.losses import Loss, reward_loss
from rlhf_core.objectives.masked import gather_last
from rlhf_core.runs.run_dir import STATE, Outcome, RunDir, StageRequest
from rlhf_core.system.files import write_text
from rlhf_core.training.engine import Engine
from rlhf_core.training.ranks import (
    EXPORT_TRIAL,
    finish_training,
    make_engine,
    on_ranks,
    shards_of,
    tell_load,
    try_export,
)
from rlhf_core.training.train_loop import Task, fit, passes_of_rank, replicas

# number of training pairs used for the statistics if there is no evaluation split
STATISTICS_PAIRS = 512


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Trains a scalar head and its backbone on `config.data`, and writes the output `checkpoint`."""
    return on_ranks(train, request, run)


def train(request: StageRequest, run: RunDir) -> Outcome:
    """Runs one rank of the stage."""
    config = cast(RewardModel, request.config)
    source = request.inputs[config.model]
    tokenizer = load_tokenizer(source, request.trust_remote_code)

    def load(data: Data) -> Loaded[Pair]:
        return preference_pairs(
            data,
            Renderer(tokenizer, data.template, template_args=data.template_args),
            config.max_len,
            request.seed,
            run / STATE,
        )

    data = load(config.data)
    held_out = load(config.eval_data) if config.eval_data else None
    pad = tokenizer.pad_token_id
    require_images(config.image_encoder, have_images(data.report))
    tell_load(source)
    scorer = trained_scorer(
        source, pad, config.dtype, request.trust_remote_code, config.lora, request.seed, shards_of(config)
    )
    if have_images(data.report, held_out.report if held_out else None):
        reads_pictures(
            scorer, source, tokenizer, config.dtype, config.sequence_parallel_size, config.image_encoder
        )
    engine = make_engine(scorer, config)
    try_export(engine, run / EXPORT_TRIAL, source, config.lora, request.trust_remote_code)
    if engine.rank == 0:
        begin = "a new one of zeros" if scorer.new_head else f"the trained one of {source}"
        print(f"the scalar head is {begin}", flush=True)
        write_data_report(
            run, request.name, data=data.report, eval_data=held_out.report if held_out else None
        )

    share = can_share(scorer.model, engine.device)
    passes = Passes(
        *config.train_pass,
        replicas(engine),
        share,
        bool(scorer.document_leak),
        row_width(scorer.model),
    )

    def loss(engine: Engine, pairs: list[Pair], denominator: float) -> Loss:
        scores = pair_scores(engine, pairs, pad, passes)
        margins = sent(torch.tensor([pair.margin for pair in pairs]), engine.device)
        return reward_loss(scores[0], scores[1], margins, config.centering, denominator)

    # scores of the held-out pairs at the last evaluation, which takes place at the end of training
    last: list[np.ndarray] = []

    def evaluate(engine: Engine) -> dict[str, float]:
        assert held_out is not None
        last[:] = [score_all(engine, held_out.items, pad, passes)]
        return held_out_metrics(last[0][0], last[0][1])

    task = Task(
        data.items,
        lambda pairs: passes.split(pairs, passes.row_tokens),
        lambda pairs: float(len(pairs)),
        loss,
        evaluate if held_out else None,
        show=("loss", "accuracy", "eval/accuracy"),
        text=lambda pair: tokenizer.decode(pair.chosen.tokens),
        documents=lambda pairs: [pair.chosen for pair in pairs],
    )
    metrics = fit(engine, run, task, config, request.seed) | data.report.metrics("data")
    scores = last[0] if last else score_all(engine, data.items[:STATISTICS_PAIRS], pad, passes)
    outcome = finish_training(engine, request, run, source, config.lora, metrics)
    statistics = {"mean": float(scores.mean()), "std": float(scores.std())}
    if engine.rank == 0:
        write_text(run / "checkpoint" / STATISTICS, json.dumps(statistics))
    return outcome._replace(
        metrics=outcome.metrics | {f"score/{name}": value for name, value in statistics.items()}
    )


def pair_scores(engine: Engine, pairs: Sequence[Pair], pad_token_id: int, passes: Passes) -> torch.Tensor:
    """Returns the scores of a micro-batch from one forward pass: (2, N), chosen then rejected."""
    documents = [document for pair in pairs for document in (pair.chosen, pair.rejected)]
    reader = cast(Scorer, engine.module).reader
    batch = collate(passes.rows_of(documents), pad_token_id, reader=reader).to(engine.device)
    scores = gather_last(token_scores(engine, batch), batch.documents, len(documents))
    return scores.view(len(pairs), 2).T


def score_all(engine: Engine, pairs: Sequence[Pair], pad_token_id: int, passes: Passes) -> np.ndarray:
    """Returns the scores of many pairs, (2, N), without gradient. Each rank computes its share, and every
    rank receives all scores."""
    parts = passes.in_order(pairs, passes.row_tokens)
    scores = torch.zeros(2, len(pairs), device=engine.device)
    engine.module.eval()
    with torch.no_grad():
        for own in passes_of_rank(len(parts), engine):
            part = parts[own.place]
            first = parts.starts[own.place]
            found = pair_scores(engine, part, pad_token_id, passes)
            if own.counted:
                scores[:, first : first + len(part)] = found
    engine.module.train()
    return engine.all_reduce(scores).cpu().numpy()


def held_out_metrics(chosen: np.ndarray, rejected: np.ndarray) -> dict[str, float]:
    """Returns the held-out Bradley-Terry loss (without margin), the accuracy, the mean probability of the
    predicted winner (calibration in the large), and the number of pairs."""
    difference = (chosen - rejected).astype(np.float64)
    return {
        "eval/loss": float(np.logaddexp(0, -difference).mean()),
        "eval/accuracy": float((difference > 0).mean()),
        "eval/confidence": float((1 / (1 + np.exp(-np.abs(difference)))).mean()),
        "eval/pairs": float(len(difference)),
    }
