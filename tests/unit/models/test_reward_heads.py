"""A model without a trained head for one score is refused as a reward model with one message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flows.cli.app import main
from rlhf_core.config import Lora, RewardModel
from rlhf_core.models import load_model as load
from rlhf_core.models.load_model import load_policy, load_scorer, trained_scorer
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.stages.ppo.roles.read_only import Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from tests.unit.models.test_lora import config_of, run
from tests.unit.preflight.test_check import Planned, planned

__all__ = ["planned"]

TOLD = (
    "has no trained head for one score (a tensor score.weight of shape [1, hidden size], not all zeros), so"
    " its rewards would mean nothing"
)


@pytest.fixture(scope="module")
def places(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, a classifier of two labels, reward models (whole and in several files, in fp32 and
    bf16), some with a head of zeros and one whose head is almost zero, and adapters with and without a head,
    and with one of zeros."""
    folder = tmp_path_factory.mktemp("places")
    base = material / "base"
    shutil.copytree(base, folder / "lm")
    for name, labels in (("two", 2), ("one", 1)):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
        torch.nn.init.normal_(model.score.weight)
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder / name)
    model.save_pretrained(folder / "sharded", max_shard_size="200KB")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "sharded")
    for name, dtype, weight in (
        ("zeros", torch.float32, 0.0),
        ("minus-zeros", torch.float32, -0.0),
        ("bf16-zeros", torch.bfloat16, 0.0),
        ("bf16-minus-zeros", torch.bfloat16, -0.0),
        ("bf16-least", torch.bfloat16, 1e-38),
    ):
        torch.nn.init.zeros_(model.score.weight).data[0, -1] = weight
        model.to(dtype).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder / name)
    for name, kind in (("with", "reward_model"), ("without", "sft")):
        run(
            config_of(kind, material, Lora(rank=2, export="adapter"), max_epochs=1),
            base,
            folder / f"run-{name}",
        )
        shutil.copytree(folder / f"run-{name}" / "checkpoint", folder / name)
    shutil.copytree(folder / "with", folder / "with-zeros")
    weights = load_file(folder / "with" / "adapter_model.safetensors")
    weights["base_model.model.score.weight"].zero_()
    save_file(weights, folder / "with-zeros" / "adapter_model.safetensors")
    return folder


HEADLESS = ["lm", "two", "without", "zeros", "minus-zeros", "bf16-zeros", "bf16-minus-zeros", "with-zeros"]
REWARD_MODELS = ["one", "sharded", "with", "bf16-least"]


@pytest.mark.parametrize("name", HEADLESS)
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


