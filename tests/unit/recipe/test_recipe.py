"""Recipes: what is read, what overrides do, and that each mistake is one sentence with where and what to
do."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from rlhf_core.config import PPO, SFT, Evaluation, RewardJudge
from rlhf_core.recipe.load_recipe import dump_recipe, given_recipe, load_recipe, recipe_of
from rlhf_core.recipe.plan import plan
from rlhf_core.recipe.yaml_text import dump, parse
from tests.support.s3_server import s3

Write = Callable[..., Path]
TEXT = """
name: tiny
base_model: models/base
stages:
  sft: {data: {sources: train.jsonl}, learning_rate: 1e-3}
  reward_model: {data: {sources: pairs.jsonl}}
  ppo: {prompts: {sources: prompts.jsonl}, actor_learning_rate: 5e-7}
  evaluation: {models: [ppo], questions: {path: q.jsonl}, judges: [{kind: rule}, {kind: reward}]}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Write:
    def write(text: str = TEXT) -> Path:
        (tmp_path / "recipe.yaml").write_text(text)
        return tmp_path / "recipe.yaml"

    return write


def test_numbers_without_a_point_are_numbers(recipe: Write) -> None:
    loaded = load_recipe(recipe())
    sft = loaded.stages["sft"]
    ppo = loaded.stages["ppo"]
    assert isinstance(sft, SFT) and sft.learning_rate == 1e-3
    assert isinstance(ppo, PPO) and ppo.actor_learning_rate == 5e-7


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("yes", "yes"),
        ("off", "off"),
        ("1_000", "1_000"),
        ("=", "="),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("TRUE", True),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_are_those_of_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    read = parse(f"here: {text}", "text")["here"]
    assert (read, type(read)) == (value, type(value))
    assert parse(dump({"here": value}), "text") == {"here": value}


@pytest.mark.parametrize("text", ["1e-6", "0o10", "12:30", "yes", "010", "<<", "2024-01-01", "", "0b1"])
def test_a_text_that_looks_like_another_value_is_written_in_quotes(text: str) -> None:
    written = dump({"here": text})
    assert parse(written, "text") == yaml.safe_load(written) == {"here": text}


def test_an_override_is_read_as_yaml_1_2_too(recipe: Write) -> None:
    with pytest.raises(ValueError, match=r"^stages\.sft\.max_len: .*integer.*, not '12:30'; correct it$"):
        load_recipe(recipe(), ["sft.max_len=12:30"])
    assert load_recipe(recipe(), ["sft.max_len=0100"]).stages["sft"].max_len == 100  # type: ignore[attr-defined]
    assert load_recipe(recipe(), ["store_checkpoints=yes"]).store_checkpoints is True


def test_merge_keys_give_what_the_own_keys_leave_open() -> None:
    text = """
    sft: &first {data: {sources: a.jsonl}, max_len: 64}
    second: {<<: *first, max_len: 32}
    third: {max_len: 16, <<: [*first, {seed: 5, max_len: 1}]}
    deep: {in: {it: &inner {<<: *first, max_len: 8}}}
    last: {<<: *inner}
    """
    read = parse(text, "text")
    data = {"data": {"sources": "a.jsonl"}}
    assert read["second"] == data | {"max_len": 32}
    assert read["third"] == data | {"max_len": 16, "seed": 5}
    assert read["last"] == read["deep"]["in"]["it"] == data | {"max_len": 8}
    assert read["sft"] == data | {"max_len": 64}


def test_a_recipe_with_merge_keys(recipe: Write) -> None:
    text = (
        TEXT.replace("  sft: {", "  sft: &sft {")
        + "  again: {<<: *sft, stage: sft, model: sft, max_len: 64}\n"
    )
    stages = load_recipe(recipe(text)).stages
    first = stages["sft"]
    again = stages["again"]
    assert isinstance(first, SFT) and isinstance(again, SFT)
    assert again == first.model_copy(update={"model": "sft", "max_len": 64})


