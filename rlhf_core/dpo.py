"""Direct preference optimisation. Reference log-probs are computed once, before training, and kept: one model in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from rlhf_core.config import DPO, Data, Source
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.collate import collate
from rlhf_core.data.documents import Loaded, Pair
from rlhf_core.data.sources import preference_pairs
from rlhf_core.engine.base import Engine
from rlhf_core.engine.ranks import finish_training, make_engine, on_ranks
from rlhf_core.losses import Loss, dpo_loss, sft_loss
from rlhf_core.masked import document_mean, document_sum
from rlhf_core.models.load import Policy, load_policy
from rlhf_core.stage import Outcome, RunDir, StageRequest
from rlhf_core.supervised import Task, fit


class Anchored(NamedTuple):
    """A pair with the reference's log-probs of its two responses (sums, or means for IPO)."""

    pair: Pair
    ref_chosen: float
    ref_rejected: float


class PairLogprobs(NamedTuple):
    """Log-probs of responses, (2, N): chosen, rejected; and what the NLL term reads, (2N, T)."""

    responses: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor


class Denominator(NamedTuple):
    """Counts over a whole optimiser step: pairs for the preference loss, chosen response tokens for the NLL term."""

    pairs: float
    chosen_tokens: float


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Trains `config.policy` on pairs; the output is `checkpoint`."""
    return on_ranks(train, request, run)


def train(request: StageRequest, run: RunDir) -> Outcome:
    """One rank of the stage."""
    config = cast(DPO, request.config)
    source = request.inputs[config.policy]
    tokenizer = load_tokenizer(source, request.trust_remote_code)
    pad, micro, mean = tokenizer.pad_token_id, config.micro_train_batch_size, config.loss == "ipo"
    data = load_pairs(request, config, tokenizer)
    held_out = (
        preference_pairs(config.eval_data, Renderer(tokenizer, config.eval_data.template), config.max_len, request.seed)
        if config.eval_data
        else None
    )

    policy = load_policy(source, config.dtype, request.trust_remote_code)
    other = load_policy(request.inputs[config.reference], config.dtype, request.trust_remote_code) if config.reference else policy
    items = anchor(other, data.items, pad, micro, mean)
    held_out_items = anchor(other, held_out.items, pad, micro, mean) if held_out else []
    del other
    engine = make_engine(policy, config)

    def loss(engine: Engine, items: list[Anchored], denominator: Denominator) -> Loss:
        logprobs = pair_logprobs(engine, [item.pair for item in items], pad, mean, engine.device)
        chosen, rejected = logprobs.responses
        ref_chosen = torch.tensor([item.ref_chosen for item in items], device=engine.device)
        ref_rejected = torch.tensor([item.ref_rejected for item in items], device=engine.device)
        result = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, config.beta, config.label_smoothing, config.loss, denominator.pairs)
        if config.nll_coef == 0:
            return result
        n = len(items)
        nll = sft_loss(logprobs.tokens[:n], logprobs.mask[:n], denominator.chosen_tokens)
        return Loss(result.loss + config.nll_coef * nll.loss, result.metrics | {"nll": nll.metrics["loss"]})

    def micro_batches(items: Sequence[Anchored]) -> list[list[Anchored]]:
        return [list(items[i : i + micro]) for i in range(0, len(items), micro)]

    def evaluate(engine: Engine) -> dict[str, float]:
        engine.module.eval()
        with torch.no_grad():
            results = [loss(engine, items, count(held_out_items)).metrics for items in micro_batches(held_out_items)]
        engine.module.train()
        return {f"eval/{name}": float(sum(r[name] for r in results)) for name in results[0]}

    task = Task(items, micro_batches, count, loss, evaluate if held_out_items else None, show=("loss", "accuracy", "margin"))
    metrics = fit(engine, run, task, config, request.seed) | data.report.metrics("data")
    return finish_training(engine, request, run, source, metrics)


def count(items: Sequence[Anchored]) -> Denominator:
    return Denominator(float(len(items)), float(max(1, sum(sum(item.pair.chosen.mask[1:]) for item in items))))


def load_pairs(request: StageRequest, config: DPO, tokenizer) -> Loaded[Pair]:  # type: ignore[no-untyped-def]
    """The pairs of a file mixture, or those a preferences stage made (always chat messages)."""
    if config.data is not None:
        return preference_pairs(config.data, Renderer(tokenizer, config.data.template), config.max_len, request.seed)
    assert config.pairs is not None
    data = Data(sources=(Source(path=request.inputs[config.pairs], margin_key=None),), template=config.template)
    return preference_pairs(data, Renderer(tokenizer, config.template), config.max_len, request.seed)


def anchor(reference: Policy, pairs: Sequence[Pair], pad_token_id: int, micro: int, mean: bool) -> list[Anchored]:
    """Adds the reference's log-probs to pairs. Every rank does all of them: they depend on no training."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference.to(device).eval()
    items: list[Anchored] = []
    for start in range(0, len(pairs), micro):
        part = pairs[start : start + micro]
        with torch.no_grad():
            logprobs = pair_logprobs(reference, part, pad_token_id, mean, device).responses.tolist()
        items += [Anchored(pair, chosen, rejected) for pair, chosen, rejected in zip(part, *logprobs, strict=True)]
    reference.train()
    return items


def pair_logprobs(policy: Engine | Policy, pairs: Sequence[Pair], pad_token_id: int, mean: bool, device: torch.device) -> PairLogprobs:
    """Log-probs of both responses of each pair, in one forward pass over 2N rows; summed over tokens, or averaged."""
    documents = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    batch = collate([[document] for document in documents], pad_token_id).to(device)
    logprobs = policy(batch.tokens, batch.positions, batch.documents).logprobs  # (2N, T)
    reduce = document_mean if mean else document_sum
    responses = reduce(logprobs, batch.mask, batch.documents, len(documents)).view(2, len(pairs))
    return PairLogprobs(responses, logprobs, batch.mask)
