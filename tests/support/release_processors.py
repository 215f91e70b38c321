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

from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.chat.picture_rendering import PictureRenderer, _OfImages

MODELS = "transformers.models"
# Where processors are, and the name of their modules that import torchvision.
PLACES = {"gemma4": (f"{MODELS}.gemma4", "gemma4"), "mistral3": (f"{MODELS}.pixtral", "pixtral")}


def release_processor(pictures: PictureRenderer) -> Any:
    """transformers' processor with the renderer's image processor and tokenizer, for images and text."""
    own = pictures._processor
    if isinstance(own, ProcessorMixin):
        return own
    folder = Path(own.tokenizer.name_or_path)
    family = json.loads((folder / "config.json").read_text())["model_type"]
    stored = json.loads((folder / "processor_config.json").read_text())
    stored.pop("image_processor", None)
    whole = getattr(_code(*PLACES[family]), stored.pop("processor_class"))
    # some add tokens to theirs
    known = {"image_processor": own.image_processor, "tokenizer": load_tokenizer(str(folder))}
    parts = {name: known.get(name) for name in whole.get_attributes()}
    return type(whole.__name__, (_OfImages, whole), {})(**parts, **stored)


def _code(folder: str, name: str) -> ModuleType:
    """A processor's module. Where it imports torchvision's way of resizing, it gets Pillow's."""
    place = f"{folder}.processing_{name}"
    if importlib.util.find_spec("torchvision"):
        return importlib.import_module(place)
    absent = f"{folder}.image_processing_{name}"
    sys.modules[absent] = importlib.import_module(f"{folder}.image_processing_pil_{name}")
    try:
        return importlib.import_module(place)
    finally:
        del sys.modules[absent]
