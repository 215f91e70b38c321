"""Computes log-prob ratios of answers between a model and the baseline. Their mean over the model's own
samples estimates the KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_core.config import Evaluation
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, stored_suffix
from rlhf_core.data.packing import Passes
from rlhf_core.data.questions import Question
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.policy import Policy
from rlhf_core.stages.reference_logprobs import answer_logprobs

Floats = NDArray[np.float64]


def log_ratios(
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[str]],
    places: Mapping[str, str],
    config: Evaluation,
    trust_remote_code: bool = False,
) -> dict[str, Floats]:
    """Returns, by model, `log p(answer | model) - log p(answer | baseline)` summed over the answer's tokens,
    each (Q,). The baseline's values are 0.

    Texts are tokenised as `config` specifies. `places` has each model's folder. Only one model is in memory
    at a time. Raises ValueError when a model's tokenizer encodes an answer differently from the baseline's.
    """

    def documents(texts: Sequence[str], place: str) -> list[Document]:
        renderer = Renderer(
            load_tokenizer(place, trust_remote_code),
            config.template,
            stored_suffix(place),
            template_args=config.template_args,
        )
        made = []
        for question, text in zip(questions, texts, strict=True):
            prompt, _ = renderer.document_within(question.messages, config.prompt_max_len)
            answer = renderer.answer_tokens(list(prompt.tokens), text)
            made.append(replace(answer.cut(len(prompt) + config.generate_max_len), pictures=prompt.pictures))
        return made

    baseline = config.baseline
    models = [model for model in answers if model != config.baseline]
    own = {model: documents(answers[model], places[model]) for model in models}
    seen = {model: documents(answers[model], places[baseline]) for model in models}
    for model in models:
        if any(_answer(a) != _answer(b) for a, b in zip(own[model], seen[model], strict=True)):
            raise ValueError(
                f"{model} and {baseline} encode answers differently, so no KL between them can be measured:"
                " leave proxy out"
            )
    totals = {model: _logprobs(places[model], own[model], config, trust_remote_code) for model in models}
    every = [document for model in models for document in seen[model]]
    reference = np.split(_logprobs(places[baseline], every, config, trust_remote_code), len(models) or 1)
    ratios = {model: totals[model] - theirs for model, theirs in zip(models, reference, strict=False)}
    return {baseline: np.zeros(len(questions)), **ratios}


def _answer(document: Document) -> list[int]:
    return [token for token, own in zip(document.tokens, document.mask, strict=True) if own]


def _logprobs(
    place: str, documents: Sequence[Document], config: Evaluation, trust_remote_code: bool
) -> Floats:
    """Returns the log-probs of the answers, summed over their tokens, (N,)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy: Policy = load_policy(place, config.dtype, trust_remote_code).eval().to(device)
    detect_document_leak(policy, policy, device, packed=False)
    tokenizer = load_tokenizer(place, trust_remote_code)
    if any(document.pictures for document in documents):
        reads_pictures(policy, place, tokenizer, str(policy.model.dtype).removeprefix("torch."))
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))  # keeps padding small
    passes = Passes(*config.scoring_pass, apart=True)
    logprobs = np.zeros(len(documents))
    with torch.no_grad():
        for part in passes.in_order(order, lambda i: len(documents[i])):
            batch = [documents[i] for i in part]
            found = answer_logprobs(policy, batch, tokenizer.pad_token_id, False, device)
            logprobs[part] = found.double().cpu().numpy()
    return logprobs