def test_overrides(recipe: Write) -> None:
    loaded = load_recipe(
        recipe(),
        [
            "ppo.actor_learning_rate=2e-6",
            "stages.sft.data.sources.0.path=other.jsonl",
            "sft.eval_data={sources: held.jsonl}",
            "evaluation.judges.1.tie=0.5",
            "seed=3",
            "base_model=org/model",
        ],
    )
    ppo = loaded.stages["ppo"]
    sft = loaded.stages["sft"]
    evaluation = loaded.stages["evaluation"]
    assert isinstance(ppo, PPO) and isinstance(sft, SFT) and isinstance(evaluation, Evaluation)
    assert (ppo.actor_learning_rate, loaded.seed, loaded.base_model) == (2e-6, 3, "org/model")
    assert sft.data.sources[0].path == "other.jsonl" and sft.eval_data is not None
    assert isinstance(evaluation.judges[1], RewardJudge) and evaluation.judges[1].tie == 0.5


def test_an_override_adds_a_key_to_a_mapping_of_free_keys(recipe: Write) -> None:
    loaded = load_recipe(
        recipe(), ["ppo.engine.options.max_num_seqs=3", "sft.sweep.learning_rate=[1e-5, 2e-5]"]
    )
    ppo = loaded.stages["ppo"]
    sft = loaded.stages["sft"]
    assert isinstance(ppo, PPO) and isinstance(sft, SFT)
    assert ppo.engine.options == {"max_num_seqs": 3} and sft.sweep == {"learning_rate": (1e-5, 2e-5)}
    with pytest.raises(ValueError, match=r"sweep\.learning_rat"):
        load_recipe(recipe(), ["sft.sweep.learning_rat=[1e-5, 2e-5]"])


def test_overrides_are_applied_together_before_the_check(recipe: Write) -> None:
    with pytest.raises(ValueError, match="train_batch_size=12 must be a multiple"):
        load_recipe(recipe(), ["sft.train_batch_size=12"])
    assert load_recipe(recipe(), ["sft.train_batch_size=12", "sft.micro_train_batch_size=4"])


def test_shorthands_of_reward_sources(recipe: Write) -> None:
    def sources(value: str) -> list[tuple[str, str, float]]:
        ppo = load_recipe(recipe(), [f"ppo.reward={value}", "ppo.critic=reward_model"]).stages["ppo"]
        assert isinstance(ppo, PPO)
        return [(source.kind, source.title, source.weight) for source in ppo.reward]

    assert sources("org/rm-7b") == [("model", "rm-7b", 1.0)]
    assert sources("lib/checks.py:short") == [("function", "short", 1.0)]
    assert sources("https://host:8000/score?x=1") == [("http", "host:8000", 1.0)]
    assert sources("{url: 'http://host', name: mine, weight: 2}") == [("http", "mine", 2.0)]
    assert sources("[rm, {weight: 0.5}, a.py:f, {function: b.py:g}]") == [
        ("model", "rm", 1.0),
        ("model", "reward_model", 0.5),
        ("function", "f", 1.0),
        ("function", "g", 1.0),
    ]


