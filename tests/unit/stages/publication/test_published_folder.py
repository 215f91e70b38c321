"""A model published to a folder: whole or not at all, replaced only where alignflow published, nothing of
this machine in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhf_core.hub.model_files import check_loads, model_files
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.stages.publication import publication_stage as hub
from rlhf_core.stages.publication.publication_folder import MARKER, assemble, read_marker
from tests.support.chain import Chain, remember_place
from tests.support.publishing import stage, texts


def test_the_stage_publishes_a_whole_model_to_its_run_directory(chain: Chain, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = run_in_directory(stage(chain, tmp_path / "run").path, hub.run)
    out = tmp_path / "run" / "published"
    expected = {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    expected |= {
        "chat_template.jinja",
        "README.md",
        "eval_results.json",
        ".eval_results/alignflow.yaml",
        MARKER,
    }
    assert {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()} == expected
    assert result.outputs == {"published": "published"} and result.metrics["files"] == len(expected) - 1
    assert RunDir(tmp_path / "run").result() is not None
    assert "| **dpo-1** | sft | rule | 72.0" in (out / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 1000
    assert (
        AutoTokenizer.from_pretrained(out).apply_chat_template(
            [{"role": "user", "content": "one two"}], tokenize=False
        )
        == "one two "
    )


def test_a_folder_elsewhere_is_part_of_the_result(chain: Chain, tmp_path: Path) -> None:
    target = tmp_path / "models" / "mine"
    run = stage(chain, tmp_path / "run", folder=str(target))
    run_in_directory(run.path, hub.run)
    assert read_marker(target) is not None
    assert not (run / "published").exists()
    assert run.result() is not None
    (target / "model.safetensors").unlink()
    assert run.result() is None, "a published folder that lost a file is published again"
    run_in_directory(run.path, hub.run)
    assert (target / "model.safetensors").exists()


def test_publishing_again_replaces_the_folder(chain: Chain, tmp_path: Path) -> None:
    out = tmp_path / "published"
    assemble(chain.checkpoint, out, {"README.md": "old", "eval_results.json": "{}"}, "publication", "1")
    assemble(chain.checkpoint, out, {"README.md": "new"}, "publication", "2")
    assert (out / "README.md").read_text() == "new" and not (out / "eval_results.json").exists()
    marker = read_marker(out)
    assert marker is not None and marker.digest == "2"
    assert [file.name for file in tmp_path.iterdir()] == ["published"], "nothing is left beside it"


def test_a_foreign_folder_is_refused_and_untouched(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"mine holds files that were not .* alignflow: name another folder"):
        run_in_directory(stage(chain, tmp_path / "run", folder=str(tmp_path / "mine")).path, hub.run)
    assert texts(tmp_path / "mine") == "years of work"
    with pytest.raises(ValueError, match="not published by alignflow"):
        assemble(chain.checkpoint, chain.checkpoint, {}, "publication", "1")
    (tmp_path / "empty").mkdir()
    assemble(chain.checkpoint, tmp_path / "empty", {}, "publication", "1")


def test_what_was_cut_off_leaves_the_old_folder_and_is_cleaned_up(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "published"
    assemble(chain.checkpoint, out, {"README.md": "old"}, "publication", "1")
    with monkeypatch.context() as patch:
        patch.setattr(
            "rlhf_core.stages.publication.publication_folder.check_loads",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()),
        )
        with pytest.raises(KeyboardInterrupt):
            assemble(chain.checkpoint, out, {"README.md": "new"}, "publication", "1")
    assert (out / "README.md").read_text() == "old"
    assemble(chain.checkpoint, out, {"README.md": "new"}, "publication", "1")
    assert (out / "README.md").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no safetensors weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_half_a_model_is_refused(chain: Chain, tmp_path: Path, missing: str, sentence: str) -> None:
    shutil.copytree(chain.checkpoint, tmp_path / "half")
    (tmp_path / "half" / missing).unlink()
    with pytest.raises(ValueError, match=sentence):
        assemble(tmp_path / "half", tmp_path / "out", {}, "publication", "1")
    assert not (tmp_path / "out").exists()


def test_damaged_weights_and_a_lying_index_are_refused(chain: Chain, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(chain.checkpoint, model)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    check_loads(model)
    index["weight_map"]["model.layers.7.weight"] = "model-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names model-00002\.safetensors, and there is no such file"):
        check_loads(model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-8])
    with pytest.raises(ValueError, match=r"the weights of the model .* are damaged \(model\.safetensors has"):
        check_loads(model)


def test_no_pickle_no_foreign_file_and_no_place_of_the_machine_is_published(
    chain: Chain, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(chain.checkpoint, model)
    remember_place(model, str(chain.root / "secret-place"))
    for name in ("pytorch_model.bin", "optimizer.pt", "notes.txt", "code.py", "score_statistics.json"):
        (model / name).write_text("{}")
    assert {file.name for file in model_files(model)}.isdisjoint(
        {"pytorch_model.bin", "optimizer.pt", "notes.txt", "code.py"}
    )
    assert "code.py" in {file.name for file in model_files(model, trust_remote_code=True)}
    assemble(model, tmp_path / "out", {}, "publication", "1")
    assert (tmp_path / "out" / "score_statistics.json").exists()
    assert str(tmp_path) not in texts(tmp_path / "out") and "secret-place" not in texts(tmp_path / "out")


def test_nothing_published_by_the_stage_names_the_machine(chain: Chain, tmp_path: Path) -> None:
    run_in_directory(stage(chain, tmp_path / "run").path, hub.run)
    shown = texts(tmp_path / "run" / "published")
    assert str(chain.root) not in shown and str(tmp_path) not in shown
