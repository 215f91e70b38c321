"""Each kind of engine in this process: seeds, limits, log-probs, and weights that really arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import EngineConfig
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, compact
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.logprobs.token_logprobs import WHOLE, Truncation
from rlhf_core.models.policy import Policy, masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.rollout.engine_kinds import open_engine
from rlhf_core.rollout.vllm.environment import CPU_BATCHED_TOKENS
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from rlhf_core.stages.ppo.measured.probe import NOISE_FREE, WeightsDiffer, check_gap

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Setting:
    base: str
    sampler: Any
    renderer: Renderer
    prompts: list[list[int]]
    kind: str

    def generate(
        self, prompts: list[list[int]] | None = None, first_seed: int = 0, **changed: object
    ) -> list[list[SampledAnswer]]:
        prompts = self.prompts if prompts is None else prompts
        options = (
            dict(temperature=1.0, max_new_tokens=12, stop_token_ids=self.renderer.stop_token_ids, n=2)
            | changed
        )
        return self.sampler.generate(
            prompts, [first_seed + 10 * i for i in range(len(prompts))], Sampling(**options)
        )


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def setting(material: Path, request: pytest.FixtureRequest) -> Iterator[Setting]:
    base = str(material / "base")
    renderer = Renderer(load_tokenizer(base), "chat")
    prompts = [
        renderer.prompt([{"role": "user", "content": f"Copy this number: {n}"}])
        for n in (3, 14, 159, 2653, 58979)
    ]
    options = {"max_num_seqs": 48} if request.param == "vllm" else {}
    config = EngineConfig(kind=request.param, kv_cache_gib=0.5, options=options)
    sampler = open_engine(base, config, seed=0, max_model_len=96)
    yield Setting(base, sampler, renderer, prompts, request.param)
    sampler.close()


@pytest.fixture
def of_vllm(setting: Setting) -> None:
    if setting.kind != "vllm":
        pytest.skip("only vLLM has this")


@pytest.fixture(autouse=True)
def _base_weights(setting: Setting) -> None:
    setting.sampler.load(setting.base)


def largest_gap(setting: Setting, policy: Policy) -> float:
    batch = collate([[Document(p, [False] * len(p))] for p in setting.prompts], pad_token_id=0)
    with torch.no_grad():
        ours = policy(batch.tokens, batch.positions, batch.documents).logprobs
    theirs = setting.sampler.prompt_logprobs(setting.prompts)
    return max(
        float((torch.tensor(t) - row[: len(t)]).abs().max()) for t, row in zip(theirs, ours, strict=True)
    )


def changed_policy(setting: Setting) -> Policy:
    policy = load_policy(setting.base).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return policy


def named(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in policy.model.named_parameters()]


@pytest.mark.usefixtures("of_vllm")
def test_options_of_the_recipe_reach_the_engine(setting: Setting) -> None:
    assert setting.sampler.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 48
    with pytest.raises(ValueError, match="has no option 'max_num_seq'; did you mean max_num_seqs"):
        VllmEngine(setting.base, seed=0, max_model_len=96, config=EngineConfig(options={"max_num_seq": 7}))


def test_a_seed_fixes_the_answer(setting: Setting) -> None:
    assert setting.generate() == setting.generate()
    assert setting.generate() != setting.generate(first_seed=1)


def test_a_stream_gives_each_prompts_answers_once_they_are_all_there(setting: Setting) -> None:
    how = dict(temperature=1.0, max_new_tokens=12, stop_token_ids=setting.renderer.stop_token_ids, n=2)
    seeds = [10 * i for i in range(len(setting.prompts))]
    for _ in range(2):  # the second time over the prefixes of the first
        streamed = list(setting.sampler.stream(setting.prompts, seeds, Sampling(**how)))
        assert sorted(index for index, _ in streamed) == list(range(len(setting.prompts)))
        assert [answers for _, answers in sorted(streamed, key=lambda item: item[0])] == setting.generate()
    # so that some answers end long before others
    often = how | {"stop_token_ids": list(range(0, 400, 8)), "max_new_tokens": 24}
    lengths = [
        max(len(answer.tokens) for answer in answers)
        for _, answers in setting.sampler.stream(setting.prompts, seeds, Sampling(**often))
    ]
    if setting.kind == "vllm":
        assert lengths == sorted(lengths) and lengths[0] < lengths[-1], "what is finished first comes first"


def test_answers_keep_the_order_of_prompts_and_their_number(setting: Setting) -> None:
    answers = setting.generate(n=3)
    assert [len(group) for group in answers] == [3] * 5
    alone = setting.sampler.generate(
        setting.prompts[2:3], [20], Sampling(3, 1.0, 12, setting.renderer.stop_token_ids)
    )
    assert [a.tokens for a in alone[0]] == [a.tokens for a in answers[2]]
    assert setting.generate([]) == []


@pytest.mark.usefixtures("of_vllm")
def test_more_prompt_tokens_than_one_engine_step_holds(setting: Setting) -> None:
    long = [prompt + [7 + i % 50] * (80 - len(prompt)) for i, prompt in enumerate(setting.prompts * 24)]
    assert sum(map(len, long)) > 2 * CPU_BATCHED_TOKENS
    answers = setting.generate(long, n=1)
    assert (
        len(answers) == len(long)
        and answers[7]
        == setting.sampler.generate(long[7:8], [70], Sampling(1, 1.0, 12, setting.renderer.stop_token_ids))[0]
    )


def test_length_limit_cuts_and_stop_tokens_end(setting: Setting) -> None:
    cut = [a for group in setting.generate(max_new_tokens=2, stop_token_ids=[]) for a in group]
    assert all(
        len(a.tokens) == 2 and not a.finished
        for a in cut
        if a.tokens[-1] not in setting.renderer.stop_token_ids
    )
    greedy = setting.generate(temperature=0.0, n=1, stop_token_ids=[])
    first = greedy[0][0].tokens[0]
    stopped = setting.generate(temperature=0.0, n=1, stop_token_ids=[first])[0][0]
    assert list(stopped.tokens) == [first] and stopped.finished, "the stop token is part of the answer"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_logprobs_are_those_of_the_scaled_policy(setting: Setting, temperature: float) -> None:
    answers = setting.generate(temperature=temperature, n=1)
    policy = load_policy(setting.base).eval()
    for prompt, (answer,) in zip(setting.prompts, answers, strict=True):
        batch = collate([[compact(prompt, answer.tokens)]], pad_token_id=0)
        with torch.no_grad():
            ours = policy(batch.tokens, batch.positions, batch.documents, temperature).logprobs[0]
        torch.testing.assert_close(
            torch.tensor(answer.logprobs),
            ours[len(prompt) : len(prompt) + len(answer.tokens)],
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.parametrize("top", [Truncation(0.6, 0), Truncation(1.0, 3), Truncation(0.8, 20)])
def test_sampler_logprobs_are_those_of_the_truncated_policy(setting: Setting, top: Truncation) -> None:
    """vLLM's top-p and top-k beside the trainer's, on the same answers; the whole distribution, or another
    temperature, is found out."""
    answers = setting.generate(temperature=0.7, n=2, top_p=top.top_p, top_k=top.top_k)
    policy = load_policy(setting.base).eval()
    said = [
        (prompt, answer) for prompt, group in zip(setting.prompts, answers, strict=True) for answer in group
    ]
    documents = [compact(prompt, answer.tokens) for prompt, answer in said]
    batch = collate([[document] for document in documents], pad_token_id=0)
    theirs = torch.tensor([logprob for _, answer in said for logprob in answer.logprobs])

    def gap(temperature: float, kept: Truncation) -> float:
        with torch.no_grad():
            return float(
                (masked_logprobs(policy, batch, temperature, top=kept).logprobs[batch.mask] - theirs)
                .abs()
                .max()
            )

    assert gap(0.7, top) < 1e-4
    assert gap(0.7, WHOLE) > 0.1 and gap(1.0, top) > 0.05


def test_a_stop_text_ends_an_answer_which_keeps_it(setting: Setting) -> None:
    decode = setting.renderer.tokenizer.decode
    plain = [answer for group in setting.generate(max_new_tokens=24) for answer in group]
    texts = [decode(answer.tokens, skip_special_tokens=True) for answer in plain]
    stop = next(text[1:3] for text in texts if len(text) > 6)
    stopped = [answer for group in setting.generate(max_new_tokens=24, stop=[stop]) for answer in group]
    ended = 0
    for answer, whole, text in zip(stopped, plain, texts, strict=True):
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert answer.logprobs == whole.logprobs[: len(answer.tokens)]
        if stop in text:
            ended += 1
            assert (
                answer.finished and stop in decode(answer.tokens) and stop not in decode(answer.tokens[:-1])
            )
        else:
            assert answer.tokens == whole.tokens
    assert ended


def test_synced_weights_arrive_head_included(setting: Setting) -> None:
    policy = changed_policy(setting)
    assert policy.model.config.tie_word_embeddings, "the case in which a head can go missing"
    assert largest_gap(setting, policy) > NOISE_FREE["float32"]
    setting.sampler.update(named(policy))
    check_gap(largest_gap(setting, policy), NOISE_FREE["float32"])


@pytest.mark.usefixtures("of_vllm")
@pytest.mark.parametrize("planted", ["one wrong weight", "old head"])
def test_the_probe_catches_weights_that_differ(
    setting: Setting, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = changed_policy(setting)
    weights = named(policy)
    if planted == "old head":
        monkeypatch.setattr(setting.sampler, "tied", False)
    else:
        name, weight = weights[5]
        weights[5] = (name, torch.zeros_like(weight))
    setting.sampler.update(weights)
    with pytest.raises(WeightsDiffer, match="the engine does not hold the actor's weights"):
        check_gap(largest_gap(setting, policy), NOISE_FREE["float32"])


@pytest.mark.usefixtures("of_vllm")
def test_a_folder_without_weights_is_refused(setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no safetensors file"):
        setting.sampler.load(str(tmp_path))
