"""Recipes from a web server and from a bucket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from rlhf_core.recipe.load_recipe import given_recipe, load_recipe, recipe_of
from tests.support.s3_server import s3
from tests.support.tiny_recipe import TEXT, Write


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
        assert str(caught.value).startswith(told)
        assert "password" not in str(caught.value)
        assert "abc" not in str(caught.value)


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
