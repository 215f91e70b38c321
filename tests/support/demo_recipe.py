"""A shipped recipe, for material in another folder."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"


def demo_recipe(folder: Path, name: str = "tiny-cpu", file: str = "recipe.yaml") -> Path:
    """Writes a recipe of deployments/recipes into a folder; its material is `demo/material` there."""
    place = folder / file
    place.write_text(
        (RECIPES / f"{name}.yaml")
        .read_text()
        .replace("../../demo/", "demo/")
        .replace("../tasks/", f"{RECIPES.parent}/tasks/")
    )
    return place
