"""The two programs that check an answer's functions, each in a sandbox of its own: one holds the answer's
code, the other the tests. `python -c SOURCE answer|tests`; standard library only: nothing else is there.

The side of the tests asks for calls of the answer's functions, and gets their results as plain data. So the
answer sees no test and no expected value, cannot change how results are compared, and cannot report a test as
passed. Both sides read and write lines of JSON on the descriptors that they are started with; what code
prints or reads goes to /dev/null.
"""

import builtins
import json
import math
import os
import sys
from typing import IO, Any

COMMON = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from typing import *
"""
DEEPEST = 200  # containers in containers


class AnswerError(Exception):
    """An error that the answer's code raised, of a type that Python does not know."""


class AnswerObject:
    """An object of the answer's code, as the side of the tests has it. Equal to itself alone."""

    def __init__(self, link: "Link", place: Any):
        self._link = link
        self._place = place

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._link.ask("call", self, [list(args), options])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)

    def __len__(self) -> int:
        return int(self._link.ask("length", self, None))

    def __bool__(self) -> bool:
        return bool(self._link.ask("truth", self, None))

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)


class Link:
    """One side's line to the program that started both. `held`: the objects that the other side knows by
    number."""

    def __init__(self) -> None:
        self.read: IO[str] = os.fdopen(os.dup(0), encoding="utf-8")
        self.write: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self.held: list[Any] = []
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        sys.set_int_max_str_digits(0)

    def send(self, message: Any) -> None:
        print(json.dumps(message), file=self.write, flush=True)

    def receive(self) -> Any:
        line = self.read.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def ask(self, what: str, target: AnswerObject, given: Any) -> Any:
        """Asks the other side for a result. Raises what the answer's code raised."""
        self.send({"ask": [what, target._place, self.encoded(given)]})
        reply = self.receive()
        if "raised" not in reply:
            return self.decoded(reply["result"])
        kind: Any = getattr(builtins, str(reply["raised"]), None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            kind = AnswerError
        raise kind(str(reply.get("text", "")))

    def encoded(self, value: Any, depth: int = 0) -> Any:
        """Returns a value as JSON: plain data by its type, any other object by its number."""
        if depth > DEEPEST:
            raise ValueError("the value is nested too deeply")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, AnswerObject):
            return ["own", value._place]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, dict):
            pairs = [[self.encoded(k, depth + 1), self.encoded(v, depth + 1)] for k, v in value.items()]
            return ["dict", pairs]
        for name, kind in SEQUENCES.items():
            if isinstance(value, kind):
                return [name, [self.encoded(part, depth + 1) for part in value]]
        self.held.append(value)
        return ["object", len(self.held) - 1]

    def decoded(self, value: Any) -> Any:
        """Returns the value that `encoded` turned into JSON."""
        if not isinstance(value, list):
            return value
        name, *rest = value
        if name == "object":
            return AnswerObject(self, int(rest[0]))
        if name == "own":
            return self.named(rest[0])
        if name == "complex":
            return complex(*rest)
        if name == "bytes":
            return bytes.fromhex(rest[0])
        if name == "dict":
            return {self.decoded(key): self.decoded(part) for key, part in rest[0]}
        return SEQUENCES[name](self.decoded(part) for part in rest[0])

    def named(self, place: Any) -> Any:
        """Returns an object that the other side knows by its number."""
        return self.held[place]


SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class AnswerLink(Link):
    """The side of the answer: objects have numbers, and what its code defines has names."""

    names: dict[str, Any]

    def named(self, place: Any) -> Any:
        if isinstance(place, int):
            return self.held[place]
        if place not in self.names and "Solution" in self.names:
            return getattr(self.names["Solution"](), place)
        if place not in self.names:
            raise NameError(f"name {place!r} is not defined")
        return self.names[place]

    def result(self, what: str, place: Any, given: Any) -> Any:
        target = self.named(place)
        if what == "call":
            args, options = given
            return target(*args, **options)
        if what == "attribute":
            return getattr(target, given)
        if what == "item":
            return target[given]
        return len(target) if what == "length" else bool(target)


def answer_side(link: AnswerLink) -> None:
    """Runs the answer's code, then the calls that the tests ask for."""
    link.names = {"__name__": "answer"}
    exec(COMMON, link.names)  # noqa: S102 this is what the sandbox is for
    link.send({"ready": True})
    exec(compile(link.receive()["code"], "answer.py", "exec"), link.names)  # noqa: S102
    link.send({"loaded": True})
    while True:
        what, place, given = link.receive()["ask"]
        try:
            reply = {"result": link.encoded(link.result(what, place, link.decoded(given)))}
            json.dumps(reply)
        except BaseException as error:  # whatever the answer's code raises
            reply = {"raised": type(error).__name__, "text": str(error)[:200]}
        link.send(reply)


def tests_side(link: Link) -> None:
    """Runs the tests one after another and reports each."""
    names: dict[str, Any] = {"__name__": "tests", "_same": same}
    exec(COMMON, names)  # noqa: S102
    link.send({"ready": True})
    request = link.receive()
    names |= {name: AnswerObject(link, name) for name in request["names"] if name not in names}
    for code in request["checks"]:
        try:
            exec(compile(code, "tests.py", "exec"), names)  # noqa: S102
            passed = True
        except BaseException:  # whatever tests raise, or the answer's code through them
            passed = False
        link.send({"passed": passed})


def same(found: Any, known: Any) -> bool:
    """Returns whether a result equals the known one, which is JSON: tuples count as lists, and floats may
    differ by rounding."""
    if isinstance(found, list | tuple) and isinstance(known, list):
        return len(found) == len(known) and all(map(same, found, known))
    if isinstance(found, float) or isinstance(known, float):
        numbers = isinstance(found, int | float) and isinstance(known, int | float)
        return numbers and math.isclose(found, known, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(found, dict) and isinstance(known, dict):
        given = {str(key): value for key, value in found.items()}  # JSON has texts as keys
        return given.keys() == known.keys() and all(same(given[key], known[key]) for key in known)
    return type(found) is type(known) and bool(found == known)


if __name__ == "__main__" and sys.argv[-1] == "answer":
    answer_side(AnswerLink())
elif __name__ == "__main__":
    tests_side(Link())
