"""Builds vLLM's form of prompts with images from the tokens and the tensors of our own processor.

vLLM's processor sees no request: it would resize with torchvision and expand placeholders that are already
expanded. vLLM loads it only to determine the size of the largest image.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.chat.picture_rendering import PictureRenderer
from rlhf_core.data.pictures.picture_source import PictureFault, PictureSource
from rlhf_core.rollout.engine_contract import Pictures, Request

THREADS = 8  # that decode images
AHEAD = 32  # prompts whose images are decoded before they are asked for
KEPT = 64  # images whose tensors are kept for the other answers to their prompt
MOST = 256  # images of a prompt, as of a row


class SeenPicture(NamedTuple):
    """An image in vLLM's form. `key`: a digest of its content, which vLLM uses as the key of its cache.
    `item`: the tensors of its encoder. `tokens`: how many tokens it takes."""

    key: str
    item: Any
    tokens: int


def picture_options() -> dict[str, Any]:
    """Returns vLLM's options for a model that reads images: no cache of what its own processor returns, and
    pixels that are already normalised, because vLLM 0.32 would otherwise normalise them in the encoder."""
    from vllm import EngineArgs

    options = {"limit_mm_per_prompt": {"image": MOST, "video": 0, "audio": 0}, "mm_processor_cache_gb": 0}
    known = "mm_device_do_normalize" in EngineArgs.__dataclass_fields__
    return options | ({"mm_device_do_normalize": False} if known else {})


class WaitingRequests:
    """Requests that are not yet in the engine, in their order. Their prompts are built when they are taken,
    so that the tensors of their images are not held for longer."""

    def __init__(self) -> None:
        self._batches = deque[Iterator[tuple[Request, dict[str, Any]]]]()
        self._keys = set[int]()

    def add(self, requests: Sequence[Request], prompts: Iterator[dict[str, Any]]) -> None:
        """Appends requests, whose prompts are taken from `prompts` one by one."""
        if requests:
            self._batches.append(zip(requests, prompts, strict=True))
            self._keys |= {request.key for request in requests}

    def drop(self, keys: Sequence[int]) -> None:
        """Removes the requests with these keys, if they are waiting."""
        self._keys -= set(keys)

    def taken(self) -> Iterator[tuple[Request, dict[str, Any]]]:
        """Yields the next requests with their prompts, until none is waiting. Raises any error raised while a
        prompt is built."""
        while self._batches:
            try:
                for request, prompt in self._batches[0]:
                    if request.key in self._keys:
                        self._keys.remove(request.key)
                        yield request, prompt
            except Exception:
                self._batches.popleft()
                raise
            self._batches.popleft()


class PicturedPrompts:
    """Builds prompts for the vLLM engine `llm`, whose model is in `folder`."""

    def __init__(self, llm: Any, folder: str, trust_remote_code: bool):
        engine = llm.llm_engine
        self._fields = engine.renderer.get_mm_processor()._get_mm_fields_config
        self._dtype = engine.model_config.dtype
        self._family = str(engine.model_config.hf_config.model_type)
        self._renderer = PictureRenderer(load_tokenizer(folder, trust_remote_code))
        self._seen = lru_cache(maxsize=KEPT)(self._seen_of)

    def built(
        self, prompts: Sequence[Sequence[int]], pictures: Sequence[Pictures]
    ) -> Iterator[dict[str, Any]]:
        """Yields each prompt with its images, which threads decode ahead of it."""
        with ThreadPoolExecutor(THREADS, "images") as pool:
            waiting = deque[Future[dict[str, Any]]]()
            for tokens, own in zip(prompts, pictures, strict=True):
                waiting.append(pool.submit(self.prompt, tokens, own))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def prompt(self, tokens: Sequence[int], pictures: Pictures) -> dict[str, Any]:
        """Returns a prompt for `LLMEngine.add_request`. Raises ValueError if an image can no longer be read,
        or is not the one that the tokens were made for."""
        if not pictures:
            return {"prompt_token_ids": list(tokens)}
        from vllm.multimodal.inputs import PlaceholderRange

        seen = []
        places = []
        for picture in pictures:
            image = self._read(picture.source)
            marks = torch.tensor(tokens[picture.start : picture.stop]) == self._renderer.token_id
            if int(marks.sum()) != image.tokens:
                raise ValueError(
                    f"the image {picture.source.name!r:.100} takes {image.tokens} tokens, but its prompt has"
                    f" {int(marks.sum())} for it: the file has changed since the data was read, or the"
                    " processor is from another model"
                )
            seen.append(image)
            length = picture.stop - picture.start
            places.append(PlaceholderRange(picture.start, length, None if bool(marks.all()) else marks))
        return {
            "type": "multimodal",
            "prompt_token_ids": list(tokens),
            "mm_kwargs": {"image": [image.item for image in seen]},
            "mm_hashes": {"image": [image.key for image in seen]},
            "mm_placeholders": {"image": places},
        }

    def _read(self, source: PictureSource) -> SeenPicture:
        try:
            return self._seen(source.version, source)
        except (PictureFault, OSError) as fault:
            raise ValueError(f"{fault}; it could be read when the stage began: restore it") from fault

    def _seen_of(self, _version: bytes, source: PictureSource) -> SeenPicture:
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        tensors, tokens = self._renderer.seen(source)
        inputs = BatchFeature(vllm_inputs(self._family, tensors, self._dtype))
        (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, self._fields(inputs, {}))["image"]
        return SeenPicture(source.content_digest, item, tokens)


def vllm_inputs(family: str, tensors: Mapping[str, np.ndarray], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the tensors of one image (see `PictureRenderer.tensors`) under the names and in the shapes that
    vLLM's processor of the family returns, with pixels in the model's dtype."""
    inputs: dict[str, Any] = {name: _in_dtype(values, dtype) for name, values in tensors.items()}
    if family == "gemma3":
        inputs["num_patches"] = torch.ones(1, dtype=torch.int64)  # no crops
    elif family == "gemma4":
        inputs["pixel_position_ids"] = inputs.pop("image_position_ids")
    elif family == "mistral3":
        height, width = inputs["image_sizes"][0].tolist()
        inputs["pixel_values"] = [inputs["pixel_values"].view(3, height, width)]
    return inputs


def _in_dtype(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
