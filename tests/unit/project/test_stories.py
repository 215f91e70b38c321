"""Stories of wrong input (stories.yaml): each ends in a sentence with the right exit code, and
writes nothing."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.app import main
from rlhf_core.system.processes import WRONG_INPUT
from tests.support.programs import captured

ROOT = Path(__file__).parents[3]
TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "stories.yaml").read_text())
STORIES = {f"{who}: {story['did']}": story for who in ("engineer", "newcomer") for story in TABLE[who]}
HERE = {name: story for name, story in STORIES.items() if story.get("process") != "only"}
PROCESSES = {name: story for name, story in STORIES.items() if "process" in story}


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    """Imported once: `--here` then reads tokenizers in this process. The stories that are processes read them
    in another."""
    import transformers  # noqa: F401


@pytest.fixture
def folder(name: str, tmp_path: Path, material: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a story's command runs."""
    story = STORIES.get(name, {})
    text = TABLE["recipe"]
    if story.get("readme"):
        text = (
            found[1]
            if (
                found := re.search(r"```yaml\n(name: my-model.*?)```", (ROOT / "README.md").read_text(), re.S)
            )
            else ""
        )
    for old, new in story.get("change", {}).items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "material").symlink_to(material)
    write(tmp_path, {"recipe.yaml": text, **story.get("files", {})})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, files: dict[str, Any]) -> None:
    """Writes the files of a story."""
    for name, content in files.items():
        if isinstance(content, str):
            (folder / name).write_bytes(content.encode())
        elif "hex" in content:
            (folder / name).write_bytes(bytes.fromhex(content["hex"]))
        elif "link" in content:
            (folder / name).symlink_to(content["link"])
        else:
            (folder / name).mkdir()
            write(folder / name, content["folder"])


def listing(folder: Path) -> dict[Path, int]:
    """Returns all paths below a folder with the times of their last change."""
    return {path: path.lstat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def check(story: dict[str, Any], code: int, out: str, err: str) -> None:
    assert code == story.get("code", WRONG_INPUT), err
    assert [part for part in story["told"] if part not in err] == [], err
    assert "Traceback" not in out + err


@pytest.mark.parametrize("name", HERE)
def test_a_story(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    story = STORIES[name]
    before = listing(folder)
    code = main(shlex.split(story["command"]))
    printed = capsys.readouterr()
    check(story, code, printed.out, printed.err)
    assert listing(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_a_story_as_a_process(folder: Path, name: str) -> None:
    story = STORIES[name]
    before = listing(folder)
    command = [sys.executable, "-P", "-m", "flows.cli", *shlex.split(story["command"])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = captured(command, env=environment, timeout=120)
    check(story, done.returncode, done.stdout, done.stderr)
    assert listing(folder) == before


@pytest.mark.parametrize("name", ["no change"])
def test_the_recipe_of_the_stories_is_right(folder: Path) -> None:
    before = listing(folder)
    assert main(["validate", "recipe.yaml", "--here"]) == 0
    assert listing(folder) == before
