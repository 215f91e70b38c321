"""Rows of each kind as documents: answers, pairs and prompts, cut and dropped."""

from pathlib import Path

import pytest

from rlhf_core.data.chat import Renderer
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.data.sources import preference_pairs, prompts, sft_documents
from tests.support.data_rows import assistant, data, user, write


def test_roles_that_chat_templates_render_are_read(tmp_path: Path, renderer: Renderer) -> None:
    roles = (
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
        "function",
        "ipython",
        "observation",
        "critic",
        "user",
    )
    row = {"prompt": [{"role": role, "content": "x"} for role in roles]}
    source = data(write(tmp_path / "rows.jsonl", [row]))
    check_columns(source, "prompt")
    assert prompts(source, renderer, 200, 0).report.counts["kept"] == 1


def test_sft_rows_of_both_kinds_cut_and_dropped(tmp_path: Path, renderer: Renderer) -> None:
    long = "l" * 300
    rows = [
        {"messages": [user("x"), assistant("y")]},
        {"prompt": "x", "response": "y"},
        {"prompt": [user("x")], "response": long},
        {"prompt": long, "response": "y"},
    ]
    items, report, _ = sft_documents(data(write(tmp_path / "rows.jsonl", rows)), renderer, 100, seed=0)
    assert items[0] == items[1] == renderer.answer([user("x")], "y")
    assert len(items[2]) == 100 and items[2].mask[-1]
    assert not set(items[2].tokens[-50:]) & set(renderer.stop_token_ids), "nothing is forced onto a cut row"
    assert report.metrics("data") == {
        "data/rows": 4.0,
        "data/kept": 3.0,
        "data/truncated": 1.0,
        "data/dropped": 1.0,
        "data/tokens": 100.0 + 2 * len(items[0]),
    }
    with pytest.raises(ValueError, match="all 1 rows were dropped"):
        sft_documents(data(write(tmp_path / "rows.jsonl", rows[3:])), renderer, 100, seed=0)
    with pytest.raises(ValueError, match="limit of 5 tokens"):
        sft_documents(data(write(tmp_path / "rows.jsonl", rows)), renderer, 5, seed=0)


def test_every_shape_of_a_preference_is_the_same_pair(tmp_path: Path, renderer: Renderer) -> None:
    rows = [
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"prompt": [user("p")], "chosen": "c", "rejected": [assistant("r")]},
        {"prompt": "p", "chosen": [assistant("c")], "rejected": [assistant("r")]},
        {"prompt": "p", "chosen": [user("p"), assistant("c")], "rejected": [user("p"), assistant("r")]},
        {"chosen": [user("p"), assistant("c")], "rejected": [user("p"), assistant("r")]},
    ]
    items, report, _ = preference_pairs(data(write(tmp_path / "rows.jsonl", rows)), renderer, 100, seed=0)
    assert list(report.counts.values())[:4] == [5, 5, 0, 0]
    assert items[0].chosen == renderer.answer([user("p")], "c")
    assert items[0].rejected == renderer.answer([user("p")], "r")
    assert all(item == items[0] for item in items)
    assert report.survey.tokens == 5 * (len(items[0].chosen) + len(items[0].rejected))


def test_answers_that_the_length_limit_cut_when_they_were_sampled_have_no_end(
    tmp_path: Path, renderer: Renderer
) -> None:
    row = {"prompt": "x", "chosen": "yes and", "rejected": "no"}
    files = [write(tmp_path / f"{cut}.jsonl", [row | {"chosen_cut": cut}]) for cut in (False, True)]
    whole, cut = (preference_pairs(data(file), renderer, 96, 0).items[0] for file in files)
    assert cut.chosen.tokens == whole.chosen.tokens[:-1]
    assert whole.chosen.tokens[-1] in renderer.stop_token_ids
    assert cut.chosen.mask == whole.chosen.mask[:-1] and cut.rejected == whole.rejected


def test_margins(tmp_path: Path, renderer: Renderer) -> None:
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r", "gap": gap} for gap in (1.5, None)]
    source = {"path": write(tmp_path / "rows.jsonl", rows)}
    assert [pair.margin for pair in preference_pairs(data(source), renderer, 100, seed=0).items] == [0.0, 0.0]
    named = data({**source, "margin_key": "gap"})
    assert [pair.margin for pair in preference_pairs(named, renderer, 100, seed=0).items] == [1.5, 0.0]


def test_long_pairs_keep_the_end_of_the_prompt_and_equal_answers_are_dropped(
    tmp_path: Path, renderer: Renderer
) -> None:
    rows = [
        {"prompt": "a" * 200 + "end", "chosen": "c", "rejected": "rr"},
        {"prompt": "p", "chosen": "same", "rejected": "same"},
        {"prompt": "a" * 200 + "end", "chosen": "c" * 300, "rejected": "rr"},
        {"prompt": "p", "chosen": "c" * 300 + "1", "rejected": "c" * 300 + "2"},
    ]
    items, report, _ = preference_pairs(data(write(tmp_path / "rows.jsonl", rows)), renderer, 100, seed=0)
    assert list(report.counts.values())[:4] == [4, 2, 2, 2]
    short, long = items
    for pair in items:
        start = pair.chosen.mask.index(True)
        assert pair.chosen.tokens[:start] == pair.rejected.tokens[:start]
        assert pair.rejected.mask.index(True) == start
        text = renderer.tokenizer.decode(pair.chosen.tokens[:start])
        assert text.startswith("<|im_start|>user\na")
        assert text.endswith("aend<|im_end|>\n<|im_start|>assistant\n")
    assert len(short.rejected) == 100
    assert short.rejected.tokens[-1] == short.chosen.tokens[-1] == renderer.end_token_id
    assert len(long.chosen) == 100
    assert long.chosen.tokens[-1] != renderer.end_token_id
    assert long.chosen.mask.index(True) == 50
    assert long.rejected.tokens[-1] == renderer.end_token_id


def test_prompts_keep_their_row_and_count_cuts(tmp_path: Path, renderer: Renderer) -> None:
    rows = [
        {"uid": 1, "prompt": "x"},
        {"uid": 2, "prompt": [user("u"), assistant("v"), user("y" * 99 + "z")]},
    ]
    items, report, _ = prompts(data(write(tmp_path / "rows.jsonl", rows)), renderer, 60, seed=0)
    assert [(item.truncated, item.row["uid"]) for item in items] == [(False, 1), (True, 2)]
    assert items[0].tokens == renderer.prompt([user("x")]) and items[0].messages == (user("x"),)
    assert len(items[1].tokens) == 60 and len(items[1].messages) == 3
    assert list(report.counts.values())[:4] == [2, 2, 1, 0]
    assert report.survey.tokens == 60 + len(items[0].tokens)
