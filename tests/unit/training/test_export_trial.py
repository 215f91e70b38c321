"""A stage tries the export of its model before it trains, and removes what it wrote for that."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import DPO, KTO, PPO, SFT, Data, Lora, RewardModel, StageConfig
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.training.ranks import EXPORT_TRIAL
from tests.support.stage_request import stage_request

FIELDS: dict[str, Any] = {"train_batch_size": 8, "micro_train_batch_size": 8, "max_len": 64}
KINDS = ("sft", "reward_model", "dpo", "kto")


def config_of(kind: str, material: Path, **more: Any) -> StageConfig:
    def data(name: str) -> Data:
        return Data(sources=str(material / name), max_samples=8)

    if kind == "sft":
        return SFT(model="base", data=data("sft.jsonl"), **FIELDS, **more)
    if kind == "reward_model":
        return RewardModel(model="base", data=data("preferences.jsonl"), **FIELDS, **more)
    pairs = data("preferences.jsonl")
    return (DPO if kind == "dpo" else KTO)(policy="base", data=pairs, **FIELDS, **more)


def module_of(kind: str) -> ModuleType:
    return importlib.import_module(f"rlhf_core.stages.{kind}")


def run(config: StageConfig, base: Path, folder: Path) -> None:
    folder.mkdir()
    request = stage_request(config, base, seed=3)
    module_of(config.stage).run(request, RunDir(folder))


def refuse_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_pretrained(self: object, folder: Path, **_: object) -> None:
        (folder / "tokenizer.json").write_text("half")
        raise TypeError("of what a tokenizer has")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save_pretrained)


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4, export="adapter")], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_saved_is_said_before_training(
    kind: str, lora: Lora | None, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        raise AssertionError("it trains")

    for name in ("fit", "reference_logprobs"):
        monkeypatch.setattr(module_of(kind), name, train, raising=False)
    refuse_to_save(monkeypatch)
    with pytest.raises(
        ValueError,
        match=r"base could not be saved \(TypeError: of what a tokenizer has\): correct the files of .*base",
    ):
        run(config_of(kind, material, lora=lora), material / "base", tmp_path / "run")
    assert not (tmp_path / "run" / EXPORT_TRIAL).exists()


def test_the_actor_says_what_cannot_be_saved(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec(
        path=str(material / "base"),
        dtype="float32",
        pad_token_id=0,
        micro_batch_size=4,
        trust_remote_code=False,
    )
    actor = Actor(spec, PPO(prompts=Data(sources="none"), zero_stage=0), 0)
    folder = tmp_path / "trial"
    actor.try_export(str(folder))
    assert not folder.exists()
    refuse_to_save(monkeypatch)
    with pytest.raises(ValueError, match="could not be saved"):
        actor.try_export(str(folder))


def test_a_full_disk_is_not_called_a_fault_of_the_model(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, folder: Path, **_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        run(config_of("sft", material), material / "base", tmp_path / "run")


def test_a_base_with_values_that_transformers_does_not_write_is_trained_to_the_end(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(material / "base", base)
    (base / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.9, "top_p": 0.8, "eos_token_id": [1, 2]}'
    )
    run(config_of("sft", material), base, tmp_path / "run")
    printed = capsys.readouterr().out
    assert printed.count("refuses to write (temperature, top_p)") == 1
    assert not (tmp_path / "run" / EXPORT_TRIAL).exists()
    written = json.loads((tmp_path / "run" / "checkpoint" / "generation_config.json").read_text())
    assert {"temperature", "top_p"}.isdisjoint(written) and written["do_sample"] is False
    assert {1, 2} <= set(written["eos_token_id"])
