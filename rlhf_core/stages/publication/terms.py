"""Passes a base model's terms on to models derived from it: the location of its licence, and whether readers
must request access. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from rlhf_core.config import KINDS
from rlhf_core.hub.api import RETRIES, with_retries, write_refusal
from rlhf_core.runs.lineage import here, lineage, stage_of
from rlhf_core.stages.publication.licenses import license_of
from rlhf_core.stages.publication.upload import Gated
from rlhf_core.stages.publication.upstream_cards import Header, ReadCard, card_of_model

ASKING = "extra_gated_"  # prefix of the card fields that users who request access must read and fill in


class Terms(NamedTuple):
    """Holds the terms of a published model's base model. `repo_id` is the base's Hub repository, or None if
    it is a folder."""

    repo_id: str | None = None
    header: Header = {}  # noqa: RUF012

    @property
    def asking(self) -> Header:
        return {name: value for name, value in self.header.items() if name.startswith(ASKING)}

    def license_fields(self, license: str) -> dict[str, Any]:
        """Returns the card's fields for `license`. If this is the base's licence, adds the base's link to it.
        If it is not on the Hub's list, it becomes `other`."""
        if license_of(self.header) != license:
            return {"license": license}
        fields: dict[str, Any] = {
            name: self.header[name]
            for name in ("license", "license_name", "license_link")
            if name in self.header
        }
        link = str(fields.get("license_link", ""))
        if link and "://" not in link and self.repo_id:  # a file next to the base's card
            fields["license_link"] = f"https://huggingface.co/{self.repo_id}/blob/main/{link}"
        return fields


def base_terms(output: Path, base_repo: str | None, read_card: ReadCard | None) -> Terms:
    """Returns the terms of a model's base, or of the repository `base_repo` that contains an adapter's
    base."""
    place = base_repo or _base_of(str(output))
    if place is None:
        return Terms()
    found = lineage(place)
    return Terms(found.name if found.kind == "hub" else base_repo, card_of_model(place, read_card))


def _base_of(place: str) -> str | None:
    """Returns the folder or Hub ID of the initial model of a chain of stages, or None if a stage no longer
    exists."""
    while made := stage_of(place):
        folder, record = made
        kind = KINDS.get(record["config"].get("stage", ""))
        start = record["inputs"].get(record["config"].get(kind.start)) if kind else None
        if start is None:
            return None
        place = here(str(start), folder)
    return place


def gated_like(
    wanted: Literal["base", "auto", "manual", "no"], terms: Terms, private: bool, api: HfApi | None
) -> Gated | None:
    """Returns how readers of a published model request access; None if they need not. With `base`, access is
    the same as for its base model. If that model is not gated on the Hub, access is `auto` if its card has
    fields for requests.

    Raises ValueError for a public model whose base cannot be read with this token.
    """
    if wanted != "base":
        return None if wanted == "no" else wanted

    def read() -> Any:
        try:
            return api.model_info(terms.repo_id).gated if api and terms.repo_id else None
        except RepositoryNotFoundError:
            if not private:
                raise ValueError(
                    f"the base model {terms.repo_id} cannot be read with this token, so it is not known"
                    " whether its readers must ask for access: set gated to no, auto or manual"
                ) from None
            print(
                f"the base model {terms.repo_id} cannot be read with this token: set gated if its readers"
                " must ask for access",
                flush=True,
            )
            return None

    found = with_retries("read who may read it", str(terms.repo_id), read, RETRIES, write_refusal)
    return found or ("auto" if terms.asking else None)
