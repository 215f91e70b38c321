from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.rows.mixture import check_columns, load_rows
from rlhf_core.data.sources import preference_pairs, prompts, sft_documents

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """One token a byte, and ChatML."""
    names = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    letters = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(names)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHATML
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    Qwen2Config(
        vocab_size=len(letters), hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    ).save_pretrained(path)
    return Renderer(load_tokenizer(str(path)), "chat")


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def compressed(path: str, suffix: str) -> str:
    """Compresses a file beside it, in two members, as programs do that append to one."""
    content = Path(path).read_bytes()
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    packed = Path(path + suffix)
    if suffix == ".gz":
        packed.write_bytes(b"".join(gzip.compress(half) for half in halves))
    else:
        packed.write_bytes(b"".join(pyarrow.Codec("zstd").compress(half, asbytes=True) for half in halves))
    return str(packed)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def data(*sources: Any, **more: Any) -> Data:
    return Data.model_validate({"sources": sources, **more})


# Reading


def test_every_format_gives_the_same_rows_in_the_order_of_the_file(tmp_path: Path) -> None:
    # What readers like to spoil: dates, numbers, "None", line breaks, an unusual line separator.
    rows = [
        {"prompt": "2024-01-01", "response": "007"},
        {"prompt": "None", "response": 'a\n,"b"\u2028c'},
        {"prompt": "", "response": "1e3"},
    ]
    jsonl = write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text("\n " + json.dumps(rows))
    Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "response"])
        writer.writeheader()
        writer.writerows(rows)
    plain = [jsonl, *(str(tmp_path / f"rows.{suffix}") for suffix in ("json", "parquet", "csv"))]
    packed = [
        compressed(path, suffix)
        for path in plain
        if not path.endswith("parquet")
        for suffix in (".gz", ".zst")
    ]
    for path in (*plain, *packed):
        assert load_rows(data(path), seed=3) == rows, path
        check_columns(data(path), "sft")


def test_named_columns_get_standard_names_and_the_others_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "q", "prompt": "not meant", "uid": 7}])
    assert load_rows(data({"path": path, "prompt_key": "question"}), seed=0) == [
        {"question": "q", "prompt": "q", "uid": 7}
    ]


def test_a_mixture_keeps_its_shares_and_its_seed(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(count)])
        for name, count in (("a", 30), ("b", 100))
    ]
    mixture = [{"path": path, "probability": share} for path, share in zip(paths, (0.25, 0.75), strict=True)]
    first = [row["prompt"] for row in load_rows(data(*mixture), seed=1)]
    assert len(set(first)) == len(first)
    # a could give 30/0.25 = 120 rows, b 100/0.75 = 133: a is exhausted first.
    assert 120 <= len(first) <= 123 and sum(name[0] == "a" for name in first) == 30
    for size in (1, 4, 10, 100):
        assert abs(sum(name[0] == "a" for name in first[:size]) - size / 4) <= 1
    assert [row["prompt"] for row in load_rows(data(*mixture), seed=1)] == first
    assert [row["prompt"] for row in load_rows(data(*mixture), seed=2)] != first
    assert [row["prompt"] for row in load_rows(data(*mixture, max_samples=10), seed=1)] == first[:10]
    assert [int(name[1:]) for name in first if name[0] == "a"] != list(range(30))
    none_of_a = [{**mixture[0], "probability": 0.0}, {**mixture[1], "probability": 1.0}]
    assert {row["prompt"][0] for row in load_rows(data(*none_of_a), seed=1)} == {"b"}


