"""Weights of every family, with adapters and experts, arrive in vLLM; what did not arrive is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rlhf_core.config import EngineConfig, Lora
from rlhf_core.data.documents import Document
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights, trained_weights
from rlhf_core.models.checkpoint.save import save_adapter, save_tokenizer
from rlhf_core.models.load_model import load_policy, trained_policy
from rlhf_core.models.lora import lora_layers
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from rlhf_core.stages.ppo.measured.probe import NOISE_FREE, WeightsDiffer, check_gap
from rlhf_core.training.engine import AdamW, TorchEngine, on_cpu
from tests.support.families import make_family

pytestmark = pytest.mark.slow
DOCUMENTS = [[5, 9, 20, 33, 40, 51, 7], [8, 8, 9, 10, 77, 81]]
LORA = Lora(rank=4, alpha=8)


class Setting(NamedTuple):
    base: Path
    sampler: VllmEngine

    def gap(self, policy: Policy) -> float:
        """Largest difference of log-probs, vLLM's against the policy's."""
        batch = collate([[Document(d, [False] * len(d))] for d in DOCUMENTS], pad_token_id=0)
        with torch.no_grad():
            ours = policy(batch.tokens, batch.positions, batch.documents).logprobs
        theirs = self.sampler.prompt_logprobs(DOCUMENTS)
        return max(
            float((torch.tensor(t) - row[: len(t)]).abs().max()) for t, row in zip(theirs, ours, strict=True)
        )

    def send(self, policy: Policy) -> None:
        self.sampler.update(checkpoint_weights(policy.model, lambda parameters: nullcontext()))


EACH_TIME = ["llama", "qwen3", "mixtral", "granite-hybrid", "gemma4-wrapper"]
LONG = [
    *(
        "mistral",
        "ministral3",
        "mistral3-wrapper",
        "qwen3-moe",
        "gemma2",
        "gemma3-wrapper",
        "gemma4",
        "glm4",
        "phi3",
        "granite",
        "lfm2",
    ),
    *("glm4-moe-lite", "deepseek-v3"),
]


@pytest.fixture(
    params=[*EACH_TIME, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)], scope="module"
)
def setting(
    request: pytest.FixtureRequest, material: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    base = make_family(request.param, material / "base", tmp_path_factory.mktemp(request.param))
    sampler = VllmEngine(str(base), seed=0, max_model_len=96, config=EngineConfig(kv_cache_gib=0.5))
    yield Setting(base, sampler)
    sampler.close()


def adapted(base: Path) -> Policy:
    """A policy whose adapters say something."""
    policy = trained_policy(str(base), "float32", False, LORA, seed=1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in lora_layers(policy.model).values():
            layer.lora_B["default"].weight.normal_(std=0.1, generator=generator)
    return policy


def test_weights_arrive(setting: Setting) -> None:
    policy = load_policy(str(setting.base)).eval()
    assert setting.gap(policy) < 1e-3
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    setting.send(policy)
    assert setting.gap(policy) < 1e-3


def test_an_adapter_arrives_and_one_that_was_not_sent_is_noticed(setting: Setting) -> None:
    setting.send(load_policy(str(setting.base)))
    policy = adapted(setting.base)
    with pytest.raises(WeightsDiffer, match="does not hold the actor's weights"):
        check_gap(setting.gap(policy), NOISE_FREE["float32"])
    setting.send(policy)
    check_gap(setting.gap(policy), NOISE_FREE["float32"])


def test_an_adapter_checkpoint_is_sampled_from_as_the_model_it_makes(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "space").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "space"))
    policy = adapted(setting.base)
    engine = TorchEngine(policy, AdamW((0.9, 0.95), 0.0, 1.0))
    save_adapter(
        policy.model,
        on_cpu(engine, trained_weights(policy.model, engine.gathered)),
        str(setting.base),
        tmp_path,
    )
    save_tokenizer(str(setting.base), tmp_path)
    setting.sampler.load(str(setting.base))
    assert setting.gap(policy) > 0.01
    setting.sampler.load(str(tmp_path))
    assert setting.gap(policy) < 1e-3
    assert not list((tmp_path / "space").glob("alignflow-merged-*")), "the merged model is left behind"


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="vLLM runs the family where torchvision is")
def test_a_family_that_vllm_cannot_run_is_one_sentence(material: Path, tmp_path: Path) -> None:
    base = make_family("qwen3_5", material / "base", tmp_path / "model")
    with pytest.raises(
        ValueError,
        match=(
            r"^vLLM [\d.]+\S* cannot run \S+ here \(.*Qwen3_5ForCausalLM.*\): the log above says what it"
            r" lacks$"
        ),
    ):
        VllmEngine(str(base), seed=0, max_model_len=96, config=EngineConfig(kv_cache_gib=0.5))
