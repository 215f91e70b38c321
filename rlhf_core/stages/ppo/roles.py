"""Defines the object of one rank of each PPO role: actor, critic, reference and reward models.

Each method is called on every rank of the role with the same arguments; the ranks divide the work.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document
from rlhf_core.data.packing import Passes
from rlhf_core.models.checkpoint.weights import checkpoint_weights
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.kernels.attention import can_share, split_attention
from rlhf_core.models.kernels.sequence_ranks import ALONE, sequence_ranks
from rlhf_core.models.load import Policy, Scorer, load_policy, load_scorer, masked_logprobs, trained_policy, trained_scorer
from rlhf_core.models.lora import without_adapters
from rlhf_core.models.sequence_split import split_sequences
from rlhf_core.models.token_logprobs import WHOLE, Entropy, Truncation
from rlhf_core.objectives.actor_loss import PerToken, actor_loss, count, sampler_weights
from rlhf_core.objectives.collate import Batch, collate, sent
from rlhf_core.objectives.losses import Loss, value_loss, with_balance
from rlhf_core.objectives.masked import before
from rlhf_core.rollout.weight_receiver import gpu_uuid
from rlhf_core.rollout.weight_transfer import Broadcast, Channel, Rendezvous, Route, SameGpu
from rlhf_core.stages.ppo.records import Experience
from rlhf_core.stages.ppo.roofline import Ceilings, Shape, measure_ceilings, shape_of
from rlhf_core.stages.ppo.rounding import noise_of, noisy
from rlhf_core.system import progress
from rlhf_core.training.engine import Engine, at
from rlhf_core.training.process_group import join_ranks
from rlhf_core.training.ranks import export, make_engine, shards_of
from rlhf_core.training.train_loop import accumulate, replicas, turns
from rlhf_core.training.zero_engine import library
from rlhf_core.training.zero_frozen import FrozenZero
from rlhf_core.training.zero_shards import ZeroShards

Scored = list[tuple[int, np.ndarray]]  # (index of the document, its values)


class Read(NamedTuple):
    """Holds the values (B, T) of a pass, perhaps on a GPU: for these indices, of these documents in rows."""

    part: list[int]
    rows: list[list[Document]]
    real: Tensor
    values: Tensor


def prepare(deepspeed: bool) -> None:
    """Imports what a role needs that this module does not."""
    if deepspeed:
        library()


class ModelSpec(NamedTuple):
    """Says which model a role loads, how many documents or tokens one scoring pass has, and how many ranks compute it together."""

    path: str
    dtype: str
    pad_token_id: int
    micro_batch_size: int
    trust_remote_code: bool
    micro_tokens: int | None = None
    sharing: int = 1


class Update(NamedTuple):
    """Describes one optimiser step: the indices of its experience, its learning rate, and the coefficient of a KL in the loss."""

    indices: list[int]
    learning_rate: float
    kl_coef: float


class Steps(NamedTuple):
    """Holds the metrics of each optimiser step, and log-probs of experience that had none, from the first step's passes (this rank's)."""

    metrics: list[dict[str, float]]
    logprobs: Scored


class ModelRole:
    """Holds the model of a role. `release` gives memory that only the allocator holds to other processes."""

    module: torch.nn.Module

    def release(self) -> None:
        torch.cuda.empty_cache()

    def gpu_uuid(self) -> str | None:
        return gpu_uuid()

    def memory(self) -> tuple[int, int, int]:
        """Returns three byte counts: peak allocated and peak reserved since the last call, and reserved now."""
        if not torch.cuda.is_available():
            return 0, 0, 0
        found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return found

    def shape(self) -> Shape:
        return shape_of(self.module.model)


class ReadOnlyModel(ModelRole):
    """Scores documents with a model that is not trained. With `offload` its weights are in pinned host memory between two calls; one that
    was loaded with `shards` stays cut over its ranks."""

    module: Policy | Scorer

    def __init__(self, module: Policy | Scorer, model: ModelSpec, offload: bool, shards: ZeroShards | None = None):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module, self.model = module.eval().requires_grad_(False), model
        self.rank, self.world_size, self.sharing = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), model.sharing
        self.frozen = None if shards is None else FrozenZero(module, model.dtype)
        self._sequence = ALONE
        if model.sharing > 1:
            split_attention(module.model, model.sharing)
            join_ranks()
            self._sequence = sequence_ranks(model.sharing)
        if not offload and shards is None:
            self.module.to(self.device)
        for tensor in _tensors(module) if offload else []:  # one after the other: the host holds nothing twice
            tensor.data = tensor.data.cpu().pin_memory()
        self._offloaded = [(tensor, tensor.data) for tensor in _tensors(module)] if offload else []

    def run(self, *inputs: Any) -> Any:
        """Runs the model; cut over ranks a collective."""
        return (self.module if self.frozen is None else self.frozen)(*inputs)

    def score(self, documents: Sequence[Document], forward: Callable[[Batch], Tensor]) -> Scored:
        for parameter, host in self._offloaded:
            parameter.data = host.to(self.device, non_blocking=True)
        detect_document_leak(self.run, self.module, self.device, bool(self.model.micro_tokens))
        split_sequences(self.run, self.module, self._sequence, self.device, self._sequence.summed)
        scored = _score(self, documents, self.model, forward)
        for parameter, host in self._offloaded:
            parameter.data = host
        if self.frozen is not None:
            self.frozen.release()
        if self._offloaded:
            torch.cuda.empty_cache()
        return scored


class Trained(ModelRole):
    """Trains a model. `name`: that of the role's group; `config`: with its ZeRO stage decided."""

    def __init__(self, name: str, module: Policy | Scorer, model: ModelSpec, config: PPO):
        self.engine = make_engine(module, config, packed=bool(model.micro_tokens), role=name)
        self.module, self.model, self.config = module, model, config
        self.passes = _passes(self.engine, config.micro_train_batch_size, config.micro_train_tokens)

    def train(self, experience: Sequence[Experience], updates: Sequence[Update]) -> Steps:
        """Takes one optimiser step per update."""
        metrics, logprobs = [], Scored()
        for number, update in enumerate(updates, 1):
            with at(f"optimiser step {number} of {len(updates)}"):
                items = [experience[i] for i in update.indices]
                metrics.append(self.update(items, update, read := list[Read]()))
                logprobs += [(update.indices[i], values) for i, values in _scored(read)]
        return Steps(metrics, logprobs)

    def update(self, items: list[Experience], update: Update, read: list[Read]) -> dict[str, float]:
        """Takes one optimiser step on `items`; returns its metrics. Adds log-probs of items without any to `read`."""
        raise NotImplementedError

    def release(self) -> None:
        self.engine.release()

    def save_state(self, folder: str) -> None:
        self.engine.save_state(Path(folder))

    def finish_saving(self) -> None:
        self.engine.finish_saving()

    def load_state(self, folder: str) -> None:
        with progress.files(Path(folder)):
            self.engine.load_state(Path(folder))


