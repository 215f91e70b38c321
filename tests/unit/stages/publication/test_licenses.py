"""The licence on the card: inherited, or a conflict said before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import Publication
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.stages.publication import publication_stage as hub
from rlhf_core.stages.publication.licenses import inherited, license_of, upstream_licenses
from rlhf_core.stages.publication.upstream_cards import header_of, upstream_cards
from tests.support.chain import BASE, Chain, save_model
from tests.support.stage_request import stage_request
from tests.support.text_rows import rows_of_text


@pytest.mark.parametrize(
    ("declared", "upstream", "expected"),
    [
        (None, {}, "unknown"),
        ("mit", {}, "mit"),
        (None, {"base": "apache-2.0", "data": "mit"}, "apache-2.0"),
        ("mit", {"base": "apache-2.0", "data": "cc-by-4.0"}, "mit"),
        (None, {"base": "apache-2.0", "data": "cc-by-nc-4.0"}, "cc-by-nc-4.0"),
        ("cc-by-nc-sa-4.0", {"base": "apache-2.0", "data": "CC-BY-NC-4.0"}, "cc-by-nc-sa-4.0"),
        (None, {"base": "llama3.1", "data": "mit"}, "llama3.1"),
        (None, {"base": "unknown", "data": "cc-by-sa-4.0"}, "cc-by-sa-4.0"),
    ],
)
def test_what_the_card_says(declared: str | None, upstream: dict[str, str], expected: str) -> None:
    assert inherited(declared, upstream) == expected


@pytest.mark.parametrize(
    ("declared", "upstream", "sentence"),
    rows_of_text(
        """
    apache-2.0 | {chats: cc-by-nc-4.0} | license is apache-2.0, and chats is under cc-by-nc-4.0: set license to
    apache-2.0 | {base: llama3.1} | license is apache-2.0, and base is under llama3.1
    mit | {chats: cc-by-sa-4.0} | license is mit, and chats is under cc-by-sa-4.0
    null | {base: llama3.1, chats: cc-by-nc-4.0} | chats is under cc-by-nc-4.0 and base under llama3.1, and one model cannot
    null | {chats: cc-by-nd-4.0} | chats is under cc-by-nd-4.0, which allows no derived work
    """,
        yaml_columns={0},
    ),
)
def test_conflicts_are_one_sentence(declared: str | None, upstream: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        inherited(declared, upstream)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: mit\n---\n# x\n", "mit"),
        ("---\nlicense: other\nlicense_name: gemma\n---\n", "gemma"),
        ("---\nlicense: [mit, gpl-3.0]\n---\n", "mit"),
        *(
            (text, None)
            for text in ("# x\n", "---\n[\n---\n", "", "---\ntags: []\n---\n", "---\n- mit\n---\n")
        ),
    ],
)
def test_the_front_matter_of_a_card(card: str, license: str | None) -> None:
    assert license_of(header_of(card)) == license


def test_licences_of_a_chain_come_from_cards_and_from_the_recipe(chain: Chain, tmp_path: Path) -> None:
    cards = upstream_cards(chain.checkpoint, None)
    assert upstream_licenses(cards, {}) == {}
    named = {str(chain.root / "data" / "sloppy.jsonl"): "mit", BASE: "llama3.1"}
    assert upstream_licenses(cards, named) == {"sloppy.jsonl": "mit", BASE: "llama3.1"}
    with pytest.raises(ValueError, match=r"licenses names other\.jsonl, which was not .* stand-in/base-1m, "):
        upstream_licenses(cards, {"other.jsonl": "mit"})
    save_model(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: gemma\n---\n")
    assert upstream_licenses(upstream_cards(tmp_path / "base", None), {}) == {"base": "gemma"}


def test_a_conflict_stops_the_stage_before_anything_is_written_or_sent(chain: Chain, tmp_path: Path) -> None:
    licenses = {"sloppy.jsonl": "cc-by-nc-4.0"}
    for license, place in (("apache-2.0", tmp_path / "stopped"), (None, tmp_path / "inherited")):
        run = RunDir(place)
        config = Publication(model="dpo-1", license=license, licenses=licenses)
        run.prepare(stage_request(config, {"dpo-1": str(chain.checkpoint)}, digest="0a"))
        if license:
            with pytest.raises(
                ValueError, match=r"license is apache-2\.0, and sloppy\.jsonl is under cc-by-nc-4\.0"
            ):
                run_in_directory(run.path, hub.run)
            assert not (run / "published").exists()
        else:
            run_in_directory(run.path, hub.run)
            assert "license: cc-by-nc-4.0" in (run / "published" / "README.md").read_text()
