"""Wrong input that `alignflow validate --here` and `run` refuse before any work: a sentence for each, exit
code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.app import main
from rlhf_core.models.load_model import load_policy, load_scorer
from rlhf_core.stages.publication.publication_folder import MARKER
from tests.support.frame_lengths import frame_lengths
from tests.support.text_rows import rows_of_text
from tests.support.tiny_models import save_weights
from tests.unit.preflight.test_check import TEMPLATE, Planned, planned, save_tokenizer

__all__ = ["planned"]

Refused = Callable[..., list[str]]
CONFIG: dict[str, Any] = dict(
    model_type="llama", vocab_size=300, hidden_size=8, intermediate_size=16, num_hidden_layers=1
)
CONFIG["num_attention_heads"] = 2
SHAPES = {
    "model.embed_tokens.weight": (300, 8),
    "lm_head.weight": (300, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
}
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor"
    " %}{% endfor %}"
)
SHORT = ("sft.max_len=64", "reward_model.max_len=64")
LENGTHS = (
    "prompt_max_len + generate_max_len = 200 needs more: lower prompt_max_len or generate_max_len, or name a"
    " model with more"
)


@pytest.fixture
def base(planned: Planned, tmp_path: Path) -> Path:
    """The base model of the recipe, whose files fit each other."""
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    save_weights(tmp_path / "base" / "model.safetensors", SHAPES)
    return tmp_path / "base"


@pytest.fixture
def refused(base: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What `validate --here` says against the recipe with overrides; it must refuse it and write nothing."""

    def check(*overrides: str) -> list[str]:
        before = sorted(base.parent.rglob("*"))
        assert main(["validate", "recipe.yaml", *overrides, "--here"]) == 2
        assert sorted(base.parent.rglob("*")) == before
        return capsys.readouterr().err.splitlines()

    return check


def configured(base: Path, **changed: Any) -> None:
    (base / "config.json").write_text(json.dumps(CONFIG | changed))


def test_the_recipe_is_sound(base: Path) -> None:
    assert main(["validate", "recipe.yaml", "--here"]) == 0


def test_wrong_keys_and_wrong_files_are_told_at_once(refused: Refused, base: Path) -> None:
    (base.parent / "q.jsonl").write_text('{"text": "a"}\n')
    recipe = base.parent / "recipe.yaml"
    raw = yaml.safe_load(recipe.read_text())
    raw["stages"]["sft"]["learning_rat"] = 1
    raw["stages"]["reward_model"]["data"] = {"sources": "none.jsonl"}
    recipe.write_text(yaml.safe_dump(raw))
    told = refused()
    for part in (
        "stages.sft.learning_rat: unknown key",
        "none.jsonl: there is no such file",
        "stages.evaluation.questions: ",
    ):
        assert [line for line in told if part in line], told
    raw["stages"]["ppo"]["actor"] = "stf"  # no plan can be made
    recipe.write_text(yaml.safe_dump(raw))
    assert "unknown key 'learning_rat'" in refused()[0]
    assert "stages.ppo.actor: unknown name 'stf'" in refused()[1]


def test_fields_that_contradict_each_other_hide_no_wrong_file_of_their_stage(refused: Refused) -> None:
    overrides = ("sft.train_batch_size=12", "sft.micro_train_batch_size=8", "sft.data={sources: none.jsonl}")
    told = refused(*overrides, "publication.model=stf")
    for part in ("train_batch_size=12 must be a multiple", "unknown name 'stf'"):
        assert [line for line in told if part in line], told
    told = refused(*overrides)
    for part in (
        "train_batch_size=12 must be a multiple",
        "stages.sft.data: none.jsonl: there is no such file",
    ):
        assert [line for line in told if part in line], told
    assert len(told) == 2, told


