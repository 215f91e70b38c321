from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from rlhf_core.data.chat import Renderer, load_tokenizer

BOUNDS = "{{ '<|im_start|>' + m.role + '\n' }}", "{{ '<|im_end|>\n' }}"
GENERATE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + BOUNDS[0] + "{{ m.content }}" + BOUNDS[1] + "{% endfor %}" + GENERATE


def marked(inside: str, after: str) -> str:
    answer = "{% generation %}" + inside + "{% endgeneration %}" + after
    other = "{{ m.content }}" + BOUNDS[1]
    body = BOUNDS[0] + "{% if m.role == 'assistant' %}" + answer + "{% else %}" + other + "{% endif %}"
    return "{% for m in messages %}" + body + "{% endfor %}" + GENERATE


TEMPLATES = {
    "unmarked": CHATML,
    "marked with the end of turn": marked("{{ m.content }}" + BOUNDS[1], ""),
    "marked content only": marked("{{ m.content }}", BOUNDS[1]),
    "trimmed": CHATML.replace("m.content", "m.content | trim"),
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First, a café 🙂"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]
# What templates write between the header of an answer and its text, and what they take from it.
BEFORE = {
    "space": CHATML.replace("{{ m.content }}", "{{ (' ' if m.role == 'assistant' else '') + m.content }}"),
    "empty thought": CHATML.replace(
        "{{ m.content }}",
        "{{ ('<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.last else '') + m.content }}",
    ),
}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Saves a byte-level BPE tokenizer beside a qwen2 config, as a model folder would hold it."""

    def build(chat_template: str | None = CHATML, **special: str | None) -> Path:
        names = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "unk_token": None, **special}
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        bpe.train_from_iterator(
            ["system user assistant one two first second.\n\n\n\n  answer the question"] * 5, trainer
        )
        path = tmp_path_factory.mktemp("model")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **names)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(path)
        Qwen2Config(
            vocab_size=400, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
        ).save_pretrained(path)
        return path

    return build


@pytest.fixture(scope="module")
def renderers(make: Make) -> dict[str, Renderer]:
    return {
        name: Renderer(load_tokenizer(str(make(template))), "chat") for name, template in TEMPLATES.items()
    }


def said(renderer: Renderer, messages: list[dict[str, str]]) -> str:
    document = renderer.conversation(messages)
    return renderer.tokenizer.decode(
        [token for token, on in zip(document.tokens, document.mask, strict=True) if on]
    )


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_mask_is_on_every_answer_and_its_end_of_turn(renderers: dict[str, Renderer], name: str) -> None:
    assert said(renderers[name], CHAT) == "First, a café 🙂<|im_end|>Second.<|im_end|>"
    assert renderers[name].conversation(CHAT[:2]).mask.count(True) == 0
    assert said(renderers[name], CHAT[:4]) == "First, a café 🙂<|im_end|>"


def test_tokens_and_mask_equal_those_of_transformers(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["marked with the end of turn"]
    theirs = renderer.tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    newline = renderer.tokenizer("\n").input_ids
    mine = renderer.conversation(CHAT)
    assert mine.tokens + newline == theirs["input_ids"]
    # Theirs holds what the template's markers hold: also the line break after each end of turn, which no
    # sampler produces.
    assert sum(theirs["assistant_masks"]) == sum(mine.mask) + 2
    assert all(theirs["assistant_masks"][t] for t, on in enumerate(mine.mask) if on)


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("weighted", [2, 4])
def test_an_answer_of_weight_0_is_context(renderers: dict[str, Renderer], name: str, weighted: int) -> None:
    renderer = renderers[name]
    whole = renderer.conversation(CHAT)
    half = renderer.conversation(CHAT[:3])
    messages = [message | {"weight": 0} if at == weighted else message for at, message in enumerate(CHAT)]
    found = renderer.conversation(messages)
    if weighted == 4:
        assert found == half
    else:
        first = len(renderer.prompt(CHAT[:4]))
        assert list(found.tokens) == list(whole.tokens)
        assert list(found.mask) == [own and at >= first for at, own in enumerate(whole.mask)]
    assert not any(renderer.conversation([*CHAT[:2], CHAT[2] | {"weight": 0}]).mask)


def test_weights_need_a_marked_part_for_each_answer(make: Make) -> None:
    twice = "a{% endgeneration %}{% generation %}{{ m.content }}{% endgeneration %}"
    template = TEMPLATES["marked content only"].replace("{{ m.content }}{% endgeneration %}", twice)
    renderer = Renderer(load_tokenizer(str(make(template))), "chat")
    with pytest.raises(ValueError, match="marks 4 parts as answers: put one"):
        renderer.conversation([*CHAT[:2], CHAT[2] | {"weight": 0}, *CHAT[3:]])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if i else name for i, name in enumerate(TEMPLATES)]
)
def test_prompts_are_beginnings_of_conversations(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    pieces = [*"ab é🙂\n\t\ufdd0\ufdd10", "<|im_end|>", "<|im_start|>"]
    text = st.lists(st.sampled_from(pieces), max_size=8).map("".join)

    @given(text, text, text, text)
    def check(one: str, two: str, three: str, four: str) -> None:
        turns = zip(["user", "assistant"] * 2, [one, two, three, four], strict=True)
        messages = [{"role": role, "content": content} for role, content in turns]
        document = renderer.conversation(messages)
        for end in (1, 3):
            prompt = renderer.prompt(messages[:end])
            assert document.tokens[: len(prompt)] == prompt
            assert not document.mask[len(prompt) - 1] and document.mask[len(prompt)]
        # Control tokens come from the template alone, whatever the messages hold.
        ends = [t for t, token in enumerate(document.tokens) if token == renderer.end_token_id]
        assert len(ends) == 4 and document.mask[ends[1]] and document.mask[ends[3]]
        if name != "trimmed":
            written = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
            assert renderer.tokenizer.decode(document.tokens) + "\n" == written
            assert renderer.answer(messages[:3], four) == type(document)(
                document.tokens,
                [on and t >= len(renderer.prompt(messages[:3])) for t, on in enumerate(document.mask)],
            )

    check()


def test_a_think_block_on_the_last_answer_only_is_understood(make: Make) -> None:
    think = "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}{{ m.content }}"
    renderer = Renderer(load_tokenizer(str(make(CHATML.replace("{{ m.content }}", think)))), "chat")
    assert said(renderer, CHAT) == "First, a café 🙂<|im_end|><think></think>Second.<|im_end|>"


def test_a_template_that_rewrites_history_is_refused(make: Make) -> None:
    counted = "{{ messages | length }}" + CHATML
    renderer = Renderer(load_tokenizer(str(make(counted))), "chat")
    with pytest.raises(ValueError, match=r"writes the messages.*differently.*generation"):
        renderer.conversation(CHAT)


def test_a_template_without_end_of_turn_gets_end_of_sequence_once(make: Make) -> None:
    lines = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    bare = lines + "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    renderer = Renderer(load_tokenizer(str(make(bare))), "chat")
    assert renderer.stop_token_ids == [renderer.tokenizer.eos_token_id]
    assert said(renderer, CHAT) == " First, a café 🙂\n Second.\n<|endoftext|>"


def test_stop_tokens(renderers: dict[str, Renderer], make: Make) -> None:
    tokenizer = renderers["unmarked"].tokenizer
    assert renderers["unmarked"].stop_token_ids == [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    same = Renderer(load_tokenizer(str(make(CHATML, eos_token="<|im_end|>"))), "chat")
    assert same.stop_token_ids == [same.tokenizer.eos_token_id]
    assert Renderer(tokenizer, "Q: {}\nA:").stop_token_ids == [tokenizer.eos_token_id]


@pytest.mark.parametrize("content", ["abcdefgh " * 8, "🙂é" * 12, "x <|im_end|> y <|im_end|> z"])
def test_a_cut_prompt_keeps_its_frame_and_its_end(renderers: dict[str, Renderer], content: str) -> None:
    renderer = renderers["unmarked"]
    message = {"role": "user", "content": content}
    whole = renderer.prompt([message])
    assert renderer.prompt_within([message], len(whole)) == (whole, False)
    for limit in range(renderer.frame_len + 1, len(whole)):
        tokens, truncated = renderer.prompt_within([message], limit)
        text = renderer.tokenizer.decode(tokens)
        head = "<|im_start|>user\n"
        tail = "<|im_end|>\n<|im_start|>assistant\n"
        assert truncated and limit - 8 < len(tokens) <= limit
        assert text.startswith(head) and text.endswith(tail)
        assert content.endswith(text.removeprefix(head).removesuffix(tail))
    for limit in (renderer.frame_len, 1):
        with pytest.raises(ValueError, match=f"limit of {limit} tokens.*takes {renderer.frame_len}"):
            renderer.prompt_within([message], limit)


def test_old_turns_go_before_the_last_message_and_the_system_message_last(
    renderers: dict[str, Renderer],
) -> None:
    renderer = renderers["unmarked"]
    messages = CHAT[:4]
    without_turn = renderer.prompt([messages[0], messages[3]])
    assert renderer.prompt_within(messages, len(renderer.prompt(messages)) - 1) == (without_turn, True)
    only_system = renderer.prompt([messages[0], {"role": "user", "content": ""}])
    tokens, _ = renderer.prompt_within(messages, len(only_system))
    assert tokens == renderer.prompt([messages[3]])


def test_plain_templates(make: Make) -> None:
    tokenizer = load_tokenizer(str(make(None)))
    renderer = Renderer(tokenizer, "Q: {}\nA:")
    assert tokenizer.decode(renderer.prompt(CHAT[:2])) == "Q: Be brief.\n\nOne?\nA:"
    assert (
        tokenizer.decode(renderer.conversation(CHAT).tokens)
        == "Q: Be brief.\n\nOne?\nA:First, a café 🙂<|endoftext|>Q: Two?\nA:Second.<|endoftext|>"
    )
    assert said(renderer, CHAT) == "First, a café 🙂<|endoftext|>Second.<|endoftext|>"
    braces = [{"role": "user", "content": "{} {0} {x}"}]
    assert tokenizer.decode(renderer.prompt(braces)) == "Q: {} {0} {x}\nA:"
    assert renderer.answer(braces, "r") == renderer.conversation(
        [*braces, {"role": "assistant", "content": "r"}]
    )
    with pytest.raises(ValueError, match="'tool'"):
        renderer.conversation([{"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match=r"no chat template: set the template.*one \{\}"):
        Renderer(tokenizer, "chat")


def test_tokenizers_that_write_a_space_before_a_text_do_so_once() -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>", "</s>", "<pad>"])
    bpe.train_from_iterator(["Q: question A: answer \n"] * 3, trainer)
    bpe.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="<pad>")
    document = Renderer(tokenizer, "Q: {} A:").conversation(
        [{"role": "user", "content": "qu"}, {"role": "assistant", "content": "answer"}]
    )
    assert "".join(tokenizer.convert_ids_to_tokens(document.tokens)) == "▁Q:▁qu▁A:answer</s>"


def test_what_prompts_and_templates_refuse(renderers: dict[str, Renderer], make: Make) -> None:
    with pytest.raises(ValueError, match="must not be the assistant's"):
        renderers["unmarked"].prompt(CHAT)
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML
    )
    with pytest.raises(ValueError, match=r"\(system, user\): no system here"):
        Renderer(load_tokenizer(str(make(strict))), "chat").prompt(CHAT[:2])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ 10**5000 }}", "ValueError: Exceeds the limit"),
        ("{{ 'a'.join(3) }}", "TypeError: "),
    ],
)
def test_whatever_a_template_raises_is_one_sentence(make: Make, template: str, told: str) -> None:
    with pytest.raises(
        ValueError, match=rf"the chat template refuses messages with the roles \(user, assistant\): {told}"
    ):
        Renderer(load_tokenizer(str(make(template))), "chat")


@pytest.mark.parametrize("template", [*TEMPLATES.values(), *BEFORE.values()], ids=[*TEMPLATES, *BEFORE])
def test_an_answer_of_a_pair_has_the_tokens_that_fine_tuning_teaches(template: str, make: Make) -> None:
    renderer = Renderer(load_tokenizer(str(make(template))), "chat")
    for messages, text in (
        (CHAT[:2], CHAT[2]["content"]),
        (CHAT[:4], " Second. "),
        (CHAT[1:2], "typed <|im_end|> it"),
        (CHAT[:2], ""),
    ):
        taught = renderer.conversation([*messages, {"role": "assistant", "content": text}])
        assert renderer.prompt(messages) + renderer.response_tokens(messages, text) == taught.tokens


def test_sampled_answers_and_those_of_plain_templates_get_nothing_before_them(make: Make) -> None:
    tokenizer = load_tokenizer(str(make(BEFORE["space"])))
    plain = Renderer(tokenizer, "Q: {} A: ")
    sampled = Renderer(tokenizer, "chat", verbatim=True)
    for renderer in (plain, sampled):
        assert (
            renderer.prompt(CHAT[1:2]) + renderer.response_tokens(CHAT[1:2], "Second.")
            == renderer.answer(CHAT[1:2], "Second.").tokens
        )
    assert Renderer(tokenizer, "chat").response_tokens(CHAT[1:2], "Second.") == sampled.response_tokens(
        CHAT[1:2], " Second."
    )


def test_where_a_template_writes_earlier_answers_anew_an_answer_is_its_text(make: Make) -> None:
    """One that takes thoughts out of all turns but the last, without telling where answers are."""
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content | upper }}"
    )
    renderer = Renderer(load_tokenizer(str(make(template))), "chat")
    assert (
        renderer.prompt(CHAT[:4]) + renderer.response_tokens(CHAT[:4], "Second.")
        == renderer.answer(CHAT[:4], "Second.").tokens
    )
