"""Launch scripts of SFT, reward models, DPO, KTO and of whole chains become recipes that validate; wrong ones
are a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flows.cli
from rlhf_core.migrate.script import migrate
from rlhf_core.recipe.load_recipe import load_recipe
from tests.support.launch_scripts import (
    CHAIN,
    CONFIG_MAP,
    DPO,
    JOBS,
    KTO,
    LOOP,
    REWARD_MODEL,
    SFT,
    migrated,
    told,
)
from tests.support.text_rows import rows_of_text


def test_a_reward_model(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, REWARD_MODEL)
    stage = raw["stages"]["reward_model"]
    source = dict(
        path="acme/pairs", format="columns", margin_key="margin", chosen_key="better", rejected_key="worse"
    )
    assert stage["data"]["sources"] == [source] and "template" not in stage["data"]
    assert stage["model"] == "base"
    assert stage["ranks"]["num_ranks_per_node"] == 4
    assert stage["train_batch_size"] == 256
    assert stage["micro_train_batch_size"] == 1
    assert stage["max_len"] == 8192
    assert stage["learning_rate"] == 9e-6
    assert stage["zero_stage"] == 3
    assert stage["save_steps"] == 0
    assert "one function" in told(found, "dropped")["--loss sigmoid"]
    assert "always does this" in told(found, "dropped")["--load_checkpoint"]


def test_sft(tmp_path: Path) -> None:
    raw, _ = migrated(tmp_path, SFT)
    stage = raw["stages"]["sft"]
    assert stage["data"]["template"] == "User: {}\nAssistant: "
    assert stage["data"]["sources"] == [
        {"path": "data/chats.jsonl", "format": "columns", "prompt_key": "question", "response_key": "answer"}
    ]
    assert stage["eval_data"]["sources"][0]["path"] == "data/held.jsonl" and stage["eval_steps"] == 50
    assert stage["ranks"] == {"num_nodes": 2, "num_ranks_per_node": 4, "gpus": 1.0}
    assert stage["lora"] == {"rank": 64, "alpha": 32, "targets": ["q_proj", "v_proj"]}
    assert stage["learning_rate"] == 5e-6
    assert stage["weight_decay"] == 0.01
    assert stage["warmup_ratio"] == 0.05
    assert stage["max_epochs"] == 2


def test_sft_on_conversations(tmp_path: Path) -> None:
    text = (
        "python train_sft.py --pretrain a/b --dataset c --input_key messages --apply_chat_template"
        " --packing_samples --bf16"
    )
    raw, found = migrated(tmp_path, text)
    assert raw["stages"]["sft"]["data"]["sources"] == [
        {"path": "c", "format": "columns", "messages_key": "messages"}
    ]
    assert "not only the last" in told(found, "approximated")["--input_key messages"]


def test_dpo_and_kto(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, DPO)
    stage = raw["stages"]["dpo"]
    assert stage["beta"] == 0.2
    assert stage["label_smoothing"] == 0.1
    assert stage["nll_coef"] == 0.05
    assert stage["learning_rate"] == 1e-5
    assert stage["zero_stage"] == 2
    assert stage["ranks"]["num_ranks_per_node"] == 8 and "reference" not in stage
    assert stage["data"]["template"] == "Human: {}\nAssistant: "
    assert "(no --apply_chat_template)" in told(found, "approximated")

    raw, found = migrated(tmp_path, KTO)
    stage = raw["stages"]["kto"]
    assert stage["w_desirable"] == 1.5
    assert stage["w_undesirable"] == 1
    assert stage["beta"] == 0.01
    assert stage["train_batch_size"] == 64
    keys = {"prompt_key": "instruction", "response_key": "response", "label_key": "score"}
    assert stage["data"] == {
        "sources": [{"path": "acme/labelled", "format": "columns", **keys}],
        "template": "Q: {} A: ",
    }


def test_several_commands_are_chained_by_their_outputs(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, CHAIN)
    stages = raw["stages"]
    assert raw["base_model"] == "acme/base" and list(stages) == ["sft", "reward_model", "ppo", "dpo", "dpo-2"]
    assert (stages["sft"]["model"], stages["reward_model"]["model"]) == ("base", "sft")
    assert stages["ppo"]["actor"] == "sft"
    assert stages["ppo"]["reward"] == "reward_model"
    assert "critic" not in stages["ppo"]
    assert stages["dpo"]["policy"] == "ppo"
    assert stages["dpo"]["reference"] == "sft"
    assert stages["dpo"]["loss"] == "ipo"
    assert (stages["dpo-2"]["stage"], stages["dpo-2"]["policy"]) == ("dpo", "acme/other")
    assert {note.text for note in found.notes if note.flag == "(all GPUs of the machine)"} == {
        "ranks: 8 GPUs on a machine, from --gpus of alignflow migrate"
    }


def test_a_folder_inside_an_earlier_output(tmp_path: Path) -> None:
    text = (
        "python train_sft.py --pretrain a/b --dataset c --save_path out/sft --bf16\n"
        "python train_rm.py --pretrain out/sft/step_100 --dataset d --bf16"
    )
    raw, found = migrated(tmp_path, text)
    assert raw["stages"]["reward_model"]["model"] == "sft"
    assert "taken as its final model" in told(found, "approximated")["--pretrain out/sft/step_100"]


def test_of_a_loop_that_samples_the_training_is_read(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, LOOP)
    dpo = raw["stages"]["dpo"]
    assert list(raw["stages"]) == ["dpo"] and (dpo["policy"], dpo["data"]["sources"][0]["path"]) == (
        "base",
        "./work/scored.jsonl",
    )
    remarks = [remark.text for remark in found.remarks]
    assert any("POLICY is set again in a condition or a loop" in text for text in remarks)
    assert sum("batch_inference is left out: a stage `iterative_dpo`" in text for text in remarks) == 2


def test_a_config_map_and_its_job(tmp_path: Path) -> None:
    raw, found = migrated(tmp_path, CONFIG_MAP, "rm.yaml")
    assert raw["base_model"] == "acme/base"
    assert raw["stages"]["reward_model"]["ranks"]["num_ranks_per_node"] == 4
    (line,) = {note.line for note in found.notes}
    assert "openrlhf.cli.train_rm" in CONFIG_MAP.splitlines()[line - 1]


def test_jobs_of_several_kinds(tmp_path: Path) -> None:
    raw, _ = migrated(tmp_path, JOBS, "jobs.yaml")
    assert raw["base_model"] == "acme/base" and set(raw["stages"]) == {"sft", "dpo", "ppo"}
    assert raw["stages"]["sft"]["ranks"]["num_ranks_per_node"] == 2
    assert raw["stages"]["sft"]["model"] == "base"


@pytest.mark.parametrize(
    ("flags", "expected", "what"),
    rows_of_text("""
    --train_batch_size 100 --micro_train_batch_size 8 | {train_batch_size: 104, micro_train_batch_size: 1} | approximated
    --train_batch_size 128 --micro_train_batch_size 12 | {train_batch_size: 128, micro_train_batch_size: 8} | approximated
    --zero_stage 0 | {zero_stage: 1} | approximated
    --learning_rate $UNSET | {learning_rate: 1.0e-05} | dropped
    --max_len many | {max_len: 512} | dropped
    --train_batch_size 0 --max_epochs -1 | {train_batch_size: 128, max_epochs: 1} | dropped
    --gamma 0.9 --lora_rank 4 --lora_alpha x | {gamma: 1.0, lora: {rank: 4, alpha: 16.0}} | dropped
    --learning_rate $((1 + 1)) | {learning_rate: 1.0e-05} | dropped
    --load_in_4bit --lora_rank 8 --zero_stage 3 | {zero_stage: 2, lora: {rank: 8, alpha: 16.0, quantize: nf4}} | approximated
    """),
)
def test_values_that_do_not_fit(tmp_path: Path, flags: str, expected: dict[str, Any], what: str) -> None:
    text = (
        f"deepspeed --num_gpus 8 train_dpo.py --pretrain a/b --dataset c --bf16 --apply_chat_template {flags}"
    )
    raw, found = migrated(tmp_path, text)
    stage = found.recipe.stages["dpo"].model_dump(mode="json")
    lora = expected.pop("lora", None)
    assert {name: stage[name] for name in expected} == expected
    assert lora is None or raw["stages"]["dpo"]["lora"] == lora
    assert told(found, what)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    rows_of_text(
        r"""
    a.sh | "echo train_sft.py\nls train_rm.py --pretrain x\n" | there is no training command in it
    a.sh | "" | there is no training command in it
    a.sh | "kubectl apply -f - <<EOF\napiVersion: v1\nkind: Pod\nEOF\n" | there is no training command in it
    a.sh | "python train_sft.py --dataset x" | line 1 of the script: the command names no model
    a.sh | "\n\npython train_sft.py --pretrain x" | line 3 of the script: the command names no data \(--dataset\)
    a.sh | "python train_ppo_ray.py --pretrain x --prompt_data y" | the command names no reward
    a.sh | "python train_sft.py --pretrain 'x" | the quote ' is never closed
    a.sh | "python train_dpo.py --pretrain x --dataset y --label_smoothing 0.7" | stages.dpo.label_smoothing: .*less than 0.5
    a.yaml | "apiVersion: v1\nkind: ConfigMap\ndata: {a: {{ .Values.x }}}\n---\n: :" | the manifest is not plain YAML
    a.sh | "python batch_inference.py --eval_task generate_vllm --pretrain a --dataset b" | there is no training command in it
    """,
        yaml_columns=(1,),
    ),
)
def test_a_wrong_script_is_one_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence) as error:
        migrate(tmp_path / name)
    assert str(error.value).startswith(f"script {tmp_path / name}: ") and "\n" not in str(error.value)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the path of a shell script"):
        migrate(tmp_path / "none.sh")
    (tmp_path / "x.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text file"):
        migrate(tmp_path / "x.sh")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chain.sh").write_text(CHAIN)
    assert flows.cli.main(["migrate", "chain.sh", "--out", "mine.yaml", "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    assert "mine.yaml: 5 stages, flags: " in shown and "approximated: the model is in" in shown
    assert load_recipe("mine.yaml").stages["sft"].ranks.num_ranks_per_node == 4  # type: ignore[union-attr]
    assert flows.cli.main(["validate", "mine.yaml"]) == 0
    assert flows.cli.main(["migrate", "chain.sh", "--out", "mine.yaml"]) == 2
    assert "mine.yaml exists already" in capsys.readouterr().err
    assert flows.cli.main(["migrate", "chain.sh", "--gpus", "0"]) == 2


def test_without_out_the_next_free_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chain.sh").write_text(CHAIN)
    Path("dpo.sh").write_text(DPO)
    for script, named, stages in (
        ("chain.sh", "recipe.yaml", 5),
        ("dpo.sh", "recipe-2.yaml", 1),
        ("dpo.sh", "recipe-3.yaml", 1),
    ):
        assert flows.cli.main(["migrate", script]) == 0
        assert f"{named}: {stages} stages" in capsys.readouterr().out
        assert len(load_recipe(named).stages) == stages
