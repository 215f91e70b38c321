"""The command `alignflow`.

Exit codes: 0 ok; 1 a stage or a gate failed; 2 wrong input (recipe, overrides, files, data); 3 the machine or environment is not
enough (CPUs, GPUs, keys, packages, a folder that cannot be written to); 130 interrupted; 143 terminated.
Flows are imported where they are run: `validate` and `--dry-run` need no Prefect.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from cyclopts import App, CycloptsError
from rich.console import Console

from flows import cli_loops
from rlhf_core import watch
from rlhf_core.changes import outlook
from rlhf_core.check import MachineLacks, check_inputs, check_machine, needs, require_here
from rlhf_core.gates import GateFailed
from rlhf_core.launch import ENVIRONMENT, WRONG_INPUT, StageFailed, raised_by_us
from rlhf_core.machine import no_room
from rlhf_core.plan import Plan, plan
from rlhf_core.recipe import load_recipe
from rlhf_core.remote_files import StoreFault
from rlhf_core.revisions import PINS
from rlhf_core.stage import write_text

OK, FAILED, INTERRUPTED, TERMINATED = 0, 1, 130, 143

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True, soft_wrap=True, highlight=False)


def installed_version() -> str:
    try:
        return version("alignflow")
    except PackageNotFoundError:
        return "not installed"


app = App(
    name="alignflow",
    help="Aligns a language model by a recipe: SFT, reward model, PPO, iterative DPO, evaluation, publication.\n\n"
    "Exit codes: 0 ok, 1 a stage or a gate failed, 2 wrong input, 3 machine or environment is not enough, 130 interrupted.",
    version=installed_version,
)
app.command(cli_loops.loop_app)
app.command(cli_loops.serve)


@app.command
def run(recipe: Path, *overrides: str, dry_run: bool = False, latest: bool = False) -> int:
    """Run all stages of a recipe that are not done yet.

    Parameters
    ----------
    recipe: YAML file.
    overrides: <stage>.<field>=<value>, such as ppo.actor_learning_rate=5e-7, or seed=1.
    dry_run: only show the stages, what would be skipped and why.
    latest: look up branches and tags of the Hub anew, unless the last run of this recipe is still to be finished.
    """
    loaded = load_recipe(recipe, overrides)
    if latest and not dry_run:
        from flows.alignment import look_up_anew

        look_up_anew(loaded)
    planned = plan(loaded)
    _tell_pins(planned)
    if dry_run:
        from flows.show import show_plan

        show_plan(console, planned, outlook(planned))
        return OK
    require_here(planned, planned.nodes)
    from flows.alignment import alignment

    return _run(planned, lambda: alignment(planned.recipe))


@app.command
def stage(name: str, recipe: Path, *overrides: str) -> int:
    """Run one stage of a recipe and nothing else; its parents must be done. The name of a loop runs all of its stages.

    Parameters
    ----------
    name: name of the stage, as `alignflow run RECIPE --dry-run` shows it.
    recipe: YAML file.
    overrides: as for run.
    """
    planned = plan(load_recipe(recipe, overrides))
    nodes = planned.stages_of(name)
    from flows.alignment import require_parents
    from flows.alignment import stage as flow
    from tasks.store import bring_parents

    bring_parents(planned, nodes)
    require_parents(planned, nodes)
    require_here(planned, nodes)
    return _run(planned, lambda: flow(planned.recipe, name))


@app.command
def validate(recipe: Path, *overrides: str, here: bool = False) -> int:
    """Check a recipe: keys, values, and that its stages fit together. Needs none of its files, and a network only to look up branches and
    tags of the Hub.

    Parameters
    ----------
    recipe: YAML file.
    overrides: as for run.
    here: also check files, columns, tokenizer, limits and this machine's resources, as run does before any work.
    """
    planned = plan(load_recipe(recipe, overrides))
    _tell_pins(planned)
    inputs = check_inputs(planned, planned.nodes) if here else []
    machine = check_machine(planned, planned.nodes) if here else []
    for problem in inputs + machine:
        errors.print(problem, markup=False)
    if not inputs and not machine:
        console.print(f"{recipe}: ok, {len(planned.nodes)} stages{' and everything they need is here' if here else ''}", markup=False)
    return WRONG_INPUT if inputs else ENVIRONMENT if machine else OK


@app.command(name="plan")
def forecast(recipe: Path, *overrides: str, gpus: int = 0, card_memory: float = 139.8, flops: float = 770, bandwidth: float = 4.3) -> int:
    """Estimate memory of each card and seconds of an iteration, and say which placement to choose. Starts nothing.

    Parameters
    ----------
    recipe: YAML file.
    overrides: as for run.
    gpus: cards to place a PPO stage on; default: as many as the recipe asks for.
    card_memory: GiB of a card; the defaults of these three are those of an H200.
    flops: TFLOP/s of its bf16 matrix products, as measured.
    bandwidth: TB/s of its memory, as measured.
    """
    from flows.forecast import show_forecast
    from rlhf_core.forecast.seconds import Card

    planned = plan(load_recipe(recipe, overrides))
    asked = max((round(needs(node.config).gpus) for node in planned.nodes), default=0)
    show_forecast(console, planned, gpus or max(1, asked), Card(card_memory * 2**30, flops * 1e12, bandwidth * 1e12))
    return 0


@app.command
def data(recipe: Path, *overrides: str) -> int:
    """Report on the data of a recipe without training: rows, lengths, duplicates, balance and faults. Needs files and tokenizers.

    Parameters
    ----------
    recipe: YAML file.
    overrides: as for run.
    """
    from rlhf_core.data.examine import examine
    from rlhf_core.data.report import markdown

    for name, surveys in examine(plan(load_recipe(recipe, overrides))):
        console.print(f"# Data of {name}\n\n{markdown(surveys)}", markup=False, highlight=False)
    return OK


@app.command
def migrate(script: Path, *, out: Path = Path("recipe.yaml"), gpus: int = 8) -> int:
    """Turn a launch script of OpenRLHF, in its flat or its dotted flags, into a recipe. Executes nothing of it.

    Parameters
    ----------
    script: shell script, or Kubernetes YAML with one inside.
    out: recipe to write; it must not exist yet. Its comments say what became of every flag.
    gpus: GPUs of one machine, for launchers that take all there are.
    """
    from flows.show import show_migration
    from rlhf_core.migrate.script import migrate as read

    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: give the number of GPUs of one machine, 1 or more")
    if out.exists():
        raise ValueError(f"{out} exists already: give another --out, or remove it")
    found = read(script, gpus)
    write_text(out, found.text)
    show_migration(console, out, found)
    return OK


@app.command
def doctor() -> int:
    """Show versions and devices, and what is missing."""
    from flows.doctor import examine

    findings = examine()
    for level, what, value in findings:
        mark = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "bad": "[red]bad [/]"}[level]
        console.print(f"{mark} {what:22} {value}", highlight=False)
    return ENVIRONMENT if any(finding.level == "bad" for finding in findings) else OK


@app.command
def report(run: Path) -> int:
    """Write the page of a run again, and the page over all runs beside it.

    Parameters
    ----------
    run: a recipe, the folder <artifacts>/<recipe name>, or <artifacts> for the page over all runs alone.
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


