"""`make algorithms`: runs every algorithm's recipe through the real command and shows that each raises its
own objective.

SFT and the reward model are made once, all recipes find them done; so does a second start with everything
else. Writes the table to
docs/reference/algorithms-learn.md. Exit code 1 when a run failed or an algorithm did not learn.
    python tests/algorithms/run_all.py [--only GRPO --only RLOO] [--reward-port 8000]
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date
from urllib.error import URLError
from urllib.request import Request, urlopen

from cases import CASES, ROOT, Case
from measure import CLEAR, Measured, measure
from transformers.utils.logging import disable_progress_bar

from flows.cli.results.artifacts import REWARD_KEY
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.files import write_text
from rlhf_core.system.machine import num_cpus

TABLE = ROOT / "docs" / "reference" / "algorithms-learn.md"
RUN_SECONDS = 1800
SERVER_SECONDS = 120
UNITS = {
    "answers": "log-prob a token, nats",
    "ranking": "pairs ranked correctly",
    "margin": "margin, nats",
    "mean margin": "margin a token, nats",
    "reward": "reward",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Runs every algorithm for a short time and writes the table of what each learned."
    )
    parser.add_argument(
        "--only",
        action="append",
        help="an algorithm as the table names it; can be repeated; the table is then only printed",
    )
    parser.add_argument(
        "--reward-port",
        type=int,
        default=8000,
        help="port of the reward server, which is part of that run's identity",
    )
    arguments = parser.parse_args()
    names = [case.algorithm for case in CASES]
    strange = [name for name in arguments.only or () if name not in names]
    if strange:
        parser.exit(2, f"unknown algorithm {strange[0]!r}; there are: {', '.join(names)}\n")
    cases = [
        with_port(case, arguments.reward_port)
        for case in CASES
        if not arguments.only or case.algorithm in arguments.only
    ]

    disable_progress_bar()
    # so that the reward server is ended too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command([str(ROOT / "deployments/demo/make_material.py"), "--out", "demo/material"], "material")
    rows: list[tuple[Case, Measured | None]] = []
    for number, case in enumerate(cases, 1):
        start = time.monotonic()
        found = learn(case)
        rows.append((case, found))
        print(f"{number}/{len(cases)} {line(case, found)} after {time.monotonic() - start:.0f} s", flush=True)
    if arguments.only:
        print(table(rows))
    else:
        write_text(TABLE, page(rows))
        print(f"The table: {TABLE}")
    return 0 if all(found is not None and found.learned for _, found in rows) else 1


def learn(case: Case) -> Measured | None:
    """Runs a case unless all of its stages are done, and reads what it learned; None when the command
    failed."""
    server = reward_server(case) if case.recipe == "rewards" else nullcontext()
    with server:
        done = all(node.done for node in case.plan().nodes)
        if not done and command(["-m", "flows.cli", "run", *case.arguments], case.name):
            return None
        return measure(case)


def command(arguments: Sequence[str], name: str) -> int:
    """Runs Python; its output is a file in artifacts/algorithms, whose end is shown when it fails."""
    log = ROOT / "artifacts" / "algorithms" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        code = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=RUN_SECONDS,
        ).returncode
    if code:
        print(
            f"{name} failed with exit code {code}; the end of {log}:\n{log.read_text()[-2000:]}", flush=True
        )
    return code


@contextmanager
def reward_server(case: Case) -> Iterator[None]:
    """`alignflow serve-reward` with the recipe's reward model, at the address that the recipe names."""
    os.environ.setdefault(REWARD_KEY, secrets.token_urlsafe(32))  # for the server and the recipe
    planned = case.plan()
    if RunDir(planned["reward_model"].run_dir).result() is None:
        command(["-m", "flows.cli", "stage", "sft", *case.arguments], f"{case.name}-sft")
        command(["-m", "flows.cli", "stage", "reward_model", *case.arguments], f"{case.name}-reward-model")
    url = next(source.url for source in planned[case.stage].config.reward if hasattr(source, "url"))  # type: ignore[union-attr]
    checkpoint = planned["reward_model"].run_dir / "checkpoint"
    port = url.rpartition(":")[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "serve-reward", str(checkpoint), "--port", port], cwd=ROOT
    )
    try:
        wait_for(url, process)
        yield
    finally:
        process.terminate()
        process.wait(30)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the server answers. RuntimeError when it ends (its port may be taken) or stays silent."""
    deadline = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(
                Request(url, headers={"Authorization": f"Bearer {os.environ[REWARD_KEY]}"}), timeout=5
            ):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(
        f"the reward server at {url} did not answer within {SERVER_SECONDS} s; is its port taken? choose one"
        " with --reward-port"
    )


def with_port(case: Case, port: int) -> Case:
    if case.recipe != "rewards" or port == 8000:
        return case
    return case._replace(overrides=(*case.overrides, f"ppo.reward.2.url=http://127.0.0.1:{port}"))


def line(case: Case, found: Measured | None) -> str:
    if found is None:
        return f"{case.algorithm}: failed"
    rise = f"{found.before:.3f} -> {found.after:.3f} (standard error of the rise {found.error:.3f})"
    return (
        f"{case.algorithm}: {UNITS[case.objective]} {rise}, {'learned' if found.learned else 'NOT LEARNED'}"
    )


def table(rows: Sequence[tuple[Case, Measured | None]]) -> str:
    lines = [
        (
            "| algorithm | recipe and overrides | objective | before | after | rise (standard error) | right"
            " answers | seconds | learned |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in rows:
        told = " ".join([f"`{case.recipe}.yaml`", *(f"`{override}`" for override in case.overrides)])
        if found is None:
            lines.append(f"| {case.algorithm} | {told} | {UNITS[case.objective]} | | | | | | failed |")
            continue
        right = f"{found.right[0]:.0%} to {found.right[1]:.0%}" if found.right else ""
        rise = f"{found.after - found.before:+.2f} ({found.error:.2f})"
        numbers = f"{found.before:.2f} | {found.after:.2f} | {rise} | {right} | {found.seconds:.0f}"
        lines.append(
            f"| {case.algorithm} | {told} | {UNITS[case.objective]} | {numbers} |"
            f" {'yes' if found.learned else 'NO'} |"
        )
    return "\n".join(lines)


def page(rows: Sequence[tuple[Case, Measured | None]]) -> str:
    return f"""# Each algorithm learns

Written by `make algorithms` (`tests/algorithms/run_all.py`), {date.today()}, {num_cpus()} CPU cores, no GPU, seed 0:
short runs of the shipped recipes on the demo's material, each from the same SFT model. All objectives are measured on held-out data, and
higher is better. The standard error is that of the mean difference per item. An algorithm counts as learned if the rise
exceeds {CLEAR:g} standard errors. There is only one seed: the table shows that each algorithm learns, not which is best.

- *log-prob a token*: mean over held-out answers; before: the random base model. *pairs ranked correctly*: by the reward model; before: chance.
- *margin*: log-prob of the chosen answer minus that of the rejected answer in held-out pairs, summed over tokens or per token.
- *reward*: the weighted sum of the recipe's own rewards (before any standardisation) for an answer to each held-out question.
- *right answers*: share of held-out questions answered correctly, by the SFT model and by the trained model.
- *seconds*: run time of the algorithm's own stages, on a machine that other programs may have used too.

{table(rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
