"""Defines the two programs that check an answer's functions, each in its own sandbox: one runs the answer's
code, the other the tests. They are started as `python -c SOURCE answer|tests`, and use only the standard
library, since nothing else is available there.

The program with the tests requests calls of the answer's functions and gets their results as plain data. The
answer therefore sees no test and no expected value, cannot change how results are compared, and cannot report
a test as passed. The programs exchange lines of JSON on the descriptors that they inherit; stdin and stdout
of the tested code are redirected to /dev/null. Changes that a call makes to lists, dicts and sets are
repeated in the program with the tests. Functions and iterators are passed by reference in both directions.
"""

import builtins
import json
import math
import os
import signal
import sys
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import IO, Any

COMMON = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from typing import *
"""
DEEPEST = 200  # nesting depth of containers


class AnswerError(Exception):
    """An error raised by the answer's code, of a type that Python does not define."""


class AnswerObject:
    """An object in the other program. It is equal only to itself."""

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

    def __iter__(self) -> Any:
        return self._link.ask("iterate", self, None)

    def __next__(self) -> Any:
        return self._link.ask("next", self, None)


class Link:
    """A connection to the program that started both programs. `held`: the objects to which the other program
    refers by number. `check`: the number of the current check."""

    def __init__(self) -> None:
        self.check = 0
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
        """Requests a result from the other program and returns it. Raises any error that the answer's code
        raises."""
        self.send({"ask": [what, target._place, self.encoded(given), self.check]})
        reply = self.receive()
        while "ask" in reply:
            self.serve(reply["ask"])
            reply = self.receive()
        for of_options, place, value in reply.get("changed", []):
            _change(given[of_options][place], self.decoded(value))
        if "raised" not in reply:
            return self.decoded(reply["result"])
        kind: Any = getattr(builtins, str(reply["raised"]), None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            kind = AnswerError
        raise kind(str(reply.get("text", "")))

    def encoded(self, value: Any, depth: int = 0) -> Any:
        """Encodes a value as JSON: plain data by type, any other object by number."""
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
        if isinstance(value, Decimal):
            return ["decimal", str(value)]
        if isinstance(value, Fraction):
            return ["fraction", value.numerator, value.denominator]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        for name, kind in SEQUENCES.items():
            if isinstance(value, kind):
                return [name, [self.encoded(part, depth + 1) for part in value]]
        self.held.append(value)
        return ["object", len(self.held) - 1]

    def decoded(self, value: Any) -> Any:
        """Decodes a value encoded by `encoded`."""
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
        if name == "keys":
            return dict.fromkeys(self.decoded(part) for part in rest[0]).keys()
        if name in NUMBERS:
            return NUMBERS[name](*rest)
        return SEQUENCES[name](self.decoded(part) for part in rest[0])

    def serve(self, asked: list[Any]) -> None:
        """Sends the result that the other program requested, or the error raised while computing it."""
        what, place, given, self.check = asked
        try:
            reply = self.reply(what, place, given)
            json.dumps(reply)
        except BaseException as error:  # whatever the code raises
            reply = {"raised": type(error).__name__, "text": str(error)[:200]}
        self.send(reply)

    def reply(self, what: str, place: Any, given: Any) -> dict[str, Any]:
        """Returns the reply to a request to call a function that was passed as an argument, or to advance an
        iterator. Allows no other access, because attributes would give the answer access to the tests."""
        if what not in ("call", "iterate", "next"):
            raise AttributeError(f"no {what} of an argument")
        return {"result": self.encoded(self.result(what, self.named(place), self.decoded(given)))}

    def result(self, what: str, target: Any, given: Any) -> Any:
        if what == "call":
            args, options = given
            return target(*args, **options)
        return iter(target) if what == "iterate" else next(target)

    def named(self, place: Any) -> Any:
        """Returns the object to which the other program refers by number."""
        return self.held[place]


SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "keys": type(dict.fromkeys("").keys()),
}
NUMBERS: dict[str, Any] = {"decimal": Decimal, "fraction": Fraction, "range": range}
CHANGEABLE = ("list", "dict", "set")


def _change(value: Any, new: Any) -> None:
    """Replaces the contents of a list, dict or set with the contents of another."""
    if isinstance(value, list):
        value[:] = new
    else:
        value.clear()
        value.update(new)