@app.command
def runs(artifacts: Path = Path("artifacts")) -> int:
    """List the stages in an artifacts folder, the oldest first.

    Parameters
    ----------
    artifacts: the `artifacts` folder of recipes.
    """
    from flows.history import runs as found
    from flows.history import stores
    from flows.show import show_runs, show_stores

    show_runs(console, found(artifacts))
    show_stores(console, stores(artifacts))
    return OK


@app.command
def diff(before: Path, after: Path) -> int:
    """Show what changed between two runs: configuration, inputs, versions, metrics.

    Parameters
    ----------
    before: a stage's directory <artifacts>/stages/<stage>-<digest>, or a recipe's folder <artifacts>/<recipe name>.
    after: another one of that sort.
    """
    from flows.history import differences
    from flows.show import show_differences

    show_differences(console, differences(before, after))
    return OK


@app.command
def lineage(checkpoint: str, *, out: Path | None = None) -> int:
    """Show what a checkpoint came from: its parents, their data and the versions they were made with.

    Parameters
    ----------
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


@app.command
def gc(artifacts: Path = Path("artifacts"), *, delete: bool = False) -> int:
    """Show what no recipe needs: stages that no folder <artifacts>/<recipe name> refers to, resume states of stages that are done.

    Parameters
    ----------
    artifacts: the `artifacts` folder of recipes.
    delete: remove it; what a process works on stays.
    """
    from flows.history import garbage, remove, stores
    from flows.show import show_garbage, show_stores

    found = garbage(artifacts)
    show_garbage(console, found, {item.path for item in found if remove(item)} if delete else None)
    show_stores(console, stores(artifacts))
    return OK


@app.command
def serve_reward(checkpoint: str, *, port: int = 8000, host: str = "127.0.0.1", template: str = "chat", micro_batch_size: int = 8) -> int:
    """Serve a reward model over HTTP, for `reward: http://HOST:PORT` of other runs. Ends with Ctrl-C.

    Parameters
    ----------
    checkpoint: folder or Hub id of a reward model.
    port: 0 takes a free one and says which.
    host: 0.0.0.0 listens to other machines too; there is no authentication.
    template: 'chat': the tokenizer's chat template; else a plain one with one {} for the prompt.
    micro_batch_size: documents of one forward pass.
    """
    if "{}" not in template and template != "chat":
        raise ValueError(f"template {template!r} must be 'chat' or hold exactly one {{}} for the prompt")
    from rlhf_core.reward_server import reward_server

    try:
        server = reward_server(checkpoint, host, port, template, micro_batch_size)
    except OSError as error:
        raise MachineLacks(f"nothing can be served on {host}:{port} ({error.strerror}); give another --port or --host") from None
    console.print(f"serving {checkpoint} on http://{host}:{server.server_address[1]}", markup=False)
    with server:
        server.serve_forever()
    return OK


@app.command
def pull(model: str, folder: Path) -> int:
    """Download a model of the Hub at one commit, to start a stage from. A private one needs a token in HF_TOKEN.

    Parameters
    ----------
    model: owner/name, or owner/name@REVISION with a branch, a tag or a commit.
    folder: where to; give it as base_model, or as a stage's model.
    """
    from rlhf_core.pull import pull as fetch

    try:
        commit = fetch(model, folder)
    except ConnectionError as error:
        raise MachineLacks(str(error)) from None
    console.print(f"{folder}: {model.partition('@')[0]} at {commit}", markup=False, highlight=False)
    return OK


@app.command
def leaderboard(
    folder: Path,
    *,
    answers: Path | None = None,
    control: tuple[Literal["length", "markdown"], ...] = ("length", "markdown"),
    category: tuple[str, ...] = (),
    reference: bool = False,
    tokenizer: str | None = None,
    rounds: int = 1000,
    seed: int = 0,
    max_failed: float = 0.02,
    json: Path | None = None,
) -> int:
    """Score a folder of judgments, ours or published ones of Arena-Hard. Asks no model.

    Parameters
    ----------
    folder: a benchmark with model_judgment/ and model_answer/, an evaluation's run directory or report, or any folder of judgments.
    answers: folder of the answers, for style control; default: beside the judgments.
    control: styles to control for.
    category: only these categories.
    reference: also show arena-hard-auto's own statistics (its bootstraps, seeded).
    tokenizer: counts the length of answers whose file does not say it: gpt-4o (tiktoken, a download) or a model's folder or Hub id.
    rounds: bootstrap resamples of the questions.
    seed: seed of the bootstraps.
    max_failed: share of games without a verdict above which there is no score.
    json: file to write the boards to.
    """
    from evaluation.arena_files import folders, read_judgments, read_styles, token_counter
    from evaluation.leaderboard import as_json, boards
    from flows.show import show_board

    places = folders(folder)
    judgments = [judgment for judgment in read_judgments(places.judgments) if not category or judgment.category in category]
    if not judgments:
        raise ValueError(f"{places.judgments}: there are no judgments of the categories {', '.join(category)}: correct --category")
    place = answers or places.answers
    styles = read_styles(place, token_counter(tokenizer) if tokenizer else None) if place and control else None
    found = boards(judgments, styles, control, "ours", rounds, seed, max_failed)
    if reference:
        found += boards(judgments, styles, control, "reference", rounds, seed, max_failed)
    for board in found:
        show_board(console, board)
    if styles is None and control:
        console.print("no style control: there are no answers beside the judgments (--answers FOLDER)", markup=False)
    if json:
        write_text(json, as_json(found))
    return OK


@app.command
def config_docs() -> int:
    """Print all fields of a recipe as markdown."""
    from flows.show import config_docs

    print(config_docs())
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    """The command: runs, tells what went wrong in one sentence, returns the exit code."""
    try:
        result: Any = app(sys.argv[1:] if argv is None else argv, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else OK
    except (CycloptsError, ValueError) as error:
        if not isinstance(error, CycloptsError) and not raised_by_us(error):
            raise
        errors.print(str(error), markup=False)
        return WRONG_INPUT
    except (MachineLacks, StoreFault) as error:
        errors.print(str(error), markup=False)
        return ENVIRONMENT
    except OSError as error:
        if not (reason := no_room(error)):
            raise
        errors.print(f"{error.filename or 'the artifacts folder'} cannot be written to: {reason}, then run again", markup=False)
        return ENVIRONMENT
    except StageFailed as error:
        errors.print(str(error), markup=False)
        return error.code if error.code in (WRONG_INPUT, ENVIRONMENT) else FAILED
    except GateFailed as error:
        errors.print(str(error), markup=False)
        return FAILED
    except KeyboardInterrupt:
        errors.print("interrupted; run the same command again to go on", markup=False)
        return INTERRUPTED


def _run(planned: Plan, flow: Callable[[], object]) -> int:
    """Runs a flow and shows how it ended."""
    from flows.show import show_end
    from flows.temporary import start_server
    from tasks.report import statuses_of

    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_trace)
    signal.signal(signal.SIGTERM, _terminate)
    watch.start()
    try:
        start_server()
        flow()
    except RuntimeError as error:
        if not str(error).startswith("Failed to reach API"):
            raise
        raise MachineLacks(f"no Prefect server answers ({error}): start it, or unset PREFECT_API_URL to use a temporary one") from error
    finally:
        show_end(console, planned, statuses_of(planned.folder))
    return OK


def _tell_pins(planned: Plan) -> None:
    for pin in planned.pins:
        console.print(f"{pin.reference} is commit {pin.commit}, kept in {planned.folder / PINS}", markup=False, highlight=False)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(TERMINATED)


def _without_trace(record: logging.LogRecord) -> bool:
    """A failed stage has its own log, and a gate its sentence: the traceback of the flow around it would only hide that.

    What Prefect says of its hooks at every state is left out.
    """
    if "ook 'tell_state'" in record.getMessage():
        return record.levelno > logging.INFO
    if record.exc_info and isinstance(record.exc_info[1], StageFailed | GateFailed | StoreFault):
        record.exc_info = None
    return True


if __name__ == "__main__":
    sys.exit(main())
