"""The lineage read from run directories, and the model card made of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_core.config.gates import Verdict
from rlhf_core.hub.ids import shown
from rlhf_core.records import Answering, EvalReport
from rlhf_core.runs.lineage import Ancestor, lineage, nodes, sources, stages, trained, tree
from rlhf_core.stages.publication.card_sections import public_names
from rlhf_core.stages.publication.model_card import CardModel, card, eval_results, front_matter, public_report
from tests.support.chain import BASE, REPORT, Chain, build


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return build(tmp_path_factory.mktemp("home"))


def header(text: str) -> dict[str, object]:
    return yaml.safe_load(text.split("---\n")[1])


def the_card(
    chain: Chain, report: EvalReport | None = REPORT, gates: Sequence[Verdict] = (), **changes: Any
) -> str:
    model = CardModel(
        lineage(chain.checkpoint),
        "dpo-1",
        "someone/tiny",
        "apache-2.0",
        is_reward_model=False,
        has_chat_template=True,
    )
    return card(model._replace(**changes), report, gates)


def test_a_report_is_published_without_places_addresses_and_system_prompts() -> None:
    rates = tuple(
        rate.model_copy(update={"model": "/home/alice/ck", "baseline": "/mnt/team/base", "judge": "/mnt/rm"})
        for rate in REPORT.win_rates
    )
    answering = Answering(
        model="gpt-x", url="http://10.0.0.5:8000/v1", settings={"temperature": 1.0, "system": "be ours", "extra": {"k": "v"}}, questions=1,
        failed=0, requests=1, input_tokens=1, output_tokens=1,
    )  # fmt: skip
    own = {
        "baseline": "/mnt/team/base",
        "judge": "/mnt/rm",
        "right": {"/home/alice/ck": 0.5},
        "answering": {"gpt": answering},
    }
    report, names = public_report(REPORT.model_copy(update={"win_rates": rates, **own}))
    text = report.model_dump_json()
    assert not any(word in text for word in ("alice", "mnt", "10.0.0.5", "be ours", "extra"))
    assert names["/home/alice/ck"] == "ck" and report.right == {"ck": 0.5} and report.judge == "rm"
    assert {rate.model for rate in report.win_rates} == {"ck"}
    assert report.answering["gpt"].settings == {"temperature": 1.0}
    assert [rate.win_rate for rate in report.win_rates] == [rate.win_rate for rate in REPORT.win_rates]


def test_public_names_stay_apart() -> None:
    names = ["/a/ck", "/b/ck", "ck", "Qwen/Qwen3-0.6B", "sft"]
    assert public_names(names) == {
        "/a/ck": "ck-2",
        "/b/ck": "ck-3",
        "ck": "ck",
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
        "sft": "sft",
    }


def test_lineage_follows_inputs_up_to_the_base_model(chain: Chain) -> None:
    model = lineage(chain.checkpoint)
    assert (model.name, model.kind, model.digest, model.seed) == ("dpo-1", "dpo", f"{4:016x}", 7)
    assert [node.name for node in stages(model)] == ["sft", "reward_model", "ppo", "pairs-1", "dpo-1"]
    assert [node.name for node in trained(model)] == [BASE, "sft", "ppo", "dpo-1"]
    assert {node.name: node.kind for node in nodes(model)}[BASE] == "hub"
    assert model.metrics == {"loss": 0.1234567891}


def test_run_directories_that_were_moved_together_find_each_other(tmp_path: Path) -> None:
    made = build(tmp_path / "old")
    before = tree(lineage(made.checkpoint))
    (tmp_path / "old").rename(tmp_path / "new")
    moved = Path(str(made.checkpoint).replace(str(tmp_path / "old"), str(tmp_path / "new")))
    (moved.parents[1] / "old").mkdir()  # a model of that name beside them
    (moved.parents[1] / "old" / "config.json").write_text("{}")
    assert tree(lineage(moved)) == before
    shutil.rmtree(tmp_path / "new" / made.stages["sft"].relative_to(tmp_path / "old"))
    assert "(unknown)" in tree(lineage(moved))


def test_a_stage_reached_twice_is_one_object_drawn_once_with_its_parents(chain: Chain) -> None:
    model = lineage(chain.checkpoint)
    ppo = dict(model.parents)["ppo"]
    assert dict(dict(model.parents)["pairs-1"].parents)["ppo"] is ppo
    lines = tree(model).splitlines()
    assert lines[0] == f"dpo-1 (dpo) {4:016x}"
    assert sum("ppo (ppo)" in line for line in lines) == 2
    assert sum("ppo (ppo)" in line and "see above" in line for line in lines) == 1


def test_lineage_of_a_plain_folder_depends_on_its_content_not_its_place(tmp_path: Path) -> None:
    for folder, content in (("a/model", "x"), ("b/model", "x"), ("c/model", "y")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / folder / "model.safetensors").write_text(content)
    a, b, c = (lineage(tmp_path / folder / "model") for folder in "abc")
    assert a == b and a.kind == "folder" and a.name == "model" and len(a.digest) == 16
    assert c.digest != a.digest


def test_lineage_knows_hub_ids_cached_snapshots_and_what_is_gone(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--a-model" / "snapshots" / ("f" * 40)
    snapshot.mkdir(parents=True)
    assert lineage("owner/a-model") == Ancestor("owner/a-model", "hub", "")
    assert lineage("gpt2").kind == "hub"
    assert lineage(snapshot) == Ancestor("owner/a-model", "hub", "f" * 40)
    assert lineage(tmp_path / "gone" / "model") == Ancestor("model", "unknown", "")


def test_lineage_survives_broken_and_unknown_records(tmp_path: Path) -> None:
    run = tmp_path / "x-1"
    (run / "checkpoint").mkdir(parents=True)
    (run / "config.json").write_text("{ not json")
    assert lineage(run / "checkpoint").kind == "folder"
    record = dict(
        name="x", digest="1", config={"stage": "of_the_future"}, inputs={"itself": str(run / "checkpoint")}
    )
    (run / "config.json").write_text(json.dumps(record))
    model = lineage(run / "checkpoint")
    assert (model.name, model.kind) == ("x", "of_the_future")
    assert tree(model).splitlines()[0] == "x (of the future) 1"


def test_front_matter_names_hub_ids_only(chain: Chain) -> None:
    model = lineage(chain.checkpoint)
    assert header(the_card(chain)) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["alignflow", "sft", "reward-model", "ppo", "preferences", "dpo"],
        "base_model": BASE,
        "base_model_relation": "finetune",
        "datasets": ["stand-in/chats"],
    }
    local = Ancestor("my-model", "folder", "abc")
    sft = replace(dict(dict(model.parents)["ppo"].parents)["sft"], parents=(("base", local),))
    assert "base_model" not in front_matter(CardModel(sft, "sft", "sft", "mit", False, True))
    assert (
        front_matter(CardModel(sft, "sft", "sft", "mit", True, True))["pipeline_tag"] == "text-classification"
    )


def test_card_shows_scores_with_interval_and_judge(chain: Chain) -> None:
    text = the_card(chain)
    counted = "won 198, lost 66 and tied 36 of 300 battles"
    assert f"| **dpo-1** | sft | rule | 72.0 | 68.0 to 77.0 | {counted} | 1 | 97.0 |" in text
    assert (
        "| ppo | sft | rule | 61.0 | 57.0 to 66.0 | won 165, lost 99 and tied 36 of 300 battles | 1 | 97.0 |"
        in text
    )
    assert "| **dpo-1** | 69.0 | 10.2 | 0.0 |" in text
    assert "| reverse | 82.0 |" in text
    assert "No evaluation" in the_card(chain, report=None)


def test_card_tells_lineage_data_and_configuration(chain: Chain) -> None:
    text = the_card(chain)
    assert text.count("<details>") == 5
    assert f"made with alignflow from `{BASE}`: SFT, then PPO, then DPO." in text
    assert "| sft | data | sloppy.jsonl | train | 50 |" in text
    assert "| sft | data | stand-in/chats | train | 50 |" in text
    assert "| ppo | prompts | prompts.jsonl | train | 100 |" in text
    block = text.split("<details><summary>ppo")[1].split("```yaml\n")[1].split("```")[0]
    config = yaml.safe_load(block)
    assert config["actor_learning_rate"] == 1e-6
    assert config["seed"] == 7
    assert config["metrics"] == {"loss": 0.123457}
    assert config["prompts"]["sources"][0]["path"] == "prompts.jsonl"


def test_card_holds_no_path_of_the_machine(chain: Chain) -> None:
    stage = lineage(chain.checkpoint)
    secret = {
        "base_url": "http://10.0.0.5:8000/v1",
        "path": "https://me:word@host.example/d/x.jsonl?sig=1",
        "folder": "/srv/out",
    }
    text = the_card(chain, lineage=replace(stage, config={**stage.config, "other": secret}), title="dpo-1-4")
    assert str(chain.root) not in text
    assert not any(
        hidden in text for hidden in ("10.0.0.5", "word@", "sig=1", "/srv/out", "host.example", "base_url")
    )
    assert "path: x.jsonl" in text


def test_card_is_the_same_each_time(chain: Chain) -> None:
    assert the_card(chain) == the_card(chain)


def test_use_fits_the_model(chain: Chain) -> None:
    assert 'AutoModelForCausalLM.from_pretrained("someone/tiny")' in the_card(chain)
    assert 'from_pretrained("path/to/this/folder")' in the_card(chain, title="dpo-1")
    assert "apply_chat_template" not in the_card(chain, has_chat_template=False)
    assert "AutoModelForSequenceClassification" in the_card(chain, is_reward_model=True)


def test_a_template_with_slashes_is_a_text_not_a_place(chain: Chain) -> None:
    stage = lineage(chain.checkpoint)
    text = the_card(
        chain, lineage=replace(stage, config={**stage.config, "data": {"template": "A/B: {}", "sources": []}})
    )
    assert "A/B: {}" in text


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("owner/name", "owner/name"),
        ("data/train.jsonl", "train.jsonl"),
        ("/a/b/c/", "c"),
        ("~/models/m", "m"),
        (r"C:\models\m", "m"),
        ("s3://bucket/key/x.parquet?token=1", "x.parquet"),
        ("plain", "plain"),
    ],
)
def test_shown(place: str, expected: str) -> None:
    assert shown(place) == expected


def test_eval_results_only_for_questions_of_the_hub() -> None:
    assert eval_results(REPORT, "dpo-1", "data/questions.jsonl") is None
    assert eval_results(REPORT, "nobody", "owner/questions") is None
    (entry,) = yaml.safe_load(eval_results(REPORT, "dpo-1", "owner/questions") or "")
    assert entry == {
        "dataset": {"id": "owner/questions", "task_id": "win_rate"},
        "value": 72.0,
        "notes": (
            "against sft, judge rule, 68.0 to 77.0 %, won 198, lost 66 and tied 36 of 300 battles, ties as"
            " half"
        ),
    }


def test_sources_are_found_in_every_stage(chain: Chain) -> None:
    found = {(stage.name, field) for stage, field, _ in sources(lineage(chain.report))}
    assert found == {
        ("sft", "data"),
        ("reward_model", "data"),
        ("ppo", "prompts"),
        ("pairs-1", "prompts"),
        ("evaluation", "questions"),
    }


def test_the_card_of_a_class_that_transformers_lacks_says_how_to_load_it(chain: Chain) -> None:
    made = CardModel(lineage(chain.checkpoint), "rm", "someone/rm", "mit", True, True, needs_score_class=True)
    code = card(made, None).split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert code.index('add_score_class(AutoConfig.from_pretrained("someone/rm"))') < code.index(
        "= AutoModelForSequenceClassification.from_"
    )
    assert "add_score_class" not in card(made._replace(needs_score_class=False), None)


def test_the_card_of_a_model_that_reads_images_loads_all_of_it(chain: Chain) -> None:
    made = CardModel(lineage(chain.checkpoint), "sft", "someone/sft", "mit", False, True, reads_images=True)
    text = card(made, None)
    assert "pipeline_tag: image-text-to-text" in text and "AutoProcessor" in text
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'AutoModelForImageTextToText.from_pretrained("someone/sft")' in code
    assert "AutoModelForCausalLM" in card(made._replace(reads_images=False), None)


def test_the_use_has_the_arguments_that_the_chat_template_was_trained_with(chain: Chain) -> None:
    given = {"date": "1 May", "enable_thinking": False}
    found = lineage(chain.checkpoint)
    argued = replace(found, config={"stage": "dpo", "data": {"sources": [], "template_args": given}})
    written = the_card(chain, lineage=argued)
    assert "}], date='1 May', enable_thinking=False, add_generation_prompt=True" in written
    answers = replace(found, config={"stage": "dpo", "data": None, "template_args": given})
    assert "enable_thinking=False, add_generation" in the_card(chain, lineage=answers)
    plain = replace(found, config={"stage": "dpo", "data": {"sources": []}}, parents=(("policy", argued),))
    assert "}], add_generation_prompt=True" in the_card(chain, lineage=plain)
