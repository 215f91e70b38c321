"""Arguments of chat templates, with a template that thinks as Qwen3's: it cuts the thoughts before the last
question, writes an empty thought into the last answer, and with enable_thinking false into the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.chat.template_arguments import read_arguments, variables_of

EMPTY = "<think>\n\n</think>\n\n"
ANSWER = (
    "{%- set thought = '' -%}{%- set said = m.content -%}"
    "{%- if '</think>' in m.content -%}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set said = m.content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) -%}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' + said -}}{%- else -%}{{- said -}}{%- endif -%}"
)
THINKING = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if reasoning_effort is defined -%}{{- 'Effort: ' + reasoning_effort + '\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' -%}BEGIN" + ANSWER + "{{- '<|im_end|>' -}}END{{- '\n' -}}"
    "{%- else -%}{{- m.content + '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}"
)
PLAIN = THINKING.replace("BEGIN", "").replace("END", "")
TAGGED = THINKING.replace("BEGIN", "{%- generation -%}").replace("END", "{%- endgeneration -%}")
SINGLE = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "First."}]
THOUGHTFUL = [SINGLE[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFirst."}]
TWO = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "<b>Second."}]
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(["user assistant one two first second think\n\n"] * 5, trainer)
    found = {}
    for name, template in {"plain": PLAIN, "tagged": TAGGED}.items():
        folder = tmp_path_factory.mktemp(name)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|pad|>"
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        Qwen2Config(vocab_size=400, hidden_size=8, num_attention_heads=1).save_pretrained(folder)
        found[name] = str(folder)
    return found


def made(place: str, **arguments: Any) -> Renderer:
    return Renderer(load_tokenizer(place), "chat", template_args=arguments)


def masked(renderer: Renderer, messages: list[dict[str, str]]) -> str:
    document = renderer.conversation(messages)
    return renderer.tokenizer.decode(
        [token for token, on in zip(document.tokens, document.mask, strict=True) if on]
    )


def test_a_prompt_without_thinking_begins_the_row_and_the_mask_is_the_answer_alone(
    places: dict[str, str],
) -> None:
    renderer = made(places["plain"], **OFF)
    prompt = renderer.prompt(SINGLE[:1])
    row = renderer.conversation(SINGLE)
    assert renderer.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n" + EMPTY)
    assert list(row.tokens[: len(prompt)]) == prompt
    assert list(row.mask) == [False] * len(prompt) + [True] * (len(row) - len(prompt))
    assert masked(renderer, SINGLE) == "First.<|im_end|>"
    assert masked(made(places["plain"]), SINGLE) == EMPTY + "First.<|im_end|>", "the model writes the thought"


@pytest.mark.parametrize("first", [SINGLE, THOUGHTFUL], ids=["no thought", "a thought"])
def test_an_earlier_turn_is_masked_as_it_is_written_and_its_thought_is_cut(
    places: dict[str, str], first: list[dict[str, str]]
) -> None:
    without = made(places["plain"], **OFF)
    assert masked(without, first + TWO) == "First.<|im_end|><b>Second.<|im_end|>"
    assert masked(made(places["plain"]), first + TWO) == f"First.<|im_end|>{EMPTY}<b>Second.<|im_end|>"
    prompt = without.prompt([*first, TWO[0]])
    assert list(without.conversation(first + TWO).tokens[: len(prompt)]) == prompt
    assert "hm" not in without.tokenizer.decode(prompt)


def test_an_earlier_answer_that_begins_like_a_thought_loses_nothing(places: dict[str, str]) -> None:
    likes = [SINGLE[0], {"role": "assistant", "content": "<think of a number."}]
    assert masked(made(places["plain"], **OFF), likes + TWO).startswith("<think of a number.<|im_end|>")


def test_three_turns_and_weights_keep_their_masks(places: dict[str, str]) -> None:
    renderer = made(places["plain"], **OFF)
    assert masked(renderer, [*SINGLE, *SINGLE, *TWO]) == "First.<|im_end|>" * 2 + "<b>Second.<|im_end|>"
    weighted = [SINGLE[0], SINGLE[1] | {"weight": 0}, *TWO]
    assert masked(renderer, weighted) == "<b>Second.<|im_end|>"


def test_a_thought_where_thinking_is_off_is_refused(places: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"template_args \(enable_thinking\).*begins message 2.*differently"):
        made(places["plain"], **OFF).conversation(THOUGHTFUL)
    assert masked(made(places["plain"]), THOUGHTFUL) == "<think>\nhm\n</think>\n\nFirst.<|im_end|>"


def test_an_answer_of_a_pair_is_refused_in_the_same_case(places: dict[str, str]) -> None:
    renderer = made(places["plain"], **OFF)
    thought, plain = THOUGHTFUL[1]["content"], SINGLE[1]["content"]
    with pytest.raises(ValueError, match=r"begins message 2.*differently"):
        renderer.response_tokens(SINGLE[:1], thought)
    prompt = renderer.prompt(SINGLE[:1])
    found = renderer.response_tokens(SINGLE[:1], plain)
    assert [*prompt, *found] == list(renderer.conversation(SINGLE).tokens)


def test_a_tagged_template_is_checked_too(places: dict[str, str]) -> None:
    renderer = made(places["tagged"], **OFF)
    assert masked(renderer, SINGLE) == EMPTY + "First.<|im_end|>", "the tags say what is trained"
    with pytest.raises(ValueError, match="another prompt would be trained than is sampled"):
        renderer.conversation(THOUGHTFUL)


def test_messages_after_an_answer_are_rendered_with_the_arguments(places: dict[str, str]) -> None:
    renderer = made(places["plain"], **OFF)
    followed = renderer.follow(SINGLE, TWO[:1], ended=True)
    assert renderer.tokenizer.decode(followed).endswith("Two?<|im_end|>\n<|im_start|>assistant\n" + EMPTY)


def test_an_argument_that_is_never_read_is_refused_with_those_that_are(places: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"never reads thinking of.*only enable_thinking, reasoning_effort"):
        made(places["plain"], thinking=False)
    tokenizer = load_tokenizer(places["tagged"])
    assert read_arguments(tokenizer, {"thinking": 1, **OFF}) == OFF
    assert variables_of("{% set a = a if a is defined else 1 %}{% for m in b %}{% break %}{% endfor %}") >= {
        "a",
        "b",
    }


def test_a_control_token_in_an_argument_stays_text(places: dict[str, str]) -> None:
    renderer = made(places["plain"], reasoning_effort="low<|im_end|>")
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert renderer.prompt(SINGLE[:1]).count(end) == 1, "of the user's turn"
    assert masked(renderer, SINGLE) == EMPTY + "First.<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"template_args": {"tools": []}}, "alignflow itself passes tools"),
        ({"template_args": {"bos_token": ""}}, "alignflow itself passes bos_token"),
        ({"template_args": {"enable-thinking": False}}, "not a name that a chat template can read"),
        ({"template_args": {"date": Path("x")}}, "valid JSON values"),
        ({"template_args": {"date": float("nan")}}, "valid JSON values"),
        ({"template": "Q: {}", "template_args": OFF}, "only chat templates read template_args:"),
    ],
)
def test_a_wrong_argument_is_one_sentence(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told) as error:
        Data.model_validate({"sources": "rows.jsonl", **fields})
    assert error.value.error_count() == 1


def test_the_order_of_nested_keys_reaches_no_template() -> None:
    """Digests sort keys, so equal digests have to mean equal texts."""
    first = {"tool": {"b": 1, "a": [{"d": 1, "c": 2}]}, "date": "x"}
    second = {"date": "x", "tool": {"a": [{"c": 2, "d": 1}], "b": 1}}
    one, other = (Data(sources="p.jsonl", template_args=form).template_args for form in (first, second))
    assert str(one) == str(other) == "{'date': 'x', 'tool': {'a': [{'c': 2, 'd': 1}], 'b': 1}}"
    assert Data(sources="p.jsonl", template_args={"order": ["b", "a"]}).template_args == {"order": ["b", "a"]}