def test_a_data_set_that_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n\n{"prompt": \n')
    empty = tmp_path / "empty.jsonl"
    header = tmp_path / "header.csv"
    text = tmp_path / "rows.txt"
    empty.write_text("")
    header.write_text("prompt\n")
    text.write_text("x")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "e"}\n{"prompt": "é"}\n'.encode("latin-1"))
    utf16 = tmp_path / "utf16.jsonl"
    table = tmp_path / "latin.csv"
    utf16.write_text('{"prompt": "x"}', encoding="utf-16")
    table.write_bytes("prompt\né\n".encode("latin-1"))
    cut, whole = tmp_path / "cut.jsonl", tmp_path / "cut.json"
    cut.write_text('{"prompt": "x"}\n{"prompt": "y\n')
    whole.write_text('[\n{"prompt": "x"},\n{"prompt": "y')
    quoted = tmp_path / "quoted.csv"
    quoted.write_text('prompt\n"a" b\n')
    ragged = tmp_path / "ragged.csv"
    nothing = tmp_path / "nothing.parquet"
    ragged.write_text("prompt,uid\na,1\nb, unquoted,2\n")
    Dataset.from_dict({"prompt": []}).to_parquet(str(nothing))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 no parquet")
    cases = {
        str(tmp_path / "missing.jsonl"): "there is no such file: correct",
        str(tmp_path / "missing.parquet"): "no such file",
        str(bad): "line 3: is not valid JSON",
        str(empty): "has no rows",
        str(header): "has no rows",
        str(text): "data files end with",
        str(latin): ", line 2: is not UTF-8 (0xe9 at byte 13): save the file as UTF-8",
        str(table): ", line 2: is not UTF-8 (0xe9 at byte 1): save the file as UTF-8",
        str(utf16): ": is in UTF-16: save the file as UTF-8",
        str(cut): (
            ", line 2: is not valid JSON: Unterminated string starting at character 12: correct or drop"
            " the row"
        ),
        str(whole): (
            ": is not valid JSON: Unterminated string starting at line 3, character 12: correct or drop"
            " the row"
        ),
        str(quoted): ": is not valid CSV: ',' expected after '\"': correct the quotes of its cells",
        str(ragged): "row 2: has another number of cells",
        str(nothing): "has no rows",
        str(broken): "cannot be read as parquet",
        write(tmp_path / "list.jsonl", [{"prompt": "x"}, ["y"]]): "row 2: must be a JSON object",
        "nobody/no-such-data": "cannot be read as a Hub data set with the split 'train'",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError) as told:
            load_rows(data(path), seed=0)
        assert str(told.value).startswith(path) and message in str(told.value) and "\n" not in str(told.value)
        with pytest.raises(ValueError, match=re.escape(message)):
            check_columns(data(path), "prompt")


def test_a_compressed_file_that_cannot_be_unpacked_is_told_in_one_sentence(tmp_path: Path) -> None:
    whole = write(tmp_path / "rows.jsonl", [{"prompt": str(i)} for i in range(1000)])
    cases = {}
    for suffix in (".gz", ".zst"):
        packed = Path(compressed(whole, suffix))
        cut = tmp_path / f"cut.jsonl{suffix}"
        cut.write_bytes(packed.read_bytes()[:-20])
        plain = tmp_path / f"plain.jsonl{suffix}"
        plain.write_text('{"prompt": "x"}\n')
        broken = tmp_path / f"broken.csv{suffix}"
        broken.write_bytes(packed.read_bytes()[:40] + b"\0" * 400)
        cases |= dict.fromkeys(map(str, (cut, plain, broken)), "cannot be unpacked")
    latin = tmp_path / "latin.csv.gz"
    latin.write_bytes(gzip.compress("prompt\n\u00e9\n".encode("latin-1")))
    cases[str(latin)] = ", line 2: is not UTF-8 (0xe9 at byte 1)"
    archive = tmp_path / "rows.parquet.gz"
    archive.write_bytes(b"")
    cases[str(archive)] = (
        "data files end with .jsonl, .json, .csv (compressed: also with .gz or .zst) or .parquet"
    )
    for path, message in cases.items():
        with pytest.raises(ValueError) as told:
            load_rows(data(path), seed=0)
        assert (
            str(told.value).startswith(path) and message in str(told.value) and "\n" not in str(told.value)
        ), told.value


def test_a_small_compressed_file_cannot_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.data.rows.compressed.LARGEST_ROW", 1 << 20)
    monkeypatch.setattr("rlhf_core.data.rows.compressed.LARGEST_LIST", 1 << 20)
    good = json.dumps({"prompt": "x"}) + "\n"
    fat = json.dumps({"prompt": "x" * (2 << 20)}) + "\n"
    contents = {
        "line.jsonl.gz": good + fat,
        "cell.csv.gz": 'prompt\nx\n"' + "x\n" * (1 << 20) + '"\n',
        "list.json.gz": "[" + good.strip() + ", " * (1 << 20),
    }
    wrong = {
        "line.jsonl.gz": ", line 2: a row has more than 1 Mi",
        "cell.csv.gz": ": a row has more than 1 Mi",
        "list.json.gz": ": holds a list",
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(gzip.compress(content.encode()))
        with pytest.raises(ValueError, match=re.escape(wrong[name])) as told:
            load_rows(data(str(path)), seed=0)
        assert str(told.value).startswith(str(path)) and "\n" not in str(told.value)
    many = tmp_path / "many.jsonl.gz"
    # more than the limit in all, and each row is small
    many.write_bytes(gzip.compress((good * 80_000).encode()))
    assert len(load_rows(data(str(many)), seed=0)) == 80_000
    plain = write(tmp_path / "plain.jsonl", [{"prompt": "x" * (2 << 20)}])
    assert len(load_rows(data(plain), seed=0)) == 1


def test_a_missing_file_is_told_with_the_place_that_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=f"^x.jsonl: there is no such file at {tmp_path}/x.jsonl: correct the path"
    ):
        load_rows(data("x.jsonl"), seed=0)


