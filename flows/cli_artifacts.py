"""The commands on what runs left in an artifacts folder: `alignflow report`, `runs`, `diff`, `lineage` and `gc`."""

from __future__ import annotations

from pathlib import Path

from flows.terminal import OK, console
from rlhf_core.plan import plan
from rlhf_core.recipe import load_recipe
from rlhf_core.stage import write_text


def report(run: Path) -> int:
    """Write the page of a run again, and the page over all runs beside it.

    Args:
        run: a recipe, the folder ARTIFACTS/NAME of one, or ARTIFACTS for the page over all runs alone.
    """
    from evaluation.index import write_index
    from tasks.report import RUN, found, rewrite, write

    if run.is_dir() and not (run / RUN).exists() and any(run.glob(f"*/{RUN}")):
        page = write_index(run)
    elif run.is_dir():
        page = rewrite(run)
    else:
        planned = plan(load_recipe(run))
        page = write(planned, {node.name: found(node.run_dir) for node in planned.nodes})
    console.print(str(page), markup=False)
    return OK


def runs(artifacts: Path = Path("artifacts")) -> int:
    """List the stages in an artifacts folder, the oldest first.

    Args:
        artifacts: the `artifacts` folder of recipes.
    """
    from flows.history import runs as found
    from flows.history import stores
    from flows.show import show_runs, show_stores

    show_runs(console, found(artifacts))
    show_stores(console, stores(artifacts))
    return OK


def diff(before: Path, after: Path) -> int:
    """Show what changed between two runs: configuration, inputs, versions, metrics.

    Args:
        before: a stage's directory ARTIFACTS/stages/STAGE-DIGEST, or a recipe's folder ARTIFACTS/NAME.
        after: another one of that sort.
    """
    from flows.history import differences
    from flows.show import show_differences

    show_differences(console, differences(before, after))
    return OK


def lineage(checkpoint: str, *, out: Path | None = None) -> int:
    """Show what a checkpoint came from: its parents, their data and the versions they were made with.

    Args:
        checkpoint: a checkpoint, a stage's directory, or a Hub id.
        out: also draw it, to this SVG file.
    """
    from flows.history import lineage_of
    from flows.show import show_lineage

    found = lineage_of(checkpoint)
    show_lineage(console, found)
    if out is not None:
        from evaluation.family import family_svg
        from rlhf_core.lineage import data_of

        if not out.absolute().parent.is_dir():
            raise ValueError(f"--out {out}: there is no folder {out.absolute().parent}; make it, or give another file")
        write_text(out, family_svg(found, data_of(found)))
        console.print(f"\ndrawn in {out}", markup=False, highlight=False)
    return OK


def gc(artifacts: Path = Path("artifacts"), *, delete: bool = False) -> int:
    """Show what no recipe needs: stages that no folder ARTIFACTS/NAME refers to, resume states of stages that are done.

    Args:
        artifacts: the `artifacts` folder of recipes.
        delete: remove it; what a process works on stays.
    """
    from flows.history import garbage, remove, stores
    from flows.show import show_garbage, show_stores

    found = garbage(artifacts)
    show_garbage(console, found, {item.path for item in found if remove(item)} if delete else None)
    show_stores(console, stores(artifacts))
    return OK
