"""Finds the licence of a publication from base models and data, and reports a conflict before anything is sent. Torch-free.

It knows the licences that cards name (`license` in README.md of a model folder, of the Hub's cache, or on the Hub) and those that
`publication.licenses` names. This compares names by a short table; it is no legal advice; an unknown licence does not stop a publication.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from huggingface_hub import try_to_load_from_cache

from rlhf_core.hub.ids import is_hub_id, parted, shown
from rlhf_core.runs.lineage import lineage, sources, stage_of

UNKNOWN = "unknown"
FREE = re.compile(r"(apache-2\.0|mit|isc|bsd(-.+)?|cc0-1\.0|cc-by-\d\.\d|odc-by|unlicense|wtfpl|zlib|cdla-permissive-.+|pddl)")
NON_COMMERCIAL, NO_DERIVATIVES = re.compile(r"(^|-)(nc|noncommercial|non-commercial)(-|$)"), re.compile(r"(^|-)nd(-|$)")

ReadCard = Callable[[str, str], str | None]  # (repository, "model" or "dataset") -> its README.md here; None: it has none for us
Upstream = Mapping[str, str]  # name of a model or data set -> its licence


def inherited(declared: str | None, upstream: Upstream) -> str:
    """The licence for the card: `declared` if nothing upstream forbids it, else what upstream requires; `unknown` when nobody says.

    Permissive licences require nothing here; non-commercial ones for a non-commercial one; every other one (share-alike, a model's own)
    for itself. Raises ValueError, one sentence, when `declared` gives less, or when two of them cannot both be met.
    """
    known = {name: license.lower() for name, license in upstream.items() if license.lower() != UNKNOWN}
    for name, license in known.items():
        if NO_DERIVATIVES.search(license):
            raise ValueError(f"{name} is under {license}, which allows no derived work: what was made of it cannot be published")
    binding = {name: license for name, license in known.items() if not FREE.fullmatch(license)}
    chosen = declared.lower() if declared else next(iter(dict.fromkeys([*binding.values(), *known.values()])), UNKNOWN)
    for name, license in binding.items():
        met = bool(NON_COMMERCIAL.search(chosen)) if NON_COMMERCIAL.search(license) and "-sa" not in license else chosen == license
        if not met and declared:
            raise ValueError(f"license is {declared}, and {name} is under {license}: set license to {license}, or train without {name}")
        if not met:
            other = next(name for name, license in binding.items() if license == chosen)
            raise ValueError(
                f"{name} is under {license} and {other} under {chosen}, and one model cannot have both: set license to one for both, "
                f"or train without one of them"
            )
    return declared or chosen


def upstream_licenses(output: Path, named: Mapping[str, str], read_card: ReadCard | None) -> dict[str, str]:
    """Licences of the base models and the data that an output of a stage goes back to, by Hub id or file name, as far as they are known.

    `named` (of the recipe) goes first; then cards on this machine; then, with `read_card`, the Hub's.
    ValueError when `named` names nothing that was used.
    """
    lookups: dict[str, Callable[[], str | None]] = {}
    for place in _leaves(str(output), set()):
        found = lineage(place)
        at = f"{found.name}@{found.digest}" if found.kind == "hub" and found.digest else found.name
        lookups[found.name] = lambda place=place, at=at: _local(Path(place)) or _hub(at, "model", read_card)  # type: ignore[misc]
    for _, _, source in sources(lineage(output)):
        lookups[shown(parted(source["path"])[0])] = lambda path=source["path"]: _hub(path, "dataset", read_card)  # type: ignore[misc]
    given = {shown(parted(name)[0]): license for name, license in named.items()}
    if strange := [name for name in given if name not in lookups]:
        raise ValueError(f"licenses names {strange[0]}, which was not used: name one of {', '.join(lookups)}")
    licenses = {name: given.get(name) or look_up() for name, look_up in lookups.items()}
    return {name: license for name, license in licenses.items() if license}


def license_of(readme: str) -> str | None:
    """The licence that a card's front matter names; `license_name` when it is none of the Hub's list (`other`)."""
    parts = readme.split("---\n", 2)
    try:
        header = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        return None
    if not isinstance(header, dict):
        return None
    license = (header.get("license_name") if header.get("license") == "other" else None) or header.get("license")
    return str(license[0] if isinstance(license, list) and license else license) if license else None


def _leaves(place: str, seen: set[str]) -> list[str]:
    """The models that no stage made, which a place goes back to."""
    found = stage_of(place)
    if found is None:
        return [place]
    folder, record = found
    if str(folder) in seen:
        return []
    seen.add(str(folder))
    return [leaf for parent in record["inputs"].values() for leaf in _leaves(str(parent), seen)]


def _local(folder: Path) -> str | None:
    readme = folder / "README.md"
    return license_of(readme.read_text()) if readme.is_file() and (folder / "config.json").is_file() else None


def _hub(place: str, repo_type: str, read_card: ReadCard | None) -> str | None:
    """The licence of a repository; its card at the commit if it is here, else as it is today."""
    if not is_hub_id(place):
        return None
    repo_id, revision = parted(place)
    cached = try_to_load_from_cache(repo_id, "README.md", repo_type=repo_type, revision=revision)
    if not isinstance(cached, str) and read_card is not None:
        cached = read_card(repo_id, repo_type)
    return license_of(Path(cached).read_text()) if isinstance(cached, str) else None
