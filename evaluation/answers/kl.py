"""Computes log-prob ratios of answers between a model and the baseline, whose mean over the model's own samples estimates the KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, stored_suffix
from rlhf_core.data.questions import Question
from rlhf_core.models.document_leak import try_rows
from rlhf_core.models.load import Policy, load_policy
from rlhf_core.stages.reference_logprobs import answer_logprobs

Floats = NDArray[np.float64]


class Reading(NamedTuple):
    """How questions and answers are tokenised: the template, and the token limits that the models answered with."""

    template: str
    prompt_max_len: int
    generate_max_len: int
    micro_batch_size: int
    trust_remote_code: bool


def log_ratios(
    questions: Sequence[Question], answers: Mapping[str, Sequence[str]], places: Mapping[str, str], baseline: str, dtype: str, how: Reading
) -> dict[str, Floats]:
    """Returns `log p(answer | model) - log p(answer | baseline)` summed over the answer's tokens, by model, each (Q,); 0 for the baseline.

    One model is in memory at a time. Raises ValueError when a model's tokenizer encodes an answer differently from the baseline's.
    """
    models = [model for model in answers if model != baseline]
    own = {model: _documents(questions, answers[model], places[model], how) for model in models}
    seen = {model: _documents(questions, answers[model], places[baseline], how) for model in models}
    for model in models:
        if any(_answer(a) != _answer(b) for a, b in zip(own[model], seen[model], strict=True)):
            raise ValueError(f"{model} and {baseline} encode answers differently, so there is no KL between them: leave proxy out")
    totals = {model: _logprobs(places[model], dtype, own[model], how) for model in models}
    reference = np.split(_logprobs(places[baseline], dtype, [d for model in models for d in seen[model]], how), len(models) or 1)
    ratios = {model: totals[model] - theirs for model, theirs in zip(models, reference, strict=False)}
    return {baseline: np.zeros(len(questions)), **ratios}


def _documents(questions: Sequence[Question], texts: Sequence[str], place: str, how: Reading) -> list[Document]:
    renderer = Renderer(load_tokenizer(place, how.trust_remote_code), how.template, stored_suffix(place))
    documents = []
    for question, text in zip(questions, texts, strict=True):
        prompt, _ = renderer.prompt_within(question.messages, how.prompt_max_len)
        documents.append(renderer.answer_tokens(prompt, text).cut(len(prompt) + how.generate_max_len))
    return documents


def _answer(document: Document) -> list[int]:
    return [token for token, own in zip(document.tokens, document.mask, strict=True) if own]


def _logprobs(place: str, dtype: str, documents: Sequence[Document], how: Reading) -> Floats:
    """Returns the log-probs of the answers, summed over tokens, (N,)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy: Policy = load_policy(place, dtype, how.trust_remote_code).eval().to(device)
    try_rows(policy, policy, device, packed=False)
    pad = load_tokenizer(place, how.trust_remote_code).pad_token_id
    parts = []
    with torch.no_grad():
        for start in range(0, len(documents), how.micro_batch_size):
            parts.append(
                answer_logprobs(policy, documents[start : start + how.micro_batch_size], pad, False, device).double().cpu().numpy()
            )
    return np.concatenate(parts) if parts else np.zeros(0)
