"""Finds the licence of a publication from base models and data, and reports a conflict before anything is
sent. Torch-free.

It knows the licences that cards name (`upstream_cards`) and those that `publication.licenses` names. This
compares names by a short table; it is no legal advice; an unknown licence does not stop a publication.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlhf_core.hub.ids import parted, shown
from rlhf_core.stages.publication.upstream_cards import Cards, Header

UNKNOWN = "unknown"
FREE = re.compile(
    r"(apache-2\.0|mit|isc|bsd(-.+)?|cc0-1\.0|cc-by-\d\.\d|odc-by|unlicense|wtfpl|zlib|cdla-permissive-.+|pddl)"
)
NON_COMMERCIAL = re.compile(r"(^|-)(nc|noncommercial|non-commercial)(-|$)")
NO_DERIVATIVES = re.compile(r"(^|-)nd(-|$)")

Upstream = Mapping[str, str]  # name of a model or data set -> its licence


def inherited(declared: str | None, upstream: Upstream) -> str:
    """The licence for the card: `declared` if nothing upstream forbids it, else what upstream requires;
    `unknown` when nobody says.

    Permissive licences require nothing here; non-commercial ones for a non-commercial one; every other one
    (share-alike, a model's own) for itself. Raises ValueError, one sentence, when `declared` gives less, or
    when two of them cannot both be met.
    """
    known = {name: license.lower() for name, license in upstream.items() if license.lower() != UNKNOWN}
    for name, license in known.items():
        if NO_DERIVATIVES.search(license):
            raise ValueError(
                f"{name} is under {license}, which allows no derived work: what was made of it cannot be"
                " published"
            )
    binding = {name: license for name, license in known.items() if not FREE.fullmatch(license)}
    chosen = (
        declared.lower()
        if declared
        else next(iter(dict.fromkeys([*binding.values(), *known.values()])), UNKNOWN)
    )
    for name, license in binding.items():
        met = (
            bool(NON_COMMERCIAL.search(chosen))
            if NON_COMMERCIAL.search(license) and "-sa" not in license
            else chosen == license
        )
        if not met and declared:
            raise ValueError(
                f"license is {declared}, and {name} is under {license}: set license to {license}, or train"
                f" without {name}"
            )
        if not met:
            other = next(name for name, license in binding.items() if license == chosen)
            raise ValueError(
                f"{name} is under {license} and {other} under {chosen}, and one model cannot have both: set"
                " license to one for both, or train without one of them"
            )
    return declared or chosen


def upstream_licenses(cards: Cards, named: Mapping[str, str]) -> dict[str, str]:
    """Licences of the base models and the data whose cards these are, as far as they are known. `named` (of
    the recipe) goes first.

    ValueError when `named` names nothing that was used.
    """
    given = {shown(parted(name)[0]): license for name, license in named.items()}
    strange = [name for name in given if name not in cards]
    if strange:
        raise ValueError(f"licenses names {strange[0]}, which was not used: name one of {', '.join(cards)}")
    licenses = {name: given.get(name) or license_of(read()) for name, read in cards.items()}
    return {name: license for name, license in licenses.items() if license}


def license_of(header: Header) -> str | None:
    """The licence that a card names; `license_name` when it is none of the Hub's list (`other`)."""
    license = (header.get("license_name") if header.get("license") == "other" else None) or header.get(
        "license"
    )
    return str(license[0] if isinstance(license, list) and license else license) if license else None
