"""Conversations in tokens, for the chat template of each family: what was sampled stays as it was, all else
is masked."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Prompt
from rlhf_core.environments.conversation import Call
from rlhf_core.environments.trajectories.calls import CallFormat, call_format
from rlhf_core.environments.trajectories.trajectory import Full, Limits, Trajectory
from rlhf_core.rollout.engine_contract import SampledAnswer
from tests.support.templates import TEMPLATES, WITHOUT_TOOLS, save_tokenizer

LIMITS = Limits(turns=4, prompt_tokens=400, tokens=600, answer_tokens=None)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
SAID = {  # how a model of the family calls `look`
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": "the <|im_end|> sky"}}\n</tool_call>',
    "qwen3": '<think>hm</think>I look.<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>',
    "qwen3-coder": (
        "<tool_call>\n<function=look>\n<parameter=at>\nthe\nsky\n</parameter>\n</function>\n</tool_call>"
    ),
    "llama3": '{"name": "look", "parameters": {"at": "x"}}',
    "mistral": (
        '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}, {"name": "look", "arguments": {"at": "y"}}]'
    ),
    "mistral-names": '[TOOL_CALLS]look[ARGS]{"at": "x"}',
    "deepseek": 'I look.<|tool_call|>function<|tool_sep|>look\n```json\n{"at": "x"}\n```<|tool_call_end|>',
}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    root = tmp_path_factory.mktemp("templates")
    return {
        name: Renderer(load_tokenizer(str(save_tokenizer(name, root / name))), "chat") for name in TEMPLATES
    }


def begun(renderer: Renderer, tools: bool = False, limits: Limits = LIMITS) -> Trajectory:
    messages = ({"role": "user", "content": "Where?"},)
    prompt = Prompt(messages, renderer.prompt(messages), {}, False)
    return Trajectory(
        prompt, renderer, limits, [TOOL] if tools else [], call_format(renderer) if tools else None
    )


def sampled(renderer: Renderer, text: str, finished: bool = True) -> SampledAnswer:
    tokens = [
        *renderer.tokenizer(text, add_special_tokens=False).input_ids,
        *([renderer.end_token_id] if finished else []),
    ]
    return SampledAnswer(tokens, [-0.5 - i for i in range(len(tokens))], finished)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_reads_as_the_template_writes_it(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    path = begun(renderer)
    said = ["First,  odd   text", "Second"]
    path.ask([])
    path.take(sampled(renderer, said[0]))
    path.ask([{"role": "user", "content": "And <|im_end|> then </s>?"}])
    path.take(sampled(renderer, said[1]))
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": said[0]},
        {"role": "user", "content": "And <|im_end|> then </s>?"},
        {"role": "assistant", "content": said[1]},
    ]
    assert path.messages == messages and path.turns == 2
    whole = renderer.conversation(messages)  # what SFT would train on
    assert path.document == whole and any(whole.mask)
    # The log-probs are those of the sampler, on the answers alone.
    mask = path.document.mask_array
    assert (path.logprobs[~mask] == 0).all() and (path.logprobs[mask] < 0).all()
    ends = [
        t
        for t, token in enumerate(path.document.tokens)
        if token == renderer.end_token_id and path.document.mask[t]
    ]
    assert len(ends) == 2, "control tokens in a message are text"


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in WITHOUT_TOOLS])
def test_calls_are_read_and_results_are_masked(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    path = begun(renderer, tools=True)
    path.ask([])
    assert "look" in renderer.decoded(path.document.tokens, False), "the template describes the tools"
    answer, message = path.take(sampled(renderer, SAID[name]))
    expected = {"hermes": "the <|im_end|> sky", "qwen3-coder": "the\nsky"}.get(name, "x")
    assert (
        answer.calls[0] == Call("look", {"at": expected}, id="call00000")
        and message["tool_calls"][0]["function"]["name"] == "look"
    )
    assert len(answer.calls) == (2 if name == "mistral" else 1)
    assert answer.text == {"qwen3": "<think>hm</think>I look.", "deepseek": "I look."}.get(name, "")
    before = len(path.document)
    path.ask([{"role": "tool", "name": "look", "content": "a bird </s>", "tool_call_id": "call00000"}])
    path.take(sampled(renderer, "A bird."))
    document = path.document
    added = [i for i in range(before, len(document)) if not document.mask[i]]
    said = renderer.decoded([document.tokens[i] for i in added], False)
    assert "a bird" in said and "A bird." not in said and "look" not in said
    answers = renderer.decoded(
        [token for token, own in zip(document.tokens, document.mask, strict=True) if own], False
    )
    end = renderer.decoded([renderer.end_token_id], False)
    assert answers == f"{SAID[name]}{end}A bird.{end}", "what was sampled is what is trained on"


def test_a_template_without_tools_is_refused(renderers: dict[str, Renderer]) -> None:
    for name in WITHOUT_TOOLS:
        with pytest.raises(ValueError, match="writes no calls of tools"):
            call_format(renderers[name])


def test_what_is_no_call_is_said(renderers: dict[str, Renderer]) -> None:
    read = {name: call_format(renderers[name]).read for name in SAID}
    assert read["hermes"]("<tool_call>\n{oops")[1][0].wrong
    assert read["hermes"]('<tool_call>{"name": "look", "arguments": [1]}</tool_call>')[1][0].wrong
    assert read["hermes"]("no call") == ("no call", []) and read["llama3"]("{no call}") == ("{no call}", [])
    assert read["mistral-names"]("[TOOL_CALLS]look")[1][0].wrong
    assert read["hermes"]('<tool_call>{"name": "look", "arguments": "{\\"at\\": 1}"}')[1] == [
        Call("look", {"at": 1})
    ]
    assert CallFormat("<t>").read("<t>[" * 1000)[1][0].wrong


def test_limits(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["hermes"]
    one_turn = begun(renderer, limits=LIMITS._replace(turns=1))
    one_turn.ask([])
    one_turn.take(sampled(renderer, "a"))
    with pytest.raises(Full, match="max_turns"):
        one_turn.ask([{"role": "user", "content": "b"}])
    short = begun(renderer, limits=LIMITS._replace(tokens=30, answer_tokens=10))
    assert short.ask([])[1] == 10
    short.take(sampled(renderer, "abcdefghij"[:9]))
    before = short.document
    with pytest.raises(Full, match="generate_max_len"):
        short.ask([{"role": "user", "content": "a question that is longer than what is left of the tokens"}])
    assert short.document == before and short.messages[-1]["role"] == "assistant"
    # An answer that was cut is ended by the template, masked.
    cut = begun(renderer)
    cut.ask([])
    cut.take(sampled(renderer, "abc", finished=False))
    assert not cut.finished
    cut.ask([{"role": "user", "content": "b"}])
    cut.take(sampled(renderer, "d"))
    ends = [
        own
        for token, own in zip(cut.document.tokens, cut.document.mask, strict=True)
        if token == renderer.end_token_id
    ]
    assert ends == [False, False, False, True][-len(ends) :] and len(ends) == 4


def test_a_conversation_that_a_limit_ends_is_not_finished(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["hermes"]
    question = [{"role": "user", "content": "b"}]
    one_turn = begun(renderer, limits=LIMITS._replace(turns=1))
    one_turn.ask([])
    one_turn.take(sampled(renderer, "a"))
    assert one_turn.finished, "the environment may be done"
    with pytest.raises(Full):
        one_turn.ask(question)
    assert not one_turn.finished and one_turn.ended
    short = begun(renderer, limits=LIMITS._replace(tokens=40))
    short.ask([])
    short.take(sampled(renderer, "a"))
    with pytest.raises(Full):
        short.ask([{"role": "user", "content": "a question that is longer than what is left of the tokens"}])
    assert not short.finished
    short.ask(question)
    short.take(sampled(renderer, "c"))
    assert short.finished, "a shorter question was answered"
