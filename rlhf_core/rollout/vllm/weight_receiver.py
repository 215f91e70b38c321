"""Receives weights inside vLLM, whose workers import `WeightReceiver` by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_pp_group

from rlhf_core.hub.model_config import FIXED_EXPERTS, keeps_experts
from rlhf_core.hub.model_files import weight_files
from rlhf_core.models.multimodal.wrapper import stored_names, text_names
from rlhf_core.rollout.vllm.patches.language_models import whole_name
from rlhf_core.rollout.vllm.patches.packed_experts import forget_packed_experts
from rlhf_core.rollout.vllm.patches.vocabulary_rows import leave_out_padding
from rlhf_core.rollout.vllm.pipeline import join_stages
from rlhf_core.rollout.weight_transfer import Broadcast, Channel, Rendezvous, Route, SameGpu, gpu_uuid

join_stages()  # vLLM's processes import this module before they connect


ADAPTER_ID = 1  # of an engine's only adapter


class WeightReceiver:
    """Adds methods to vLLM's worker. `rank`: the worker's number in its engine. `tied`: whether embeddings
    and head are one weight."""

    model_runner: Any
    rank: int
    _channel: Channel

    def gpu_uuid(self) -> str | None:
        return gpu_uuid()

    def prepare_runner(self, known: int | None) -> None:
        """Excludes vocabulary rows from `known` on from sampling, and creates buffers of a later stage that
        otherwise only a warm-up would create."""
        runner = self.model_runner
        if known is not None:
            leave_out_padding(runner.get_model(), known)
        if getattr(runner, "intermediate_tensors", self) is None and not get_pp_group().is_first_rank:
            shape = {
                "batch_size": runner.max_num_tokens,
                "dtype": runner.model_config.dtype,
                "device": runner.device,
            }
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(**shape)

    def seed(self, seed: int) -> None:
        """Seeds the random numbers for answers without their own seed. vLLM's model runners use either
        PyTorch's or numpy's generator."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)

    def open_channel(self, route: Route, rendezvous: Rendezvous, first: int) -> None:
        """Connects to the trainer. `first`: the index of this engine's first worker among the workers of all
        engines."""
        if route.kind == "gpus":
            gpu = gpu_uuid()
            assert gpu is not None
            self._channel = SameGpu([Client(rendezvous.sockets[gpu], authkey=rendezvous.key)])
        else:
            self._channel = Broadcast(route.kind, 1 + first + self.rank, 1 + route.receivers, rendezvous)

    def receive_weights(self, tied: bool) -> None:
        """Loads all weights, under checkpoint names, as the trainer sends them at the same time."""
        self._reload(self._channel.receive(), tied)

    def keep_plain_head(self) -> None:
        """Excludes the head from the layers that can have adapters. Our adapters never include the head, and
        vLLM's head with adapters does not support log-probs of prompts. Raises ValueError if vLLM runs the
        whole of a multimodal model, whose layers have other names."""
        config = self.model_runner.model_config
        if config.hf_config is not config.hf_text_config:
            raise ValueError(
                f"engine.adapters: alone is for language models, and vLLM runs the whole of {config.model}:"
                " leave it out"
            )
        manager = self.model_runner.lora_manager._adapter_manager
        model = self.model_runner.get_model()
        for owner in [*model.modules()]:
            for name, part in [*owner.named_children()]:
                if type(part).__name__ == "LogitsProcessorWithLoRA" or (
                    name == "lm_head" and hasattr(part, "base_layer")
                ):
                    setattr(owner, name, part.base_layer)
        for name in [
            name for name, part in manager.modules.items() if type(part).__name__ == "LogitsProcessorWithLoRA"
        ]:
            del manager.modules[name]

    def receive_adapters(self, rank: int) -> None:
        """Replaces the adapters with the adapters that the trainer sends at the same time. Raises ValueError
        for a layer that cannot have adapters in vLLM."""
        replace_adapters(self.model_runner, dict(self._channel.receive()), rank)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def take_weights(self, named: Sequence[tuple[str, Tensor]], tied: bool) -> None:
        self._reload(named, tied)

    def load_checkpoint(self, folder: str, tied: bool) -> None:
        """Loads the weights from the safetensors files in a folder; from a multimodal checkpoint, only the
        weights of its language model."""
        from safetensors.torch import load_file

        names = self._names(stored_names(Path(folder)))
        read = (named for file in weight_files(Path(folder)) for named in load_file(file).items())
        self._reload(((name, weight) for name, weight in read if name in names), tied)

    def _names(self, stored: set[str]) -> dict[str, str]:
        """Maps stored names to the names under which the weights are loaded. If vLLM runs the whole of a
        multimodal model, the two are equal but for `whole_name`."""
        config = self.model_runner.model_config
        if config.hf_config is config.hf_text_config:
            return text_names(stored)
        return {name: whole_name(config.hf_config.model_type, name) for name in stored}

    def _reload(self, weights: Iterable[tuple[str, Tensor]], tied: bool) -> None:
        """Replaces the weights. vLLM's `load_weights` alone fails once linear layers have been repacked,
        which happens at start on CPU."""
        config = self.model_runner.model_config
        model = self.model_runner.get_model()
        if config.hf_text_config.model_type in FIXED_EXPERTS:
            raise ValueError(keeps_experts(config.model))
        weights = ((name, weight) for sent, weight in weights for name in self._names({sent}).values())
        if not torch.cuda.is_available():
            forget_packed_experts(model)
            model = getattr(model, "language_model", model)  # the head of a whole multimodal model
        if tied and hasattr(model, "lm_head"):
            weights = _with_head(weights)
        with _quiet() if config.hf_config is not config.hf_text_config else nullcontext():
            self.model_runner.reload_weights(weights_iterator=weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses vLLM's warning about each layer of an image encoder, which stays as it was loaded."""
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def adapter_request() -> Any:
    """Returns the LoRA request that makes vLLM answer with the adapters from `replace_adapters`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("actor", ADAPTER_ID, "sent by the actor")  # the last is a path that is not read


def replace_adapters(model_runner: Any, named: dict[str, Tensor], rank: int) -> None:
    """Loads adapters that have peft's names and this `rank`, for requests with `ADAPTER_ID`."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    outer = model_runner.lora_manager
    manager = outer._adapter_manager
    mapper = getattr(model_runner.get_model(), "hf_to_vllm_mapper", None)
    loaded = LoRAModel.from_lora_tensors(
        lora_model_id=ADAPTER_ID,
        tensors=named,
        peft_helper=PEFTHelper(r=rank, lora_alpha=rank, target_modules="all-linear"),  # already scaled
        device="cpu",
        dtype=outer.lora_config.lora_dtype,
        weights_mapper=mapper and getattr(mapper, "get_rename_mapper", lambda: mapper)(),
    )
    # one layer in the trainer, several in vLLM
    unknown = {name for name in loaded.loras if name in manager.packed_modules}
    if model_runner.model_config.use_mla:  # decoding splits this weight and ignores its adapter
        unknown |= {name for name in loaded.loras if name.endswith(".kv_b_proj")}
    if not unknown:
        outer.remove_adapter(ADAPTER_ID)
        manager.add_adapter(loaded)
        unknown = loaded.loras.keys() - manager.modules.keys()
    if unknown:
        lacking = ", ".join(sorted(unknown)[:3])
        raise ValueError(
            f"vLLM has no adapters for {lacking}: name other layers in lora.targets, or leave"
            " engine.adapters out"
        )
    manager.activate_adapter(ADAPTER_ID)


def _with_head(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Adds the head to the weights of a model with tied embeddings, because vLLM repacks the head and would
    keep the old one."""
    embeddings = None
    sent = False
    for name, weight in weights:
        sent = sent or name == "lm_head.weight"
        if name.endswith("embed_tokens.weight"):
            embeddings = weight
        yield name, weight
    if embeddings is not None and not sent:
        yield "lm_head.weight", embeddings
