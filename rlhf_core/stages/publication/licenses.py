"""Determines the licence of a publication from its base models and data, and reports conflicts before
anything is sent. Torch-free.

Uses the licences named in cards (see `upstream_cards`) and in `publication.licenses`, and looks up their
terms in a short table. This is not legal advice, and an unknown licence does not stop a publication.
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

Upstream = Mapping[str, str]  # maps the name of a model or data set to its licence


def inherited(declared: str | None, upstream: Upstream) -> str:
    """Returns the licence for the card: `declared` if nothing upstream forbids it, otherwise the licence that
    upstream requires; `unknown` if no licence is known.

    Permissive licences require nothing here. Non-commercial licences require a non-commercial licence. Any
    other licence (share-alike, or a model's own) requires itself. Raises ValueError with a one-sentence
    message if `declared` is too permissive, if two licences cannot both be met, or if a licence forbids
    derived works.
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
    """Returns the known licences of the base models and data that these cards describe. `named` (from the
    recipe) takes precedence.

    Raises ValueError if `named` contains something that was not used.
    """
    given = {shown(parted(name)[0]): license for name, license in named.items()}
    strange = [name for name in given if name not in cards]
    if strange:
        raise ValueError(f"licenses names {strange[0]}, which was not used: name one of {', '.join(cards)}")
    licenses = {name: given.get(name) or license_of(read()) for name, read in cards.items()}
    return {name: license for name, license in licenses.items() if license}


def license_of(header: Header) -> str | None:
    """Returns the licence named in a card, or its `license_name` if the licence is not on the Hub's list
    (`other`); None if no licence is named."""
    license = (header.get("license_name") if header.get("license") == "other" else None) or header.get(
        "license"
    )
    return str(license[0] if isinstance(license, list) and license else license) if license else None
