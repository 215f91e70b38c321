"""Models that let documents of a row attend to each other get each document in a row of its own; all others
stay packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FalconForSequenceClassification,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from rlhf_core.config import DPO, KTO, PPO, SFT, Data, RewardModel, StageConfig
from rlhf_core.models import document_leak
from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.kernels import attention
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.policy import Policy, Scorer, masked_logprobs
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec, score_share
from rlhf_core.training.engine import TorchEngine
from rlhf_core.training.ranks import make_engine
from tests.support.families import HYBRID
from tests.unit.models.test_attention import WINDOWED, kernel
from tests.unit.models.test_lora import run
from tests.unit.models.test_models import FAMILIES, SHAPE, documents, logprobs_by_document

__all__ = ["kernel"]

CPU = torch.device("cpu")
PLAIN = {
    name: value for name, value in SHAPE.items() if name not in ("num_key_value_heads", "intermediate_size")
}
# a layer of gated delta rule, one of attention; every expert is used, since rounding would change a choice
DELTA = {
    **dict(
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
    ),
    **dict(
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, num_shared_experts=1, num_dense_layers=1, moe_intermediate_size=16
)


def afmoe(**more: object) -> AfmoeForCausalLM:
    return AfmoeForCausalLM(AfmoeConfig(**{**SHAPE, "head_dim": 8, **EXPERTS, **more}))


def falcon(model_class: type[PreTrainedModel] = FalconForCausalLM, **more: object) -> PreTrainedModel:
    return model_class(FalconConfig(**{**PLAIN, "alibi": False, **more}))


def lfm2(**more: object) -> PreTrainedModel:
    return Lfm2ForCausalLM(
        Lfm2Config(**{**SHAPE, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, **more})
    )


def granite_hybrid(**more: object) -> PreTrainedModel:
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**{**SHAPE, **HYBRID, "mamba_d_head": 16, **more})
    )


def qwen3_next(**more: object) -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**SHAPE, **DELTA, **more}))


CARRYING = {"lfm2": lfm2, "granite-hybrid": granite_hybrid, "qwen3-next": qwen3_next}
LEAKING: dict[str, Callable[[], PreTrainedModel]] = {
    "afmoe": afmoe,
    "falcon": falcon,
    "falcon-alibi": lambda: falcon(alibi=True),
    "opt": lambda: OPTForSequenceClassification(
        OPTConfig(**PLAIN, ffn_dim=48, word_embed_proj_dim=32, num_labels=1)
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(**PLAIN)),
    "mpt": lambda: MptForCausalLM(
        MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
}


@pytest.mark.parametrize("family", LEAKING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_without_a_mask_between_documents_is_found(
    family: str, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = LEAKING[family]().to(dtype)
    module = (Scorer if hasattr(model, "score") else Policy)(model).train()
    before = torch.get_rng_state()
    detect_document_leak(module, module, CPU, packed=False)
    # nothing to try where no row holds two documents
    assert module.document_leak is None and not capsys.readouterr().out
    detect_document_leak(module, module, CPU, packed=True)
    detect_document_leak(module, module, CPU, packed=True)
    assert module.document_leak and capsys.readouterr().out.count("one document a row") == 1
    assert module.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
@pytest.mark.parametrize("form", ["float32", "bfloat16", attention.VARLEN])
def test_other_families_stay_packed(
    family: str, form: str, kernel: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = {**FAMILIES, **WINDOWED}[family]()
    if form == attention.VARLEN:
        model.set_attn_implementation(form)
    else:
        model = model.to(getattr(torch, form))
    policy = Policy(model.eval())
    detect_document_leak(policy, policy, CPU, packed=form != attention.VARLEN)
    assert policy.document_leak is False
    assert policy.training
    assert not policy.model.training
    assert not capsys.readouterr().out


def test_no_token_of_the_vocabularys_padding_is_drawn() -> None:
    torch.manual_seed(0)
    policy = Policy(FAMILIES["llama"]().eval())
    policy.known = 8  # of 97 rows; a log-prob of another token raises
    detect_document_leak(policy, policy, CPU, packed=True)
    assert policy.document_leak is False


def test_a_new_head_of_zeros_hides_nothing() -> None:
    torch.manual_seed(0)
    for model, leaks in (
        (Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1)), False),
        (falcon(FalconForSequenceClassification), True),
    ):
        torch.nn.init.zeros_(model.score.weight)
        scorer = Scorer(model)
        detect_document_leak(scorer, scorer, CPU, packed=True)
        assert scorer.document_leak is leaks


def test_all_ranks_decide_alike() -> None:
    torch.manual_seed(0)
    policy = Policy(FAMILIES["llama"]().eval())
    # another rank saw a leak
    detect_document_leak(policy, policy, CPU, True, all_reduce=lambda found: found + 1)
    assert policy.document_leak


def test_attention_that_takes_one_row_only_is_left_where_documents_leak(
    kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    policy = Policy(FAMILIES["llama"]().eval())
    alone = [logprobs_by_document(policy, [[document]])[0] for document in documents()]
    policy.model.set_attn_implementation(attention.VARLEN)
    monkeypatch.setattr(document_leak, "leaks", lambda *_: True)
    detect_document_leak(policy, policy, CPU, packed=False)
    kernel.clear()
    for ours, theirs in zip(
        logprobs_by_document(policy, [[document] for document in documents()]), alone, strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    assert policy.document_leak and not kernel


def test_rows_of_layers_that_carry_state_are_not_concatenated(capsys: pytest.CaptureFixture[str]) -> None:
    model = Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], conv_L_cache=3))
    model.config._attn_implementation = attention.FLASH
    assert not attention.takes_varlen(model)
    policy = Policy(model)
    detect_document_leak(policy, policy, CPU, packed=False)
    assert policy.document_leak is None and not capsys.readouterr().out
    detect_document_leak(policy, policy, CPU, packed=True)
    assert policy.document_leak
    assert (
        capsys.readouterr().out
        == "Lfm2ForCausalLM has layers that carry state along a row: one document a row\n"
    )


# Stages: what is asked to be packed trains as what is not.


def save_leaking(name: str, tokenizer_of: Path, folder: Path) -> Path:
    """A random model of the family with the tokenizer of a checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    torch.manual_seed(0)
    make = {"afmoe": afmoe, "falcon": falcon, **CARRYING}[name]
    make(
        vocab_size=len(tokenizer), initializer_range=0.2, max_position_embeddings=128, **ids
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bases(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for name in ("afmoe", "falcon", *CARRYING):
        save_leaking(name, material / "base", folder / name)
    return folder


def stage(kind: str, material: Path, **rows: object) -> StageConfig:
    def data(name: str) -> Data:
        return Data(sources=str(material / name), max_samples=16)

    fields = {
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "max_len": 96,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        **rows,
    }
    if kind == "sft":
        return SFT(model="base", data=data("sft.jsonl"), eval_data=data("sft.jsonl"), **fields)
    if kind == "reward_model":
        return RewardModel(
            model="base", data=data("preferences.jsonl"), eval_data=data("preferences.jsonl"), **fields
        )
    config = DPO if kind == "dpo" else KTO
    return config(
        policy="base",
        data=data("preferences.jsonl"),
        eval_data=data("preferences.jsonl"),
        reference="base",
        **fields,
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [("afmoe", "sft"), ("falcon", "reward_model"), ("granite-hybrid", "kto"), ("lfm2", "dpo")]
    + [
        pytest.param(family, kind, marks=pytest.mark.long)
        for family, kind in [("afmoe", "dpo"), *(("falcon", kind) for kind in ("sft", "dpo", "kto"))]
        + [(family, kind) for family in CARRYING for kind in ("sft", "reward_model", "dpo", "kto")]
    ],
)
def test_what_would_leak_when_packed_trains_as_one_document_a_row(
    family: str, kind: str, bases: Path, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packing: dict[str, object] = {"packing": False} if kind == "sft" else {}
    run(stage(kind, material, **packing), bases / family, tmp_path / "rows")
    assert "one document a row" not in capsys.readouterr().out
    run(stage(kind, material, micro_train_tokens=200), bases / family, tmp_path / "tokens")
    assert "one document a row" in capsys.readouterr().out
    run(stage(kind, material, micro_train_batch_size=None), bases / family, tmp_path / "default")
    assert "one document a row" in capsys.readouterr().out
    if kind == "sft":
        run(stage(kind, material, packing=True), bases / family, tmp_path / "packed")
    expected = read_metrics(tmp_path / "rows")
    for other in ("tokens", "default", *(["packed"] if kind == "sft" else [])):
        for ours, theirs in zip(read_metrics(tmp_path / other), expected, strict=True):
            for name in ("loss", "eval/loss"):
                if name in theirs:
                    assert ours[name] == pytest.approx(theirs[name], abs=1e-5), (other, name)


def test_roles_of_ppo_score_what_would_leak_one_document_a_row(
    bases: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    torch.manual_seed(0)
    scored = falcon(FalconForSequenceClassification, num_labels=1, initializer_range=0.2)
    torch.nn.init.normal_(scored.score.weight)
    scored.save_pretrained(tmp_path / "rm")
    places = {"policy": bases / "falcon", "rm": tmp_path / "rm"}
    found = []
    for tokens in (None, 30):
        policy, reward = (
            ModelSpec(str(places[name]), "float32", 0, 8, False, tokens) for name in ("policy", "rm")
        )
        trained = Policy(load_policy(policy.path).model)
        size = {"micro_train_tokens": tokens, "micro_train_batch_size": 8}
        engine = make_engine(trained, PPO(prompts=Data(sources="none"), zero_stage=0, **size))
        assert isinstance(engine, TorchEngine) and trained.document_leak is (True if tokens else None)
        own = score_share(
            engine, documents(), policy, lambda batch, policy=trained: masked_logprobs(policy, batch).logprobs
        )
        found.append(
            [
                dict(own),
                dict(ReferenceModel(policy, 1.0).logprobs(documents())),
                dict(Reward(reward).scores(documents())),
            ]
        )
    for ours, theirs in zip(*found, strict=True):
        for index, values in theirs.items():
            torch.testing.assert_close(torch.tensor(ours[index]), torch.tensor(values), atol=1e-5, rtol=1e-5)