def test_dump_reads_back(recipe: Write, tmp_path: Path) -> None:
    loaded = load_recipe(recipe(), ["ppo.kl_target=0.1", "ppo.reward=[reward_model, a.py:f, 'http://host']"])
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "again.yaml") == loaded


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "ppo.actor_learning_rat=1",
            "ppo.actor_learning_rat: unknown key 'actor_learning_rat'; did you mean actor_learning_rate",
        ),
        (
            "ppo.seed=1",
            (
                "override ppo.seed: seed is a field of the whole recipe: write it at the top (override:"
                " seed=...)"
            ),
        ),
        ("pppo.gamma=1", "unknown stage 'pppo'; did you mean ppo?"),
        ("sede=1", "unknown key 'sede'; did you mean seed?"),
        ("ppo.xyzzy=1", "valid: router_aux_coef, "),
        ("ppo.gamma", "write <stage>.<field>=<value>"),
        ("sft.data.sources.4.path=x", "sft.data.sources has 1 entries"),
        ("sft.eval_data.max_samples=3", "sft.eval_data is None"),
        ("sft.max_len=many", "stages.sft.max_len: input should be a valid integer"),
        (
            "sft.learning_rate=.inf",
            "stages.sft.learning_rate: input should be a finite number, not inf; correct it",
        ),
        (
            "sft.learning_rate=1e400",
            "stages.sft.learning_rate: input should be a finite number, not inf; correct it",
        ),
        (
            "sft.learning_rate=true",
            (
                "stages.sft.learning_rate: input should be a valid number, unable to parse string as a"
                " number, not 'true'"
            ),
        ),
        ("ppo.betas=[0.9, .nan]", "stages.ppo.betas.1: input should be a finite number, not nan; correct it"),
        (
            "ppo.zero_stage=true",
            "stages.ppo.zero_stage: input should be 'auto', 0, 1, 2 or 3, not 'true'; correct it",
        ),
        ("sft.max_len=-1", "stages.sft.max_len: input should be greater than 0, not -1"),
        ("sft.data=train.jsonl", "stages.sft.data: must be a mapping (sources, template, max_samples)"),
        (
            "evaluation.judges.0.kind=rul",
            "stages.evaluation.judges.0: kind: unknown value 'rul'; did you mean rule?",
        ),
        (
            "evaluation.judges.0={kind: rule, anser_key: a}",
            "stages.evaluation.judges.0.anser_key: unknown key 'anser_key'; did you mean answer",
        ),
        (
            "ppo.engine={adapters: alone}",
            "stages.ppo: engine.adapters: alone sends adapters, and there are none: set lora, or leave it out",
        ),
        (
            "ppo.engine={sleep: true}",
            (
                "stages.ppo.engine: engine.sleep gives a GPU's memory back, and gpus is 0: set gpus, or leave"
                " sleep out"
            ),
        ),
        ("ppo.engine={gpu: 1}", "stages.ppo.engine.gpu: unknown key 'gpu'; did you mean gpus?"),
        ("ppo.reward.0.weigth=1", "unknown key 'weigth'; did you mean weight"),
        (
            "ppo.reward=[{model: reward_model, weigth: 1}]",
            "stages.ppo.reward.0.weigth: unknown key 'weigth'; did you mean weight",
        ),
        ("evaluation.questions=q.jsonl", "not 'q.jsonl'; write { path: q.jsonl }"),
        ("sft.data=x.jsonl", "not 'x.jsonl'; write { sources: x.jsonl }"),
        (
            "ppo.reward=[{kind: functoin, model: rm}]",
            "stages.ppo.reward.0: kind: unknown value 'functoin'; did you mean function",
        ),
        ("ppo.reward=[{modle: rm}]", "stages.ppo.reward.0.modle: unknown key 'modle'; did you mean model"),
        ("ppo.reward=[{function: 'a.py'}]", "stages.ppo.reward.0.function: string should match pattern"),
        ("ppo.reward=[]", "stages.ppo.reward: value should have at least 1 item"),
        ("ppo.temperature=0", "stages.ppo: temperature=0 gives the same answer every time"),
        ("ppo.min_p=0.9", "unknown key 'min_p'"),
        ("ppo.betas=[0.9, 1]", "stages.ppo.betas.1: input should be less than 1, not 1; correct it"),
        (
            "ppo.ref_reward_offload=true",
            "stages.ppo: ref_reward_offload frees a GPU's memory, and these have none: reference: set gpus",
        ),
        (
            "ppo.adam_offload=true",
            "stages.ppo: adam_offload frees a GPU's memory, and these have none: actor, critic: set gpus",
        ),
        (
            "ppo.engine.num_engines=1000000000",
            "stages.ppo.engine.num_engines: input should be less than or equal to 10000",
        ),
        (
            "ppo.engine.tensor_parallel_size=512",
            "stages.ppo.engine.tensor_parallel_size: input should be less than or equal to 256",
        ),
        (
            "sft.ranks.num_nodes=1024",
            "stages.sft.ranks.num_nodes: input should be less than or equal to 1000",
        ),
        (
            "sft.ranks.num_ranks_per_node=1024",
            "stages.sft.ranks.num_ranks_per_node: input should be less than or equal to 256",
        ),
        (
            "evaluation.models=ppo",
            "stages.evaluation.models: input should be a valid list, not 'ppo'; correct it",
        ),
        (
            "evaluation.models=[]",
            "stages.evaluation.models: list should have at least 1 item, not []; correct it",
        ),
        ("SFT.max_len=3", "override SFT.max_len: unknown stage 'SFT'; did you mean sft?"),
        (
            "ppo.reward=[{url: 'http://host', api_key_env: 'sk-1'}]",
            "stages.ppo.reward.0.api_key_env: give the name of an environment",
        ),
        ("seed=4294967296", "seed: input should be less than 4294967296"),
        (
            "sft.template='Question:'",
            "stages.sft: template 'Question:' must be 'chat' or hold exactly one {}",
        ),
        (
            "sft.data.template='{} {}'",
            "stages.sft.data: template '{} {}' must be 'chat' or hold exactly one {}",
        ),
        (
            "sft.data.sources.0.path=''",
            "stages.sft.data.sources.0.path: string should have at least 1 character",
        ),
        ("sft.lora={targets: []}", "stages.sft.lora.targets: "),
        (
            "evaluation.endpoints={gpt: {model: x, base_url: 'localhost:8000/v1'}}",
            (
                "stages.evaluation.endpoints.gpt.base_url: 'localhost:8000/v1' is no address: begin it with"
                " http:// or https://"
            ),
        ),
        (
            "evaluation.judges=[{kind: openai, model: x, api_key_env: sk-123}]",
            "stages.evaluation.judges.0.api_key_env: give the name of an environment variable",
        ),
        ("name=[", "correct the YAML"),
        ("sft\n.max_len=3", "override 'sft\\n.max_len=3': write <stage>.<field>=<value>"),
        (
            "evaluation.endpoints={gpt: {model: x, more: {since: !!timestamp 2024-01-01}}}",
            (
                "stages.evaluation.endpoints.gpt.more: cannot be sent as JSON (Object of type date is not"
                " JSON serializable): write dates in"
            ),
        ),
        (
            "evaluation.endpoints={gpt: {model: x, more: {top_p: .nan}}}",
            "stages.evaluation.endpoints.gpt.more: cannot be sent as JSON",
        ),
    ],
)
def test_a_wrong_override_is_one_sentence(recipe: Write, override: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(), [override])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            (", learning_rate", ", learning_rat"),
            "stages.sft.learning_rat: unknown key 'learning_rat'; did you mean learning_rate",
        ),
        (
            ("base_model: models/base\n", ""),
            "base_model: missing (local folder or Hub id of the model that is called `base`); add it",
        ),
        (("  ppo: {", "  ppo: {model: sft, "), "stages.ppo.model: unknown key 'model'; did you mean actor?"),
        (("ppo", "policy"), "stages.policy: say which stage it is with `stage:`, one of sft, "),
        (("  ppo: {", "  ppo: {stage: pppo, "), "stages.ppo: stage: unknown value 'pppo'; did you mean ppo?"),
        (("ppo", "p.po"), "stages.p.po"),
        (
            ("name: tiny", "name: stages"),
            "name: 'stages' is what the artifacts folder has of all recipes: give this one another name",
        ),
        (
            ("name: tiny", "name: !!timestamp 2001-13-45"),
            "recipe.yaml line 2: '2001-13-45' cannot be read as the date or number it",
        ),
        (
            ("name: tiny", "name: !!bool tiny"),
            "recipe.yaml line 2: 'tiny' cannot be read as the date or number it looks like",
        ),
        (("name: tiny", "name: tiny\nseed: " + "9" * 5000), "recipe.yaml line 3: '9999"),
        (("name: tiny", "name: !!set [tiny]"), "correct the YAML"),
        (
            ("name: tiny", "[name]: tiny"),
            "recipe.yaml line 2: a key is a list or a mapping, and must be text",
        ),
        (
            ("name: tiny", "name: tiny\ntrue: 1"),
            "recipe: the key True is no text: put it in quotes (YAML reads true, null and 1 as",
        ),
        (("name: tiny", "name: tiny\non: 1"), "on: unknown key 'on'; valid: name, base_model"),
        (
            ("name: tiny", "name: tiny\nseed: 12:30"),
            "seed: input should be a valid integer, unable to parse string as an integer, not '12:30'",
        ),
        (
            ("name: tiny", "name: tiny\n<<: 3"),
            "recipe.yaml line 3: expected a mapping or list of mappings for merging, but found scalar",
        ),
        (
            ("  ppo: {", "  ppo: {<<: {seed: 1}, <<: {seed: 2}, "),
            "recipe.yaml line 7: the key '<<' appears twice",
        ),
        (
            ("{data: {sources: train.jsonl}", "{3: 1, data: {sources: train.jsonl}"),
            "stages.sft: the key 3 is no text",
        ),
        (("  ppo: {", "  false: {stage: ppo, "), "stages: the key False is no text"),
        (
            ("name: tiny", "name: tiny\nartifacts: ''"),
            "artifacts: string should have at least 1 character, not ''; correct it",
        ),
        (
            ("  ppo:", "  base: {stage: sft, data: {sources: a.jsonl}}\n  ppo:"),
            "stages.base: a stage name is",
        ),
        (("  ppo:", "  sft:"), "line 7: the key 'sft' appears twice"),
        (
            ("sources: train.jsonl}", "sources: [{path: a, probability: 0.2}, {path: b, probability: 0.2}]}"),
            "sum to 0.4",
        ),
    ],
)
def test_a_wrong_recipe_is_one_sentence(recipe: Write, change: tuple[str, str], told: str) -> None:
    assert change[0] in TEXT
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(TEXT.replace(*change)))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            BOMB,
            "holds more than 100,000 values, with those that its aliases (*name) stand for; correct the YAML",
        ),
        ("name: &a [*a]", "holds more than 100,000 values"),
        ("name: " + "[" * 100_000, "its brackets are nested too deeply to be read; correct the YAML"),
    ],
)
def test_a_recipe_that_would_fill_the_memory(recipe: Write, text: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(text))
    assert str(caught.value).startswith(f"recipe {recipe(text)}: {told}") and "\n" not in str(caught.value)


