"""Reads only the language model's weights from a multimodal checkpoint, or the weights of the whole model if
it reads images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_core.models.multimodal.wrapper import stored_names, text_names
from rlhf_core.system import progress


def apply() -> None:
    """Makes vLLM read the language model of a multimodal checkpoint under the names of its own class
    (`text_names`), and the whole under `whole_name`. Each weight read counts as progress of this process."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    read = DefaultModelLoader.get_all_weights

    def of_language_model(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        names = language_model_names(model_config)
        family = getattr(model_config.hf_config, "model_type", "")
        for name, weight in read(self, model_config, model):
            progress.made()
            if names is None:
                yield whole_name(family, name), weight
            elif name in names:
                yield names[name], weight

    DefaultModelLoader.get_all_weights = of_language_model


def language_model_names(model_config: Any) -> dict[str, str] | None:
    """Returns vLLM's name for each stored weight of the language model; None if vLLM runs the whole model, or
    if there is no local folder."""
    folder = Path(model_config.model)
    if model_config.hf_config is not model_config.hf_text_config or not folder.is_dir():
        return None
    return text_names(stored_names(folder))


def whole_name(family: str, stored: str) -> str:
    """Returns vLLM's name for a weight of a whole multimodal checkpoint. transformers 5 stores Gemma 3's
    encoder without the prefix that releases have."""
    if family != "gemma3":
        return stored
    return re.sub(r"^(model\.)?vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.", stored)
