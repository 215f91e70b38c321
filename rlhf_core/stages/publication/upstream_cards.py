"""Reads the cards of the base models and data sets from which a stage's output is derived. Reads them from
their folders, the Hub's cache, or the Hub. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache

from rlhf_core.hub.ids import is_hub_id, parted, shown
from rlhf_core.runs.lineage import here, lineage, sources, stage_of

# (repository, "model" or "dataset") -> local path of its README.md; None if it is missing or unreadable
ReadCard = Callable[[str, str], str | None]
Header = dict[str, Any]  # a card's front matter
# keyed by Hub ID or file name; read on demand; {} if there is no card
Cards = Mapping[str, Callable[[], Header]]


def upstream_cards(output: Path, read_card: ReadCard | None) -> Cards:
    """Returns the cards. Local cards take precedence over cards on the Hub, which need `read_card`."""
    cards: dict[str, Callable[[], Header]] = {}
    for place in _leaves(str(output), set()):
        cards[lineage(place).name] = cache(partial(card_of_model, place, read_card))
    for _, _, source in sources(lineage(output)):
        cards[shown(parted(source["path"])[0])] = cache(
            partial(_of_hub, source["path"], "dataset", read_card)
        )
    return cards


def header_of(readme: str) -> Header:
    """Returns a card's front matter; {} if it has none."""
    parts = readme.split("---\n", 2)
    try:
        header = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        return {}
    return header if isinstance(header, dict) else {}


def _leaves(place: str, seen: set[str]) -> list[str]:
    """Returns the models that a checkpoint is derived from and that no stage created."""
    found = stage_of(place)
    if found is None:
        return [place]
    folder, record = found
    if str(folder) in seen:
        return []
    seen.add(str(folder))
    return [leaf for parent in record["inputs"].values() for leaf in _leaves(here(str(parent), folder), seen)]


def card_of_model(place: str, read_card: ReadCard | None) -> Header:
    """Returns a base model's card, given its folder or Hub ID."""
    found = lineage(place)
    at = f"{found.name}@{found.digest}" if found.kind == "hub" and found.digest else found.name
    readme = Path(place) / "README.md"
    local = readme.is_file() and (readme.parent / "config.json").is_file()
    return header_of(readme.read_text()) if local else _of_hub(at, "model", read_card)


def _of_hub(place: str, repo_type: str, read_card: ReadCard | None) -> Header:
    """Returns a repository's card at the given commit if that is cached, otherwise the current card."""
    if not is_hub_id(place):
        return {}
    repo_id, revision = parted(place)
    cached = try_to_load_from_cache(repo_id, "README.md", repo_type=repo_type, revision=revision)
    if not isinstance(cached, str) and read_card is not None:
        cached = read_card(repo_id, repo_type)
    return header_of(Path(cached).read_text()) if isinstance(cached, str) else {}
