"""A base model's terms on what was made of it: the link to its licence, and access on request, on the card
and on the stand-in Hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from rlhf_core.config import Publication
from rlhf_core.hub.api import Retries
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.stages.publication import publication_stage as publication
from rlhf_core.stages.publication.terms import Terms, base_terms, gated_like
from rlhf_core.stages.publication.upload import upload
from tests.support.chain import BASE, Chain, save_model
from tests.support.hub_server import Blob, Hub, Repository
from tests.support.publishing import REPO, TAG, api, model_to_publish, serving_hub
from tests.support.stage_request import stage_request

HEADER = {
    "license": "other",
    "license_name": "some-community-license",
    "license_link": "https://example.org/license",
    "extra_gated_prompt": "Accept the terms.",
    "extra_gated_fields": {"Name": "text", "I accept": "checkbox"},
    "tags": ["not a term"],
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving_hub(monkeypatch) as running:
        yield running


def with_base(server: Hub, gated: Any, header: dict[str, Any] = HEADER) -> None:
    base = server.repositories[BASE] = Repository(private=False, gated=gated)
    base.commit(
        "main", "card", {"README.md": Blob(f"---\n{yaml.safe_dump(header)}---\n# base\n".encode(), False)}
    )


def published(chain: Chain, place: Path, **config: Any) -> dict[str, Any]:
    """Runs the stage; returns the card's front matter."""
    request = stage_request(
        Publication(model="dpo-1", **{"repo_id": REPO, **config}),
        {"dpo-1": str(chain.checkpoint)},
        digest="00aa",
    )
    run = RunDir(place)
    run.prepare(request)
    run_in_directory(run.path, publication.run)
    return dict(yaml.safe_load((place / "published" / "README.md").read_text().split("---\n")[1]))


@pytest.mark.parametrize("gated", ["manual", "auto", False])
def test_card_and_repository_have_the_bases_terms(
    chain: Chain, server: Hub, gated: Any, tmp_path: Path
) -> None:
    with_base(server, gated)
    header = published(chain, tmp_path / "run")
    assert {name: header[name] for name in HEADER if name != "tags"} == {
        name: HEADER[name] for name in HEADER if name != "tags"
    }
    assert "not a term" not in header["tags"]
    assert server.repositories[REPO].gated == (gated or "auto")  # the card has fields for those that ask


def test_readers_ask_before_there_is_anything_to_read(chain: Chain, server: Hub, tmp_path: Path) -> None:
    with_base(server, "manual")
    published(chain, tmp_path / "run", private=False)
    asked = [request.split("?")[0] for request in server.requests]
    assert next(i for i, r in enumerate(asked) if r.endswith("/settings")) < next(
        i for i, r in enumerate(asked) if "/commit/" in r
    )


def test_an_open_base_leaves_access_alone(chain: Chain, server: Hub, tmp_path: Path) -> None:
    with_base(server, False, {"license": "apache-2.0"})
    assert published(chain, tmp_path / "run")["license"] == "apache-2.0"
    assert server.repositories[REPO].gated is False
    assert not any("/settings" in request for request in server.requests)


@pytest.mark.parametrize(("wanted", "found"), [("no", False), ("auto", "auto"), ("manual", "manual")])
def test_the_recipe_decides_where_it_says_so(
    chain: Chain, server: Hub, wanted: str, found: Any, tmp_path: Path
) -> None:
    with_base(server, "manual" if wanted != "manual" else "auto")
    published(chain, tmp_path / "run", gated=wanted)
    assert server.repositories[REPO].gated == found


def test_a_base_that_this_token_cannot_read(
    chain: Chain, server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert published(chain, tmp_path / "run")["license"] == "unknown"
    assert server.repositories[REPO].gated is False
    assert f"the base model {BASE} cannot be read with this token" in capsys.readouterr().out
    with pytest.raises(
        ValueError,
        match="so it is not known whether its readers must ask for access: set gated to no, auto or manual",
    ):
        published(chain, tmp_path / "public", private=False)
    del server.repositories[REPO]
    published(chain, tmp_path / "open", private=False, gated="no")
    assert not server.repositories[REPO].private and server.repositories[REPO].gated is False


def test_an_adapter_has_the_terms_of_the_repository_of_its_base(
    server: Hub, chain: Chain, tmp_path: Path
) -> None:
    with_base(server, "manual")
    save_model(tmp_path / "base")
    found = base_terms(
        tmp_path / "base", BASE, lambda repo, kind: str(api(server).hf_hub_download(repo, "README.md"))
    )
    assert found.repo_id == BASE and found.asking and gated_like("base", found, True, api(server)) == "manual"


def test_a_moved_chain_has_the_terms_of_its_base(chain: Chain, server: Hub, tmp_path: Path) -> None:
    with_base(server, "manual")
    shutil.copytree(chain.root, tmp_path / "moved")
    chain.root.rename(gone := chain.root.with_name("gone"))
    try:
        there = tmp_path / "moved" / chain.checkpoint.relative_to(chain.root)
        found = base_terms(
            there, None, lambda repo, kind: str(api(server).hf_hub_download(repo, "README.md"))
        )
    finally:
        gone.rename(chain.root)
    assert found.repo_id == BASE and found.asking


def test_a_dry_run_says_it_and_asks_nobody(
    chain: Chain, server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(chain, tmp_path / "run", dry_run=True, gated="manual")
    assert "access: on request (manual)" in capsys.readouterr().out and not server.requests


def test_a_repository_that_is_gated_already_keeps_how(server: Hub, tmp_path: Path) -> None:
    server.repositories[REPO] = Repository(private=True, gated="manual")
    upload(api(server), model_to_publish(tmp_path), REPO, True, TAG, Retries(1, 0.0), gated="auto")
    assert server.repositories[REPO].gated == "manual"


def test_a_declared_licence_has_no_link_of_anothers() -> None:
    terms = Terms("owner/base", HEADER)
    assert terms.license_fields("mit") == {"license": "mit"}
    beside = Terms("owner/base", HEADER | {"license_link": "LICENSE"}).license_fields(
        "some-community-license"
    )
    assert beside["license_link"] == "https://huggingface.co/owner/base/blob/main/LICENSE"
    assert set(terms.license_fields("some-community-license")) == {"license", "license_name", "license_link"}
