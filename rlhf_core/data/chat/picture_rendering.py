"""Expands image placeholders in rendered text with the model's own processor, and turns images into the
tensors for its image encoder.

The text is expanded before it is encoded, as the processor itself does, so that the text around an image gets
the same tokens. The number of tokens of an image depends only on its size. The processor resizes with Pillow
on every machine, with or without torchvision. Video processors, which require torchvision, are not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from rlhf_core.data.chat.picture_processors import OWN_PROCESSORS
from rlhf_core.data.chat.text_encoder import Span
from rlhf_core.data.pictures.picture_decoding import decoded
from rlhf_core.data.pictures.picture_source import TOO_THIN, EncodedPicture, PictureFault, PictureSource
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import PICTURE_FAMILIES
from rlhf_core.hub.snapshots import cached
from rlhf_core.system.files import read_json

SIZES = 4096  # number of image sizes whose expansions are cached
OWN_ARGUMENTS = ("image_seq_length",)  # arguments of processors other than their parts


class PictureRenderer:
    """Renders images with the processor in a tokenizer's folder. `token_id` is the token that an image
    feature replaces.

    Raises ValueError for a model that cannot be trained on images, or whose folder has no processor.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        named = str(tokenizer.name_or_path)
        folder = str(cached(named)) if is_remote(named) else named
        self._processor = _load(folder, tokenizer)
        self._images = self._processor.image_processor
        self.token_id = int(AutoConfig.from_pretrained(folder).image_token_id)
        self._token = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self._options: dict[str, Any] = self._processor.picture_options
        self._sizes: dict[str, tuple[int, int]] = {}  # keyed by the images' identities
        self._expansion = lru_cache(maxsize=SIZES)(self._expansion_of)

    def expanded(
        self, text: str, spans: Sequence[Span], sources: Sequence[PictureSource]
    ) -> tuple[str, list[Span], list[int]]:
        """Returns the text with all placeholders expanded, its spans shifted accordingly, and the number of
        image tokens of each image. Raises ValueError if the template wrote more or fewer placeholders than
        there are images. Raises PictureFault for an image that cannot be used."""
        placeholder = str(self._processor.image_token)
        places = [match.start() for match in re.finditer(re.escape(placeholder), text)]
        if len(places) != len(sources):
            raise ValueError(
                f"the chat template writes {len(places)} placeholders {placeholder} for {len(sources)}"
                " images: use the template of the model's release"
            )
        expansions = [self._expansion(self._size(source)) for source in sources]
        parts = []
        last = 0
        for place, expansion in zip(places, expansions, strict=True):
            parts += [text[last:place], expansion]
            last = place + len(placeholder)
        added = [len(expansion) - len(placeholder) for expansion in expansions]

        def moved(at: int) -> int:
            return at + sum(more for place, more in zip(places, added, strict=True) if place < at)

        counts = [expansion.count(self._token) for expansion in expansions]
        return "".join([*parts, text[last:]]), [(moved(begin), moved(end)) for begin, end in spans], counts

    def _size(self, source: PictureSource) -> tuple[int, int]:
        """Returns width and height. Decodes each image only once, even if its row is rendered several times
        until it is short enough."""
        identity = source.identity
        if identity not in self._sizes:
            if len(self._sizes) >= SIZES:
                self._sizes.clear()
            self._sizes[identity] = decoded(source).size
        return self._sizes[identity]

    def located(
        self, tokens: Sequence[int], sources: Sequence[PictureSource], counts: Sequence[int]
    ) -> tuple[EncodedPicture, ...]:
        """Returns the images, each with its range of tokens. Raises ValueError if there are more or fewer
        image tokens than the images need."""
        places = np.flatnonzero(np.asarray(tokens) == self.token_id)
        if len(places) != sum(counts):
            raise ValueError(
                f"a text has {len(places)} tokens {self._token}, but its images need {sum(counts)}: mark it"
                " as a special token in the model's tokenizer, and do not write it in texts"
            )
        ends = np.cumsum(counts)
        return tuple(
            EncodedPicture(int(places[end - count]), int(places[end - 1]) + 1, source)
            for source, count, end in zip(sources, counts, ends, strict=True)
        )

    def tensors(self, source: PictureSource) -> dict[str, np.ndarray]:
        """Returns the inputs of the model's image encoder for one image, by name. Their first dimension is
        images, patches or pixels. Raises PictureFault for an image that cannot be used."""
        tensors: dict[str, np.ndarray] = self._processor.picture_tensors(self._processed(decoded(source)))
        return tensors

    def seen(self, source: PictureSource) -> tuple[dict[str, np.ndarray], int]:
        """Returns `tensors` and the number of image tokens. Can be called from several threads."""
        features = self._processed(decoded(source))
        tokens = str(self._processor.replace_image_token(features, 0)).count(self._token)
        return self._processor.picture_tensors(features), tokens

    def _expansion_of(self, size: tuple[int, int]) -> str:
        """Returns the text that represents an image of size (width, height)."""
        from PIL import Image

        features = self._processed(Image.new("RGB", size))
        return str(self._processor.replace_image_token(features, 0))

    def _processed(self, image: Any) -> Mapping[str, Any]:
        try:
            return self._images([image], return_tensors="np", **self._options)
        except ValueError as error:
            raise PictureFault(
                TOO_THIN,
                f"the model's processor refuses an image of {image.size[0]} x {image.size[1]}: {error}",
            ) from error


class _OfImages:
    """Builds a processor without its video processor, and returns the inputs of the image encoder."""

    image_processor: Any
    unused_input_names: Sequence[str]

    @property
    def picture_options(self) -> dict[str, Any]:
        """Returns the arguments that the processor passes to its image processor."""
        defaults = getattr(type(self).valid_processor_kwargs, "_defaults", {})  # type: ignore[attr-defined]
        return dict(defaults.get("images_kwargs", {}))

    def picture_tensors(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns, by name, the outputs of the image processor that are inputs of the encoder."""
        names = set(self.image_processor.model_input_names) - set(self.unused_input_names)
        return {name: np.asarray(features[name]) for name in sorted(names)}

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument is None:
            return None
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


def _load(folder: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    config = AutoConfig.from_pretrained(folder) if (Path(folder) / "config.json").is_file() else None
    family = getattr(config, "model_type", "")
    if config is None or family not in PICTURE_FAMILIES:
        raise ValueError(
            f"there are images, but {folder} ({family or 'no config.json'}) cannot be trained on any: name"
            f" a model of the families {', '.join(PICTURE_FAMILIES)}, or drop the images"
        )
    try:
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{folder}: no image processor can be loaded from it ({str(error).splitlines()[0]}): copy"
            " preprocessor_config.json or processor_config.json of the model's release into it"
        ) from error
    stored = Path(folder) / "processor_config.json"
    about = read_json(stored) if stored.is_file() else {}
    if family in OWN_PROCESSORS:
        return OWN_PROCESSORS[family](config, images, tokenizer, about)
    whole = PROCESSOR_MAPPING[type(config)]
    known = {"image_processor": images, "tokenizer": tokenizer}
    kind = type(whole.__name__, (_OfImages, whole), {})
    arguments = {name: known.get(name) for name in whole.get_attributes()}
    own = {name: about[name] for name in OWN_ARGUMENTS if name in about}
    return kind(**arguments, **own)
