"""The training stages on one GPU, in bf16: DeepSpeed over NCCL, varlen FlashAttention where it is installed,
vLLM on the same GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_core.config import DPO, PPO, SFT, Data, EngineConfig, Preferences, Ranks, RewardModel, StageConfig
from rlhf_core.data.documents import Document
from rlhf_core.models.precision import dtype_of
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.roles.read_only import ReadOnlyModel, ReferenceModel, Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from tests.support.stage_request import stage_request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
TRAIN = {
    "dtype": "bfloat16",
    "zero_stage": 2,
    "train_batch_size": 32,
    "micro_train_batch_size": 8,
    "max_len": 96,
}


@pytest.fixture(scope="module")
def chain(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SFT -> reward model -> PPO, DPO, and a round of sampled pairs, each as its own process."""
    root = tmp_path_factory.mktemp("gpu")

    def data(name: str) -> Data:
        return Data(sources=str(material / name))

    share = Ranks(gpus=0.15)
    stages: dict[str, StageConfig] = {
        "sft": SFT(data=data("sft.jsonl"), eval_data=data("sft_heldout.jsonl"), learning_rate=2e-3, **TRAIN),
        "reward_model": RewardModel(data=data("preferences.jsonl"), learning_rate=1e-3, **TRAIN),
        "ppo": PPO(
            prompts=data("prompts.jsonl"),
            dtype="bfloat16",
            rollout_batch_size=32,
            n_samples_per_prompt=2,
            train_batch_size=64,
            micro_train_batch_size=16,
            max_steps=4,
            prompt_max_len=64,
            generate_max_len=24,
            actor_learning_rate=1e-4,
            critic_learning_rate=1e-4,
            actor_ranks=share,
            critic_ranks=share,
            reference_ranks=share,
            reward_ranks=share,
            engine=EngineConfig(gpus=0.3, gpu_memory_utilization=0.3),
        ),
        "dpo": DPO(data=data("preferences.jsonl"), learning_rate=1e-5, **TRAIN),
        "preferences": Preferences(
            prompts=data("prompts.jsonl"),
            num_prompts=64,
            prompt_max_len=64,
            generate_max_len=24,
            engine=EngineConfig(gpus=1, gpu_memory_utilization=0.3),
        ),
    }
    inputs = {"base": str(material / "base"), **{name: str(root / name / "checkpoint") for name in stages}}
    for name, config in stages.items():
        RunDir(root / name).prepare(stage_request(config, inputs, name=name))
        command = [sys.executable, "-m", "rlhf_core", str(root / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, (name, done.stdout[-2000:], done.stderr[-4000:])
    return root


def test_losses_fall(chain: Path) -> None:
    for name in ("sft", "reward_model", "dpo"):
        lines = read_metrics(chain / name)
        assert lines[-1]["loss"] < lines[0]["loss"], name


def test_a_round_is_sampled_and_scored_in_the_precision_of_its_checkpoints(chain: Path) -> None:
    (line,) = read_metrics(chain / "preferences")
    assert line["prompts"] == 64
    assert line["pairs"] > 16
    assert line["reward/best"] > line["reward/mean"] > line["reward/worst"]
    assert {dtype_of(str(chain / name / "checkpoint"), "auto") for name in ("sft", "reward_model")} == {
        "bfloat16"
    }


def test_the_first_ppo_steps_are_on_policy_within_bf16(chain: Path) -> None:
    for line in read_metrics(chain / "ppo"):
        assert line["policy/first_ratio_gap"] < 0.01
        assert line["sampler/gap"] < 0.02


@pytest.mark.parametrize("role", ["reference", "reward"])
def test_weights_that_wait_in_host_memory_leave_the_gpu(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with tied embeddings as well, whose head leaves room in the block that transformers loads
    weights into."""
    config = Qwen2Config(
        vocab_size=50_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
        tie_word_embeddings=True, dtype="bfloat16", num_labels=1,
    )  # fmt: skip
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    torch.manual_seed(0)
    kind = Qwen2ForCausalLM if role == "reference" else Qwen2ForSequenceClassification
    kind(config).to(torch.bfloat16).save_pretrained(tmp_path)
    before = torch.cuda.memory_reserved()
    model = ModelSpec(str(tmp_path), "bfloat16", 0, 1, False, 512)
    documents = [Document(list(range(1, 300)), [True] * 299)]
    held: ReadOnlyModel = (
        ReferenceModel(model, 1.0, offload=True) if role == "reference" else Reward(model, offload=True)
    )
    weights = sum(tensor.numel() * tensor.element_size() for tensor in held.module.parameters())
    for _ in range(2):
        scored = held.logprobs(documents) if isinstance(held, ReferenceModel) else held.scores(documents)
        assert len(scored) == 1
        assert torch.cuda.max_memory_allocated() > weights, "they were never there"
        held.release()
        assert torch.cuda.memory_reserved() - before < weights / 2
