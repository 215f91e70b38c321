"""Whether the folder that a publication names is free. Torch-free."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config import Publication
from rlhf_core.recipe.plan import Node
from rlhf_core.stages.publication.folder import refuse_foreign


def folder_problem(node: Node) -> list[str]:
    """Says when a publication's folder holds files that alignflow has not published, which it would refuse at the end of the run."""
    config = node.config
    if isinstance(config, Publication) and config.folder and not config.dry_run:
        try:
            refuse_foreign(Path(config.folder).expanduser().resolve())
        except ValueError as error:
            return [f"stages.{node.name}.folder: {error}"]
    return []