class AnswerLink(Link):
    """The connection of the program with the answer. Objects are identified by number, and definitions in the
    answer's code by name."""

    names: dict[str, Any]
    standard: dict[str, Any]  # the names defined before the answer's code ran
    seconds: float  # CPU time of one check

    def named(self, place: Any) -> Any:
        if isinstance(place, int):
            return self.held[place]
        if place in self.names and self.names[place] is not self.standard.get(place, self):
            return self.names[place]
        if "Solution" in self.names:
            return getattr(self.names["Solution"](), place)
        raise NameError(f"name {place!r} is not defined")

    def serve(self, asked: list[Any]) -> None:
        if asked[-1] != self.check:
            self.limit_time()
        super().serve(asked)

    def limit_time(self) -> None:
        """Ends this process after it has used `seconds` more of CPU time. The answer's code can undo this,
        but not the sandbox's limits."""
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def reply(self, what: str, place: Any, given: Any) -> dict[str, Any]:
        plain = self.decoded(given)
        result = {"result": self.encoded(self.result(what, self.named(place), plain))}
        if what == "call":
            args, options = given[1]
            places = [(0, place, value) for place, value in enumerate(args[1])]
            places += [(1, place, value) for place, value in options[1]]
            result["changed"] = self.changed(places, plain)
        return result

    def changed(self, places: list[Any], plain: list[Any]) -> list[Any]:
        """Returns the place and new value of each list, dict or set argument that the call has changed."""
        found = []
        for of_options, place, before in places:
            if not isinstance(before, list) or before[0] not in CHANGEABLE or _has_objects(before):
                continue
            after = self.encoded(plain[of_options][place])
            if after != before:
                found.append([of_options, place, after])
        return found

    def result(self, what: str, target: Any, given: Any) -> Any:
        if what == "attribute":
            return getattr(target, given)
        if what == "item":
            return target[given]
        if what == "length":
            return len(target)
        return bool(target) if what == "truth" else super().result(what, target, given)


def _has_objects(given: list[Any]) -> bool:
    text = json.dumps(given)
    return '"own"' in text or '"object"' in text


def answer_side(link: AnswerLink) -> None:
    """Runs the answer's code, then the calls that the tests request."""
    link.names = {"__name__": "answer"}
    exec(COMMON, link.names)  # noqa: S102 this is what the sandbox is for
    link.standard = dict(link.names)
    link.send({"ready": True})
    link.seconds = link.receive()["seconds"]
    link.limit_time()
    exec(compile(link.receive()["code"], "answer.py", "exec"), link.names)  # noqa: S102
    link.send({"loaded": True})
    while True:
        link.serve(link.receive()["ask"])


def tests_side(link: Link) -> None:
    """Runs the tests one after another and reports the result of each."""
    names: dict[str, Any] = {"__name__": "__main__", "_same": same}
    exec(COMMON, names)  # noqa: S102
    link.send({"ready": True})
    request = link.receive()
    names |= {name: AnswerObject(link, name) for name in request["names"]}
    for link.check, code in enumerate(request["checks"], 1):
        try:
            exec(compile(code, "tests.py", "exec"), names)  # noqa: S102
            passed = True
        except BaseException:  # whatever is raised by the tests or, through them, by the answer's code
            passed = False
        link.send({"passed": passed})


def same(found: Any, known: Any) -> bool:
    """Returns whether a result equals the expected one, which comes from JSON: tuples count as lists, and
    floats may differ by rounding."""
    if isinstance(found, list | tuple) and isinstance(known, list):
        return len(found) == len(known) and all(map(same, found, known))
    if isinstance(found, float) or isinstance(known, float):
        numbers = isinstance(found, int | float) and isinstance(known, int | float)
        return numbers and math.isclose(found, known, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(found, dict) and isinstance(known, dict):
        given = {str(key): value for key, value in found.items()}  # JSON keys are strings
        return given.keys() == known.keys() and all(same(given[key], known[key]) for key in known)
    return type(found) is type(known) and bool(found == known)


if __name__ == "__main__" and sys.argv[-1] == "answer":
    answer_side(AnswerLink())
elif __name__ == "__main__":
    tests_side(Link())
