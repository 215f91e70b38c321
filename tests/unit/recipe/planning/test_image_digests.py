"""Digests of stages cover the image files that data files name, and nothing changes for text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config import Source
from rlhf_core.data import image_fields
from rlhf_core.data.image_fields import image_files, image_names
from rlhf_core.recipe.digest import IMAGES_OF, Reading, content_now, deciding, images_content
from rlhf_core.runs.launch import StageFailed
from rlhf_core.system.files import ABSENT, Digests
from tasks.stages import require_unchanged
from tests.support.pictured_models import asked, square, write_rows
from tests.support.tiny_plan import Planned, changed

PART = asked([{"type": "image", "image": "images/a.png"}])


def write_image(folder: Path, name: str, colour: str, old: bool = True) -> Path:
    """Writes an image, last changed long ago, so that its digest is cached."""
    place = folder / name
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(square(colour))
    if old:
        os.utime(place, (len(colour), len(colour)))  # files of a size and a time are taken for the same
    return place


def test_a_replaced_image_makes_its_stages_anew(planned: Planned, tmp_path: Path) -> None:
    write_rows(tmp_path / "pairs.jsonl", [PART])
    write_image(tmp_path, "images/a.png", "red")
    before = planned()
    assert changed(before, planned()) == set()
    write_image(tmp_path, "images/other.png", "red")  # named by no row
    os.utime(tmp_path / "images" / "a.png", (9, 9))
    assert changed(before, planned()) == set()
    write_image(tmp_path, "images/a.png", "blue")
    assert "reward_model" in changed(before, planned()) and "sft" not in changed(before, planned())
    (tmp_path / "images" / "a.png").unlink()
    assert "reward_model" in changed(before, planned())
    write_image(tmp_path, "images/a.png", "red")
    assert changed(before, planned()) == set()


def test_a_stage_is_not_started_on_another_image(planned: Planned, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [PART])
    write_image(tmp_path, "images/a.png", "red")
    plan = planned()
    request = plan.request(plan["sft"])
    title = f"{IMAGES_OF}{tmp_path / 'train.jsonl'}"
    assert request.contents[title] == content_now(title, Digests())
    require_unchanged(request, Digests())
    write_image(tmp_path, "images/a.png", "blue")
    with pytest.raises(StageFailed):
        require_unchanged(request, Digests())


def test_text_has_the_digest_that_it_had(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [asked("an image, <image>")])
    content = deciding(Source(path=str(rows)), Digests())
    assert "images" not in content and content["path"] == Digests().of(rows)
    assert images_content("owner/name", Digests()) == images_content(str(tmp_path), Digests()) == ABSENT


def test_files_that_did_not_change_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = image_fields.image_names

    def counted(path: Path) -> list[str]:
        reads.append(path.name)
        return read(path)

    monkeypatch.setattr("rlhf_core.recipe.digest.image_names", counted)
    rows = write_rows(tmp_path / "rows.jsonl", [PART])
    write_image(tmp_path, "images/a.png", "red")
    first = Digests(tmp_path)
    images_content(str(rows), first)
    images_content(str(rows), first)
    assert len(reads) == 2  # changed within the last seconds
    os.utime(rows, (1, 1))
    found = images_content(str(rows), first)
    first.save()
    again = Digests(tmp_path)
    monkeypatch.setattr("rlhf_core.system.files.file_digest", lambda _: pytest.fail("was read again"))
    reading = Reading(again)
    assert images_content(str(rows), reading) == found and len(reads) == 3
    assert reading.contents == {f"{IMAGES_OF}{rows}": found}
    monkeypatch.undo()
    write_image(tmp_path, "images/a.png", "blue", old=False)
    assert images_content(str(rows), again) != found


NAMED: list[tuple[dict[str, Any], list[str]]] = [
    (PART, ["images/a.png"]),
    (asked([{"type": "image_url", "image_url": {"url": "b.jpg"}}, {"type": "text", "text": "x"}]), ["b.jpg"]),
    (asked([{"type": "image", "path": "c.png"}]), ["c.png"]),
    ({"prompt": "a", "images": ["d.png", {"path": "e.png", "bytes": None}, None]}, ["d.png", "e.png"]),
    ({"prompt": "a", "image": "f.png"}, ["f.png"]),
    ({"prompt": "a", "image": "data:image/png;base64,AA=="}, []),
    (asked([{"type": "image", "base64": "AA=="}]), []),
    (asked([{"type": "image", "image": "https://here/g.png"}]), []),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": ["h.png"]}, ["h.png"]),
    ({"image": 3, "images": {"a": 1}}, []),
]


@pytest.mark.parametrize(("row", "names"), NAMED)
def test_names_of_images(row: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    assert image_names(write_rows(tmp_path / "rows.jsonl", [row])) == names


def test_other_files(tmp_path: Path, write: Callable[[Path, str], Path]) -> None:
    assert image_names(write(tmp_path / "a.csv", "prompt,image\nWhat?,a.png\n")) == ["a.png"]
    assert image_names(write(tmp_path / "a.json", json.dumps([{"image": "b.png"}]))) == ["b.png"]
    broken = write(tmp_path / "a.jsonl", json.dumps({"image": "c.png"}) + "\n{\n")
    assert image_names(broken) == ["c.png"]
    cells = [{"bytes": None, "path": "d.png"}, {"bytes": b"x", "path": "e.png"}]
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet")
    assert image_names(tmp_path / "a.parquet") == ["d.png"]
    assert image_names(write(tmp_path / "b.parquet", "no parquet")) == []


def test_files_outside_of_the_datas_folder_do_not_count(tmp_path: Path) -> None:
    data = str(tmp_path / "data" / "rows.jsonl")
    assert image_files(data, ["a.png", "../b.png", "/etc/passwd"]) == {"a.png": tmp_path / "data" / "a.png"}


@pytest.fixture
def write() -> Callable[[Path, str], Path]:
    def written(file: Path, text: str) -> Path:
        file.write_text(text)
        return file

    return written
