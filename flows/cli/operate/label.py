"""The command `alignflow label`: people compare pairs of answers on a local page."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from flows.cli.show import OK, Whole, console, say, table_of
from flows.serving.page_options import host_names, server_config, token_shown
from rlhf_core.system.pages.secret_file import kept_secret
from rlhf_core.system.redaction import plain

if TYPE_CHECKING:  # these import scipy, which most commands do not need
    from evaluation.labelling.agreement import Agreement
    from evaluation.labelling.assignment import Rules
    from evaluation.labelling.items import DrawnPairs
    from evaluation.scores.arena_hard import IntervalEstimate


def label(
    source: str | None = None,
    *,
    out: Path | None = None,
    agreement: Path | None = None,
    sample: Whole = 200,
    seed: Whole = 0,
    per_item: Whole = 2,
    repeat: float = 0.05,
    models: str = "",
    artifacts: Path = Path("artifacts"),
    host: str = "127.0.0.1",
    port: Whole = 8020,
    allow_host: str = "",
    home: Path = Path(".alignflow"),
) -> int:
    """Let people compare pairs of answers on a local page, blind and by keyboard, or show how far they agree.
    Stop it with Ctrl-C.

    Args:
        source: an evaluation (its directory, its name, or the name of a recipe), or a .jsonl of preferences
            or of answer_a and answer_b.
        out: file that labels are appended to.
        agreement: a file of labels, as a calibration reads it; only show how far its annotators agree,
            without serving a page.
        sample: number of pairs to label, drawn with the seed.
        seed: seed for the choice of pairs, the position of each answer (left or right), and the pairs that
            are shown twice.
        per_item: number of annotators for each pair.
        repeat: fraction of an annotator's pairs that are shown a second time, with the answers swapped.
        models: two models of the evaluation, separated by a comma; default: all pairs that its judges
            compared.
        artifacts: folder where names of evaluations and recipes are looked up.
        host: 0.0.0.0 also accepts connections from other machines; the token crosses the network unencrypted,
            without TLS.
        port: 0 picks a free one and prints it.
        allow_host: more host names that annotators may use for this machine, separated by commas.
        home: folder of the files label-token, which holds the token that the page requires, and label-secret,
            the secret that hides which model gave which answer.
    """
    if agreement is not None:
        from evaluation.labelling.agreement import agreement as measured
        from rlhf_core.data.labels import read_label_file

        show_agreement(console, measured(read_label_file(agreement)))
        return OK
    pair = tuple(name for name in models.split(",") if name)
    names = host_names(host, allow_host)
    refuse(
        {
            "give a source of pairs to label: alignflow label SOURCE --out labels.jsonl": source is None,
            "give --out, the file that labels are appended to": out is None,
            f"--sample {sample} --per-item {per_item}: give 1 or more of each": sample < 1 or per_item < 1,
            f"--repeat {repeat}: give a share from 0 to 1": not 0 <= repeat <= 1,
            f"--models {models}: give two different models, separated by a comma": len(set(pair)) != 2
            and models != "",
            f"{port} is not a port: give 1 to 65535, or 0 for a free one": not 0 <= port <= 65535,
        }
    )
    assert source is not None and out is not None
    from evaluation.labelling.assignment import Rules
    from evaluation.labelling.items import draw

    drawn = draw(source, sample, seed, artifacts, pair)
    serve_pairs(drawn, out, Rules(per_item, repeat, seed), home, host, port, names)
    return OK


def refuse(wrong: Mapping[str, bool]) -> None:
    """Raises ValueError with each sentence whose condition is true."""
    faults = [sentence for sentence, is_so in wrong.items() if is_so]
    if faults:
        raise ValueError("\n".join(faults))


def serve_pairs(
    drawn: DrawnPairs, out: Path, rules: Rules, home: Path, host: str, port: int, names: Sequence[str]
) -> None:
    """Serves the page for comparing pairs until Ctrl-C. `names`: host names of this machine."""
    import uvicorn

    from evaluation.labelling.assignment import Assignment
    from evaluation.labelling.label_store import opened
    from evaluation.labelling.labelling_app import application
    from flows.serving.services import EVERYWHERE, listen
    from rlhf_core.system.pages.page_server import Protected

    with listen(host, port) as listener, opened(out) as file:
        place = home.absolute() / "label-token"
        token = kept_secret(place)
        assignment = Assignment(drawn.pairs, file, rules, kept_secret(home / "label-secret"))
        shown = socket.gethostname() if host == EVERYWHERE else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        same = f", {drawn.same} with equal answers left out" if drawn.same else ""
        say(f"{len(drawn.pairs)} of {drawn.found} pairs{same}; {len(file.labels)} lines in {out}")
        show_addresses(console, address, token, place)
        app = Protected(application(assignment), token, names, command="alignflow label")
        config = server_config(app, log_level="error", lifespan="off")
        # a shell ignores SIGINT for background commands
        signal.signal(signal.SIGINT, signal.default_int_handler)
        uvicorn.Server(config).run([listener])


def show_addresses(console: Console, address: str, token: str, file: Path) -> None:
    """Prints the addresses of the page, with the token only if the output is a terminal."""
    shown = token_shown(console, token, file)
    console.print(f"all annotators: {address}/?token={shown}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"one annotator:  {address}/label?annotator=NAME&token={shown}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def show_agreement(console: Console, found: Agreement) -> None:
    """Prints the agreement of annotators with each other and with themselves, with 95 % intervals."""
    console.print(
        f"{found.pairs} pairs have a verdict, {found.shared} of them by two or more annotators (in brackets:"
        " 95 % intervals)"
    )
    console.print(
        f"Krippendorff's alpha: winner {_kappa(found.alpha)}, degree {_kappa(found.ordinal_alpha)}",
        markup=False,
    )
    if found.between:
        numbers = ("pairs", "same winner", "Cohen's kappa", "weighted kappa")
        table = table_of("annotators", *numbers, right=numbers)
        for row in found.between:
            cells = (_share(row.same), _kappa(row.kappa), _kappa(row.weighted_kappa))
            table.add_row(escape(plain(f"{row.one}, {row.other}")), str(row.pairs), *cells)
        console.print(table)
    columns = (
        "labels",
        "skipped",
        "ties",
        "prefers the left",
        "shown twice",
        "same winner again",
        "median seconds",
    )
    table = table_of("annotator", *columns, right=columns)
    for annotator in found.annotators:
        seconds = "–" if annotator.seconds is None else f"{annotator.seconds:.1f}"
        sides = (_share(annotator.first_side), str(annotator.repeats), _share(annotator.consistent), seconds)
        table.add_row(
            escape(plain(annotator.name) or "(no name)"),
            str(annotator.labels),
            str(annotator.skipped),
            f"{100 * annotator.ties:.0f} %",
            *sides,
        )
    console.print(table)


def _share(value: IntervalEstimate | None) -> str:
    return (
        "–" if value is None else f"{100 * value.value:.0f} % ({100 * value.low:.0f}–{100 * value.high:.0f})"
    )


def _kappa(value: IntervalEstimate | None) -> str:
    return "–" if value is None else f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"
