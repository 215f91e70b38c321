"""Scores answers with reasoning-gym, in a sandbox: `python -c SOURCE FOLDER...`, where the folders contain
the package and its dependencies.

Reads JSON from stdin: `tag`, `seconds` and `answers`, a list of [response, entry]. Writes a line when it is
ready, then one per answer: `{"score": NUMBER}`, or `{"failed": TEXT}` if the task raised. Some tasks evaluate
an answer as Python, which may end this process or run on; a score that exceeds the time limit also ends it.
Imports nothing from alignflow.
"""

import base64
import json
import os
import pickle
import signal
import sys
from typing import Any

WAITING = 4  # a score may take this many times its CPU limit in wall-clock time


def main(folders: list[str]) -> None:
    sys.path += folders
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread's memory counts towards the limit
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    from reasoning_gym.factory import DATASETS

    data: dict[bytes, Any] = {}

    def score(response: str, entry: str) -> float:
        answer = response if request["tag"] is None else enclosed(response, request["tag"])
        if answer is None:
            return 0.0
        name, known, config = pickle.loads(base64.b64decode(entry))  # noqa: S301 in the sandbox
        key = pickle.dumps((name, config))
        if key not in data:
            data[key] = DATASETS[name][0](config)
        return float(data[key].score_answer(answer.strip(), known))

    print(json.dumps({"ready": True}), file=out, flush=True)
    for response, entry in request["answers"]:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        signal.setitimer(signal.ITIMER_REAL, WAITING * request["seconds"])
        try:
            reply: dict[str, Any] = {"score": score(response, entry)}
        except Exception as error:  # whatever a task raises for odd answers
            reply = {"failed": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(reply), file=out, flush=True)


def enclosed(response: str, tag: str) -> str | None:
    """Returns the text between the last opening tag that is closed and the closing tag that follows it; None
    if there is no such pair. Tags that are only mentioned earlier do not count."""
    opening = f"<{tag}>"
    closing = f"</{tag}>"
    start = response.rfind(opening, 0, max(0, response.rfind(closing)))
    if start < 0:
        return None
    start += len(opening)
    return response[start : response.index(closing, start)]


if __name__ == "__main__":
    main(sys.argv[1:])
