"""The receiving end of weights, inside vLLM: it imports `WeightReceiver` into its workers by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_core.rollout.vllm_patches import gather_sampled_alone
from rlhf_core.rollout.weight_transfer import Broadcast, Channel, Rendezvous, Route, SameGpu


def gpu_uuid() -> str | None:
    """The GPU this process computes on, the same in every process on it; None on CPU."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else None


class WeightReceiver:
    """Mixed into vLLM's worker. `rank` is the worker's place among those of its engine. `tied`: the model shares embeddings and head."""

    model_runner: Any
    rank: int
    _channel: Channel

    def gpu_uuid(self) -> str | None:
        return gpu_uuid()

    def lean_logprobs(self) -> None:
        gather_sampled_alone(self.model_runner.sampler)

    def seed(self, seed: int) -> None:
        """Of the random numbers for answers without a seed of their own, which one of vLLM's model runners has of PyTorch, the other of
        numpy."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)

    def open_channel(self, route: Route, rendezvous: Rendezvous, first: int) -> None:
        """`first`: the number of this engine's first worker among those of all engines."""
        if route.kind == "gpus":
            gpu = gpu_uuid()
            assert gpu is not None
            self._channel = SameGpu([Client(rendezvous.sockets[gpu], authkey=rendezvous.key)])
        else:
            self._channel = Broadcast(route.kind, 1 + first + self.rank, 1 + route.receivers, rendezvous)

    def receive_weights(self, tied: bool) -> None:
        """All weights under checkpoint names, from the trainer that sends them now."""
        self._reload(self._channel.receive(), tied)

    def take_weights(self, named: Sequence[tuple[str, Tensor]], tied: bool) -> None:
        self._reload(named, tied)

    def load_checkpoint(self, folder: str, tied: bool) -> None:
        """The weights of the safetensors files in a folder."""
        from safetensors.torch import load_file

        self._reload((named for file in sorted(Path(folder).glob("*.safetensors")) for named in load_file(file).items()), tied)

    def _reload(self, weights: Iterable[tuple[str, Tensor]], tied: bool) -> None:
        """`load_weights` alone fails after start, since CPU linears are repacked."""
        if not torch.cuda.is_available():
            _forget_packed_experts(self.model_runner.get_model())
        self.model_runner.reload_weights(weights_iterator=_with_head(weights) if tied else weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _with_head(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """With tied embeddings the head is needed too: vLLM repacks it and would keep the old one."""
    embeddings, sent = None, False
    for name, weight in weights:
        sent = sent or name == "lm_head.weight"
        if name.endswith("embed_tokens.weight"):
            embeddings = weight
        yield name, weight
    if embeddings is not None and not sent:
        yield "lm_head.weight", embeddings


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """On CPU vLLM packs experts once, when their kernel is made: without the kernel, the next load packs the new weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]