def test_a_run_tells_all_faults_at_once(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("sft.train_batch_size=12", "sft.micro_train_batch_size=8", "sft.data={sources: none.jsonl}")
    for command in (["run", "recipe.yaml"], ["stage", "sft", "recipe.yaml"]):
        assert main([*command, *overrides]) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 2 and "must be a multiple" in told[0] and "there is no such file" in told[1], told


def test_lengths_beyond_the_positions_of_the_base_model(refused: Refused, base: Path) -> None:
    """Told once for a loop; RoPE scaling counts."""
    configured(base, max_position_embeddings=128)
    assert refused(*SHORT) == [
        f"stages.{stage}: {base}: the model has 128 positions, and {LENGTHS}"
        for stage in ("ppo", "loop", "evaluation")
    ]
    configured(base, max_position_embeddings=100, rope_scaling={"type": "linear", "factor": 1.5})
    assert f"stages.ppo: {base}: the model has 150 positions, and {LENGTHS}" in refused(*SHORT)
    configured(base, max_position_embeddings=100, rope_scaling={"type": "linear", "factor": 2})
    assert main(["validate", "recipe.yaml", *SHORT, "--here"]) == 0


def test_training_lengths_beyond_the_positions_of_the_base_model(refused: Refused, base: Path) -> None:
    configured(base, max_position_embeddings=200)
    needs = "needs more: lower max_len, or name a model with more"
    assert refused("reward_model.max_len=201", "sft.max_len=99999999") == [
        f"stages.sft: {base}: the model has 200 positions, and max_len = 99999999 {needs}",
        f"stages.reward_model: {base}: the model has 200 positions, and max_len = 201 {needs}",
    ]
    assert main(["validate", "recipe.yaml", "reward_model.max_len=200", "sft.max_len=200", "--here"]) == 0


def test_lengths_beyond_the_positions_of_a_judge_and_of_an_adapter(refused: Refused, base: Path) -> None:
    shutil.copytree(base, base.parent / "adapter")
    (base.parent / "adapter" / "config.json").unlink()
    (base.parent / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(base)})
    )
    configured(base, max_position_embeddings=256)
    judge = "evaluation.judges=[{kind: rule}, {kind: vllm, model: ./adapter, max_model_len: 512}]"
    told = (
        "the model has 256 positions, and max_model_len = 512 needs more: lower max_model_len, or name a"
        " model with more"
    )
    assert refused(judge, *SHORT) == [f"stages.evaluation.judges.1: {base.parent / 'adapter'}: {told}"]


def test_repeated_question_ids(refused: Refused, base: Path) -> None:
    rows = [{"prompt": f"p{number}", "answer": "a", "uid": uid} for number, uid in enumerate("aba")]
    (base.parent / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (told,) = refused()
    assert told.startswith("stages.evaluation.questions: q.jsonl, row 3: has the uid 'a' of row 1")
    assert "give each question a `uid`" in told
    assert main(["validate", "recipe.yaml", "evaluation.max_questions=2", "--here"]) == 0


def cut(base: Path) -> None:
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def sharded(base: Path) -> None:
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "model-00002-of-00002.safetensors"}})
    )


def unindexed(base: Path) -> None:
    """Two shards, of which no index says that they belong together."""
    (base / "model.safetensors").rename(base / "model-00001-of-00002.safetensors")
    save_weights(base / "model-00002-of-00002.safetensors", {"model.norm.weight": (8,)})


