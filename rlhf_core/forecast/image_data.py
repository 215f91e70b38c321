"""Leaves the image encoder out of a model's size if a stage has no images to encode. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.config import DPO, KTO, PPO, StageConfig
from rlhf_core.data.image_fields import may_hold_images
from rlhf_core.data.prompt_rows import environment_sends, picture_refusal
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import Size

LOOKED_AT = 64 << 20  # bytes of each data file


def encodes_images(config: StageConfig) -> bool:
    """Returns whether a stage may read images, judged by the first LOOKED_AT bytes of its files."""
    return not picture_refusal(config) and may_have_images(config, LOOKED_AT)


def may_have_images(config: StageConfig, limit: int | None = None) -> bool:
    """Returns whether a stage's data may have images, or its environment may send some. Data on the Hub, and
    data that another stage makes, may always have images. `limit`: as in `may_hold_images`."""
    if environment_sends(config) or (isinstance(config, DPO | KTO) and config.data is None):
        return True
    sources = [source for text in config.texts for source in text.data.sources if not source.is_generated]
    return any(is_remote(source.path) or may_hold_images(source.path, limit) for source in sources)


def seen_size(config: StageConfig, size: Size) -> Size:
    """Returns the size of a stage's model, without its image encoder if the stage reads no images."""
    if size.encoder is None or encodes_images(config):
        return size
    return size._replace(encoder=None)


def seen_sizes(config: PPO, sizes: Mapping[str, Size]) -> dict[str, Size]:
    """Returns the size of each role's model, like `seen_size`. Engines of judges read no images."""
    encoders = any(size.encoder for size in sizes.values()) and encodes_images(config)
    return {
        name: size if encoders and name in config.groups else size._replace(encoder=None)
        for name, size in sizes.items()
    }
