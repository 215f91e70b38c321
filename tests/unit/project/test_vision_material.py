"""The material of the recipe with images: reproducible, held-out images are not trained on, answers are right."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[3] / "deployments" / "demo" / "make_vision_material.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_vision_material", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "material"
    assert script.make(folder) and not script.make(folder)
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def squares_in(script: ModuleType, file: Path) -> dict[str, str]:
    """The colours of an image's squares by quarter."""
    image = Image.open(file)
    half = script.SIZE // 2
    found = {}
    for quarter, (x, y) in script.QUARTERS.items():
        pixel = image.getpixel((x * half + half // 2, y * half + half // 2))
        for colour, rgb in script.COLOURS.items():
            if max(abs(a - b) for a, b in zip(pixel, rgb, strict=True)) <= script.SHADES:
                found[quarter] = colour
    return found


def test_the_same_seed_makes_the_same_files(script: ModuleType, made: Path, tmp_path: Path) -> None:
    script.make(tmp_path / "again")
    script.make(tmp_path / "other", seed=1)
    files = [file.relative_to(made) for file in made.rglob("*") if file.is_file()]
    assert all((tmp_path / "again" / file).read_bytes() == (made / file).read_bytes() for file in files)
    assert (tmp_path / "other" / "sft.jsonl").read_bytes() != (made / "sft.jsonl").read_bytes()


def test_other_content_is_not_taken_for_the_material(script: ModuleType, made: Path, tmp_path: Path) -> None:
    for folder, seed in ((made, 1), (tmp_path, 0)):
        with pytest.raises(ValueError, match="remove it, or name another"):
            script.make(folder, seed)


def test_images_decide_the_answers_and_held_out_ones_are_not_trained_on(
    script: ModuleType, made: Path
) -> None:
    composed: dict[str, set[object]] = {}
    for name in ("heldout", "prompts"):
        rows = rows_of(made, name)
        for row in rows:
            squares = squares_in(script, made / row["image"])
            composed.setdefault(name, set()).add(tuple(squares.items()))
            if row["category"] == "count":
                assert row["answer"] == script.NUMBERS[len(squares) - 1]
            else:
                asked = row["prompt"].removeprefix("Which colour is ").removesuffix("?")
                assert row["answer"] == squares[asked]
        images = {(made / row["image"]).read_bytes() for row in rows}
        assert len(images) > 0.99 * len(rows)
    for row in rows_of(made, "sft")[:500]:
        squares = squares_in(script, made / row["messages"][0]["content"][0]["image"])
        composed["prompts"].add(tuple(squares.items()))
    assert not composed["heldout"] & composed["prompts"]
    # a model that sees no image answers a quarter of the questions
    for name in ("heldout", "prompts"):
        rows = rows_of(made, name)
        counts = Counter((row["category"], row["answer"]) for row in rows)
        most = [max(count for key, count in counts.items() if key[0] == kind) for kind in ("count", "colour")]
        assert sum(most) < (0.25 + 4 * (0.25 * 0.75 / len(rows)) ** 0.5) * len(rows)
