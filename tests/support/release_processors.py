"""transformers' own processors, also those that import torchvision, which is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import ProcessorMixin

from rlhf_core.data.chat.picture_rendering import PictureRenderer, _OfImages

MODELS = "transformers.models"
# Modules that import torchvision, and the names that processors take from them but do not use here.
UNUSED = {
    f"{MODELS}.pixtral.image_processing_pixtral": ("get_resize_output_image_size",),
}
PLACES = {"mistral3": f"{MODELS}.pixtral.processing_pixtral"}


def release_processor(pictures: PictureRenderer) -> Any:
    """transformers' processor with the renderer's image processor and tokenizer, for images and text."""
    own = pictures._processor
    if isinstance(own, ProcessorMixin):
        return own
    folder = Path(own.tokenizer.name_or_path)
    family = json.loads((folder / "config.json").read_text())["model_type"]
    stored = json.loads((folder / "processor_config.json").read_text())
    whole = getattr(_code(PLACES[family]), stored.pop("processor_class"))
    known = {"image_processor": own.image_processor, "tokenizer": own.tokenizer}
    parts = {name: known.get(name) for name in whole.get_attributes()}
    return type(whole.__name__, (_OfImages, whole), {})(**parts, **stored)


def _code(place: str) -> ModuleType:
    if importlib.util.find_spec("torchvision"):
        return importlib.import_module(place)
    for name, attributes in UNUSED.items():
        stand_in = ModuleType(name)
        for attribute in attributes:
            setattr(stand_in, attribute, Any)
        sys.modules[name] = stand_in
    try:
        return importlib.import_module(place)
    finally:
        for name in UNUSED:
            del sys.modules[name]
