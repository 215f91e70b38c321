"""Low-rank adapters in SFT, reward model, DPO and KTO: what is trained, what is exported, where 4-bit weights
are refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from evaluation.answers.local_answers import model_config
from rlhf_core.config import DPO, KTO, PPO, SFT, Data, Lora, RewardModel, StageConfig
from rlhf_core.data.documents import Document
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.load_model import load_policy, load_scorer, trained_policy
from rlhf_core.models.lora import ADAPTER_WEIGHTS, lora_layers, merged_weight
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.runs import resume_state
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import Outcome, RunDir
from tests.support.stage_request import stage_request
from tests.support.stage_work import WORK

LORA = Lora(rank=4, alpha=8)
DOCUMENTS = [[5, 9, 20, 33, 40, 51, 7], [8, 8, 9, 10, 77, 81]]


def config_of(kind: str, material: Path, lora: Lora, **more: object) -> StageConfig:
    def data(name: str, rows: int) -> Data:
        return Data(sources=str(material / name), max_samples=rows)

    fields = {
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "max_len": 96,
        "learning_rate": 1e-2,
        "lora": lora,
        **more,
    }
    if kind == "sft":
        return SFT(model="base", data=data("sft.jsonl", 40), **fields)
    if kind == "reward_model":
        return RewardModel(model="base", data=data("preferences.jsonl", 40), **fields)
    if kind == "kto":
        return KTO(policy="base", data=data("preferences.jsonl", 20), **fields)
    return DPO(policy="base", data=data("preferences.jsonl", 40), **fields)


def run(config: StageConfig, base: Path, folder: Path) -> Outcome:
    folder.mkdir(exist_ok=True)
    request = stage_request(config, base, seed=3)
    return WORK[config.stage](request, RunDir(folder))


def logprobs(policy: Policy) -> torch.Tensor:
    batch = collate([[Document(d, [False] * len(d))] for d in DOCUMENTS], pad_token_id=0)
    with torch.no_grad():
        return policy(batch.tokens, batch.positions, batch.documents).logprobs


def scores(path: Path) -> torch.Tensor:
    batch = collate([[Document(d, [False] * len(d))] for d in DOCUMENTS], pad_token_id=0)
    with torch.no_grad():
        return load_scorer(str(path), 0).eval()(batch.tokens, batch.positions)


def test_adapters_start_at_zero_and_only_they_are_trained(material: Path) -> None:
    base, adapted = (
        load_policy(str(material / "base")),
        trained_policy(str(material / "base"), "float32", False, LORA, seed=3),
    )
    assert torch.equal(logprobs(base), logprobs(adapted))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    layers = {name.rpartition(".")[2] for name in lora_layers(adapted.model)}
    assert {"q_proj", "o_proj", "down_proj"} <= layers and "lm_head" not in layers
    again = trained_policy(str(material / "base"), "float32", False, LORA, seed=3)
    # the seed decides A
    assert all(torch.equal(a, b) for a, b in zip(adapted.parameters(), again.parameters(), strict=True))


def test_a_merged_weight_is_what_the_layer_computes(material: Path) -> None:
    policy = trained_policy(str(material / "base"), "float32", False, LORA, seed=3)
    layer = next(iter(lora_layers(policy.model).values()))
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    a = layer.lora_A["default"].weight
    b = layer.lora_B["default"].weight
    torch.testing.assert_close(
        merged_weight(layer.base_layer.weight, [layer], "weight"), layer.base_layer.weight + 8 / 4 * b @ a
    )
    x = torch.randn(5, layer.in_features)
    torch.testing.assert_close(
        layer(x),
        torch.nn.functional.linear(
            x, merged_weight(layer.base_layer.weight, [layer], "weight"), layer.base_layer.bias
        ),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_compute_what_those_of_peft_do_and_keep_nothing_in_fp32(dtype: str, material: Path) -> None:
    policy = trained_policy(str(material / "base"), dtype, False, LORA, seed=3)
    layers = list(lora_layers(policy.model).values())
    for seed, layer in enumerate(layers):
        torch.nn.init.normal_(
            layer.lora_B["default"].weight, std=0.1, generator=torch.Generator().manual_seed(seed)
        )
    kept: list[torch.Tensor] = []

    def found() -> list[torch.Tensor]:
        policy.zero_grad()
        batch = collate([[Document(d, [False] * len(d))] for d in DOCUMENTS], pad_token_id=0)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            logprobs = policy(batch.tokens, batch.positions, batch.documents).logprobs
        logprobs.sum().backward()
        gradients = [
            matrix["default"].weight.grad for layer in layers for matrix in (layer.lora_A, layer.lora_B)
        ]
        return [logprobs.detach(), *(gradient.clone() for gradient in gradients)]

    ours = found()
    kept_by_ours = len([tensor for tensor in kept if tensor.dtype == torch.float32])
    kept.clear()
    for layer in layers:
        del layer.forward
    theirs = found()
    if dtype == "bfloat16":
        more = len([tensor for tensor in kept if tensor.dtype == torch.float32]) - kept_by_ours
        assert more >= len(layers), "inputs and products of adapters are not copied to fp32"
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= (1e-5 if dtype == "float32" else 0.1) * other.norm()


def test_all_weights_are_exported_under_checkpoint_names(material: Path) -> None:
    policy = trained_policy(str(material / "base"), "float32", False, LORA, seed=3)
    names = {name for name, _ in checkpoint_weights(policy.model, lambda parameters: nullcontext())}
    assert names == set(load_file(material / "base" / "model.safetensors"))


@pytest.mark.parametrize("kind", ["sft", "dpo", pytest.param("kto", marks=pytest.mark.long)])
def test_merged_checkpoint_and_adapter_alone_are_the_same_policy(
    kind: str, material: Path, tmp_path: Path
) -> None:
    base = material / "base"
    outcome = run(config_of(kind, material, LORA), base, tmp_path / "merged")
    run(config_of(kind, material, LORA.model_copy(update={"export": "adapter"})), base, tmp_path / "adapter")
    merged = tmp_path / "merged" / "checkpoint"
    adapter = tmp_path / "adapter" / "checkpoint"
    assert outcome.metrics["loss"] < read_metrics(tmp_path / "merged")[0]["loss"]
    whole = logprobs(load_policy(str(merged)))
    assert not torch.allclose(whole, logprobs(load_policy(str(base))), atol=1e-2), "training changed nothing"
    torch.testing.assert_close(logprobs(load_policy(str(adapter))), whole, rtol=1e-4, atol=1e-5)
    with_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logprobs(Policy(with_peft.base_model.model)), whole, rtol=1e-4, atol=1e-5)
    assert {file.name for file in adapter.glob("*.safetensors")} == {ADAPTER_WEIGHTS}
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


def test_the_whole_head_of_a_reward_model_is_trained_and_saved_with_the_adapter(
    material: Path, tmp_path: Path
) -> None:
    base = material / "base"
    run(config_of("reward_model", material, LORA), base, tmp_path / "merged")
    run(
        config_of("reward_model", material, LORA.model_copy(update={"export": "adapter"})),
        base,
        tmp_path / "adapter",
    )
    whole = scores(tmp_path / "merged" / "checkpoint")
    assert whole.abs().max() > 1e-2, "the head, which begins at zero, was not trained"
    torch.testing.assert_close(scores(tmp_path / "adapter" / "checkpoint"), whole, rtol=1e-4, atol=1e-5)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    with_peft = PeftModel.from_pretrained(plain, tmp_path / "adapter" / "checkpoint")
    tokens = torch.tensor([DOCUMENTS[0]])
    torch.testing.assert_close(
        with_peft(tokens).logits[0, 0], whole[0, len(DOCUMENTS[0]) - 1], rtol=1e-4, atol=1e-5
    )


def test_an_adapter_is_evaluated_with_the_config_of_its_base(material: Path, tmp_path: Path) -> None:
    run(
        config_of("sft", material, LORA.model_copy(update={"export": "adapter"})),
        material / "base",
        tmp_path / "adapter",
    )
    config = model_config(str(tmp_path / "adapter" / "checkpoint"), 32, False)
    assert config.to_dict() == model_config(str(material / "base"), 32, False).to_dict()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("dpo", "reward_model") else pytest.mark.long) for kind in WORK],
)
def test_a_killed_stage_with_adapters_resumes_bit_for_bit(
    kind: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(kind, material, LORA, save_steps=2)
    run(config, material / "base", tmp_path / "whole")
    close = resume_state.close_state

    def killed(*state: object) -> None:
        close(*state)
        raise KeyboardInterrupt

    monkeypatch.setattr(resume_state, "close_state", killed)
    with pytest.raises(KeyboardInterrupt):
        run(config, material / "base", tmp_path / "killed")
    monkeypatch.undo()
    stored = load_file(tmp_path / "killed" / "state" / "step-2" / "rank-00000.safetensors").keys() - {"steps"}
    assert all(".lora_" in name or "score" in name for name in stored), "frozen weights need no saving"
    run(config, material / "base", tmp_path / "killed")
    assert [line["loss"] for line in read_metrics(tmp_path / "whole")] == [
        line["loss"] for line in read_metrics(tmp_path / "killed")
    ]
    whole, killed_weights = (
        load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("whole", "killed")
    )
    assert all(torch.equal(weight, killed_weights[name]) for name, weight in whole.items())


def test_adapters_of_other_layers_are_other_adapters(material: Path) -> None:
    lora = Lora(rank=2, targets=("q_proj", "v_proj"))
    policy = trained_policy(str(material / "base"), "float32", False, lora, seed=3)
    assert {name.rpartition(".")[2] for name in lora_layers(policy.model)} == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match="fits no layer of Qwen2ForCausalLM"):
        trained_policy(str(material / "base"), "float32", False, Lora(targets=("query",)), seed=3)


def test_four_bits_are_refused_with_a_reason(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = Lora(quantize="nf4")
    with pytest.raises(
        ValidationError, match=r"does not work with zero_stage=3.*set zero_stage to 2 or less"
    ):
        config_of("sft", material, lora, zero_stage=3)
    with pytest.raises(ValidationError, match="does not work with zero_stage=3"):
        PPO(prompts=Data(sources="prompts.jsonl"), lora=lora, zero_stage=3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        trained_policy(str(material / "base"), "float32", False, lora, seed=0)
