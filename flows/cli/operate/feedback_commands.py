"""Commands `alignflow feedback ...`: people's opinions on a model's answers, for training."""

from __future__ import annotations

import os
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from flows.cli.show import FAILED, OK, Whole, say, table_of
from flows.serving.page_options import host_names, server_config
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.receive import Receipt, receive, rows_of
from rlhf_core.recipe.inboxes import evaluation_texts, inboxes_of
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.runs.remote.store import store_of
from rlhf_core.system.machine import MachineLacks
from rlhf_core.system.redaction import public_address

console = Console(soft_wrap=True)
feedback_app = App(
    name="feedback", help="People's feedback on answers (thumbs, edits, rankings), as data for a recipe."
)


@feedback_app.command(name="import")
def import_(
    *files: str,
    inbox: Path | None = None,
    recipe: str | None = None,
    source: str | None = None,
    annotator: str | None = None,
) -> int:
    """Add the rows of JSONL files or URLs to an inbox; rows that it already has are skipped.

    Args:
        files: JSONL files, or URLs that fsspec reads (s3://, https://); .gz is decompressed.
        inbox: folder whose name ends with .inbox; default: the recipe's.
        recipe: reject rows that match questions of this recipe's evaluations.
        source: origin of the rows that do not name one; default: the file's name.
        annotator: author of the rows that do not name one.
    """
    if not files:
        raise ValueError("give the files to import: alignflow feedback import FILE... --inbox NAME.inbox")
    told = "its rows and the questions of the recipe's evaluations" if recipe else "its rows"
    console.print(f"opening the inbox: reading {told}", highlight=False)
    box, questions = _opened(inbox, recipe)
    worst = OK
    new = 0
    for file in files:
        shown = public_address(file)
        say(f"reading {shown}", console)
        with console.status(f"reading {escape(shown)}") as status:

            def progress(so_far: Receipt, shown: str = shown, status: Status = status) -> None:
                status.update(f"{escape(shown)}: {so_far.read:,} rows")

            named = source if source is not None else shown.rpartition("/")[2]
            done = receive(box, rows_of(file), questions, named, annotator, progress)
        tell(shown, done)
        worst = FAILED if done.wrong else worst
        new = new + done.new
    if new and os.environ.get("PREFECT_API_URL"):
        _tell_server(box)
    return worst


def _tell_server(box: Inbox) -> None:
    from flows.triggers.events import names_a_server
    from flows.triggers.events import tell as tell_of

    if names_a_server() and not tell_of([box.folder]):
        text = (
            "warning: Prefect's server (PREFECT_API_URL) did not accept the event about the new rows: start a"
            " run, or wait for the schedule"
        )
        say(text, console)


def tell(file: str, done: Receipt) -> None:
    """Prints what happened to the rows of a file."""
    parts = [f"{done.new:,} new", f"{done.duplicate:,} duplicates"]
    parts += [f"{done.leaked:,} refused: they match questions of an evaluation"] if done.leaked else []
    parts += [f"{count:,} left out: {reason}" for reason, count in done.unusable.most_common()]
    parts += [f"{count:,} x {kind} replaced" for kind, count in done.personal.most_common()]
    say(f"{file}: {done.read:,} rows: {', '.join(parts)}", console)
    for fault in done.faults:
        say(f"  {fault}", console)
    if done.wrong:
        say(f"  left out {done.wrong:,} malformed rows: correct them and import the file again", console)


@feedback_app.command
def status(*inboxes: Path, recipe: str | None = None) -> int:
    """Show the number of rows in inboxes, by kind, and the number of answers with contradictory opinions."""
    boxes = [Inbox(folder) for folder in inboxes] or (
        [Inbox(folder) for folder in inboxes_of(load_recipe(recipe, []))] if recipe else []
    )
    if not boxes:
        raise ValueError("give inboxes, or a recipe that uses some: alignflow feedback status NAME.inbox")
    missing = [str(box.folder) for box in boxes if inboxes and not box.folder.is_dir()]
    if missing:
        raise ValueError(f"inbox {', '.join(missing)} does not exist: correct the path")
    table = table_of(
        "inbox",
        "thumbs",
        "edits",
        "rankings",
        "deleted",
        "contradictions",
        right=("thumbs", "edits", "rankings", "deleted"),
    )
    for box in boxes:
        kinds = box.kinds()
        table.add_row(
            escape(str(box.folder)),
            *(f"{kinds[kind]:,}" for kind in ("thumb", "edit", "ranking", "deleted")),
            f"{box.contradictions():,}",
        )
    console.print(table)
    return OK