def test_aliases_are_read(recipe: Write) -> None:
    """A byte order mark is read over."""
    loaded = load_recipe(
        recipe("\ufeff" + TEXT.replace("{sources: train.jsonl}", "&d {sources: train.jsonl}, eval_data: *d"))
    )
    assert isinstance(sft := loaded.stages["sft"], SFT) and sft.eval_data == sft.data


@pytest.mark.parametrize("name", ["", "a" * 300, "b\0"])
def test_a_name_that_no_folder_can_have_is_unknown(recipe: Write, name: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"stages.sft.model: unknown name {name!r}; valid: base, ")
    ):
        plan(load_recipe(recipe(), [f"sft.model={json.dumps(name)}"]))
    if name:
        assert plan(
            load_recipe(
                recipe(), [f"base_model={json.dumps(name)}", f"sft.data.sources.0.path={json.dumps(name)}"]
            )
        )


def test_every_mistake_has_its_line(recipe: Write) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(
            recipe(TEXT.replace("learning_rate: 1e-3", "lr: 1").replace("models: [ppo]", "model: ppo"))
        )
    places = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert sorted(places) == ["stages.evaluation.model", "stages.evaluation.models", "stages.sft.lr"]


def test_checks_of_all_stages_are_told_with_the_first_mistake(recipe: Write) -> None:
    """Also those that a wrong key or value keeps from running, unless they may be about it."""
    both = "train_batch_size: 12, zero_stage: 0"
    sft = f"{both}, ranks: {{num_ranks_per_node: 2}}"
    ppo = f"{both}, actor_ranks: {{num_ranks_per_node: 3}}, rollout_batch_size: 10"

    def told(wrong: str = "gamma: 1") -> list[str]:
        text = TEXT.replace("learning_rate: 1e-3", sft).replace(
            "actor_learning_rate: 5e-7", f"{ppo}, {wrong}"
        )
        with pytest.raises(ValueError) as caught:
            load_recipe(recipe(text))
        return [
            line.partition(":")[0] + ":" + line.rpartition(": ")[2] for line in str(caught.value).splitlines()
        ]

    checks = [
        "stages.sft:set zero_stage to 1, 2, 3 or auto",
        "stages.sft:every rank makes the same number of full forward passes",
        "stages.ppo:set zero_stage to 1, 2, 3 or auto",
        "stages.ppo:every rank makes the same number of full forward passes",  # of the actor's ranks
        "stages.ppo:every rank makes the same number of full forward passes",  # of the critic's
        "stages.ppo:a rollout is cut into whole optimiser steps",
    ]
    assert told() == checks
    assert (
        sorted(told("gama: 1, max_epochs: some"))[-6:] == sorted(checks)
        and len(told("gama: 1, max_epochs: some")) == 8
    )
    assert len(told("rollout_batch_sise: 8")) == 3 + 1, (
        "without those on batch sizes, which may be about the wrong key"
    )


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the path of a YAML file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="must be a mapping"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        load_recipe(tmp_path / "binary.yaml")