class Actor(Trained):
    """Trains the policy, and sends its weights to the engines."""

    def __init__(self, model: ModelSpec, config: PPO, seed: int):
        policy = trained_policy(
            model.path, model.dtype, model.trust_remote_code, config.lora, seed, config.router_aux_coef, shards_of(config, "actor")
        )
        if config.routing_replay:
            policy.replay_routing()
        super().__init__("actor", policy, model, config)
        self.top = Truncation(config.top_p, config.top_k)

    def logprobs(self, documents: Sequence[Document], temperature: float | None = None) -> Scored:
        """Returns the log-probs of the distribution that answers are sampled from, or of the whole one at another `temperature`."""
        scale, top = (self.config.temperature, self.top) if temperature is None else (temperature, WHOLE)
        return _score(self.engine, documents, self.model, lambda batch: masked_logprobs(self.engine, batch, scale, top=top).logprobs)

    def reference_logprobs(self, documents: Sequence[Document]) -> Scored:
        """Returns the log-probs of `Reference.logprobs`, of the actor without its adapters."""
        with without_adapters(self.module.model):
            return _score(
                self.engine, documents, self.model, lambda batch: masked_logprobs(self.engine, batch, self.config.temperature).logprobs
            )

    def probe(self, documents: Sequence[Document]) -> tuple[Scored, Scored]:
        """Returns the log-probs of the whole distributions, and the same with noise of the size of rounding errors."""
        plain = self.logprobs(documents, 1.0)
        with noisy(self.module, noise_of(self.config.dtype, self.config.vllm.engine)):
            return plain, self.logprobs(documents, 1.0)

    def update(self, items: list[Experience], update: Update, read: list[Read]) -> dict[str, float]:
        """Takes one step on PPO's clipped surrogate or a relative of it."""
        counted = count([item.document for item in items])
        entropy: Entropy = "gradient" if self.config.entropy_coef else "value"

        def loss(part: list[int]) -> Loss:
            here = [items[i] for i in part]
            batch, rows = _collate(here, self.passes, self.model.pad_token_id, self.engine)
            new = masked_logprobs(self.engine, batch, self.config.temperature, entropy, self.top)
            old, sampler, ref, advantages = (
                _per_token(batch, rows, [getattr(e, name) for e in here])
                for name in ("old_logprobs", "sampler_logprobs", "ref_logprobs", "advantages")
            )
            if old is None:
                old = new.logprobs.detach()
                read.append(Read(part, rows, batch.host.documents >= 0, old))
            assert sampler is not None and advantages is not None
            weights = sampler_weights(old, sampler, batch.mask, batch.documents, self.config)
            per_token = PerToken(new.logprobs, new.entropy, old, ref, advantages, weights, batch.mask, batch.documents)
            result = actor_loss(per_token, len(part), counted, self.config, update.kl_coef)
            return with_balance(result, new.balance, self.config.router_aux_coef, counted.answers)

        metrics = accumulate(self.engine, _parts([item.document for item in items], self.passes), loss)
        return metrics | {"policy/grad_norm": self.engine.step(update.learning_rate), "policy/learning_rate": update.learning_rate}

    def ceilings(self) -> Ceilings | None:
        """Measures the GPU on the first rank; returns None on the others."""
        return measure_ceilings(self.engine.device, getattr(torch, self.model.dtype)) if self.engine.rank == 0 else None

    def open_listener(self, key: bytes) -> str:
        """Opens a socket for engine processes on this rank's GPU, before they connect; returns its address."""
        self._listener = Listener(authkey=key)
        return str(self._listener.address)

    def open_channel(self, route: Route, rendezvous: Rendezvous, engines_on_gpu: Sequence[int]) -> None:
        """Connects to the engines, which must open their side at the same time. `engines_on_gpu`: engine processes on each rank's GPU."""
        self._channel: Channel | None = None
        if route.kind == "gpus":
            self._channel = SameGpu([self._listener.accept() for _ in range(engines_on_gpu[self.engine.rank])])
            self._listener.close()
        elif self.engine.rank == route.source:
            self._channel = Broadcast(route.kind, 0, 1 + route.receivers, rendezvous)

    def send_weights(self) -> None:
        """Sends all weights under checkpoint names to the engines; a collective. Ranks that do not send only help to gather."""
        weights = checkpoint_weights(self.engine.module.model, self.engine.gathered)
        if self._channel is not None:
            self._channel.send(weights)
        else:
            deque(weights, maxlen=0)

    def export(self, folder: str) -> None:
        """Writes a transformers checkpoint on rank 0."""
        export(self.engine, Path(folder), self.model.path, self.config.lora, self.model.trust_remote_code)