def test_a_hub_model_without_a_head_is_refused_when_loaded(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check does not read the files of a Hub id."""
    monkeypatch.setattr(load, "has_trained_head", lambda folder: True)
    for name in ("lm", "two", "zeros", "bf16-minus-zeros"):
        with pytest.raises(ValueError, match=f"{name} has no trained head"):
            load_scorer(str(places / name), 0)
    assert load_scorer(str(places / "one"), 0).model.score.weight.abs().max() > 0


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_reward_models_are_read(name: str, places: Path) -> None:
    assert load_scorer(str(places / name), 0).model.score.weight.abs().max() > 0


def test_heads_of_bf16_models_compute_in_fp32(material: Path, tmp_path: Path) -> None:
    run(config_of("reward_model", material, None), material / "base", tmp_path / "rm")
    scorer = load_scorer(str(tmp_path / "rm" / "checkpoint"), 0, "bfloat16").eval()
    tokens = torch.arange(3, 40)[None]
    positions = torch.arange(37)[None]
    found = scorer(tokens, positions)
    states = scorer.model.model(input_ids=tokens).last_hidden_state
    assert states.dtype == torch.bfloat16 and found.dtype == torch.float32
    torch.testing.assert_close(
        found, (states.double() @ scorer.model.score.weight.double().T)[..., 0].float(), atol=1e-5, rtol=1e-5
    )
    assert (found != found.bfloat16().float()).any(), "the scores are rounded to bf16"
    found.sum().backward()
    assert scorer.model.score.weight.grad.abs().sum() > 0


def test_training_may_begin_with_a_new_head(places: Path) -> None:
    """For a reward model, and for a critic that starts from a policy."""
    assert not trained_scorer(str(places / "lm"), 0, "float32", False, None, seed=0).model.score.weight.any()


def test_no_reward_model_or_critic_starts_from_two_labels(
    places: Path, planned: Planned, tmp_path: Path
) -> None:
    two = places / "two"
    told = (
        f"{two} is a classifier of several labels (score.weight has a row for each), and a reward model or"
        " critic has one score: start"
    )
    with pytest.raises(ValueError) as refused:
        trained_scorer(str(two), 0, "float32", False, None, seed=0)
    assert str(refused.value).startswith(told)
    shutil.rmtree(tmp_path / "base")
    shutil.copytree(places / "lm", tmp_path / "base")
    for field, where in (
        ("reward_model.model", "stages.reward_model.model"),
        ("ppo.critic", "stages.ppo.critic"),
    ):
        plan = planned(f"{field}={two}")
        (problem,) = check_inputs(plan, plan.nodes)
        assert problem.startswith(f"{where}: {told}")
        for name in ("lm", "one", "zeros"):
            plan = planned(f"{field}={places / name}")
            assert check_inputs(plan, plan.nodes) == []


def test_weights_of_another_shape_than_the_config_says_are_refused(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "one", tmp_path / "one")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    (tmp_path / "one" / "config.json").write_text(
        json.dumps(config | {"vocab_size": config["vocab_size"] + 1})
    )
    with pytest.raises(
        ValueError,
        match=f"{tmp_path / 'one'}: model.embed_tokens.weight has another shape than its config.json says",
    ):
        load_scorer(str(tmp_path / "one"), 0)


@pytest.mark.parametrize("name", HEADLESS + REWARD_MODELS)
def test_a_missing_head_is_found_by_the_check(
    name: str, places: Path, planned: Planned, tmp_path: Path
) -> None:
    """Reported once, with other faults."""
    good = name in REWARD_MODELS
    place = places / name
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
        assert [problem.partition(f" {TOLD}")[0] for problem in problems] == (
            [] if good else [f"{where}: {place}"]
        )
        assert all("\n" not in problem for problem in problems)


def test_of_unreadable_files_only_the_damage_is_told(planned: Planned, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "base", tmp_path / "rm")
    header = json.dumps({"score.weight": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}}).encode()
    cut = len(header).to_bytes(8, "little") + header + bytes(8)
    for content in (b"weights", b"\x02\x00\x00\x00\x00\x00\x00\x00[]", json.dumps({}).encode(), cut):
        (tmp_path / "rm" / "model.safetensors").write_bytes(content)
        plan = planned(f"ppo.reward={tmp_path / 'rm'}")
        (problem,) = check_inputs(plan, plan.nodes)
        assert problem.startswith(
            f"stages.ppo: {tmp_path / 'rm'}: {tmp_path / 'rm'} has damaged weights (model.safetensors "
        )


@pytest.mark.parametrize(("name", "told"), [("lm", "a new one of zeros"), ("one", "the trained one of {}")])
def test_a_reward_model_keeps_its_head_and_the_log_says_so(
    places: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    model = places / name
    run(config_of("reward_model", material, None, max_epochs=1, learning_rate=1e-12), model, tmp_path / "run")
    assert f"the scalar head is {told.format(model)}\n" in capsys.readouterr().out
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint").score.weight
    before = (
        AutoModelForSequenceClassification.from_pretrained(places / "one").score.weight
        if name == "one"
        else torch.zeros_like(head)
    )
    assert torch.allclose(head, before, atol=1e-6)
    assert "keeps its trained head" in str(RewardModel.model_fields["model"].description)


def test_a_reward_model_starts_from_an_adapter_of_a_language_model(places: Path) -> None:
    """As of SFT with `lora.export: adapter`: with its adapters merged, and a new head of zeros."""
    scorer = trained_scorer(str(places / "without"), 0, "float32", False, None, 0)
    policy = dict(load_policy(str(places / "without")).model.named_parameters())
    base = dict(load_policy(str(places / "lm")).model.named_parameters())
    body = {name: weight for name, weight in scorer.model.named_parameters() if name != "score.weight"}
    assert body.keys() <= policy.keys() and all(weight.equal(policy[name]) for name, weight in body.items())
    assert not all(weight.equal(base[name]) for name, weight in body.items()), "the adapters say something"
    assert scorer.new_head and not scorer.model.score.weight.any()
    assert all(weight.requires_grad for weight in scorer.model.parameters())


def test_an_adapter_with_a_head_has_no_new_one(places: Path) -> None:
    heads = {
        name: trained_scorer(str(places / name), 0, "float32", False, None, 0).new_head
        for name in ("lm", "one", "with")
    }
    assert heads == {"lm": True, "one": False, "with": False}
