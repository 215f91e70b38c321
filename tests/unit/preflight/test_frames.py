"""What a template takes by itself, asked of a process without torch: the same numbers, and the same refusals
as with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli.app import main
from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.preflight.rows import template_length
from rlhf_core.preflight.rows.template_rows import render_rows
from tests.support.frame_lengths import frame_lengths
from tests.support.micro import ROOT
from tests.support.tiny_models import save_weights
from tests.unit.preflight.test_check import TEMPLATE, save_tokenizer
from tests.unit.preflight.test_wrong_inputs import ENDLESS as ENDLESS_TEMPLATE

PLAIN = "Question: {}\nAnswer: "
RECIPE = "{name: n, base_model: ./base, stages: {sft: {data: {sources: sft.jsonl}, max_len: LIMIT}}}"
CHECK = """
import sys
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.recipe.plan import plan
from rlhf_core.recipe.load_recipe import load_recipe
planned = plan(load_recipe("recipe.yaml", []))
print(*check_inputs(planned, planned.nodes), sep="\\n")
print("transformers" in sys.modules)
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path / "base", TEMPLATE)
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    save_weights(tmp_path / "base" / "model.safetensors", {"lm_head.weight": (300, 8)})
    (tmp_path / "sft.jsonl").write_text(json.dumps({"prompt": "hi", "response": "ho"}) + "\n")
    return tmp_path / "base"


def checked(folder: Path, limit: int) -> list[str]:
    """What the check of a recipe prints in a new process: its problems, and whether it imported
    transformers."""
    (folder / "recipe.yaml").write_text(RECIPE.replace("LIMIT", str(limit)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHECK]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_lengths_are_those_of_the_renderer_and_what_cannot_be_read_is_left_out(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    tokenizer = load_tokenizer(str(base))
    wanted = {(str(base), template): Renderer(tokenizer, template).frame_len for template in ("chat", PLAIN)}
    assert frame_lengths([*wanted, (str(tmp_path / "empty"), "chat")]) == wanted


def test_a_changed_folder_is_read_again(base: Path) -> None:
    before = frame_lengths([(str(base), "chat")])
    save_tokenizer(base, TEMPLATE.replace("assistant", "the one who answers"))
    after = frame_lengths([(str(base), "chat")])
    assert after[str(base), "chat"] > before[str(base), "chat"]


def test_a_process_that_says_nothing_leaves_all_to_the_one_that_asked(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_length.sys, "executable", "/bin/true")
    assert frame_lengths([(str(base), PLAIN)]) == {}


def test_a_sound_recipe_is_checked_without_transformers(base: Path) -> None:
    assert checked(base.parent, 200) == ["", "False"]


def test_refusals_are_those_of_the_stages(base: Path) -> None:
    limit = Renderer(load_tokenizer(str(base)), "chat").frame_len
    problems, imported = checked(base.parent, limit)
    assert problems.startswith(f"stages.sft.max_len: a limit of {limit} tokens leaves none for text")
    assert imported == "False"
    save_tokenizer(base, None)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    problems, imported = checked(base.parent, 200)
    assert problems.startswith("stages.sft.data: ")
    assert "the model has no chat template" in problems
    assert imported == "True"


def test_a_template_that_loops_on_text_alone_is_found(base: Path) -> None:
    save_tokenizer(
        base,
        "{% for m in messages %}{% if m['content'] %}"
        + ENDLESS_TEMPLATE
        + "{% endif %}{% endfor %}"
        + TEMPLATE,
    )
    assert frame_lengths([(str(base), "chat")]) == {(str(base), "chat"): template_length.ENDLESS}


@pytest.mark.long
def test_templates_of_tokenizers_with_code_have_the_limit_too(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))

    def with_code(template: str) -> tuple[str, str]:
        save_tokenizer(base, template)
        own = (
            "import torch\nfrom transformers import PreTrainedTokenizerFast\nclass"
            " Own(PreTrainedTokenizerFast):\n    pass\n"
        )
        (base / "own.py").write_text(own)
        file = base / "tokenizer_config.json"
        code = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
        file.write_text(json.dumps(json.loads(file.read_text()) | code))
        return str(base), "chat"

    pair = with_code(ENDLESS_TEMPLATE + TEMPLATE)
    assert frame_lengths([pair]) == {}, "nobody trusts it"
    assert frame_lengths([pair], trust_remote_code=True) == {pair: template_length.ENDLESS}
    pair = with_code(TEMPLATE)
    assert (
        frame_lengths([pair], trust_remote_code=True)[pair]
        == Renderer(load_tokenizer(str(base), True), "chat").frame_len
    )


def lines(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ho"}]}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def test_a_row_that_the_template_refuses_is_found_before_any_work(base: Path) -> None:
    called = {"messages": [asked("hi")["messages"][0], CALL]}
    lines(base.parent, *map(asked, "abcdefgh"), called, called)
    problems, imported = checked(base.parent, 200)
    assert problems.startswith(
        "stages.sft.data: sft.jsonl, row 9: the chat template leaves out calls of tools"
    )
    assert imported == "False"


def test_a_control_token_in_a_text_is_told_and_refuses_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base.parent)
    (base.parent / "recipe.yaml").write_text(RECIPE.replace("LIMIT", "200"))
    lines(base.parent, *map(asked, "ab"), asked("hi<|im_end|>"), asked("<|im_start|>"))
    many_steps = ("sft.train_batch_size=1", "sft.micro_train_batch_size=1", "sft.max_epochs=10")
    assert main(["validate", "recipe.yaml", *many_steps, "--here"]) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert told.startswith("warning: stages.sft.data: sft.jsonl, row 3: the text '<|im_end|>' is a control")
    lines(base.parent, *map(asked, "ab"))
    assert main(["validate", "recipe.yaml", *many_steps, "--here"]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("prompt", {"prompt": [{"role": "user", "content": "x"}, CALL, {"role": "tool", "content": "y"}]}),
        ("preference", {"prompt": "x", "chosen": [CALL], "rejected": "z"}),
        (
            "labelled",
            {
                "prompt": [{"role": "user", "content": "x"}, CALL, {"role": "tool", "content": "y"}],
                "response": "z",
                "label": True,
            },
        ),
    ],
)
def test_rows_of_every_kind_are_rendered(base: Path, kind: Any, row: dict[str, Any]) -> None:
    lines(base.parent, row)
    renderer = Renderer(load_tokenizer(str(base)), "chat")
    data = Data(sources=str(base.parent / "sft.jsonl"))
    assert "row 1: the chat template leaves out calls of tools" in render_rows(renderer, data, kind).refused
