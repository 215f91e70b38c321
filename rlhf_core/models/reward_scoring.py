"""Scores documents with a reward model in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.packing import Passes
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.load_model import load_scorer
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.policy import Scorer, token_scores
from rlhf_core.models.precision import dtype_of
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.masked import gather_last

STATISTICS = "score_statistics.json"


def score_documents(
    scorer: Scorer,
    documents: Sequence[Document],
    pad_token_id: int,
    micro_batch_size: int,
    micro_tokens: int | None = None,
) -> list[float]:
    """Returns the score at the last token of each document, in order.

    A pass has `micro_batch_size` documents or, with `micro_tokens`, at most that many tokens including
    padding. Passes are sorted by length to keep padding small.
    """
    device = next(scorer.parameters()).device
    order = sorted(range(len(documents)), key=lambda i: len(documents[i].tokens))
    scores = [0.0] * len(documents)
    passes = Passes(micro_batch_size, micro_tokens, apart=True)
    for chosen in passes.in_order(order, lambda i: len(documents[i])):
        batch = collate([[documents[i]] for i in chosen], pad_token_id, reader=scorer.reader).to(device)
        with torch.no_grad():
            values = gather_last(token_scores(scorer, batch), batch.documents, len(chosen))
        for i, value in zip(chosen, values.tolist(), strict=True):
            scores[i] = value
    return scores


class RewardScorer:
    """A reward model checkpoint that scores documents. `dtype` auto: the checkpoint's dtype. Its image
    encoder is loaded for the first document with images."""

    def __init__(
        self,
        path: str,
        dtype: str,
        micro_batch_size: int,
        trust_remote_code: bool = False,
        micro_tokens: int | None = None,
    ):
        self._path = path
        self._tokenizer = load_tokenizer(path, trust_remote_code)
        self.pad_token_id = self._tokenizer.pad_token_id
        self._dtype = dtype_of(path, dtype, trust_remote_code)
        self.scorer = load_scorer(path, self.pad_token_id, self._dtype, trust_remote_code).eval()
        if torch.cuda.is_available():
            self.scorer.cuda()
        detect_document_leak(self.scorer, self.scorer, next(self.scorer.parameters()).device, packed=False)
        self.micro_batch_size = micro_batch_size
        self.micro_tokens = micro_tokens

    def score(self, documents: Sequence[Document]) -> list[float]:
        if self.scorer.reader is None and any(document.pictures for document in documents):
            reads_pictures(self.scorer, self._path, self._tokenizer, self._dtype)
        return score_documents(
            self.scorer, documents, self.pad_token_id, self.micro_batch_size, self.micro_tokens
        )


def stored_statistics(path: str) -> tuple[float, float]:
    """Returns the mean and standard deviation of the scores that the reward model stage stored. Raises
    ValueError if the checkpoint has no statistics."""
    file = Path(path) / STATISTICS
    if not file.is_file():
        raise ValueError(
            f"rewards are to be standardised with the mean and std stored with the reward model, and {path}"
            f" has no {STATISTICS}: set `normalize` of this reward to running or none"
        )
    stored = json.loads(file.read_text())
    return float(stored["mean"]), float(stored["std"])