class Served(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a web server that hands out the test's folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Served, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_recipe_from_a_web_server(recipe: Write, site: str) -> None:
    path = recipe()
    address = f"{site}/{path.name}"
    assert given_recipe(address, ["seed=5"]) == recipe_of(yaml.safe_load(TEXT) | {"seed": 5})
    path.write_text(TEXT.replace("name: tiny", "name: edited"))
    assert load_recipe(address).name == "edited", "each run reads it anew"


def test_commands_take_addresses(recipe: Write, site: str, capsys: pytest.CaptureFixture[str]) -> None:
    from flows.cli.app import main

    assert main(["run", f"{site}/{recipe().name}", "--dry-run"]) == 0
    assert "sft" in capsys.readouterr().out
    assert main(["validate", f"{site}/none.yaml"]) == 2
    assert "404" in capsys.readouterr().err


def test_a_recipe_that_a_web_server_does_not_give(recipe: Write, site: str) -> None:
    recipe(TEXT + "  sft: {}\n")
    (recipe().parent / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    closed = "http://me:password@127.0.0.1:9/r.yaml?signature=abc"
    for address, told in {
        f"{site}/none.yaml": (
            f"recipe {site}/none.yaml cannot be read (the server says 404 File not found); correct the"
            " address"
        ),
        closed: "recipe http://***@127.0.0.1:9/r.yaml cannot be read (",
        "https://": "recipe https:// cannot be read (",
        f"{site}/binary.yaml": f"recipe {site}/binary.yaml is not a text file",
        f"{site}/": f"recipe {site}/ must be a mapping",
    }.items():
        with pytest.raises(ValueError) as caught:
            load_recipe(address)
        assert (
            str(caught.value).startswith(told)
            and "password" not in str(caught.value)
            and "abc" not in str(caught.value)
        )


def test_a_recipe_from_a_bucket() -> None:
    with s3() as place:
        with fsspec.open(f"{place}/recipes/tiny.yaml", "wt") as file:
            file.write(TEXT)
        assert given_recipe(f"{place}/recipes/tiny.yaml", ["seed=5"]) == recipe_of(
            yaml.safe_load(TEXT) | {"seed": 5}
        )
        for address, told in {
            f"{place}/none.yaml": "there is no such file",
            "s3://no-such-bucket/r.yaml": "bucket does not exist",
        }.items():
            with pytest.raises(
                ValueError, match=rf"^recipe {address}: .*{told}; give the path of a YAML file$"
            ):
                load_recipe(address)


def test_what_does_not_fit_between_stages_is_told_with_wrong_fields() -> None:
    stages = {
        "sft": {"data": {"sources": "/nowhere/x.jsonl"}, "learning_rat": 1},
        "reward_model": {
            "data": {"sources": "/nowhere/x.jsonl"},
            "model": "sfft",
            "train_batch_size": 7,
            "micro_train_batch_size": 2,
        },
        "ppo": {"actor": "fst", "reward": "sft", "prompts": {"sources": "/nowhere/x.jsonl"}},
        "evaluation": {
            "models": ["ppo"],
            "questions": {"path": "/nowhere/q.jsonl"},
            "gates": [{"metric": "win_rat/ppo", "min": 0}],
        },
        "publication": {"model": "ppo", "repo_id": "me/x", "round_branch": "round-{}"},
    }
    with pytest.raises(ValueError) as refused:
        given_recipe({"name": "x", "base_model": "org/base", "stages": stages})
    told = str(refused.value)
    for part in (
        "stages.sft.learning_rat: unknown key 'learning_rat'; did you mean learning_rate?",
        "stages.reward_model: train_batch_size=7 must be a multiple of",
        "stages.ppo.actor: unknown name 'fst'",
        "stages.ppo.reward: sft is of kind sft, but a reward model is needed here",
        "stages.evaluation.gates.0.metric: unknown metric 'win_rat/ppo'",
        "stages.publication.round_branch: ppo has no rounds",
    ):
        assert part in told, told
    assert len(told.splitlines()) == len(set(told.splitlines()))


def test_a_recipe_whose_only_stage_is_wrong_is_one_sentence() -> None:
    for stages, told in (
        ({"sft": {"stage": "sftt"}}, "stages.sft: stage: unknown value 'sftt'; did you mean sft?"),
        (
            {"sft": {"data": {"sources": "/x.jsonl"}, "train_batch_size": 7}},
            "stages.sft: train_batch_size=7 must be a multiple of",
        ),
    ):
        with pytest.raises(ValueError) as refused:
            given_recipe({"name": "x", "base_model": "org/base", "stages": stages})
        assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


def test_checks_behind_missing_fields_are_told_with_them() -> None:
    stages = {
        "ppo": {"advantage_estimator": "rloo", "n_samples_per_prompt": 1},
        "evaluation": {"gates": [{"metric": "win_rate/ppo"}], "judges": []},
        "dpo": {"data": {}, "train_batch_size": 7, "micro_train_batch_size": 2},
    }
    with pytest.raises(ValueError) as refused:
        given_recipe({"base_model": "org/base", "stages": stages})
    told = str(refused.value)
    for part in (
        "name: missing (",
        "stages.ppo.prompts: missing (rows with a prompt); add it",
        "stages.ppo: rloo compares the answers to one prompt: set n_samples_per_prompt to 2 or more",
        "stages.evaluation.models: missing (",
        "stages.evaluation.questions: missing (",
        "stages.dpo.data.sources: missing (",
        "stages.dpo: train_batch_size=7 must be a multiple of",
    ):
        assert part in told, told
    assert "placeholder" not in told and len(told.splitlines()) == len(set(told.splitlines()))
