"""Steps that `alignflow serve` takes once its server is up: deployments, endpoints, live pages. Imports
Prefect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.schedules import Schedule
from rich.console import Console

from flows.cli.operate.dashboard import TOKEN, show_address
from flows.cli.show import say
from flows.serving.deployments import ServedRecipe, deploy, feedback_name, pause_others
from flows.serving.services import FEEDBACK_TOKEN, TRIGGER_TOKEN, Services
from flows.triggers.inbox_watch import InboxWatch, takes_feedback
from flows.triggers.runs import FeedbackTrigger
from rlhf_core.recipe.inboxes import inboxes_of
from rlhf_core.system.pages.secret_file import kept_secret


def watches_of(recipes: Sequence[ServedRecipe]) -> dict[str, InboxWatch]:
    """Returns, by recipe name, an inbox watch for each recipe whose loop trains on feedback. Raises
    ValueError when there is none."""
    watches = {one.recipe.name: InboxWatch(one.recipe) for one in recipes if takes_feedback(one.recipe)}
    if not watches:
        raise ValueError(
            "--on-feedback: no recipe has a loop of kind iterative_feedback: leave it out, or serve a recipe"
            " with one"
        )
    return watches


def deploy_all(
    console: Console,
    client: SyncPrefectClient,
    services: Services,
    recipes: Sequence[ServedRecipe],
    when: Schedule | None,
    ends: Mapping[str, float],
    watches: Mapping[str, InboxWatch],
) -> list[str]:
    """Creates the recipes' deployments, and pauses the schedules of an earlier `serve`. Returns the names of
    the deployments that requests may start."""
    started_by_request = []
    identities = list[UUID]()
    for one in recipes:
        made = deploy(services.api, one, when, ends, one.recipe.name in watches)
        started_by_request += [name for name in made if name.endswith(f"/{one.recipe.name}")]
        services.record({identity: one.parameters for identity in made.values()})
        identities += made.values()
        for name in made:
            say(f"deployment {name}", console)
    for name in pause_others(client, identities):
        say(f"deployment {name} of an earlier serve: its schedule is paused", console)
    return started_by_request


def start_feedback(console: Console, services: Services, recipes: Sequence[ServedRecipe], port: int) -> None:
    """Starts the endpoint that accepts feedback, if a recipe has an inbox."""
    inboxes = list(dict.fromkeys(folder for one in recipes for folder in inboxes_of(one.recipe)))
    if inboxes:
        address = services.start_feedback([one.path for one in recipes], inboxes, port)
        place = services.home / FEEDBACK_TOKEN
        say(f"feedback: POST {address}/NAME (token: {place})", console)


def start_triggers(
    console: Console, services: Services, deployments: Sequence[str], port: int, starts_an_hour: int
) -> None:
    """Starts the endpoint that starts runs of deployments on requests."""
    address = services.start_triggers(deployments, port, starts_an_hour)
    place = services.home / TRIGGER_TOKEN
    say(f"triggers: POST {address}/FLOW/NAME (token: {place})", console)


def start_dashboards(
    console: Console, services: Services, recipes: Sequence[ServedRecipe], port: int
) -> None:
    """Starts a live page for each artifacts folder, the first on `port` and the others on free ports."""
    token = kept_secret(services.home / TOKEN)
    folders = dict.fromkeys(Path(one.recipe.artifacts).absolute() for one in recipes)
    for nth, artifacts in enumerate(folders):
        address = services.start_dashboard(artifacts, 0 if nth else port)
        show_address(console, artifacts, address, token, services.home / TOKEN)


def triggers_of(client: SyncPrefectClient, watches: Mapping[str, InboxWatch]) -> list[FeedbackTrigger]:
    """Returns the triggers that start the loops' runs on new feedback."""
    return [FeedbackTrigger(client, f"loop/{feedback_name(name)}", watch) for name, watch in watches.items()]
