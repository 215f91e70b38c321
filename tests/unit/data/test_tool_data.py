"""Calls of tools in the data of SFT, preferences and prompts: trained on as the template of each family
writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.sources import labelled_answers, preference_pairs, prompts, sft_documents
from tests.support.templates import TEMPLATES, WITHOUT_TOOLS, save_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": dict(
        name="look", description="d", parameters={"type": "object", "properties": {"at": {"type": "string"}}}
    ),
}
CALL = dict(
    id="call00000", type="function", function={"name": "look", "arguments": json.dumps({"at": "sky"})}
)
ASKED = [{"role": "user", "content": "Where?"}]
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "a bird"}
SAID = {"role": "assistant", "content": "There."}
FAMILIES = [name for name in TEMPLATES if name not in WITHOUT_TOOLS]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    root = tmp_path_factory.mktemp("templates")
    return {
        name: Renderer(load_tokenizer(str(save_tokenizer(name, root / name))), "chat") for name in TEMPLATES
    }


def data(folder: Path, row: dict[str, Any]) -> Data:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return Data(sources=str(folder / "rows.jsonl"))


def answers(renderer: Renderer, document: Any) -> str:
    return renderer.decoded(
        [token for token, own in zip(document.tokens, document.mask, strict=True) if own], False
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_trained_on_and_results_are_not(
    renderers: dict[str, Renderer], name: str, tmp_path: Path
) -> None:
    renderer = renderers[name]
    (document,) = sft_documents(
        data(tmp_path, {"messages": [*ASKED, CALLED, RESULT, SAID], "tools": [TOOL]}), renderer, 600, 0
    ).items
    trained = answers(renderer, document)
    whole = renderer.decoded(document.tokens, False)
    assert "look" in trained and "sky" in trained and "There." in trained
    assert "a bird" not in trained and "a bird" in whole and '"description": "d"' in whole
    assert trained.count(renderer.decoded([renderer.end_token_id], False)) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_preferences_may_be_calls(renderers: dict[str, Renderer], name: str, tmp_path: Path) -> None:
    renderer = renderers[name]
    row = {"prompt": ASKED, "chosen": [CALLED], "rejected": "No idea.", "tools": json.dumps([TOOL])}
    (pair,) = preference_pairs(data(tmp_path, row), renderer, 600, 0).items
    assert "look" in answers(renderer, pair.chosen) and "No idea." in answers(renderer, pair.rejected)
    assert (
        pair.chosen.tokens[: pair.chosen.answer_start] == pair.rejected.tokens[: pair.rejected.answer_start]
    )
    found = [item.document for item in labelled_answers(data(tmp_path, row), renderer, 600, 0).items]
    assert found == [pair.chosen, pair.rejected]
    # As SFT would train on it.
    whole = renderer.conversation([*ASKED, {**CALLED, "content": "", "tool_calls": _read(CALL)}], [TOOL])
    assert whole == pair.chosen


def _read(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**call, "function": {"name": "look", "arguments": {"at": "sky"}}}]


def test_prompts_describe_tools(renderers: dict[str, Renderer], tmp_path: Path) -> None:
    renderer = renderers["hermes"]
    (prompt,) = prompts(data(tmp_path, {"prompt": ASKED, "tools": [TOOL]}), renderer, 600, 0).items
    assert '"description": "d"' in renderer.decoded(prompt.tokens, False)


def test_a_template_that_leaves_calls_out_is_refused(renderers: dict[str, Renderer], tmp_path: Path) -> None:
    for renderer in (renderers["gemma"], Renderer(renderers["hermes"].tokenizer, "Q: {} A: ")):
        with pytest.raises(ValueError, match="template leaves out calls of tools"):
            sft_documents(data(tmp_path, {"messages": [*ASKED, CALLED]}), renderer, 600, 0)
        with pytest.raises(ValueError, match="template leaves out calls of tools"):
            preference_pairs(
                data(tmp_path, {"prompt": ASKED, "chosen": [CALLED], "rejected": "x"}), renderer, 600, 0
            )


LIMIT: dict[str, Any] = {"type": ["integer", "null"], "default": None, "enum": [1, None]}
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "limit": LIMIT}},
    },
}
ARGUMENTS = {"q": "12", "limit": None}
ROWS = {
    "objects": [{"type": "function", "function": {"name": "search", "arguments": ARGUMENTS}}, [SEARCH]],
    "texts": [
        {"type": "function", "function": {"name": "search", "arguments": json.dumps(ARGUMENTS)}},
        json.dumps([SEARCH]),
    ],
}


def rendered(renderer: Renderer, folder: Path, file: str, row: dict[str, Any]) -> str:
    if file.endswith(".parquet"):
        Dataset.from_list([row]).to_parquet(str(folder / file))
    else:
        (folder / file).write_text(json.dumps(row) + "\n")
    (document,) = sft_documents(Data(sources=str(folder / file)), renderer, 900, 0).items
    return renderer.decoded(document.tokens, False)


@pytest.mark.parametrize(
    ("form", "file"), [("objects", "rows.jsonl"), ("texts", "rows.jsonl"), ("texts", "rows.parquet")]
)
def test_nulls_of_json_are_values(
    renderers: dict[str, Renderer], tmp_path: Path, form: str, file: str
) -> None:
    call, tools = ROWS[form]
    row = {"messages": [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": tools}
    whole = rendered(renderers["hermes"], tmp_path, file, row)
    assert '"limit": null' in whole
    assert '"default": null' in whole and '"enum": [1, null]' in whole


def test_nulls_that_arrow_adds_are_left_out(renderers: dict[str, Renderer], tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "other", "arguments": {"far": "1"}}}
    calls = [{"type": "function", "function": {"name": "search", "arguments": {"q": "12"}}}, other]
    row = {"messages": [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}], "tools": [TOOL]}
    whole = rendered(renderers["hermes"], tmp_path, "rows.parquet", row)
    assert '{"q": "12"}' in whole and '{"far": "1"}' in whole and "null" not in whole


def test_sft_leaves_answers_of_weight_0_out_of_its_loss(
    renderers: dict[str, Renderer], tmp_path: Path
) -> None:
    renderer = renderers["hermes"]
    unsaid = SAID | {"content": "Nowhere.", "weight": 0}
    kept = {"messages": [*ASKED, unsaid, *ASKED, SAID | {"weight": 1}]}
    (document,) = sft_documents(data(tmp_path, kept), renderer, 600, 0).items
    assert "Nowhere." in renderer.decoded(document.tokens, False)
    assert answers(renderer, document) == "There." + renderer.decoded([renderer.end_token_id], False)
    rows = [kept, {"messages": [*ASKED, unsaid]}]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = sft_documents(Data(sources=str(tmp_path / "two.jsonl")), renderer, 600, 0).report
    assert report.survey.dropped == {"every answer has weight 0": 1}
    # Weights in a prompt change nothing.
    (one,) = prompts(data(tmp_path, {"prompt": [*ASKED, unsaid, *ASKED]}), renderer, 600, 0).items
    assert one.messages == tuple([*ASKED, {"role": "assistant", "content": "Nowhere."}, *ASKED])
