"""Checkpoints before they are served: identity of their weights, dtype and length; judges that cannot work;
lm-eval's local tasks."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from transformers import Qwen2Config

from evaluation.answers.served_models import identity_of, local_model
from evaluation.judges.factory import judge_names, make_judge
from rlhf_core.config import Evaluation, RuleJudge, Source, VllmJudge
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.system.files import Digests
from tests.support.stage_request import stage_request

TASKS = Path(__file__).parents[4] / "deployments" / "tasks"


def checkpoint(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    folder.mkdir(parents=True)
    Qwen2Config(max_position_embeddings=256, dtype="bfloat16", **config).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_an_identity_follows_the_files_and_not_their_place(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one")
    same = checkpoint(tmp_path / "same")
    other = checkpoint(tmp_path / "other", b"weighted")
    assert (
        identity_of(str(one), Digests())
        == identity_of(str(same), Digests())
        != identity_of(str(other), Digests())
    )
    (same / "chat_template.jinja").write_text("{{ messages }}")
    assert identity_of(str(one), Digests()) != identity_of(str(same), Digests())
    assert identity_of("org/judge", Digests(), "abc") == "org/judge@abc"
    assert identity_of("org/judge", Digests()) == "org/judge"


def test_a_stages_manifest_gives_the_identity_without_reading_the_weights(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "stages" / "judged-0")
    # any stage: what counts is its manifest
    config = Evaluation(models=("sft",), questions=Source(path="q.jsonl"))
    request = stage_request(config, name="judged")
    run.prepare(request)
    folder = checkpoint(run / "checkpoint")
    read = identity_of(str(folder), Digests())
    run.finish(request, Outcome({}, {"checkpoint": "checkpoint"}), 1.0)
    assert identity_of(str(folder), Digests()) == read
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")  # as long as before, so the manifest still holds
    assert identity_of(str(folder), Digests()) == read


def test_an_adapter_is_itself_and_its_base(tmp_path: Path) -> None:
    found = []
    for base in (checkpoint(tmp_path / "base"), checkpoint(tmp_path / "other", b"weighted")):
        adapter = tmp_path / f"adapter-{base.name}"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base)})
        )
        found.append(identity_of(str(adapter), Digests()))
    assert found[0] != found[1]


def test_dtype_and_length_are_the_models_own_unless_said(tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path / "model"))
    run = RunDir(tmp_path / "stages" / "x-0")
    assert local_model("here", path, VllmJudge(model="m"), run, False)[1:3] == ("bfloat16", 256)
    assert local_model("here", path, VllmJudge(model="m", dtype="float32", max_model_len=64), run, False)[
        1:3
    ] == ("float32", 64)
    with pytest.raises(ValueError, match=r"^here: max_model_len is 300, but .* has 256 positions: lower it$"):
        local_model("here", path, VllmJudge(model="m", max_model_len=300), run, False)


def test_the_digests_of_a_model_are_kept_with_the_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model")
    run = RunDir(tmp_path / "stages" / "x-0")
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))  # settled: a file that has just changed is not remembered
    first = local_model("here", str(folder), VllmJudge(model="m"), run, False)
    monkeypatch.setattr(
        "rlhf_core.system.files.file_digest", lambda path: pytest.fail(f"{path} is read again")
    )
    assert local_model("here", str(folder), VllmJudge(model="m"), run, False) == first


def test_a_judge_without_room_for_a_prompt_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    judge = VllmJudge(model="big", max_tokens=256)
    config = Evaluation(models=("sft",), questions=Source(path="q.jsonl"), judges=(judge,))
    inputs = {"big": str(checkpoint(tmp_path / "big"))}
    request = stage_request(config, inputs)
    with (
        ExitStack() as stack,
        pytest.raises(
            ValueError, match=r"judge big: max_tokens=256 leaves none of its 256 tokens for a prompt"
        ),
    ):
        make_judge("big", judge, request, config, RunDir(tmp_path / "run"), stack)


def test_a_local_judge_is_called_by_its_name_and_never_by_its_path() -> None:
    judges = (
        VllmJudge(model="/models/judge-7b"),
        VllmJudge(model="sft"),
        RuleJudge(),
        VllmJudge(model="org/judge"),
    )
    assert list(judge_names(judges)) == ["judge-7b", "sft", "rule", "org/judge"]


# --- lm-eval's loader ---


def test_shipped_tasks_load_from_any_working_directory_under_their_files_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="alignflow's extra `tax` is not installed")
    from evaluation.alignment_tax.harness import Tasks

    monkeypatch.chdir(tmp_path)
    files = [str(TASKS / f"{name}.yaml") for name in ("digits_choice", "digits_answer")]
    assert Tasks(files, trust_code=False).leaves == {
        "digits_choice": ["digits_choice"],
        "digits_answer": ["digits_answer"],
    }
    (tmp_path / "mine.yaml").write_text(
        (TASKS / "digits_answer.yaml")
        .read_text()
        .replace("digits.jsonl", str(TASKS / "digits.jsonl"))
        .replace("test_split: test", "")
    )
    with pytest.raises(ValueError, match=r"^tasks: mine.yaml cannot be loaded \(.*\): correct the file$"):
        Tasks(["mine.yaml"], trust_code=False)


def test_a_task_file_runs_no_code_unless_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="alignflow's extra `tax` is not installed")
    from lm_eval import utils

    from evaluation.alignment_tax.harness import Tasks

    monkeypatch.setattr(utils, "env", utils.env)
    text = (TASKS / "digits_answer.yaml").read_text().replace("digits.jsonl", str(TASKS / "digits.jsonl"))
    (tmp_path / "own.yaml").write_text(text.replace("metric: exact_match", "metric: someone/metric"))
    with pytest.raises(
        ValueError,
        match=r"tasks: lm-eval has no metric someone/metric, and would run code from the Hub for it",
    ):
        Tasks([str(tmp_path / "own.yaml")], trust_code=False)
    assert utils.apply_template("{{ prompt | regex_replace('a', 'b') }}", {"prompt": "a"}) == "b"
    with pytest.raises(SecurityError):
        utils.apply_template("{{ cycler.__init__.__globals__.os.getcwd() }}", {})
