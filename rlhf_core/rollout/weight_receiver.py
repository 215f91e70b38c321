"""Receives weights inside vLLM, which imports `WeightReceiver` into its workers by its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_core.hub.model_config import FIXED_EXPERTS, keeps_experts
from rlhf_core.models.wrapper import stored_names, text_names
from rlhf_core.rollout.patches.engine import gather_sampled_alone
from rlhf_core.rollout.patches.models import forget_packed_experts
from rlhf_core.rollout.weight_transfer import Broadcast, Channel, Rendezvous, Route, SameGpu


def gpu_uuid() -> str | None:
    """Returns the id of the GPU this process computes on, the same in every process on it; None on CPU."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else None


class WeightReceiver:
    """Adds methods to vLLM's worker. `rank`: the worker's number in its engine. `tied`: embeddings and head are one weight."""

    model_runner: Any
    rank: int
    _channel: Channel

    def gpu_uuid(self) -> str | None:
        return gpu_uuid()

    def lean_logprobs(self) -> None:
        gather_sampled_alone(self.model_runner.sampler)

    def seed(self, seed: int) -> None:
        """Seeds the random numbers of answers without a seed of their own: vLLM's model runners use PyTorch's or numpy's."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)

    def open_channel(self, route: Route, rendezvous: Rendezvous, first: int) -> None:
        """Connects to the trainer. `first`: the number of this engine's first worker among those of all engines."""
        if route.kind == "gpus":
            gpu = gpu_uuid()
            assert gpu is not None
            self._channel = SameGpu([Client(rendezvous.sockets[gpu], authkey=rendezvous.key)])
        else:
            self._channel = Broadcast(route.kind, 1 + first + self.rank, 1 + route.receivers, rendezvous)

    def receive_weights(self, tied: bool) -> None:
        """Loads all weights under checkpoint names from the trainer, which sends them now."""
        self._reload(self._channel.receive(), tied)

    def take_weights(self, named: Sequence[tuple[str, Tensor]], tied: bool) -> None:
        self._reload(named, tied)

    def load_checkpoint(self, folder: str, tied: bool) -> None:
        """Loads the weights of the safetensors files in a folder, of a multimodal checkpoint those of its language model."""
        from safetensors.torch import load_file

        names = self._names(stored_names(Path(folder)))
        read = (named for file in sorted(Path(folder).glob("*.safetensors")) for named in load_file(file).items())
        self._reload(((name, weight) for name, weight in read if name in names), tied)

    def _names(self, stored: set[str]) -> dict[str, str]:
        """Returns the names to load weights by, unless vLLM runs the whole of a multimodal model, which has the checkpoint's own."""
        config = self.model_runner.model_config
        return text_names(stored) if config.hf_config is config.hf_text_config else {name: name for name in stored}

    def _reload(self, weights: Iterable[tuple[str, Tensor]], tied: bool) -> None:
        """Replaces the weights. `load_weights` alone fails once linear layers are repacked, as they are on CPU after the start."""
        if (config := self.model_runner.model_config).hf_text_config.model_type in FIXED_EXPERTS:
            raise ValueError(keeps_experts(config.model))
        weights = ((name, weight) for sent, weight in weights for name in self._names({sent}).values())
        if not torch.cuda.is_available():
            forget_packed_experts(self.model_runner.get_model())
        if tied and hasattr(self.model_runner.get_model(), "lm_head"):
            weights = _with_head(weights)
        self.model_runner.reload_weights(weights_iterator=weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _with_head(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Adds the head to the weights of a model with tied embeddings: vLLM repacks it and would keep the old one."""
    embeddings, sent = None, False
    for name, weight in weights:
        sent = sent or name == "lm_head.weight"
        if name.endswith("embed_tokens.weight"):
            embeddings = weight
        yield name, weight
    if embeddings is not None and not sent:
        yield "lm_head.weight", embeddings
