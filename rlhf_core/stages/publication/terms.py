"""Carries a base model's terms on to what was made of it: where its licence is, and that readers must ask for access. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from rlhf_core.hub.api import RETRIES, with_retries, write_refusal
from rlhf_core.runs.lineage import lineage, trained
from rlhf_core.stages.publication.licenses import license_of
from rlhf_core.stages.publication.upload import Gated
from rlhf_core.stages.publication.upstream_cards import Cards, Header

ASKING = "extra_gated_"  # fields of a card that say what those who ask for access read and fill in


class Terms(NamedTuple):
    """Terms of the base model that a published one was trained from. `repo_id`: its Hub repository; None: it is a folder."""

    repo_id: str | None = None
    header: Header = {}  # noqa: RUF012

    @property
    def asking(self) -> Header:
        return {name: value for name, value in self.header.items() if name.startswith(ASKING)}

    def license_fields(self, license: str) -> dict[str, Any]:
        """The card's fields for `license`: with the base's link to it, and as `other` where the Hub's list does not have it."""
        if license_of(self.header) != license:
            return {"license": license}
        return {name: self.header[name] for name in ("license", "license_name", "license_link") if name in self.header}


def base_terms(output: Path, cards: Cards) -> Terms:
    base = trained(lineage(output))[0]
    if base.is_stage or base.name not in cards:
        return Terms()
    return Terms(base.name if base.kind == "hub" else None, cards[base.name]())


def gated_like(wanted: Literal["base", "auto", "manual", "no"], terms: Terms, api: HfApi | None) -> Gated | None:
    """How readers of a published model ask for access. `base`: as those of its base do; where its repository cannot be read: `auto` if
    the base's card has fields for them."""
    if wanted != "base":
        return None if wanted == "no" else wanted

    def read() -> Any:
        try:
            return api.model_info(terms.repo_id).gated if api and terms.repo_id else None
        except RepositoryNotFoundError:
            return None

    found = with_retries("read who may read it", str(terms.repo_id), read, RETRIES, write_refusal)
    return found or ("auto" if terms.asking else None)
