"""Imports made-up feedback into an inbox: rows a second and peak memory, with planted duplicates, personal
data and evaluation questions.

    python tests/benchmarks/feedback.py --rows 1000000 --folder FOLDER --json feedback.json

Prints what was planted beside what was found, then the seconds of a second import of the same file, of the
file that a stage reads, and of the deletion of one person.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from record import add_options, figure, save

PEOPLE = 5000
IMPORT = """
import json, resource, sys
from pathlib import Path
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.receive import receive, rows_of
rows, inbox, questions = sys.argv[1:]
done = receive(Inbox(Path(inbox)), rows_of(rows), Questions(json.loads(Path(questions).read_text())))
print(json.dumps({"new": done.new, "duplicate": done.duplicate, "leaked": done.leaked, "personal": sum(done.personal.values()),
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def write(file: Path, rows: int, questions: list[str], vocabulary: list[str]) -> Counter[str]:
    """Writes rows and returns how many of each kind were planted: 10 % duplicates, 1 % with a mail address,
    0.5 % with a question."""
    rng = random.Random(0)
    planted = Counter[str]()
    last = ""
    with file.open("w") as out:
        for _ in range(rows):
            kind = rng.choices(["plain", "duplicate", "personal", "leaked"], [88.5, 10, 1, 0.5])[0]
            if kind == "duplicate" and last:
                planted[kind] += 1
                out.write(last)
                continue
            prompt = " ".join(rng.choices(vocabulary, k=rng.randint(5, 60)))
            if kind == "leaked":
                prompt = f"{prompt} {rng.choice(questions)}"
                planted[kind] += 1
            answer = " ".join(rng.choices(vocabulary, k=rng.randint(10, 120)))
            if kind == "personal":
                answer += f" write to user{rng.randrange(10**6)}@example.org"
                planted[kind] += 1
            person = f"person{rng.randrange(PEOPLE)}"
            line = (
                json.dumps(
                    dict(prompt=prompt, response=answer, thumb=rng.choice(["up", "down"]), annotator=person)
                )
                + "\n"
            )
            last = line if kind == "plain" else last
            out.write(line)
    return planted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    add_options(parser, "feedback")
    arguments = parser.parse_args()
    from rlhf_core.feedback.forget import forget
    from rlhf_core.feedback.inbox import Inbox
    from rlhf_core.feedback.take import take

    arguments.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(20_000)]
    questions = [" ".join(rng.choices(vocabulary, k=rng.randint(6, 60))) for _ in range(500)]
    (arguments.folder / "questions.json").write_text(json.dumps(questions))
    figures = {}

    def imported(rows: int, file: Path, inbox: Path) -> tuple[dict[str, float], float]:
        start = time.perf_counter()
        command = [
            sys.executable,
            "-c",
            IMPORT,
            str(file),
            str(inbox),
            str(arguments.folder / "questions.json"),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout), time.perf_counter() - start

    for rows in (arguments.rows // 10, arguments.rows):
        file = arguments.folder / f"{rows}.jsonl"
        folder = arguments.folder / f"{rows}.inbox"
        planted = write(file, rows, questions, vocabulary)
        shutil.rmtree(folder, ignore_errors=True)
        found, seconds = imported(rows, file, folder)
        print(
            f"{rows:,} rows of {file.stat().st_size / 2**20:.0f} MiB: {seconds:.0f} s; planted"
            f" {dict(planted)}, found {found}",
            flush=True,
        )
        figures[f"peak memory at {rows:,} rows"] = figure(round(found["peak"]), "MiB")
    inbox = Inbox(folder)
    figures["rows a second"] = figure(round(rows / seconds), "rows/s", "higher")
    for kind in ("duplicate", "leaked", "personal"):
        figures[f"{kind}: found of planted"] = figure(round(found[kind] / planted[kind], 4), "share", None)
    again, seconds = imported(rows, file, folder)
    print(f"the same file again: {seconds:.0f} s, {again['new']} new", flush=True)
    figures["new rows of a second import"] = figure(again["new"], "rows")
    start = time.perf_counter()
    take(inbox, "labelled", 0, inbox.end())
    figures["file for a stage"] = figure(round(time.perf_counter() - start, 1), "s")
    start = time.perf_counter()
    gone = forget(inbox, "person7").rows
    figures["deletion of one person"] = figure(round(time.perf_counter() - start, 1), "s")
    figures["peak memory of file and deletion"] = figure(
        round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), "MiB"
    )
    print(f"{gone} rows of one person deleted; {figures}", flush=True)
    save(arguments, "Import of feedback into an inbox", figures)


if __name__ == "__main__":
    main()
