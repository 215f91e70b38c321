"""A model without a trained head for one score is refused as a reward model with one message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flows.cli.app import main
from rlhf_core.config import Lora
from rlhf_core.models import load
from rlhf_core.models.load import load_scorer, trained_scorer
from rlhf_core.models.scoring import RewardScorer
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.stages.ppo.roles import ModelSpec, Reward
from tests.unit.models.test_lora import config_of, run
from tests.unit.preflight.test_check import Planned, planned

__all__ = ["planned"]

TOLD = (
    "has no trained head for one score (a tensor score.weight of shape [1, hidden size]), so its rewards would mean nothing: name a reward"
)


@pytest.fixture(scope="module")
def places(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, a classifier of two labels, a reward model (whole and in several files), and adapters with and without a head."""
    folder, base = tmp_path_factory.mktemp("places"), material / "base"
    shutil.copytree(base, folder / "lm")
    for name, labels in (("two", 2), ("one", 1)):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
        torch.nn.init.normal_(model.score.weight)
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder / name)
    model.save_pretrained(folder / "sharded", max_shard_size="200KB")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "sharded")
    for name, kind in (("with", "reward_model"), ("without", "sft")):
        run(config_of(kind, material, Lora(rank=2, export="adapter"), max_epochs=1), base, folder / f"run-{name}")
        shutil.copytree(folder / f"run-{name}" / "checkpoint", folder / name)
    return folder


@pytest.mark.parametrize("name", ["lm", "two", "without"])
def test_a_model_without_a_head_is_refused_everywhere(
    name: str, places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    place = str(places / name)
    readers: list[Callable[[], object]] = [
        lambda: load_scorer(place, 0),
        lambda: RewardScorer(place, "auto", 2),
        lambda: Reward(ModelSpec(place, "float32", 0, 8, False)),
    ]
    for read in readers:
        with pytest.raises(ValueError) as refused:
            read()
        assert str(refused.value).startswith(f"{place} {TOLD}")
    assert main(["serve-reward", place, "--port", "0"]) == 2
    assert TOLD in " ".join(capsys.readouterr().err.split())


def test_a_hub_model_without_a_head_is_refused_when_loaded(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not read the files of a Hub id."""
    monkeypatch.setattr(load, "has_scalar_head", lambda folder: True)
    with pytest.raises(ValueError, match="has no trained head"):
        load_scorer(str(places / "lm"), 0)
    assert load_scorer(str(places / "one"), 0).model.score.weight.abs().max() > 0


@pytest.mark.parametrize("name", ["one", "sharded", "with"])
def test_reward_models_are_read(name: str, places: Path) -> None:
    assert load_scorer(str(places / name), 0).model.score.weight.abs().max() > 0


def test_training_may_begin_with_a_new_head(places: Path) -> None:
    """For a reward model, and for a critic that starts from a policy."""
    assert not trained_scorer(str(places / "lm"), 0, "float32", False, None, seed=0).model.score.weight.any()


@pytest.mark.parametrize("name", ["lm", "two", "without", "one", "sharded", "with"])
def test_a_missing_head_is_found_by_the_check(name: str, places: Path, planned: Planned, tmp_path: Path) -> None:
    """Reported once, with other faults."""
    good, place = name in ("one", "sharded", "with"), places / name
    shutil.rmtree(tmp_path / "base")
    shutil.copytree(places / "lm", tmp_path / "base")
    for overrides, where in (
        ([f"ppo.reward={place}"], "stages.ppo.reward"),
        ([f"ppo.reward=[reward_model, {place}]"], "stages.ppo.reward.1"),
        ([f"loop.reward={place}"], "stages.loop.round1.preferences.reward"),
        ([f"evaluation.judges=[{{kind: reward, reward: {place}}}]"], "stages.evaluation.judges.0.reward"),
        ([f"evaluation.proxy={place}", "evaluation.temperature=1"], "stages.evaluation.proxy"),
    ):
        plan = planned("sft.data={sources: none.jsonl}", *overrides)
        problems = [problem for problem in check_inputs(plan, plan.nodes) if "none.jsonl" not in problem]
        assert [problem.partition(f" {TOLD}")[0] for problem in problems] == ([] if good else [f"{where}: {place}"])
        assert all("\n" not in problem for problem in problems)


def test_of_unreadable_files_only_the_damage_is_told(planned: Planned, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "base", tmp_path / "rm")
    for content in (b"weights", b"\x02\x00\x00\x00\x00\x00\x00\x00[]", json.dumps({}).encode()):
        (tmp_path / "rm" / "model.safetensors").write_bytes(content)
        plan = planned(f"ppo.reward={tmp_path / 'rm'}")
        (problem,) = check_inputs(plan, plan.nodes)
        assert problem.startswith(f"stages.ppo: {tmp_path / 'rm'}: {tmp_path / 'rm'} has damaged weights (model.safetensors ")
