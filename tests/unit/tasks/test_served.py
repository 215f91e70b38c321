"""What a run of a deployment may change in its recipe, and which requests the server of one refuses."""

from __future__ import annotations

import json
import os
import stat
import types
import typing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel

from flows.serving.services import AUTH
from rlhf_core.config import Recipe
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.sentences import models_in
from rlhf_core.records import RECIPE_ONLY
from rlhf_core.system.pages.secret_file import kept_secret
from tasks.served import SERVED_ENV, _is_plain, own_recipe, require_settings
from tasks.server_process import refusal

TEXT = """
name: served
base_model: org/model
stages:
  sft: {data: {sources: train.jsonl}, lora: {rank: 4}}
  ppo: {actor: sft, max_steps: 7, reward: [{model: org/reward}, {function: "score.py:f"}], prompts: {sources: prompts.jsonl}, critic: null}
  evaluation:
    models: [mine, ppo]
    endpoints: {mine: {model: m, base_url: "http://127.0.0.1:1/v1"}}
    questions: {path: q.jsonl}
    gates: [{metric: win_rate/ppo, min: 0.5}]
  alignment_tax: {models: [ppo], tasks: [gsm8k]}
  publication: {model: ppo}
"""
SETTINGS = [
    *(
        "seed=3",
        "store_checkpoints=true",
        "stages.sft.learning_rate=1e-6",
        "sft.betas=[0.8, 0.9]",
        "sft.betas.0=0.7",
        "sft.zero_stage=2",
    ),
    *(
        "sft.packing=false",
        "sft.lora.rank=8",
        "sft.ranks.num_nodes=2",
        "ppo.kl_estimator=k2",
        "ppo.max_steps=null",
        "ppo.reward.1.weight=2",
    ),
    *(
        "ppo.export_at=[10, 20]",
        "ppo.engine.seed_answers=true",
        "evaluation.endpoints.mine.max_attempts=2",
        "evaluation.gates.0.min=0.1",
    ),
]
NO_SETTINGS = [
    *(
        "base_model=other",
        "artifacts=/tmp/x",
        "store=s3://b/x",
        "name=x",
        "trust_remote_code=true",
        "notify={url_env: X}",
        "wandb={project: p}",
    ),
    *(
        "ppo.reward=file.py:fn",
        "ppo.reward.1.function=other.py:f",
        "ppo.reward.0.model=x",
        "ppo.critic=x",
        "ppo.prompts.sources.0.path=/x",
    ),
    *(
        "ppo.prompts=/etc/x",
        "ppo.engine.options.trust_remote_code=true",
        "sft.lora={rank: 2}",
        "sft.lora=null",
        "sft.lora.targets=[q]",
        "sft.template=x",
        "sft.data={sources: x.jsonl}",
    ),
    *(
        "evaluation.models=[base]",
        "evaluation.models.1=x",
        "evaluation.endpoints.mine.base_url=http://x/v1",
        "evaluation.proxy=x",
    ),
    *(
        "evaluation.endpoints.mine.more={a: 1}",
        "evaluation.endpoints.mine.api_key_env=HOME",
        "alignment_tax.tasks=[x.yaml]",
    ),
    *(
        "alignment_tax.trust_task_code=true",
        "publication.repo_id=me/x",
        "publication.private=false",
        "publication.dry_run=true",
    ),
    *("publication.licenses={a: b}", "evaluation.gates=[]", "stages={sft: {data: {sources: x.jsonl}}}"),
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("override", SETTINGS)
def test_settings(recipe: Path, override: str) -> None:
    changed = load_recipe(recipe, [override])
    require_settings(changed, [override])
    assert changed != load_recipe(recipe)


@pytest.mark.parametrize("override", NO_SETTINGS)
def test_what_is_no_setting(recipe: Path, override: str) -> None:
    """Also where the recipe with it would be refused."""
    key = override.partition("=")[0]
    with pytest.raises(
        ValueError,
        match=(
            rf"^override {key}: a run of a deployment may set numbers, .*; write this field into the recipe"
        ),
    ):
        require_settings(load_recipe(recipe), ["seed=1", override])


def test_what_is_not_in_the_recipe(recipe: Path) -> None:
    for override, told in (
        ("sft.learning_rat=1", "'learning_rat'; did you mean"),
        ("st.max_len=1", "'st'; did you mean"),
        ("ppo.reward.2.weight=1", "'2'; valid: 0, 1"),
    ):
        with pytest.raises(ValueError, match=f"^override .*: unknown key {told}"):
            require_settings(load_recipe(recipe), [override])


def test_no_setting_of_any_stage_can_hold_a_text() -> None:
    """Whatever fields come: one that a run may set takes no str, no mapping and no record, and one that says
    trust is not among them."""
    known: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = [Recipe]
    settings = 0
    while waiting:
        model = waiting.pop()
        known.add(model)
        for name, info in model.model_fields.items():
            waiting += [each for each in models_in(info.annotation) if each not in known]
            if _is_plain(info.annotation) and info.json_schema_extra != RECIPE_ONLY:
                settings += 1
                assert "trust" not in name and name != "sandbox", f"{model.__name__}.{name}"
                assert leaves(info.annotation) <= {
                    int,
                    float,
                    bool,
                    types.NoneType,
                }, f"{model.__name__}.{name}"
    assert len(known) > 20 and settings > 200


def leaves(annotation: Any) -> set[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return set()
    parts = [
        part for part in typing.get_args(annotation) if isinstance(part, type) or typing.get_origin(part)
    ]
    return {leaf for part in parts for leaf in leaves(part)} if parts else {annotation}


def test_a_run_has_its_deployments_own_recipe(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["ppo.critic=org/critic"]
    identity = uuid4()
    served = {str(identity): {"recipe": "recipe.yaml", "overrides": own}}
    (tmp_path / "served.json").write_text(json.dumps(served))
    monkeypatch.setenv(SERVED_ENV, str(tmp_path / "served.json"))
    assert own_recipe("recipe.yaml", [*own, "seed=5"], identity) == load_recipe(recipe, [*own, "seed=5"])
    # overrides stand in place of the deployment's
    assert own_recipe("recipe.yaml", [], str(identity)) == load_recipe(recipe)
    (tmp_path / "other.yaml").write_text(TEXT)
    for other in (
        "other.yaml",
        str(recipe),
        "http://127.0.0.1:9/recipe.yaml",
        load_recipe(recipe).model_dump(mode="json"),
        None,
    ):
        with pytest.raises(
            ValueError,
            match=(
                r"^parameter recipe: a run of this deployment has the deployment's own recipe, recipe\.yaml: "
            ),
        ):
            own_recipe(other, [], identity)
    with pytest.raises(ValueError, match=r"^override ppo\.critic: a run of a deployment may set numbers"):
        own_recipe("recipe.yaml", ["ppo.critic=org/other"], identity)
    with pytest.raises(ValueError, match=r"^parameter overrides: give a list of texts"):
        own_recipe("recipe.yaml", {"seed": 5}, identity)
    with pytest.raises(ValueError, match=r"^`alignflow serve` did not create this deployment"):
        own_recipe("recipe.yaml", [], UUID(int=1))
    # without a deployment: somebody's own call
    assert own_recipe("other.yaml", ["artifacts=elsewhere"], None).artifacts == "elsewhere"


def test_a_kept_secret_is_its_users_alone_and_stays(tmp_path: Path) -> None:
    place = tmp_path / AUTH
    before = os.umask(0)
    try:
        made = kept_secret(place)
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600 and place.read_text() == f"{made}\n" and len(made) > 40
    assert kept_secret(place) == made
    place.chmod(0o644)
    # one that others could read is not used again
    assert kept_secret(place) != made and stat.S_IMODE(place.stat().st_mode) == 0o600
    place.unlink()
    (tmp_path / "elsewhere").write_text("known:to-another\n")
    place.symlink_to(tmp_path / "elsewhere")
    assert kept_secret(place) != "known:to-another" and not place.is_symlink()


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:4200", None, None),
        ("LOCALHOST:4200", "http://localhost:4200", None),
        ("own.example", "https://own.example", None),
        ("evil.example:4200", None, 400),
        ("127.0.0.1.evil.example:4200", None, 400),
        ("", None, 400),
        (None, None, 400),
        ("127.0.0.1:4200", "http://evil.example", 403),
        ("127.0.0.1:4200", "http://127.0.0.1:8888", 403),
        ("127.0.0.1:4200", "null", 403),
        ("evil.example:4200", "http://evil.example:4200", 400),
    ],
)
def test_requests_of_others_are_refused(host: str | None, origin: str | None, status: int | None) -> None:
    headers = [
        (name, value.encode()) for name, value in ((b"host", host), (b"origin", origin)) if value is not None
    ]
    found = refusal(headers, ["127.0.0.1", "localhost", "Own.example"])
    assert (found and found[0]) == status
    if host == "127.0.0.1:4200" and origin is None:
        assert refusal([*headers, (b"host", b"evil.example")], ["127.0.0.1"]) is not None, "two hosts"
