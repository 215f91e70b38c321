"""Commands for results (`alignflow report`, `runs`, `stages`, `diff`, `lineage`, `gc`, `leaderboard`), and
`serve-reward`."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from flows.cli.results import artifacts_history, named_runs
from flows.cli.results.artifacts_tables import (
    show_board,
    show_differences,
    show_garbage,
    show_lineage,
    show_runs,
    show_stages,
    show_stores,
)
from flows.cli.show import OK, Whole, console, say
from rlhf_core.config.data import template_mistakes
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.lineage import data_of, stage_of
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.runs.run_records import RUN, RUNS, kept, pin, records
from rlhf_core.system.files import write_text
from rlhf_core.system.pages.secret_file import kept_secret

REWARD_KEY = "ALIGNFLOW_REWARD_KEY"  # the variable that `serve-reward` and its clients use

Artifacts = Annotated[Path, Parameter(help="The `artifacts` folder of recipes.")]
RunName = Annotated[
    str, Parameter(help="Name or id, as `alignflow runs` shows them; a name means its newest run.")
]
SECONDS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
runs_app = App(name="runs", help="The runs in an artifacts folder.")


def report(which: Annotated[str, Parameter(name="run")], *, artifacts: Artifacts = Path("artifacts")) -> int:
    """Rewrite the page of a run, and the page of all runs.

    Args:
        which: a run's name or id, a recipe, a recipe's folder ARTIFACTS/NAME, or ARTIFACTS for only the page
            of all runs.
    """
    from evaluation.report.index import write_index
    from tasks.run_report import found, rewrite, rewrite_run, write

    run = Path(which) if which.endswith((".yaml", ".yml")) else named_runs.place_of(artifacts, which)
    if run.parent.name == RUNS and run.suffix == ".json":
        page = rewrite_run(run)
    elif run.is_dir() and not (run / RUN).exists() and any(run.glob(f"*/{RUN}")):
        page = write_index(run)
    elif run.is_dir():
        page = rewrite(run)
    elif not run.exists():
        raise ValueError(
            f"{run}: this file or folder does not exist: give a recipe, the folder ARTIFACTS/NAME of one, or"
            " ARTIFACTS"
        )
    else:
        planned = plan(load_recipe(run))
        if not (planned.folder / RUN).exists():
            raise ValueError(
                f"recipe {planned.recipe.name} has not run yet ({planned.folder / RUN} does not exist): run"
                " it first"
            )
        page = write(planned, {node.name: found(node.run_dir) for node in planned.nodes})
    console.print(str(page), markup=False)
    return OK


@runs_app.default
def runs(artifacts: Artifacts = Path("artifacts"), *, json: bool = False) -> int:
    """List the runs in an artifacts folder, newest first.

    Args:
        json: print a JSON list instead of a table.
    """
    show_runs(console, records(artifacts), artifacts_history.stages(artifacts), json)
    return OK


@runs_app.command(name="pin")
def pin_run(run: RunName, artifacts: Artifacts = Path("artifacts")) -> int:
    """Pin a run: `alignflow gc` keeps its stages, whatever its options."""
    say(f"pinned: {pin(artifacts, run, True).label}")
    return OK


@runs_app.command(name="unpin")
def unpin_run(run: RunName, artifacts: Artifacts = Path("artifacts")) -> int:
    """Undo `alignflow runs pin`."""
    say(f"not pinned: {pin(artifacts, run, False).label}")
    return OK


def stages(artifacts: Artifacts = Path("artifacts")) -> int:
    """List the stages in an artifacts folder, oldest first."""
    show_stages(console, artifacts_history.stages(artifacts))
    show_stores(console, artifacts_history.stores(artifacts))
    return OK


def diff(before: str, after: str, *, artifacts: Artifacts = Path("artifacts")) -> int:
    """Show what changed between two runs: configuration, inputs, versions, metrics, win rates.

    Args:
        before: a run's name or id, a recipe's folder ARTIFACTS/NAME (its last run), or a stage's directory
            ARTIFACTS/stages/STAGE-DIGEST.
        after: another run, or another stage's directory.
    """
    places = [named_runs.place_of(artifacts, given) for given in (before, after)]
    show_differences(console, artifacts_history.differences(*places))
    return OK


def lineage(checkpoint: str, *, out: Path | None = None, artifacts: Artifacts = Path("artifacts")) -> int:
    """Show what a checkpoint was made from: its parents, their data, and the package versions they ran with.

    Args:
        checkpoint: a checkpoint, a stage's directory, a Hub id, or a run's name or id, which means its last
            checkpoint.
        out: also draw the lineage, into this SVG file.
    """
    checkpoint = named_runs.checkpoint_of(artifacts, checkpoint)
    found = artifacts_history.lineage_of(checkpoint)
    stage = stage_of(checkpoint)
    data = data_of(found, RunDir(stage[0]).artifacts if stage else None)
    show_lineage(console, found, data)
    if found.kind == "hub" and not Path(checkpoint).exists():
        console.print(
            f"The folder {checkpoint} does not exist. For a model on the Hub, nothing here records what it"
            " was made from.",
            markup=False,
        )
    if out is not None:
        from evaluation.report.drawing.dag import family_svg

        if not out.absolute().parent.is_dir():
            raise ValueError(
                f"--out {out}: the folder {out.absolute().parent} does not exist: create it, or give another"
                " file"
            )
        write_text(out, family_svg(found, data))
        say(f"\ndrawn in {out}")
    return OK


def gc(
    artifacts: Artifacts = Path("artifacts"),
    *,
    keep_runs: Whole | None = None,
    older_than: str | None = None,
    delete: bool = False,
) -> int:
    """Show which run keeps which stage, and what can be removed: stages that no run keeps, and resume states
    of finished stages.

    Without --keep-runs and --older-than, every recorded run keeps its stages. Pinned runs and runs in
    progress always do.

    Args:
        keep_runs: the newest N runs of each recipe keep their stages; older runs do not, unless --older-than
            keeps them.
        older_than: runs that began longer ago than this (such as 12h, 30d or 8w) do not keep their stages.
        delete: remove what no run keeps, except directories in which a process is working.
    """
    age = re.fullmatch(r"(\d{1,5})([hdw])", older_than or "0h", re.ASCII)
    if not age or (keep_runs or 0) < 0:
        raise ValueError(
            f"--older-than {older_than} --keep-runs {keep_runs}: give an age such as 12h, 30d or 8w, and 0 or"
            " more runs"
        )
    not_before = time.time() - int(age[1]) * SECONDS[age[2]] if older_than else None
    keeping = partial(kept, keep_runs=keep_runs, not_before=not_before)
    used, garbage = artifacts_history.survey(artifacts, keeping)
    show_garbage(
        console,
        used,
        garbage,
        {item.path for item in garbage if artifacts_history.remove(item, keeping)} if delete else None,
    )
    show_stores(console, artifacts_history.stores(artifacts))
    return OK


def serve_reward(
    checkpoint: str,
    *,
    port: Whole = 8000,
    host: str = "127.0.0.1",
    allow_host: str = "",
    home: Path = Path(".alignflow"),
    without_key: bool = False,
    template: str = "chat",
    template_args: str = "{}",
    micro_batch_size: Whole = 8,
) -> int:
    """Serve a reward model over HTTP, for `reward: {url: "http://HOST:PORT", api_key_env:
    ALIGNFLOW_REWARD_KEY}`. Stop it with Ctrl-C.

    Args:
        checkpoint: folder or Hub id of a reward model.
        port: 0 picks a free one and prints it.
        host: 0.0.0.0 also accepts connections from other machines.
        allow_host: more host names that clients may use for this machine, separated by commas.
        home: folder of the file reward-key, which holds the key that requests need unless
            ALIGNFLOW_REWARD_KEY is set.
        without_key: answer all users of this machine, without a key.
        template: 'chat' for the tokenizer's chat template, or a plain template with one {} for the prompt.
        template_args: arguments of the chat template as JSON, the same as in training, such as
            '{"enable_thinking": false}'.
        micro_batch_size: documents per forward pass.
    """
    arguments = _template_arguments(template_args)
    for mistake in template_mistakes(template, arguments):
        raise ValueError(mistake)
    if without_key and host not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(
            f"--without-key with --host {host}: anyone who reaches that address could use the server: leave"
            " one of them out"
        )
    import uvicorn

    from flows.serving.page_options import server_config
    from flows.serving.services import listen
    from rlhf_core.rewards.reward_server import reward_application
    from tasks.server_process import own_only

    names = [host, socket.gethostname(), *(name for name in allow_host.split(",") if name)]
    with listen(host, port) as listener:
        key = None if without_key else os.environ.get(REWARD_KEY) or kept_secret(home / "reward-key")
        application = reward_application(checkpoint, template, micro_batch_size, key, arguments)
        told = f"serving {checkpoint} on http://{host}:{listener.getsockname()[1]}"
        if without_key:
            told += "\nwarning: without a key, every user of this machine can use the server"
        elif not os.environ.get(REWARD_KEY):
            told += (
                f'\nclients need the key: export {REWARD_KEY}="$(cat'
                f' {shlex.quote(str((home / "reward-key").absolute()))})"'
            )
        console.print(told, markup=False, soft_wrap=True)
        uvicorn.Server(server_config(own_only(application, names), log_level="error", lifespan="off")).run(
            [listener]
        )
    return OK


def _template_arguments(text: str) -> dict[str, Any]:
    """Parses the JSON arguments of a chat template."""
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        example = '{"enable_thinking": false}'
        raise ValueError(f"--template-args {text}: give a JSON object, such as '{example}'")
    return arguments


def leaderboard(
    folder: Path,
    *,
    answers: Path | None = None,
    control: tuple[Literal["length", "markdown"], ...] = ("length", "markdown"),
    category: tuple[str, ...] = (),
    tokenizer: str | None = None,
    rounds: Whole = 1000,
    seed: Whole = 0,
    max_failed: float = 0.02,
    json: Path | None = None,
) -> int:
    """Score a folder of judgments: our own, or published judgments of Arena-Hard. Needs no model.

    Args:
        folder: a benchmark with model_judgment/ and model_answer/, an evaluation's run directory or report,
            or any folder of judgments.
        answers: folder of the answers, for style control; default: located from the folder of judgments.
        control: styles to control for.
        category: score only these categories.
        tokenizer: counts the tokens of answers whose file has no length: gpt-4o (tiktoken, downloaded), or a
            model's folder or Hub id.
        rounds: number of bootstrap resamples of the questions, for the intervals of style control.
        seed: seed of the bootstraps.
        max_failed: fraction of games without a verdict above which no score is given.
        json: file to write the boards to.
    """
    from evaluation.scores.arena_files import folders, read_judgments, read_styles, token_counter
    from evaluation.scores.leaderboard import How, as_json, boards

    if rounds < 1 or seed < 0:
        raise ValueError(
            f"--rounds {rounds} and --seed {seed}: give 1 or more rounds, and a seed of 0 or more"
        )
    if json and not json.absolute().parent.is_dir():
        raise ValueError(f"{json} cannot be written: the folder {json.absolute().parent} does not exist")
    if answers and not answers.is_dir():
        raise ValueError(f"{answers} is not a folder: give the folder with the answers as --answers")
    places = folders(folder)
    judgments = [
        judgment
        for judgment in read_judgments(places.judgments)
        if not category or judgment.category in category
    ]
    if not judgments:
        raise ValueError(
            f"{places.judgments}: found no judgments of the categories {', '.join(category)}: correct"
            " --category"
        )
    place = answers or places.answers
    styles = (
        read_styles(place, token_counter(tokenizer) if tokenizer else None) if place and control else None
    )
    found = boards(judgments, styles, How(control, rounds, seed, max_failed))
    for board in found:
        show_board(console, board)
    if styles is None and control:
        console.print(
            "no style control: no answers were found for the judgments (--answers FOLDER)", markup=False
        )
    if json:
        write_text(json, as_json(found))
    return OK