class Critic(Trained):
    """Trains the value model, which starts from the reward model, head included."""

    def __init__(self, model: ModelSpec, config: PPO, seed: int):
        scorer = trained_scorer(
            model.path, model.pad_token_id, model.dtype, model.trust_remote_code, config.lora, seed, shards_of(config, "critic")
        )
        super().__init__("critic", scorer, model, config)

    def values(self, documents: Sequence[Document]) -> Scored:
        """Returns `V(tokens[<t])` for every token."""
        return _score(self.engine, documents, self.model, self._values)

    def update(self, items: list[Experience], update: Update, read: list[Read]) -> dict[str, float]:
        """Takes one step on the clipped value loss."""
        tokens = count([item.document for item in items]).tokens

        def loss(part: list[int]) -> Loss:
            here = [items[i] for i in part]
            batch, rows = _collate(here, self.passes, self.model.pad_token_id, self.engine)
            old, returns = (_per_token(batch, rows, [getattr(e, name) for e in here]) for name in ("values", "returns"))
            assert old is not None and returns is not None
            return value_loss(self._values(batch), old, returns, batch.mask, self.config.value_clip, tokens)

        metrics = accumulate(self.engine, _parts([item.document for item in items], self.passes), loss)
        return metrics | {"value/grad_norm": self.engine.step(update.learning_rate), "value/learning_rate": update.learning_rate}

    def _values(self, batch: Batch) -> Tensor:
        return before(self.engine(batch.tokens, batch.host.positions), batch.host.positions)


