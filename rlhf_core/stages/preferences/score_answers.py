"""Scores a round's answers with a reward model, using as many processes as there were engines."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from rlhf_core.cluster.temporary_group import temporary_group
from rlhf_core.cluster.worker_group import in_order, put_on_nodes
from rlhf_core.config import Preferences
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.packing import Passes
from rlhf_core.models.precision import dtype_of
from rlhf_core.stages.ppo.roles.read_only import Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec

SILENT_SECONDS = 3600.0  # limit for one part
PROGRESS_SECONDS = 15.0
PASSES = 16  # number of passes per process between two progress checks


def scores_on_ranks(
    config: Preferences, path: str, documents: Sequence[Document], trust_remote_code: bool = False
) -> list[float]:
    """Returns the score at the last token of each document, in order. Every process of `config.engine` loads
    the complete reward model."""
    size = config.scoring_pass
    model = ModelSpec(
        path=path,
        dtype=dtype_of(path, config.dtype, trust_remote_code),
        pad_token_id=load_tokenizer(path, trust_remote_code).pad_token_id,
        micro_batch_size=size.rows,
        trust_remote_code=trust_remote_code,
        micro_tokens=size.tokens,
        pictures=any(document.pictures for document in documents),
    )
    scores: list[float] = []
    with temporary_group("scorer", config.engine, config.engine.start_timeout, Reward, model=model) as group:
        at_once = PASSES * group.world_size
        whole = Passes(at_once * size.rows, size.tokens and at_once * size.tokens)
        logged = time.monotonic()
        for part in whole.in_order(documents, len):
            by_rank = group.call("score", Reward.scores, put_on_nodes(part)).wait(SILENT_SECONDS)
            scores += np.concatenate(in_order(by_rank)).tolist()
            if time.monotonic() - logged > PROGRESS_SECONDS:
                logged = time.monotonic()
                print(f"scored {len(scores)} of {len(documents)} answers", flush=True)
    return scores