@pytest.mark.parametrize(
    ("kind", "row", "named"),
    [
        ("sft", {"prompt": "x", "text": "y"}, ["'response'", "'messages'", "prompt, text", "response_key"]),
        (
            "sft",
            {"text": "y"},
            ["'prompt', nor 'response'", "set prompt_key and response_key in this data source"],
        ),
        (
            "sft",
            {"answer": "y", "question": "x"},
            ["answer, question: set prompt_key: question and response_key: answer in"],
        ),
        ("prompt", {"prompt_id": "x", "instruction": "x"}, ["'prompt'", "set prompt_key: instruction in"]),
        ("prompt", {"Prompts": "x"}, ["set prompt_key: Prompts in"]),
        (
            "preference",
            {"prompt": "x", "response_chosen": "y", "response_rejected": "z"},
            [
                "'chosen', nor 'rejected'; its columns",
                "set chosen_key: response_chosen and rejected_key: response_rejected in",
            ],
        ),
        ("preference", {"prompt": "x", "chosen": "y"}, ["'rejected'", "prompt, chosen", "rejected_key"]),
        ("preference", {"chosen": "y", "rejected": "z"}, ["'prompt'", "chosen, rejected", "prompt_key"]),
    ],
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
        ("sft", {"messages": "x"}, "must be a list of"),
        ("sft", {"messages": [user("x"), {"role": "assistant"}]}, "message 2 of column 'messages'"),
        (
            "sft",
            {"messages": [user("x"), {**assistant(""), "tool_calls": [{"f": 1}]}]},
            "must have a function with a name and arguments",
        ),
        (
            "sft",
            {"messages": [{**user("x"), "tool_calls": [{"name": "f"}]}]},
            "tool_calls must be a list, and of an assistant message",
        ),
        (
            "sft",
            {"messages": [user("x"), {**assistant(""), "function_call": {"name": "f"}}]},
            "an old form: write it as tool_calls",
        ),
        (
            "sft",
            {"messages": [user("x"), assistant("y")], "tools": "[{'name': 'f'}]"},
            "column 'tools' must be a list of JSON schemas",
        ),
        (
            "sft",
            {"messages": [{"role": "human", "content": "x"}, assistant("y")]},
            "'messages' has the role 'human', which is no chat role: write user",
        ),
        (
            "sft",
            {"messages": [user("x"), {"role": "GPT", "content": "x"}]},
            "message 2 of column 'messages' has the role 'GPT'",
        ),
        ("sft", {"messages": [user("x"), {"role": "bot", "content": "x"}]}, "no chat role: write assistant"),
        (
            "sft",
            {"messages": [user("x"), {"role": "Assistant", "content": "x"}]},
            "no chat role: write assistant",
        ),
        ("prompt", {"prompt": [{"role": "Human", "content": "x"}]}, "no chat role: write user"),
        (
            "sft",
            {"messages": [user("x"), assistant("y") | {"weight": 0.5}]},
            "has the weight 0.5: write 0 (not trained on) or 1",
        ),
        ("sft", {"messages": [user("x"), assistant("y") | {"weight": True}]}, "has the weight True: write 0"),
        (
            "sft",
            {"messages": [user("x") | {"weight": 1}, assistant("y")]},
            "only answers of the assistant are trained on",
        ),
        (
            "preference",
            {"prompt": "x", "chosen": [assistant("y") | {"weight": 0}], "rejected": "z"},
            "the chosen answer has weight 0",
        ),
        (
            "sft",
            {"messages": None},
            "there is neither 'messages' nor 'prompt' with 'response': fill them or drop the row",
        ),
        ("sft", {"prompt": "x", "response": 3}, "'response' must be a string, found int: write it as text"),
        (
            "sft",
            {"prompt": "x", "response": ["y"]},
            "'response' must be a string, found list: correct or drop the row",
        ),
        ("sft", {"messages": []}, "found an empty list"),
        (
            "prompt",
            {"prompt": 3},
            "'prompt' must be a string or a list of messages, found int: write it as text",
        ),
        ("prompt", {"other": 3}, "column 'prompt' is missing or null: fill it or drop the row"),
        ("prompt", {"prompt": [user("x"), assistant("y")]}, "nothing to answer"),
        (
            "preference",
            {**GOOD["preference"], "rejected": None},
            "column 'rejected' is missing or null: fill it or drop the row",
        ),
        ("preference", {**GOOD["preference"], "chosen": [user("x")]}, "must end with an assistant message"),
        (
            "preference",
            {**GOOD["preference"], "margin": "much"},
            "'margin' must be a finite number, found 'much'",
        ),
        (
            "preference",
            {**GOOD["preference"], "margin": float("nan")},
            "'margin' must be a finite number, found nan",
        ),
        (
            "preference",
            {"chosen": [user("x"), assistant("y")], "rejected": [user("X"), assistant("z")]},
            "differ before it",
        ),
        (
            "preference",
            {"chosen": [assistant("y")], "rejected": [assistant("z")]},
            "column 'prompt' is missing or null",
        ),
        (
            "preference",
            {
                "prompt": "zzz0",
                "chosen": [user("a0"), assistant("x")],
                "rejected": [user("a0"), assistant("y")],
            },
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
        ValueError, match="row 61: column 'rejected' is missing or null: fill it or drop the row"
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


# Documents, pairs, prompts


def test_sft_rows_of_both_kinds_cut_and_dropped(tmp_path: Path, renderer: Renderer) -> None:
    long = "l" * 300
    rows = [
        {"messages": [user("x"), assistant("y")]},
        {"prompt": "x", "response": "y"},
        {"prompt": [user("x")], "response": long},
        {"prompt": long, "response": "y"},
    ]
    items, report = sft_documents(data(write(tmp_path / "rows.jsonl", rows)), renderer, 100, seed=0)
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
    items, report = preference_pairs(data(write(tmp_path / "rows.jsonl", rows)), renderer, 100, seed=0)
    assert list(report.counts.values())[:4] == [5, 5, 0, 0]
    assert items[0].chosen == renderer.answer([user("p")], "c") and items[0].rejected == renderer.answer(
        [user("p")], "r"
    )
    assert all(item == items[0] for item in items)
    assert report.survey.tokens == 5 * (len(items[0].chosen) + len(items[0].rejected))


def test_answers_that_the_length_limit_cut_when_they_were_sampled_have_no_end(
    tmp_path: Path, renderer: Renderer
) -> None:
    row = {"prompt": "x", "chosen": "yes and", "rejected": "no"}
    files = [write(tmp_path / f"{cut}.jsonl", [row | {"chosen_cut": cut}]) for cut in (False, True)]
    whole, cut = (preference_pairs(data(file), renderer, 96, 0).items[0] for file in files)
    assert (
        cut.chosen.tokens == whole.chosen.tokens[:-1] and whole.chosen.tokens[-1] in renderer.stop_token_ids
    )
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
    items, report = preference_pairs(data(write(tmp_path / "rows.jsonl", rows)), renderer, 100, seed=0)
    assert list(report.counts.values())[:4] == [4, 2, 2, 2]
    short, long = items
    for pair in items:
        start = pair.chosen.mask.index(True)
        assert (
            pair.chosen.tokens[:start] == pair.rejected.tokens[:start]
            and pair.rejected.mask.index(True) == start
        )
        text = renderer.tokenizer.decode(pair.chosen.tokens[:start])
        assert text.startswith("<|im_start|>user\na") and text.endswith(
            "aend<|im_end|>\n<|im_start|>assistant\n"
        )
    assert (
        len(short.rejected) == 100
        and short.rejected.tokens[-1] == short.chosen.tokens[-1] == renderer.end_token_id
    )
    assert (
        len(long.chosen) == 100
        and long.chosen.tokens[-1] != renderer.end_token_id
        and long.chosen.mask.index(True) == 50
    )
    assert long.rejected.tokens[-1] == renderer.end_token_id


def test_prompts_keep_their_row_and_count_cuts(tmp_path: Path, renderer: Renderer) -> None:
    rows = [
        {"uid": 1, "prompt": "x"},
        {"uid": 2, "prompt": [user("u"), assistant("v"), user("y" * 99 + "z")]},
    ]
    items, report = prompts(data(write(tmp_path / "rows.jsonl", rows)), renderer, 60, seed=0)
    assert [(item.truncated, item.row["uid"]) for item in items] == [(False, 1), (True, 2)]
    assert items[0].tokens == renderer.prompt([user("x")]) and items[0].messages == (user("x"),)
    assert len(items[1].tokens) == 60 and len(items[1].messages) == 3
    assert list(report.counts.values())[:4] == [2, 2, 1, 0]
    assert report.survey.tokens == 60 + len(items[0].tokens)


def test_errors_of_the_template_name_the_row(tmp_path: Path, renderer: Renderer) -> None:
    plain = Renderer(renderer.tokenizer, "Q: {} A:")
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x"}, {"prompt": [{"role": "tool", "content": "x"}]}])
    with pytest.raises(ValueError, match="row 2: a plain template knows the roles"):
        prompts(data(path), plain, 60, seed=0)


def test_checking_columns_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    code = (
        "import sys; from rlhf_core.config import Data; from rlhf_core.data import documents, packing,"
        f" sources;from rlhf_core.data.rows import mixture;mixture.check_columns(Data(sources={path!r}),"
        " 'prompt');assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
