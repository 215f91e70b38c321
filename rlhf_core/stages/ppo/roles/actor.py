"""Holds the actor: scores documents, trains, and sends its weights to the engines. Each method is called on
every rank with the same arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights, scaled_adapters
from rlhf_core.models.load_model import trained_policy
from rlhf_core.models.logprobs.token_logprobs import WHOLE, Entropy, Truncation
from rlhf_core.models.lora import require_linear, without_adapters
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.models.weights.trained_encoder import trained_encoder_of
from rlhf_core.models.weights.unbiased_rounding import Survival
from rlhf_core.objectives.actor_loss import PerToken, actor_loss, count
from rlhf_core.objectives.entropy_spread import entropy_counts, entropy_percentiles
from rlhf_core.objectives.losses import Loss, with_balance
from rlhf_core.objectives.sampler_weights import kept_tokens, sampler_weights
from rlhf_core.rollout.weight_transfer import Broadcast, Channel, Rendezvous, Route, SameGpu
from rlhf_core.stages.ppo.measured.roofline import Ceilings, measure_ceilings
from rlhf_core.stages.ppo.measured.rounding import noise_of, noisy
from rlhf_core.stages.ppo.roles.role_passes import (
    ModelSpec,
    Read,
    Scored,
    collate_rows,
    documents_of,
    parts_of,
    read_pictures,
    score_share,
    teacher_rows,
    token_values,
)
from rlhf_core.stages.ppo.roles.trained import Trained, Update
from rlhf_core.stages.ppo.rollout_records import Experience
from rlhf_core.training.backends import import_zero
from rlhf_core.training.ranks import export, export_average, shards_of, try_export
from rlhf_core.training.train_loop import accumulate, passes_of_rank


def prepare(deepspeed: bool) -> None:
    """Imports dependencies of a role that this module does not import."""
    if deepspeed:
        import_zero()


class Actor(Trained):
    """Trains the policy, and sends its weights to the engines."""

    def __init__(self, model: ModelSpec, config: PPO, seed: int):
        policy = trained_policy(
            model.path,
            model.dtype,
            model.trust_remote_code,
            config.lora,
            seed,
            config.router_aux_coef,
            shards_of(config, "actor"),
        )
        policy.leave_out_padding(model.path)
        policy.fp32_head = config.fp32_head
        read_pictures(policy, model, config.image_encoder)
        if config.engine.adapters == "alone":
            require_linear(policy.model)
        if config.replays_routing:
            policy.replay_routing()
        super().__init__("actor", policy, model, config)
        self.top = Truncation(config.top_p, config.top_k)
        self.vocabulary = policy.known or policy.model.config.vocab_size

    def logprobs(self, documents: Sequence[Document], temperature: float | None = None) -> Scored:
        """Returns log-probs under the distribution from which answers are sampled, or under the whole
        distribution at another `temperature`."""
        scale, top = (self.config.temperature, self.top) if temperature is None else (temperature, WHOLE)
        return score_share(
            self.engine,
            documents,
            self.model,
            lambda batch: masked_logprobs(self.engine, batch, scale, top=top).logprobs,
        )

    def reference_logprobs(self, documents: Sequence[Document]) -> Scored:
        """Returns the same log-probs as `ReferenceModel.logprobs`, computed with the actor without its
        adapters."""
        with without_adapters(self.module.model):
            return score_share(
                self.engine,
                documents,
                self.model,
                lambda batch: masked_logprobs(self.engine, batch, self.config.temperature).logprobs,
            )

    def probe(self, documents: Sequence[Document]) -> tuple[Scored, Scored]:
        """Returns the log-probs under the whole distributions, first without and then with noise of the size
        of rounding errors."""
        plain = self.logprobs(documents, 1.0)
        noise = noise_of(self.config.dtype, self.config.engine.options, self.config.float8)
        with noisy(self.module, noise):
            return plain, self.logprobs(documents, 1.0)

    def update(self, items: list[Experience], update: Update, read: list[Read]) -> dict[str, float]:
        """Takes one step on PPO's clipped surrogate or a variant of it, and returns the step's metrics. Skips
        the step if no rank has a token to train on, because Adam's momentum and weight decay would still
        change the weights. A skipped step has only the learning rate as a metric."""
        trained = [self.trained_tokens(item) for item in items]
        if not any(mask.any() for mask in trained):
            return {"policy/learning_rate": update.learning_rate}
        counted = count(trained)
        entropy: Entropy = "gradient" if self.config.entropy_coef else "value"

        entropies: list[Tensor] = []  # the counts of each pass

        def loss(part: list[int]) -> Loss:
            here = [items[i] for i in part]
            batch, rows = collate_rows(here, self.passes, self.model.pad_token_id, self.engine)
            teacher = teacher_rows(here, self.vocabulary, self.engine.device)
            new = masked_logprobs(self.engine, batch, self.config.temperature, entropy, self.top, teacher)
            old, sampler, ref, advantages = (
                token_values(batch, rows, [getattr(e, name) for e in here])
                for name in ("old_logprobs", "sampler_logprobs", "ref_logprobs", "advantages")
            )
            own = new.logprobs.detach()
            if old is None or self.config.sampler_is == "in_ratio":
                read.append(Read(part, rows, batch.real, own))
            old = own if old is None else old
            assert advantages is not None
            weights = sampler_weights(old, sampler, batch.mask, batch.documents, self.config)
            mask = batch.mask
            if self.config.sampler_is == "mask":
                mask = mask & (weights > 0)
            entropies.append(entropy_counts(new.entropy, mask))
            per_token = PerToken(
                new.logprobs,
                new.entropy,
                old,
                ref,
                advantages,
                weights,
                mask,
                batch.documents,
                new.teacher_kl,
            )
            result = actor_loss(per_token, len(part), counted, self.config, update.kl_coef)
            return with_balance(result, new.balance, self.config.router_aux_coef, float(len(items)))

        parts = parts_of([item.document for item in items], self.passes)
        metrics = accumulate(
            self.engine, parts, loss, documents=documents_of(items)
        ) | self._entropy_percentiles(entropies, len(parts))
        return metrics | self.step("policy", update.learning_rate)

    def _entropy_percentiles(self, counts: Sequence[Tensor], micro_batches: int) -> dict[str, float]:
        """Returns percentiles over the tokens of all ranks. `counts` are from this rank's passes; some passes
        only repeat another."""
        own = passes_of_rank(micro_batches, self.engine)
        weighted = [of_pass * rank_pass.counted for of_pass, rank_pass in zip(counts, own, strict=True)]
        return entropy_percentiles(self.engine.all_reduce(torch.stack(weighted).sum(0)))

    def ends_iteration(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the policy was beyond `stop_kl` in this step. `metrics` cover all ranks."""
        limit = self.config.stop_kl
        return limit is not None and metrics.get("policy/kl_old", 0.0) > limit

    def trained_tokens(self, item: Experience) -> np.ndarray:
        """Returns a mask (T,) of the answer's tokens that are in the loss."""
        mask = item.document.mask_array
        if self.config.sampler_is != "mask":
            return mask
        assert item.old_logprobs is not None and item.sampler_logprobs is not None
        return kept_tokens(item.old_logprobs, item.sampler_logprobs, mask, self.config)

    def ceilings(self) -> Ceilings | None:
        """Measures the GPU on the first rank. Returns None on the other ranks."""
        return (
            measure_ceilings(self.engine.device, getattr(torch, self.model.dtype))
            if self.engine.rank == 0
            else None
        )

    def open_listener(self, key: bytes) -> str:
        """Opens a socket for engine processes on this rank's GPU, before they connect. Returns its
        address."""
        self._listener = Listener(authkey=key)
        return str(self._listener.address)

    def open_channel(self, route: Route, rendezvous: Rendezvous, engines_on_gpu: Sequence[int]) -> None:
        """Connects to the engines, which must open their end of the channel at the same time.
        `engines_on_gpu` is the number of engine processes on each rank's GPU."""
        self._channel: Channel | None = None
        if route.kind == "gpus":
            self._channel = SameGpu(
                [self._listener.accept() for _ in range(engines_on_gpu[self.engine.rank])]
            )
            self._listener.close()
        elif self.engine.rank == route.source:
            self._channel = Broadcast(route.kind, 0, 1 + route.receivers, rendezvous)

    def send_weights(self) -> float | None:
        """Sends weights to the engines under their checkpoint names: either only the adapters, or all trained
        weights, including the weights of a trained image encoder. Returns the fraction of the adapters'
        update that survives in merged weights, or None if nothing is merged.

        This is a collective: ranks that do not send only help to gather.
        """
        survival = Survival()
        model = self.engine.module.model
        if self.config.engine.adapters == "alone":
            weights = scaled_adapters(model, self.engine.gathered)
        else:
            encoder = trained_encoder_of(self.engine.module)
            weights = checkpoint_weights(model, self.engine.gathered, survival, encoder)
        if self._channel is not None:
            self._channel.send(weights)
        else:
            deque(weights, maxlen=0)
        return survival.share()

    def try_export(self, folder: str) -> None:
        """Writes and then removes everything that `export` will write, except the weights, on rank 0. Raises
        ValueError for the same reasons as `try_export` in `training/ranks.py`."""
        try_export(self.engine, Path(folder), self.model.path, self.config.lora, self.model.trust_remote_code)

    def export_average(self, folder: str) -> None:
        """Writes the moving average of the policy, on rank 0."""
        model = self.model
        export_average(self.engine, Path(folder), model.path, self.config.lora, model.trust_remote_code)

    def export(self, folder: str) -> None:
        """Writes a transformers checkpoint, on rank 0."""
        export(self.engine, Path(folder), self.model.path, self.config.lora, self.model.trust_remote_code)
