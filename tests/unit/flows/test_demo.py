"""`alignflow demo` before it trains: what is missing, what is in the way. (All of it:
tests/engines/test_wheel.py, and `make demo`.)"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

import flows
from flows.cli import first_commands as start
from flows.cli import run_commands as cli_run
from flows.cli.app import main
from rlhf_core.recipe.load_recipe import load_recipe

WAITS_FOR_IMPORT = """
import sys, time
from pathlib import Path
for _ in range(10000):
    if Path("importing").exists():
        sys.exit(0)
    time.sleep(0.02)
sys.exit("the import has not begun")
"""


def test_without_the_engines_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("torch", "transformers") else find(name)
    )
    assert main(["demo", "--folder", str(tmp_path / "new")]) == 3
    assert capsys.readouterr().err.startswith("the demo trains models, and torch, transformers cannot be")
    assert not (tmp_path / "new").exists()


def test_a_folder_with_other_files_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / "material").mkdir(parents=True)
    (tmp_path / "demo" / "material" / "thesis.txt").write_text("ten years")
    assert main(["demo", "--folder", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == "demo/material exists and is not demo material: remove it, or name another folder\n"
    )
    (tmp_path / "file").touch()
    assert main(["demo", "--folder", str(tmp_path / "file")]) == 2


@pytest.mark.slow
def test_material_is_made_in_the_folder_and_the_shipped_recipe_is_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Replaces the run, which trains for minutes, by a function that records its arguments."""
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str, Path]] = []

    def run(recipe: str, plain: bool) -> int:
        assert plain
        seen.append((Path(recipe).read_text(), Path(load_recipe(recipe).base_model)))
        return 0

    monkeypatch.setattr(cli_run, "run", run)
    assert main(["demo", "--folder", "tried", "--plain"]) == 0
    root = Path(__file__).parents[3]
    shipped = (root / "deployments" / "recipes" / "tiny-cpu.yaml").read_text()
    assert seen == [
        (
            shipped.replace("../../demo/material", "material"),
            tmp_path / "tried" / "demo" / "material" / "base",
        )
    ]
    assert (seen[0][1] / "model.safetensors").is_file()
    assert capfd.readouterr().out == "demo/material: made\n", "DeepSpeed does not warn that it finds no GPU"
    model, loading = Qwen2ForCausalLM.from_pretrained(seen[0][1], output_loading_info=True)
    assert not any(loading.values()) and model.lm_head.weight is model.model.embed_tokens.weight


def test_the_flow_is_imported_while_the_material_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The material of this test is not made before the flow's import has begun."""
    importing = tmp_path / "importing"
    script = tmp_path / "material.py"
    script.write_text(WAITS_FOR_IMPORT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flows, "alignment", None, raising=False)  # so that both are as before after the test
    monkeypatch.delitem(sys.modules, "flows.alignment", raising=False)
    find = type(
        "Finder",
        (),
        dict(
            find_spec=staticmethod(lambda name, *_: importing.touch() if name == "flows.alignment" else None)
        ),
    )
    monkeypatch.setattr(sys, "meta_path", [find, *sys.meta_path])
    start._make_material(script)
    assert importing.exists()


@pytest.mark.parametrize(("code", "error"), [(2, ValueError), (1, RuntimeError)])
def test_what_is_wrong_with_the_material_is_said(tmp_path: Path, code: int, error: type[Exception]) -> None:
    script = tmp_path / "material.py"
    script.write_text(f"import sys\nprint('no room', file=sys.stderr)\nsys.exit({code})\n")
    with pytest.raises(error, match="no room"):
        start._make_material(script)
