"""Images of strangers: each that cannot be used is a fault with a sentence, and none is opened outside of the
data's folder."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlhf_core.data.pictures import picture_source
from rlhf_core.data.pictures.picture_decoding import decoded
from rlhf_core.data.pictures.picture_source import (
    ANIMATED,
    DAMAGED,
    MISSING,
    OTHER_FORMAT,
    OUTSIDE,
    TOO_LARGE,
    PictureFault,
    PictureSource,
)
from tests.support.pictured_models import square


def encoded(image: Image.Image, kind: str, **how: object) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **how)
    return content.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes whose header promises this size."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 120, 250)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def many_scans() -> bytes:
    """A progressive JPEG whose last scan is repeated: each costs a pass over all pixels."""
    whole = encoded(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * 200 + whole[-2:]


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
HOSTILE = {
    "a truncated JPEG": (encoded(NOISE, "JPEG")[:900], DAMAGED),
    "a truncated PNG": (encoded(NOISE, "PNG")[:3000], DAMAGED),
    "a PNG with one bit turned": (encoded(NOISE, "PNG")[:-40] + b"\xff" * 40, DAMAGED),
    "a JPEG of many scans": (many_scans(), DAMAGED),
    "a bomb": (bomb(60_000, 60_000), TOO_LARGE),
    "above the limit on pixels": (bomb(8001, 8000), TOO_LARGE),
    "an animated GIF": (animated("GIF"), ANIMATED),
    "an animated PNG": (animated("PNG"), ANIMATED),
    "an animated WebP": (animated("WEBP"), ANIMATED),
    "a TIFF": (encoded(NOISE, "TIFF"), OTHER_FORMAT),
    "an EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", OTHER_FORMAT),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", OTHER_FORMAT),
    "a text": (b"no image", OTHER_FORMAT),
    "only a header": (b"\x89PNG\r\n\x1a\n", OTHER_FORMAT),
}


def test_a_progressive_image_is_read() -> None:
    data = encoded(NOISE, "JPEG", progressive=True)
    assert data.count(b"\xff\xda") > 5
    assert decoded(PictureSource("a.jpg", None, data)).size == (64, 64)


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_are_no_usable_image(name: str) -> None:
    data, fact = HOSTILE[name]
    with pytest.raises(PictureFault) as told:
        decoded(PictureSource("x.png", None, data))
    assert told.value.fact == fact
    assert "\n" not in str(told.value) and "x.png" in str(told.value)


def test_limits_on_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_source, "MAX_BYTES", 100)
    (tmp_path / "large.png").write_bytes(encoded(NOISE, "PNG"))
    for source in (
        PictureSource("large.png", str(tmp_path)),
        PictureSource("x", None, encoded(NOISE, "PNG")),
    ):
        with pytest.raises(PictureFault, match="make it smaller, at most 100") as told:
            decoded(source)
        assert told.value.fact == TOO_LARGE


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("../secret.png", OUTSIDE),
        ("a/../../secret.png", OUTSIDE),
        ("{root}/secret.png", OUTSIDE),
        ("/etc/passwd", OUTSIDE),
        ("", MISSING),
        ("no.png", MISSING),
        ("data/..", OUTSIDE),
        ("images", MISSING),
        ("pipe.png", MISSING),
        ("with\0null.png", MISSING),
        ("n" * 5000 + ".png", MISSING),
        ("empty.png", DAMAGED),
    ],
)
def test_paths_that_are_not_opened(name: str, fact: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(square("red"))
    (folder / "empty.png").touch()
    os.mkfifo(folder / "pipe.png")
    with pytest.raises(PictureFault) as told:
        decoded(PictureSource(name.format(root=tmp_path), str(folder)))
    assert told.value.fact == fact


def test_a_path_without_a_folder_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(square("red"))
    with pytest.raises(PictureFault, match="put it beside the data"):
        decoded(PictureSource(str(tmp_path / "a.png"), None))


def test_files_in_the_folder_are_opened_and_links_in_it_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "large-disk" / "a.png").write_bytes(square("green"))
    (folder / "linked").symlink_to(tmp_path / "large-disk")
    (folder / "images" / "a.png").write_bytes(square("red"))
    for name, colour in (
        ("images/a.png", (220, 20, 20)),
        ("./images/../images/a.png", (220, 20, 20)),
        (str(folder / "images" / "a.png"), (220, 20, 20)),
        ("linked/a.png", (20, 200, 20)),
    ):
        assert decoded(PictureSource(name, str(folder))).getpixel((3, 3)) == colour


def test_all_modes_become_rgb() -> None:
    red = Image.new("RGB", (4, 4), (220, 20, 20))
    clear = Image.new("RGBA", (4, 4), (220, 20, 20, 0))
    deep = Image.fromarray(np.full((4, 4), 200 << 8, np.uint16))
    cut = red.quantize(4)
    cut.info["transparency"] = cut.getpixel((0, 0))
    cases = [
        (encoded(red.convert("CMYK"), "JPEG", quality=95), (220, 20, 20)),
        (encoded(red.convert("P", palette=Image.Palette.ADAPTIVE), "PNG"), (220, 20, 20)),
        (encoded(clear, "PNG"), (255, 255, 255)),
        (encoded(cut, "PNG", transparency=cut.info["transparency"]), (255, 255, 255)),
        (encoded(red.convert("LA"), "PNG"), (80, 80, 80)),
        (encoded(red.convert("1"), "PNG"), None),
        (encoded(deep, "PNG"), (200, 200, 200)),
    ]
    for data, colour in cases:
        image = decoded(PictureSource("", None, data))
        assert image.mode == "RGB"
        if colour is not None:
            assert max(abs(a - b) for a, b in zip(image.getpixel((1, 1)), colour, strict=True)) < 12


def test_exif_rotation_is_applied() -> None:
    image = Image.new("RGB", (8, 4), (0, 0, 0))
    image.putpixel((0, 0), (255, 255, 255))
    about = Image.Exif()
    about[0x0112] = 6  # turn by 90 degrees clockwise to show
    turned = decoded(PictureSource("", None, encoded(image, "PNG", exif=about)))
    assert turned.size == (4, 8) and turned.getpixel((3, 0)) == (255, 255, 255)


def test_a_suffix_of_another_format_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(square("red"))
    (tmp_path / "b.PNG").write_bytes(square("red"))
    assert PictureSource("a.jpg", str(tmp_path)).is_misnamed
    assert not PictureSource("b.PNG", str(tmp_path)).is_misnamed
    assert not PictureSource("b", None, square("red")).is_misnamed
    assert PictureSource("b.webp", None, square("red", kind="JPEG")).is_misnamed