class Reference(ReadOnlyModel):
    """Scores with the policy that the KL is measured against: its whole distribution, so that the KL is finite with `top_p` or `top_k`."""

    def __init__(self, model: ModelSpec, temperature: float, offload: bool = False, routing_replay: bool = False, shard: bool = False):
        shards = ZeroShards(model.dtype) if shard else None
        policy = load_policy(model.path, model.dtype, model.trust_remote_code, on_host=offload, shards=shards)
        if routing_replay:
            policy.replay_routing()
        super().__init__(policy, model, offload, shards)
        self.temperature = temperature

    def logprobs(self, documents: Sequence[Document]) -> Scored:
        return self.score(documents, lambda batch: masked_logprobs(self.run, batch, self.temperature).logprobs)


class Reward(ReadOnlyModel):
    """Scores with a reward model."""

    def __init__(self, model: ModelSpec, offload: bool = False, shard: bool = False):
        shards = ZeroShards(model.dtype) if shard else None
        scorer = load_scorer(model.path, model.pad_token_id, model.dtype, model.trust_remote_code, on_host=offload, shards=shards)
        super().__init__(scorer, model, offload, shards)

    def scores(self, documents: Sequence[Document]) -> Scored:
        """Returns the score at each document's last token, as an array of one."""
        everywhere = self.score(documents, lambda b: self.run(b.tokens, b.host.positions))
        return [(index, values[-1:]) for index, values in everywhere]


def _tensors(module: torch.nn.Module) -> list[Tensor]:
    """Returns parameters and buffers, each once."""
    return list({id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}.values())


def _score(holder: Engine | ReadOnlyModel, documents: Sequence[Document], model: ModelSpec, forward: Callable[[Batch], Tensor]) -> Scored:
    """Scores this rank's share of the documents, similar lengths together; `forward` returns (B, T)."""
    passes = _passes(holder, model.micro_batch_size, model.micro_tokens)
    read: list[Read] = []
    parts = _parts(documents, passes)
    for turn in turns(len(parts), holder):
        rows = passes.rows_of([documents[i] for i in parts[turn.place]])
        batch = collate(rows, model.pad_token_id, _replays(holder)).to(holder.device)
        with torch.no_grad():
            values = forward(batch).float()
        progress.made()
        if turn.counted:
            read.append(Read(parts[turn.place], rows, batch.host.documents >= 0, values))
    return _scored(read)  # only now does the host wait for the GPU


def _scored(read: Sequence[Read]) -> Scored:
    """Returns the values of all passes by document, zeros where a prompt is shared."""
    scored: Scored = []
    for part, rows, real, values in read:
        packed = [document for row in rows for document in row]
        ends = np.cumsum([len(document) - document.shared for document in packed])
        own = np.split(values.cpu()[real].numpy(), ends[:-1])
        progress.made()
        scored += [(i, np.pad(array, (document.shared, 0))) for i, document, array in zip(part, packed, own, strict=True)]
    return scored


def _passes(holder: Engine | ReadOnlyModel, rows: int, tokens: int | None) -> Passes:
    share = can_share(holder.module.model, holder.device) and not (isinstance(holder.module, Policy) and holder.module.balanced)
    return Passes(rows, tokens, replicas(holder), share, bool(holder.module.document_leak))


def _replays(holder: Engine | ReadOnlyModel) -> bool:
    return isinstance(holder.module, Policy) and holder.module.replays


def _parts(documents: Sequence[Document], passes: Passes) -> list[list[int]]:
    """Returns the indices of the documents of each pass: answers to a prompt together where it can be shared, else similar lengths, so
    that rows have little padding."""

    def row_tokens(group: list[int]) -> int:
        return sum(len(document) - document.shared for document in passes.branched([documents[i] for i in group]))

    return [[i for group in part for i in group] for part in passes.split(passes.together(documents), row_tokens)]


def _collate(items: Sequence[Experience], passes: Passes, pad_token_id: int, engine: Engine) -> tuple[Batch, list[list[Document]]]:
    """Returns the batch, and its rows of documents."""
    rows = passes.rows_of([item.document for item in items])
    return collate(rows, pad_token_id, _replays(engine)).to(engine.device), rows


def _per_token(batch: Batch, rows: Sequence[Sequence[Document]], arrays: Sequence[np.ndarray | None]) -> Tensor | None:
    """Lays out per-token arrays of the batch's documents like its tokens: (B, T), zeros on padding; None where they are None."""
    known = [array for array in arrays if array is not None]
    if not known:
        return None
    documents = [document for row in rows for document in row]
    own = [array[document.shared :] for array, document in zip(known, documents, strict=True)]
    values = torch.zeros(batch.tokens.shape)
    values[batch.host.documents >= 0] = torch.from_numpy(np.concatenate(own)).float()
    return sent(values, batch.tokens.device)
