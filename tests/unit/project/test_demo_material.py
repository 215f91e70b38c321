"""The demo's material: the script by its path, at a small scale; properties of the full rows where no model
is needed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

SCRIPT = Path(__file__).parents[3] / "deployments" / "demo" / "make_material.py"
SCALE = 0.05


def _module():
    spec = importlib.util.spec_from_file_location("make_material", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


material = _module()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "material"
    assert material.make(out, seed=0, scale=SCALE)
    return out


@pytest.fixture(scope="module")
def full() -> dict[str, list[dict]]:
    return material.make_rows(seed=0, scale=1.0)


def _rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _prompts(rows: list[dict]) -> list[str]:
    return [
        text
        for row in rows
        for text in (
            [row["prompt"]]
            if "prompt" in row
            else [m["content"] for m in row["messages"] if m["role"] == "user"]
        )
    ]


def _right(category: str, prompt: str) -> str:
    """The answer worked out again from the text of the prompt, another way than the script does it."""
    numbers = "".join(c if c.isdigit() else " " for c in prompt).split()
    if category == "sum":
        return str(sum(int(number) for number in numbers))
    (digits,) = numbers
    if category == "reverse":
        return "".join(digits[i] for i in range(len(digits) - 1, -1, -1))
    if category == "sort":
        return "".join(digit * digits.count(digit) for digit in "0123456789")
    return {"copy": digits, "first": digits[:1], "last": digits[-1:], "count": f"{len(digits)}"}[category]


def test_rows_have_the_promised_columns(folder):
    assert set(_rows(folder / "questions.jsonl")[0]) == {"uid", "category", "prompt", "answer"}
    assert set(_rows(folder / "prompts.jsonl")[0]) == {"prompt"}
    for name in ("preferences", "preferences_heldout"):
        assert set(_rows(folder / f"{name}.jsonl")[0]) == {"prompt", "chosen", "rejected"}
    for name in ("sft", "sft_heldout"):
        for row in _rows(folder / f"{name}.jsonl"):
            assert [m["role"] for m in row["messages"]] in (["user", "assistant"], ["user", "assistant"] * 2)


def test_at_least_300_questions_of_every_category_with_right_answers(full):
    questions = full["questions"]
    assert len(questions) >= 300 and len({q["uid"] for q in questions}) == len(questions)
    assert min(Counter(q["category"] for q in questions)[c] for c in material.CATEGORIES) >= 40
    for question in questions:
        assert question["answer"] == _right(question["category"], question["prompt"])


def test_held_out_prompts_occur_nowhere_else(full):
    prompts = {name: _prompts(rows) for name, rows in full.items()}
    for held_out in material.HELD_OUT:
        assert len(set(prompts[held_out])) == len(prompts[held_out])
        for name in set(prompts) - {held_out}:
            assert not set(prompts[held_out]) & set(prompts[name]), (held_out, name)


def test_at_least_half_of_the_sft_answers_are_sloppy_and_some_conversations_have_two_turns(full):
    turns = [row["messages"][i : i + 2] for row in full["sft"] for i in range(0, len(row["messages"]), 2)]
    heads = {
        wording.partition("{}")[0]: name
        for name, wordings in material.WORDINGS.items()
        for wording in wordings
    }
    heads.pop("")  # one wording begins with its number
    good = known = 0
    for question, answer in turns:
        category = next((name for head, name in heads.items() if question["content"].startswith(head)), None)
        if category:
            known += 1
            good += _right(category, question["content"]) == answer["content"]
    assert known > 0.9 * len(turns)
    assert 0.3 < good / known < 0.5
    assert 0.05 < len(turns) / len(full["sft"]) - 1 < 0.2


def test_chosen_is_never_rejected_and_a_share_of_the_rejected_are_near_misses(full):
    pairs = full["preferences"] + full["preferences_heldout"]
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)
    bare = sum(pair["rejected"].isdigit() for pair in pairs) / len(pairs)
    assert 0.2 < bare < 0.3


@pytest.mark.slow
@pytest.mark.long
def test_same_seed_same_bytes_other_seed_other_rows(folder, tmp_path):
    """In another process with another hash seed: no set or dict order may leak into the files."""
    again = tmp_path / "again"
    command = [sys.executable, str(SCRIPT), "--out", str(again), "--scale", str(SCALE)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    names = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    assert names == sorted(file.relative_to(again) for file in again.rglob("*") if file.is_file())
    assert len(names) >= 11
    for name in names:
        assert (folder / name).read_bytes() == (again / name).read_bytes(), name
    assert material.make_rows(1, SCALE)["sft"] != material.make_rows(0, SCALE)["sft"]


def test_complete_material_is_left_alone_broken_material_is_made_again(folder, tmp_path):
    weights = folder / "base" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert not material.make(folder, seed=0, scale=SCALE)
    assert weights.stat().st_mtime_ns == before

    out = tmp_path / "material"
    assert material.make(out, seed=0, scale=0.01)
    sft = (out / "sft.jsonl").read_bytes()
    (out / "sft.jsonl").write_text("cut")
    assert material.make(out, seed=0, scale=0.01)
    assert (out / "sft.jsonl").read_bytes() == sft
    assert [path.name for path in tmp_path.iterdir()] == ["material"]


def test_a_folder_with_other_things_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.txt").write_text("ten years")
    with pytest.raises(ValueError, match="not demo material"):
        material.make(tmp_path, seed=0, scale=0.01)
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(ValueError, match="not demo material"):
        material.make(tmp_path, seed=0, scale=0.01)
    assert (tmp_path / "thesis.txt").read_text() == "ten years"


def test_base_is_a_small_tied_model_whose_tokenizer_survives_the_auto_classes(folder):
    base = folder / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    assert 700_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id
    generation = GenerationConfig.from_pretrained(base)
    assert generation.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert len(tokenizer) == model.config.vocab_size
    for text in ("Reverse this number: 4719", "naïve 你好 🙂\n\tcode", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_marks_assistant_tokens_and_the_generation_prompt_is_a_prefix(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    messages = next(row["messages"] for row in _rows(folder / "sft.jsonl") if len(row["messages"]) == 4)
    whole = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(whole["input_ids"], whole["assistant_masks"], strict=True) if mask]
    end = tokenizer.eos_token
    assert tokenizer.decode(marked) == messages[1]["content"] + end + messages[3]["content"] + end
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert whole["input_ids"][: len(prompt)] == prompt
    assert whole["input_ids"][len(prompt) :] == tokenizer.encode(messages[3]["content"] + end)