@feedback_app.command
def forget(
    annotator: str,
    *,
    inbox: Path | None = None,
    recipe: str | None = None,
    artifacts: Path = Path("artifacts"),
) -> int:
    """Delete one person's rows and their copies, and list the models that were trained on them.

    Args:
        annotator: the person's name in the rows.
        inbox: folder whose name ends with .inbox; default: the recipe's.
        recipe: recipe whose artifacts folder and store are searched for copies.
        artifacts: artifacts folder to search if no recipe is given.
    """
    from rlhf_core.feedback.forget import forget as forget_person

    box, _ = _opened(inbox, recipe)
    loaded = load_recipe(recipe, []) if recipe else None
    store = store_of(loaded) if loaded else None
    found = forget_person(
        box,
        annotator,
        [Path(loaded.artifacts).absolute() if loaded else artifacts.absolute()],
        [store] if store else [],
    )
    say(f"deleted {found.rows:,} rows of {annotator} from {box.folder}", console)
    for file in found.files:
        say(f"  deleted from {file}", console)
    if found.trained:
        say(
            "these stages used the rows, and their models cannot forget them; train these stages again:",
            console,
        )
        for name in found.trained:
            say(f"  {name}", console)
    return OK


@feedback_app.command
def serve(
    *recipes: str,
    inbox: list[Path] | None = None,
    home: Path = Path(".alignflow"),
    host: str = "127.0.0.1",
    port: Whole = 4300,
    allow_host: str = "",
) -> int:
    """Accept feedback over HTTP (POST /feedback/NAME with a bearer token) until Ctrl-C.

    Args:
        recipes: recipes whose inboxes accept rows; rows that match their evaluation questions are rejected.
        inbox: more inboxes.
        home: folder of the token, `feedback-token`, which only you can read.
        host: 0.0.0.0 also accepts connections from other machines; the token crosses the network unencrypted,
            without TLS.
        port: 0 picks a free one.
        allow_host: more host names that requests may use for this machine, such as a proxy's, separated by
            commas.
    """
    import uvicorn

    from flows.serving.services import EVERYWHERE, FEEDBACK_TOKEN, listen
    from rlhf_core.feedback.feedback_endpoint import application, by_name
    from rlhf_core.feedback.personal_data import masked
    from rlhf_core.system.pages.secret_file import kept_secret

    hosts = host_names(host, allow_host)
    loaded = [load_recipe(recipe, []) for recipe in recipes]
    folders = list(
        dict.fromkeys(
            [folder.absolute() for folder in inbox or []] + [f for one in loaded for f in inboxes_of(one)]
        )
    )
    if not folders:
        raise ValueError(
            "give inboxes, or recipes that use some: alignflow feedback serve --inbox NAME.inbox"
        )
    questions = Questions(text for one in loaded for text in evaluation_texts(one))
    masked(["a@example.org"])  # loads presidio, or raises if it is missing
    token = kept_secret(home.absolute() / FEEDBACK_TOKEN)
    named = by_name(folders, lambda: questions)
    if os.environ.get("PREFECT_API_URL"):
        from flows.triggers.events import Teller, names_a_server
        from flows.triggers.inbox_watch import InboxWatch, takes_feedback

        if names_a_server():
            Teller([InboxWatch(one) for one in loaded if takes_feedback(one)]).start()
    with listen(host, port) as listener:
        address = f"http://{'127.0.0.1' if host == EVERYWHERE else host}:{listener.getsockname()[1]}"
        for name in named:
            say(f"feedback for {name}: POST {address}/feedback/{name}", console)
        say(f"the bearer token is in {home.absolute() / FEEDBACK_TOKEN} (press Ctrl-C to stop)", console)
        server = uvicorn.Server(
            server_config(application(named, token, tuple(hosts)), log_level="warning", access_log=False)
        )
        server.run(sockets=[listener])
    return OK


def _opened(inbox: Path | None, recipe: str | None) -> tuple[Inbox, Questions]:
    """Returns the inbox that a command refers to, and the questions of the recipe's evaluations."""
    loaded = load_recipe(recipe, []) if recipe else None
    own = inboxes_of(loaded) if loaded else []
    if inbox is None and len(own) != 1:
        found = f"the recipe uses {len(own)}" if loaded else "no recipe uses one"
        raise ValueError(f"the inbox is not clear ({found}): give --inbox NAME.inbox")
    try:
        return Inbox((inbox or own[0]).absolute()), Questions(evaluation_texts(loaded) if loaded else ())
    except OSError as error:
        raise MachineLacks(f"{inbox or own[0]} cannot be used ({error.strerror})") from None