def stray(base: Path) -> None:
    """A single file beside an index that lists another."""
    shutil.copy(base / "model.safetensors", base / "model-00001-of-00001.safetensors")
    listed = dict.fromkeys(SHAPES, "model-00001-of-00001.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def pickled(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


def nested(base: Path) -> None:
    (base / "model.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)


def few_layers(base: Path) -> None:
    configured(base, num_hidden_layers=3)


def small_vocabulary(base: Path) -> None:
    configured(base, vocab_size=290)


def wide(base: Path) -> None:
    configured(base, intermediate_size=32)


def own_code(base: Path) -> None:
    configured(base, model_type="mine", auto_map={"AutoConfig": "mine.Mine"})


@pytest.mark.parametrize(
    ("change", "told"),
    rows_of_text("""
    cut | has damaged weights (model.safetensors has 19,
    nested | has damaged weights (model.safetensors is no safetensors file, or is cut off in its header); copy or download
    sharded | has damaged weights (model.safetensors.index.json names model-00002-of-00002.safetensors, and there is no such file)
    unindexed | has model-00001-of-00002.safetensors and 1 more weight files, and neither model.safetensors nor model.safetensors.index.json
    stray | has model.safetensors beside model.safetensors.index.json, which lists other files, so it is unclear which weights are meant
    pickled | has its weights as pickles (pytorch_model.bin), which are not loaded; save them with save_pretrained, as safetensors
    few_layers | has weights of 1 layers, and num_hidden_layers=3 in config.json; use the config.json that was saved with
    small_vocabulary | has the shape [300, 8] in model.embed_tokens.weight, and vocab_size=290 and hidden_size=8 in config.json; use the config.json
    wide | has the shape [8, 16] in model.layers.0.mlp.down_proj.weight, and
    own_code | needs code of its own (auto_map in config.json; transformers does not know the model_type 'mine'); read that code and set trust_remote_code: true
    """),
)
def test_weights_that_cannot_be_loaded(refused: Refused, base: Path, change: str, told: str) -> None:
    globals()[change](base)
    (problem,) = refused()
    assert problem.startswith(f"base_model: {base} {told}")


@pytest.mark.parametrize("change", [unindexed, stray])
def test_weights_of_which_it_is_unclear_what_belongs_together_are_not_loaded(
    base: Path, change: Callable[[Path], None]
) -> None:
    change(base)
    for load in (load_policy, lambda path: load_scorer(path, 0)):
        with pytest.raises(ValueError, match=rf"^{base} has model.* model\.safetensors\.index\.json"):
            load(str(base))


def test_an_index_beside_its_shards_and_files_of_other_tools_is_fine(base: Path) -> None:
    stray(base)
    (base / "model.safetensors").rename(base / "consolidated.safetensors")
    assert main(["validate", "recipe.yaml", "--here"]) == 0


def test_a_tokenizer_with_more_tokens_than_embeddings(refused: Refused, base: Path) -> None:
    """Special tokens past the last row are no fault: no text becomes one."""
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 301, "content": "<image>"})
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["validate", "recipe.yaml", "--here"]) == 0
    tokenizer["added_tokens"][-1]["special"] = False
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    (problem,) = refused()
    assert problem.startswith(
        f"base_model: {base} has a tokenizer with the token '<image>' at number 301, and embeddings for 300"
        " tokens; "
    )
    assert "call resize_token_embeddings(len(tokenizer)) on the model" in problem


def test_code_of_a_known_family_is_not_needed(base: Path) -> None:
    configured(base, auto_map={"AutoConfig": "mine.Mine"})
    assert main(["validate", "recipe.yaml", "--here"]) == 0


def test_a_publication_into_a_folder_of_somebody_else(refused: Refused, base: Path) -> None:
    folder = base.parent / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("")
    told = (
        f"{folder} holds files that were not published by alignflow: name another folder, or move them away"
    )
    assert refused("publication.folder=mine") == [f"stages.publication.folder: {told}"]
    (folder / MARKER).write_text(json.dumps({"name": "p", "digest": "0", "files": {}}))
    assert main(["validate", "recipe.yaml", "publication.folder=mine", "--here"]) == 0


