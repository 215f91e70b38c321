"""Holds the models that are not trained: reference and reward models. Each method is called on every rank of
the role with the same arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_core.data.documents import Document
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.kernels.attention import split_attention
from rlhf_core.models.kernels.float8 import use_float8
from rlhf_core.models.kernels.sequence_ranks import ALONE, sequence_ranks
from rlhf_core.models.load_model import load_policy, load_scorer
from rlhf_core.models.policy import Policy, Scorer, masked_logprobs, token_scores
from rlhf_core.models.sequence_split import split_sequences
from rlhf_core.models.weights.shards import Shards
from rlhf_core.objectives.collate import Batch
from rlhf_core.rollout.weight_transfer import gpu_uuid
from rlhf_core.stages.ppo.measured.roofline import ModelShape, shape_of
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec, Scored, read_pictures, score_share
from rlhf_core.stages.ppo.rollout_records import TeacherTokens
from rlhf_core.system import progress
from rlhf_core.system.gpu_allocator import move_to_pinned
from rlhf_core.training.backends import zero_backend
from rlhf_core.training.process_group import join_ranks


class ModelRole:
    """Holds the model of a role. `release` frees memory that only the allocator holds, for use by other
    processes."""

    module: torch.nn.Module

    def release(self) -> None:
        torch.cuda.empty_cache()

    def gpu_uuid(self) -> str | None:
        return gpu_uuid()

    def memory(self) -> tuple[int, int, int]:
        """Returns three byte counts: peak allocated and peak reserved since the last call, and currently
        reserved."""
        if not torch.cuda.is_available():
            return 0, 0, 0
        found = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
            torch.cuda.memory_reserved(),
        )
        torch.cuda.reset_peak_memory_stats()
        return found

    def shape(self) -> ModelShape:
        return shape_of(self.module.model)


class ReadOnlyModel(ModelRole):
    """Scores documents with a model that is not trained. With `offload`, its weights are in pinned host
    memory between calls. A model loaded with `shards` stays sharded across its ranks."""

    module: Policy | Scorer

    def __init__(
        self, module: Policy | Scorer, model: ModelSpec, offload: bool, shards: Shards | None = None
    ):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module = module.eval().requires_grad_(False)
        self.model = model
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.sharing = model.sharing
        self.frozen = None if shards is None else zero_backend().frozen(module, model.dtype)
        if model.float8:
            use_float8(module.model, required=False)
        self._sequence = ALONE
        if model.sharing > 1:
            split_attention(module.model, model.sharing)
            join_ranks()
            self._sequence = sequence_ranks(model.sharing)
        if not offload and shards is None:
            self.module.to(self.device)
        if offload:
            move_to_pinned(_tensors(module))
        self._offloaded = [(tensor, tensor.data) for tensor in _tensors(module)] if offload else []

    def run(self, *inputs: Any) -> Any:
        """Runs the model. This is a collective operation if the model is sharded across ranks."""
        return (self.module if self.frozen is None else self.frozen)(*inputs)

    def score(self, documents: Sequence[Document], forward: Callable[[Batch], Tensor]) -> Scored:
        for parameter, host in self._offloaded:
            parameter.data = host.to(self.device, non_blocking=True)
        detect_document_leak(self.run, self.module, self.device, bool(self.model.micro_tokens))
        split_sequences(self.run, self.module, self._sequence, self.device, self._sequence.summed)
        scored = score_share(self, documents, self.model, forward)
        for parameter, host in self._offloaded:
            parameter.data = host
        if self.frozen is not None:
            self.frozen.release()
        if self._offloaded:
            torch.cuda.empty_cache()
        return scored


class ReferenceModel(ReadOnlyModel):
    """Scores with the policy to which the KL is measured. Uses the whole distribution, so that the KL is
    finite with `top_p` or `top_k`."""

    def __init__(
        self,
        model: ModelSpec,
        temperature: float,
        offload: bool = False,
        routing_replay: bool = False,
        shard: bool = False,
    ):
        shards = zero_backend().frozen_shards(model.dtype) if shard else None
        policy = load_policy(model.path, model.dtype, model.trust_remote_code, on_host=offload, shards=shards)
        policy.leave_out_padding(model.path)
        policy.fp32_head = model.fp32_head
        read_pictures(policy, model)
        if routing_replay:
            policy.replay_routing()
        super().__init__(policy, model, offload, shards)
        self.policy = policy
        self.temperature = temperature

    def take_weights(self, folder: str) -> None:
        """Loads the weights from a later checkpoint of the same model, including its image encoder."""
        with progress.files(Path(folder)), torch.no_grad():
            later = load_policy(folder, self.model.dtype, self.model.trust_remote_code, on_host=True)
            weights = dict(later.named_parameters())
            for name, weight in self.module.named_parameters():
                weight.copy_(weights.pop(name))
        assert not weights, "it is the same model"
        read_pictures(self.policy, self.model._replace(path=folder))

    def logprobs(self, documents: Sequence[Document]) -> Scored:
        return self.score(
            documents, lambda batch: masked_logprobs(self.run, batch, self.temperature).logprobs
        )

    def top_tokens(self, documents: Sequence[Document], count: int) -> list[tuple[int, TeacherTokens]]:
        """Returns the log-probs of `logprobs`, and the `count` most probable tokens at each token of the
        answers."""

        def read(batch: Batch) -> Tensor:
            found = masked_logprobs(self.run, batch, self.temperature, top_k=count)
            assert found.top is not None, "they were requested"
            values = torch.cat([found.logprobs[None], found.top]).movedim(0, -1)
            return values.cpu()  # 8 * count bytes per token would fill the GPU before the last pass

        return [(i, teacher_tokens(documents[i], values)) for i, values in self.score(documents, read)]


class Reward(ReadOnlyModel):
    """Scores with a reward model."""

    def __init__(self, model: ModelSpec, offload: bool = False, shard: bool = False):
        shards = zero_backend().frozen_shards(model.dtype) if shard else None
        scorer = load_scorer(
            model.path,
            model.pad_token_id,
            model.dtype,
            model.trust_remote_code,
            on_host=offload,
            shards=shards,
        )
        read_pictures(scorer, model)
        super().__init__(scorer, model, offload, shards)

    def scores(self, documents: Sequence[Document]) -> Scored:
        """Returns the score at each document's last token, as an array with one element."""
        everywhere = self.score(documents, lambda batch: token_scores(self.run, batch))
        return [(index, values[-1:]) for index, values in everywhere]


def teacher_tokens(document: Document, values: np.ndarray) -> TeacherTokens:
    """Returns the record of `values` (T, 2 k + 2): the log-probs of the document's tokens, then k token ids,
    their log-probs, and the log-prob of all other tokens together."""
    answer = values[document.mask_array, 1:]
    ids, logprobs = np.split(answer, [answer.shape[1] // 2], axis=1)
    return TeacherTokens(np.ascontiguousarray(values[:, 0]), ids.astype(np.int32), logprobs.copy())


def _tensors(module: torch.nn.Module) -> list[Tensor]:
    """Returns the parameters and buffers, each once."""
    return list({id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}.values())
