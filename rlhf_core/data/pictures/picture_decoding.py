"""Decodes images with Pillow into upright RGB, and accepts only a fixed list of formats. Torch-free."""

from __future__ import annotations

import io
import warnings
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.data.pictures.picture_source import (
    ANIMATED,
    DAMAGED,
    MAX_PIXELS,
    OTHER_FORMAT,
    TOO_LARGE,
    PictureFault,
    PictureSource,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
SEVERAL_VIEWS = "MPO"  # a phone's JPEG with a preview or a second view; the first image is the photo
SCAN = b"\xff\xda"  # starts a scan of a JPEG; never in its compressed data, where 0 follows 0xff
MAX_SCANS = 100  # a progressive JPEG has about 10, and each costs a pass over all pixels


def decoded(source: PictureSource) -> PilImage:
    """Returns the image in RGB, rotated according to its EXIF orientation. Fills transparent areas with
    white, as vLLM does. Raises PictureFault for an image that is missing, too large, animated, damaged or in
    another format."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    data = source.encoded()
    named = f"the image {source.name!r:.100}" if source.name else "an image"
    try:
        _silence_pillow()
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise PictureFault(
                    TOO_LARGE, f"{named} has {width} x {height} pixels: at most {MAX_PIXELS:,} are read"
                )
            if image.format in ("JPEG", SEVERAL_VIEWS) and data.count(SCAN) > MAX_SCANS:
                raise PictureFault(DAMAGED, f"{named} has more than {MAX_SCANS} scans: save it again")
            # n_frames would read all frames
            if image.format != SEVERAL_VIEWS and getattr(image, "is_animated", False):
                raise PictureFault(ANIMATED, f"{named} is animated: store one of its frames")
            image.load()
            return _in_rgb(ImageOps.exif_transpose(image))
    except PictureFault:
        raise
    except UnidentifiedImageError:
        raise PictureFault(OTHER_FORMAT, f"{named} is not JPEG, PNG, WebP, GIF or BMP: convert it") from None
    except Image.DecompressionBombError:
        raise PictureFault(TOO_LARGE, f"{named} has more than {MAX_PIXELS:,} pixels: shrink it") from None
    except Exception as error:  # decoders raise many kinds of errors for damaged data
        raise PictureFault(DAMAGED, f"{named} is damaged ({type(error).__name__}: {error})") from error


@cache
def _silence_pillow() -> None:
    """Ignores Pillow's warnings in the whole process. `warnings.catch_warnings` is not safe in the threads
    that decode images."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _in_rgb(image: PilImage) -> PilImage:
    from PIL import Image

    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):  # conversion would clip 16 bits at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        seen = image.convert("RGBA")
        below = Image.new("RGBA", seen.size, (255, 255, 255, 255))
        return Image.alpha_composite(below, seen).convert("RGB")
    return image.convert("RGB")
