"""Commands `alignflow serve` and `alignflow loop ...`. They import Prefect only when they run."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from flows.cli.show import Override, RecipePlace, Whole, table_of
from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.loops.loop_choice import loop_of
from rlhf_core.recipe.loops.loop_record import LOCK, folder_of
from rlhf_core.recipe.loops.loop_state import LoopState, loop_state
from rlhf_core.system.files import is_locked
from rlhf_core.system.machine import MachineLacks

loop_app = App(
    name="loop", help="A recipe's loop (iterative_dpo, iterative, iterative_feedback), one round at a time."
)


OnFeedback = Annotated[
    bool,
    Parameter(
        negative=(),
        help=(
            "loops of kind iterative_feedback also train a round when their inbox has min_new_rows new rows."
        ),
    ),
]


def serve(
    *given: str,
    home: Path = Path(".alignflow"),
    host: str = "127.0.0.1",
    port: Whole = 4200,
    allow_host: str = "",
    schedule: bool = True,
    cron: str = "0 2 * * *",
    timezone: str = "UTC",
    every: float | None = None,
    max_rounds: Whole | None = None,
    min_gain: float | None = None,
    feedback_port: Whole = 4300,
    dashboard_port: Whole = 0,
    on_feedback: OnFeedback = False,
    trigger_port: Whole | None = None,
    starts_an_hour: Whole = 12,
) -> int:
    """Start a Prefect server, a worker and the deployments of recipes on this machine; Ctrl-C ends all of
    them.

    Args:
        given: recipe YAML files, and overrides (STAGE.FIELD=VALUE) that apply to all of them.
        home: folder of the server's database and logs, and of the auth string that its API requires; one
            `serve` at a time.
        host: 0.0.0.0 also accepts connections from other machines; the auth string crosses the network
            unencrypted, without TLS.
        port: port of the server and its pages; 0 picks a free one.
        allow_host: more host names that requests may use for this machine, such as a proxy's, separated by
            commas.
        schedule: let loops train a round when their schedule fires; a recipe without a loop then runs as a
            whole.
        cron: minute, hour, day, month, weekday.
        timezone: time zone of the cron schedule, such as Europe/Berlin.
        every: interval in seconds, instead of the cron schedule.
        max_rounds: loops of the recipes end after this many rounds.
        min_gain: loops end when their last round's win rate exceeds the previous round's by no more than
            this.
        dashboard_port: port of the live page of the recipes' artifacts; 0 picks a free one.
        feedback_port: port of the endpoint that accepts feedback, if a recipe has an inbox; 0 picks a free
            one.
        trigger_port: port of an endpoint that starts runs on requests with a token (webhooks), such as 4301;
            0 picks a free one; default: none.
        starts_an_hour: maximum number of runs of one deployment that such requests may start per hour.
    """
    check_addresses((port, feedback_port, dashboard_port, trigger_port or 0), allow_host)
    console = Console(soft_wrap=True)
    console.print("importing Prefect and reading the recipes", highlight=False)
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from flows.cli.operate import serve_steps
    from flows.serving.deployments import prepare, served
    from flows.serving.schedules import schedule_of
    from flows.serving.services import AUTH, Services, only_one
    from flows.serving.supervise import supervise

    limits = {"max_rounds": max_rounds, "min_gain": min_gain}
    ends = {name: value for name, value in limits.items() if value is not None}
    recipes = served(
        [text for text in given if "=" not in text], [text for text in given if "=" in text], ends
    )
    if not recipes:
        raise ValueError("give the recipes to serve: alignflow serve RECIPE...")
    when = schedule_of(every, cron, timezone) if schedule else None
    watches = serve_steps.watches_of(recipes) if on_feedback else {}
    if starts_an_hour < 1:
        raise ValueError(f"--starts-an-hour {starts_an_hour}: give 1 or more")
    with only_one(home.absolute()):
        hosts = [name for name in allow_host.split(",") if name]
        services = Services(home.absolute(), host, port or free_port_on(host), hosts)
        ours = temporary_settings({PREFECT_API_URL: services.api, PREFECT_API_AUTH_STRING: services.auth})
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # a shell ignores SIGINT for background commands
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            console.print("starting Prefect's server, a worker and the deployments", highlight=False)
            services.start_server()
            with ours, get_client(sync_client=True) as client:
                prepare(client)
                started_by_request = serve_steps.deploy_all(
                    console, client, services, recipes, when, ends, watches
                )
                services.start_worker()
                serve_steps.start_feedback(console, services, recipes, feedback_port)
                if trigger_port is not None:
                    serve_steps.start_triggers(
                        console, services, started_by_request, trigger_port, starts_an_hour
                    )
                timing = f"every {every:g} s" if every is not None else f"'{cron}' {timezone}"
                timing = (timing if when else "none") + (" and on new feedback" if watches else "")
                console.print(
                    f"schedule: {timing}\nserving on {services.ui} (press Ctrl-C to stop)",
                    markup=False,
                    highlight=False,
                )
                show_auth(console, services.api, services.auth, services.home / AUTH)
                serve_steps.start_dashboards(console, services, recipes, dashboard_port)
                supervise(console, client, services, serve_steps.triggers_of(client, watches))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the shutdown
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            console.print("stopping the worker, its runs and the server", markup=False)
            services.stop()


def check_addresses(ports: Iterable[int], allow_host: str) -> None:
    """Raises ValueError for an invalid port or --allow-host."""
    for number in ports:
        if not 0 <= number <= 65535:
            raise ValueError(f"{number} is not a port: give 1 to 65535, or 0 for a free one")
    if not re.fullmatch(r"[A-Za-z0-9.,_-]*", allow_host):
        raise ValueError(
            f"--allow-host {allow_host}: give names or addresses of hosts, without ports, separated by commas"
        )


def free_port_on(host: str) -> int:
    """Returns a free port. Raises MachineLacks when this machine does not have the address."""
    try:
        return free_port(host)
    except OSError as error:
        raise MachineLacks(
            f"nothing can be served on {host} ({error.strerror}): give another --host"
        ) from None


def show_auth(console: Console, api: str, auth: str, file: Path) -> None:
    """Prints a server's auth string if the output is a terminal; otherwise (a service manager's log, for
    example) prints only the path of the file that holds it."""
    shown = auth if console.is_terminal else f"the content of {file}"
    console.print(f"its pages request the auth string once: {shown}", markup=False, highlight=False)
    command = f'export PREFECT_API_URL={api} PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(file))})"'
    console.print(f"from another shell: {command}", markup=False, highlight=False)


@loop_app.command
def status(recipe: RecipePlace, *overrides: Override, stage: str | None = None) -> int:
    """Show the rounds of a loop: which rounds are done, when, and with which win rates, and what the next
    round waits for.

    Args:
        stage: the loop to show, if the recipe has several.
    """
    loaded = load_recipe(recipe, overrides)
    name = loop_of(loaded, stage)
    show(Console(soft_wrap=True), loop_state(loaded, name), is_locked(folder_of(loaded) / LOCK))
    return 0


def show(console: Console, found: LoopState, running: bool) -> None:
    """Prints the rounds as a table, followed by a sentence about the next one."""
    record = found.record
    table = table_of(
        "round", "ended (UTC)", "win rate", "result", title=f"{record.loop} of {found.plan.recipe.name}"
    )
    for number, done in enumerate(record.rounds, start=1):
        rate = "" if done.win_rate is None else f"{done.win_rate:.3f}"
        result = (
            f"refused: {done.refused}"
            if done.refused
            else os.path.relpath(found.plan[f"{record.loop}.round{number}"].run_dir)
        )
        table.add_row(str(number), f"{done.ended:%Y-%m-%d %H:%M}", rate, result)
    console.print(table)
    console.print(
        f"{len(record.rounds)} rounds are done. {next_of(found, running)}", markup=False, highlight=False
    )


def next_of(found: LoopState, running: bool) -> str:
    """Returns a sentence that describes the next round's state and, if it is not running, says why."""
    part = f"finished stages: {', '.join(found.done()) or 'none'}"
    if running:
        return f"Round {found.number} is in progress; {part}."
    if found.failed:
        stopped = f"Round {found.number} is stopped by a gate ({(found.held or found.failed)[0].summary})"
        if found.renewed or found.turned_down:
            return f"{stopped}: the next run skips this round and starts another one."
        fed = found.held and found.plan.recipe.stages[found.record.loop].new_rows_needed
        return (
            f"{stopped}: {'send more feedback for another round, or ' if fed else ''}change the recipe, its"
            " data or the gate."
        )
    if found.waiting:
        return f"Round {found.number}: {found.waiting[0].summary}: alignflow approve {found.plan.folder}"
    if found.record.begun:
        when = f"{found.record.begun.at:%Y-%m-%d %H:%M} UTC"
        return f"Round {found.number} started {when} and is not finished; {part}. The next run continues it."
    if found.waits:
        return f"{found.waits[0].upper()}{found.waits[1:]}."
    return f"Round {found.number} is next; a started or scheduled run of the flow `loop` trains it."