def test_all_faults_are_told_at_once(refused: Refused, base: Path) -> None:
    """Too few prompts for an iteration too, which are counted only where the prompts can be read."""
    configured(base, max_position_embeddings=199)
    problems = refused(
        *SHORT,
        "sft.data={sources: none.jsonl}",
        "ppo.rollout_batch_size=8",
        "loop.prompts={sources: none.jsonl}",
    )
    places = [problem.split(": ")[0] for problem in problems]
    assert sorted(set(places)) == [
        *(
            "stages.evaluation",
            "stages.loop",
            "stages.loop.round1.preferences.prompts",
            "stages.loop.round2.preferences.prompts",
        ),
        *("stages.ppo", "stages.ppo.prompts", "stages.sft.data"),
    ]


def test_rows_of_brackets_and_of_digits(refused: Refused, base: Path) -> None:
    good = (base.parent / "sft.jsonl").read_text().splitlines()
    for bad, told in (
        ("[" * 100_000, "its brackets are nested too deeply to be read"),
        ('{"messages": ' + "9" * 5000 + "}", "Exceeds the limit (4300 digits)"),
    ):
        (base.parent / "sft.jsonl").write_text("\n".join([*good[:1], bad]))
        (problem,) = refused()
        assert problem.startswith(f"stages.sft.data: sft.jsonl, line 2: is not valid JSON: {told}")


def test_a_byte_order_mark_is_read_over(base: Path) -> None:
    for name in ("sft", "q"):
        file = base.parent / f"{name}.jsonl"
        file.write_text("\ufeff" + file.read_text(), encoding="utf-8")
    assert main(["validate", "recipe.yaml", "--here"]) == 0


def test_directories_for_files_and_a_file_for_a_directory(refused: Refused, base: Path) -> None:
    (base.parent / "rows.jsonl").mkdir()
    assert refused("sft.data={sources: rows.jsonl}") == [
        "stages.sft.data: rows.jsonl: is a directory: name a file in it"
    ]
    assert refused("evaluation.questions={path: base}") == [
        "stages.evaluation.questions: base: is a directory: name a file in it"
    ]
    told = f"base_model: {base / 'config.json'} is a file; correct the path, or make the model first"
    assert refused("base_model=base/config.json") == [told]


def test_a_tokenizer_without_an_end_and_no_tokenizer(refused: Refused, base: Path) -> None:
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "eos_token"})
    )
    assert all(
        "the tokenizer has no end-of-sequence token: set eos_token in its tokenizer_config.json" in told
        for told in refused()
    )
    for file in base.glob("*token*"):
        file.unlink()
    told = "there is no tokenizer.json, *.model, vocab.*: save the model's tokenizer into this folder"
    assert refused()[0] == f"stages.sft.data: {base}: no tokenizer can be loaded from here ({told})"


def test_an_endless_template(base: Path) -> None:
    """In a process of its own, as `validate` has no transformers."""

    save_tokenizer(base, ENDLESS + TEMPLATE)
    shutil.copytree(base, base.parent / "good")
    save_tokenizer(base.parent / "good", TEMPLATE)
    bad = (str(base), "chat")
    good = (str(base.parent / "good"), "chat")
    found = frame_lengths([good, bad, (str(base), "{}")])
    assert (
        found[bad]
        == "the chat template did not end within 2 s; correct it, or set the template of the data to a"
        " plain one"
    )
    # those before and after it are read
    assert isinstance(found[good], int) and isinstance(found[str(base), "{}"], int)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        (
            "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
            "OverflowError: Range too big.",
        ),
    ],
)
def test_a_template_that_raises(refused: Refused, base: Path, template: str, told: str) -> None:
    save_tokenizer(base, template)
    assert refused()[0].startswith(
        f"stages.sft.data: the chat template refuses messages with the roles (user, assistant): {told}"
    )


def test_a_template_that_takes_all_memory(base: Path) -> None:
    """In a process of its own, as `validate` has no transformers."""

    save_tokenizer(base, "{% set s = 'a' * 2**33 %}{{ s }}" + TEMPLATE)
    told = (
        "the chat template takes more than 4 GiB; correct it, or set the template of the data to a plain one"
    )
    assert frame_lengths([(str(base), "chat")]) == {(str(base), "chat"): told}
