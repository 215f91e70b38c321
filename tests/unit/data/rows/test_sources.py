"""Data files: formats, columns, mixtures, and files that cannot be read."""

import csv
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, Features, Json, List, Value
from datasets import Image as Picture

from rlhf_core.config import Source
from rlhf_core.data.rows.mixture import check_columns, load_rows
from rlhf_core.data.rows.row_files import raw_rows
from tests.support.data_rows import compressed, data, write


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


def test_checking_columns_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    code = (
        "import sys; from rlhf_core.config import Data; from rlhf_core.data import documents, packing,"
        f" sources;from rlhf_core.data.rows import mixture;mixture.check_columns(Data(sources={path!r}),"
        " 'prompt');assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


def test_columns_of_mixed_types_are_read_as_values(tmp_path: Path) -> None:
    mixed = Features({"messages": List({"role": Value("string"), "content": Json()}), "image": Picture()})
    rows = [
        {"messages": [{"role": "user", "content": "hi"}], "image": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "image": None},
    ]
    for name, features in (("with", mixed), ("without", Features({"messages": mixed["messages"]}))):
        file = tmp_path / f"{name}.parquet"
        kept = [{column: row[column] for column in features} for row in rows]
        Dataset.from_list(kept, features=features).to_parquet(str(file))
        found = [row["messages"][0]["content"] for row in raw_rows(Source(path=str(file)), None)]
        assert found == ["hi", [{"type": "text", "text": "hi"}]], name
