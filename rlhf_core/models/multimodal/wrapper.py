"""Trains and samples only the language model of a multimodal checkpoint: the other parts stay unchanged,
under the checkpoint's names.

transformers loads the language model with its own class from the names in the whole checkpoint, and the
export restores these names. vLLM is given a folder with the same weights and the language model's config, and
maps names with `text_names`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.utils import logging

from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import more_than_text
from rlhf_core.hub.model_files import SECOND_COPY, TOKENIZER, WEIGHTS, stored_tensors
from rlhf_core.hub.snapshots import cached
from rlhf_core.models.multimodal.picture_language_models import (
    PICTURE_LANGUAGE_MODELS,
    has_causal_class,
)

# Names in checkpoints and in the language model's class, by the prefix of the former.
RENAMED = {
    "model.language_model.": {r"^model\.language_model\.": "model."},
    "language_model.model.": {
        r"^language_model\.model\.": "model.",
        r"^language_model\.lm_head\.": "lm_head.",
    },
    # releases of Qwen2-VL and Qwen2.5-VL, whose language model has the names of its own class
    "visual.": {r"^model\.": "model."},
}


def is_wrapper(config: PretrainedConfig) -> bool:
    """Returns whether a config describes a model that contains its language model as a part."""
    return config.get_text_config() is not config


def language_model(path: str, config: PretrainedConfig) -> dict[str, Any]:
    """Returns the options with which `from_pretrained` loads the language model of the multimodal checkpoint
    at `path`.

    Raises ValueError if transformers has no class for it, or the checkpoint uses other names.
    """
    text = config.get_text_config()
    prefix = _prefix(stored_names(folder_of(path)))
    if prefix is None or not has_causal_class(text):
        raise ValueError(more_than_text(path, (config.architectures or [type(config).__name__])[0]))
    text.tie_word_embeddings = config.tie_word_embeddings  # some configs set it only for the whole
    return {"config": text, "key_mapping": RENAMED[prefix]}


def stored_names(folder: Path) -> set[str]:
    """Returns the names of all weights in a folder. Raises the same errors as `stored_tensors`."""
    return {name for tensors in stored_tensors(folder).values() for name in tensors}


def _prefix(names: Iterable[str]) -> str | None:
    """Returns the prefix of the language model's names in a multimodal checkpoint, or None."""
    return next((prefix for prefix in RENAMED if any(name.startswith(prefix) for name in names)), None)


def text_names(names: set[str]) -> dict[str, str]:
    """Maps the names of a language model's weights in a checkpoint to the names in its own class. For a text
    model the names are equal."""
    prefix = _prefix(names)
    if prefix is None:
        return {name: name for name in names}
    found = {}
    for name in names:
        for pattern, into in (RENAMED[prefix] | {r"^lm_head\.": "lm_head."}).items():
            if re.match(pattern, name):
                found[name] = re.sub(pattern, into, name)
    return found


def link_language_model(path: str, folder: Path, trust_remote_code: bool) -> bool:
    """Fills `folder` with links to the files of the multimodal checkpoint at `path`, and with the config of
    its language model.

    Returns False for a checkpoint whose language model vLLM cannot load alone; vLLM then runs the whole
    model, or reports an error.
    """
    try:
        whole = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if type(whole.get_text_config()) in PICTURE_LANGUAGE_MODELS:
            return False
        config = language_model(path, whole)["config"]
    except (OSError, ValueError):
        return False
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.dtype = config.dtype or whole.dtype
    for pattern in (*WEIGHTS, *TOKENIZER, "generation_config.json", "chat_template.*"):
        for file in _matching(folder_of(path), pattern):
            (folder / file.name).symlink_to(file.resolve())
    config.save_pretrained(folder)
    return True


@contextmanager
def without_reports() -> Iterator[None]:
    """Prevents transformers from listing the weights of a checkpoint that it does not load."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def folder_of(path: str) -> Path:
    """Returns the folder of a model; for a model on the Hub, its folder in the Hub client's cache."""
    return cached(path) if is_remote(path) else Path(path)


def require_stored(weights: Collection[str], base: Path) -> None:
    """Raises ValueError if one of the `weights` is not in the checkpoint at `base`, in which they will be
    replaced (see `fill`)."""
    unknown = sorted(set(weights) - stored_names(base))
    if unknown:
        raise ValueError(
            f"{base} has no weight called {unknown[0]}, which was trained ({len(unknown)} such): it cannot be"
            " saved as it was"
        )


def copy_files(base: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copies the files of the checkpoint at `base` that match one of the patterns."""
    for pattern in patterns:
        for file in _matching(base, pattern):
            shutil.copyfile(file, folder / file.name)


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Returns the matching files, without a second copy of the weights, which vLLM would load instead."""
    return [file for file in folder.glob(pattern) if not file.match(SECOND_COPY)]
