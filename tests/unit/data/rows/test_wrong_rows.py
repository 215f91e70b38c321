"""Wrong rows and missing columns are named, wherever in the data they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.data.sources import preference_pairs, prompts, sft_documents
from tests.support.data_rows import assistant, data, user, write
from tests.support.text_rows import rows_of_text


@pytest.mark.parametrize(
    ("kind", "row", "named"),
    rows_of_text("""
    sft | {prompt: x, text: y} | ['''response''', '''messages''', 'prompt, text', response_key]
    sft | {text: y} | ['''prompt'', nor ''response''', set prompt_key and response_key in this data source]
    sft | {answer: y, question: x} | ['answer, question: set prompt_key: question and response_key: answer in']
    prompt | {prompt_id: x, instruction: x} | ['''prompt''', 'set prompt_key: instruction in']
    prompt | {Prompts: x} | ['set prompt_key: Prompts in']
    preference | {prompt: x, response_chosen: y, response_rejected: z} | ['''chosen'', nor ''rejected''; its columns', 'set chosen_key: response_chosen and rejected_key: response_rejected in']
    preference | {prompt: x, chosen: y} | ['''rejected''', 'prompt, chosen', rejected_key]
    preference | {chosen: y, rejected: z} | ['''prompt''', 'chosen, rejected', prompt_key]
    """),
)
def test_a_missing_column_is_named_with_those_that_exist(
    tmp_path: Path, renderer: Renderer, kind: Any, row: Any, named: list[str]
) -> None:
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError) as cheap:
        check_columns(data(path), kind)
    load = {"sft": sft_documents, "prompt": prompts, "preference": preference_pairs}[kind]
    with pytest.raises(ValueError) as full:
        load(data(path), renderer, 200, 0)
    assert str(cheap.value) == str(full.value)
    assert all(part in str(full.value) for part in [path, *named])


GOOD: dict[str, dict[str, Any]] = {
    "sft": {"messages": [user("x"), assistant("y")]},
    "prompt": {"prompt": "x"},
    "preference": {"prompt": "x", "chosen": "y", "rejected": "z", "margin": 1},
}


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        *rows_of_text("""
    sft | {messages: x} | must be a list of
    sft | {messages: [{role: user, content: x}, {role: assistant}]} | message 2 of column 'messages'
    sft | {messages: [{role: user, content: x}, {role: assistant, content: '', tool_calls: [{f: 1}]}]} | must have a function with a name and arguments
    sft | {messages: [{role: user, content: x, tool_calls: [{name: f}]}]} | tool_calls must be a list, and of an assistant message
    sft | {messages: [{role: user, content: x}, {role: assistant, content: '', function_call: {name: f}}]} | an old form: write it as tool_calls
    sft | {messages: [{role: user, content: x}, {role: assistant, content: y}], tools: '[{''name'': ''f''}]'} | column 'tools' must be a list of JSON schemas
    sft | {messages: [{role: human, content: x}, {role: assistant, content: y}]} | 'messages' has the role 'human', which is no chat role: write user
    sft | {messages: [{role: user, content: x}, {role: GPT, content: x}]} | message 2 of column 'messages' has the role 'GPT'
    sft | {messages: [{role: user, content: x}, {role: bot, content: x}]} | no chat role: write assistant
    sft | {messages: [{role: user, content: x}, {role: Assistant, content: x}]} | no chat role: write assistant
    prompt | {prompt: [{role: Human, content: x}]} | no chat role: write user
    sft | {messages: [{role: user, content: x}, {role: assistant, content: y, weight: 0.5}]} | has the weight 0.5: write 0 (not trained on) or 1
    sft | {messages: [{role: user, content: x}, {role: assistant, content: y, weight: true}]} | has the weight True: write 0
    sft | {messages: [{role: user, content: x, weight: 1}, {role: assistant, content: y}]} | only answers of the assistant are trained on
    preference | {prompt: x, chosen: [{role: assistant, content: y, weight: 0}], rejected: z} | the chosen answer has weight 0
    sft | {messages: null} | there is neither 'messages' nor 'prompt' with 'response': fill them or drop the row
    sft | {prompt: x, response: 3} | 'response' must be a string, found int: write it as text
    sft | {prompt: x, response: [y]} | 'response' must be a string, found list: correct or drop the row
    sft | {messages: []} | found an empty list
    prompt | {prompt: 3} | 'prompt' must be a string or a list of messages, found int: write it as text
    prompt | {other: 3} | column 'prompt' is missing or null: fill it or drop the row
    prompt | {prompt: [{role: user, content: x}, {role: assistant, content: y}]} | nothing to answer
    preference | {prompt: x, chosen: y, rejected: null, margin: 1} | column 'rejected' is missing or null: fill it or drop the row
    preference | {prompt: x, chosen: [{role: user, content: x}], rejected: z, margin: 1} | must end with an assistant message
    preference | {prompt: x, chosen: y, rejected: z, margin: much} | 'margin' must be a finite number, found 'much'
    preference | {prompt: x, chosen: y, rejected: z, margin: .nan} | 'margin' must be a finite number, found nan
    preference | {chosen: [{role: user, content: x}, {role: assistant, content: y}], rejected: [{role: user, content: X}, {role: assistant, content: z}]} | differ before it
    preference | {chosen: [{role: assistant, content: y}], rejected: [{role: assistant, content: z}]} | column 'prompt' is missing or null
    """),
        (
            "preference",
            dict(prompt="zzz0", chosen=[user("a0"), assistant("x")], rejected=[user("a0"), assistant("y")]),
            (
                "the prompt says 'zzz0', and the messages before the answers in chosen and rejected say 'a0':"
                " correct or drop"
            ),
        ),
        (
            "preference",
            {"prompt": [user("zzz0")], "chosen": [user("a0"), assistant("x")], "rejected": "y"},
            (
                "the prompt says 'zzz0', and the messages before the answers in chosen and rejected say 'a0':"
                " correct or drop"
            ),
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, renderer: Renderer, kind: Any, row: Any, message: str) -> None:
    source = {
        "path": write(tmp_path / "rows.jsonl", [GOOD[kind], GOOD[kind], row]),
        "margin_key": "margin" if kind == "preference" else None,
    }
    load = {"sft": sft_documents, "prompt": prompts, "preference": preference_pairs}[kind]
    with pytest.raises(ValueError) as full:
        load(data(source), renderer, 200, 0)
    assert str(full.value).startswith(f"{source['path']}, row 3: ") and message in str(full.value)
    with pytest.raises(ValueError, match="row 3"):
        check_columns(data(source), kind)


def test_a_later_row_that_a_mixture_may_leave_out_is_not_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [*[{"prompt": "x"}] * 20, {"no": 1}]) for name in "ab"]
    check_columns(
        Data.model_validate(
            {"sources": [{"path": path, "probability": 0.5} for path in paths], "max_samples": 4}
        ),
        "prompt",
    )
    with pytest.raises(ValueError, match="row 21"):
        check_columns(data(paths[0]), "prompt")


def test_a_wrong_row_far_from_the_first_is_found_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = GOOD["preference"]
    short = {"prompt": "x", "chosen": "y"}
    late = write(tmp_path / "late.jsonl", [*[good] * 60, short])
    with pytest.raises(
        ValueError, match=r"row 61: .* 'rejected' is missing or null: fill it or drop the row"
    ):
        check_columns(data(late), "preference")
    broken = tmp_path / "broken.jsonl"
    broken.write_text((json.dumps(good) + "\n") * 70 + '{"prompt": "x\n')
    with pytest.raises(ValueError, match="line 71: is not valid JSON"):
        check_columns(data(str(broken)), "preference")
    check_columns(data(late, max_samples=60), "preference")  # the stage does not read row 61 either
    monkeypatch.setattr("rlhf_core.data.rows.mixture.CHECKED_ROWS", 60)
    check_columns(
        data({"path": late, "probability": 0.5}, {"path": str(broken), "probability": 0.5}), "preference"
    )


def test_errors_of_the_template_name_the_row(tmp_path: Path, renderer: Renderer) -> None:
    plain = Renderer(renderer.tokenizer, "Q: {} A:")
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x"}, {"prompt": [{"role": "tool", "content": "x"}]}])
    with pytest.raises(ValueError, match="row 2: a plain template knows the roles"):
        prompts(data(path), plain, 60, seed=0)
