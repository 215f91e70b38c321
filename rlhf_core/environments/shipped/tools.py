"""`environment: tools`: the model answers a question and may first use a calculator and a Python interpreter.

The reward is 1 if the last answer equals the row's column `answer`, either as text or in its last number.
Configure other rewards in `reward`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.environments import sandbox
from rlhf_core.environments.conversation import Call, Conversation

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LARGEST = 10**100
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "abs": abs,
    "round": round,
}


def calculate(expression: str) -> str:
    """Evaluates an arithmetic expression with numbers, + - * / // % **, sqrt, log, exp, abs and round.
    Returns the result or an error message."""
    try:
        result = _value(ast.parse(expression[:1000].strip(), mode="eval").body)
        return str(int(result) if isinstance(result, float) and result.is_integer() else result)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float | int:
    match node:
        case ast.Constant(value=int() | float() as value) if (
            not isinstance(value, bool) and abs(value) <= LARGEST
        ):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base = _value(left)
            power = _value(right)
            if abs(power) > 1000 or (abs(base) > 1 and abs(power) * math.log10(abs(base)) > 100):
                raise ValueError("the result is too large")
            return _bounded(base**power)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](_value(argument)))
    raise ValueError("only numbers, + - * / // % **, and sqrt, log, exp, abs, round of one number")


def _bounded(value: Any) -> float | int:
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError("the result is no number, or too large")
    return value


def _schema(name: str, what: str, argument: str, about: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": about}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


SCHEMAS = {
    "calculator": _schema(
        "calculator", "Computes an arithmetic expression.", "expression", "such as (3 + 4) * sqrt(2)"
    ),
    "python": _schema(
        "python", "Runs a Python program without network; returns what it prints.", "code", "the program"
    ),
}


class Tools:
    """Answers the model's tool calls.

    `tools`: calculator, python, or both. `answer`: the column with the right answer; if None, the
    environment's reward is 0, for recipes with other rewards in `reward`. `seconds` and `memory_mib` limit
    one Python program, `all_seconds` all programs of an episode, and `calls` the calls in one answer. Calls
    beyond a limit return an error message.
    """

    def __init__(
        self,
        tools: Sequence[str] = ("calculator", "python"),
        answer: str | None = "answer",
        seconds: float = sandbox.SECONDS,
        memory_mib: int = sandbox.MEMORY_MIB,
        all_seconds: float = 3 * sandbox.SECONDS,
        calls: int = 8,
    ):
        unknown = [tool for tool in tools if tool not in SCHEMAS]
        if unknown:
            raise ValueError(f"there is no tool {unknown[0]!r}, there are {', '.join(SCHEMAS)}")
        if "python" in tools and sandbox.asked() and not sandbox.available():
            raise ValueError("no bubblewrap (bwrap) works here, which closes Python programs in")
        self.tools = [SCHEMAS[tool] for tool in tools]
        self._answer = answer
        self._seconds = seconds
        self._memory_mib = memory_mib
        self._all_seconds = all_seconds
        self._calls = calls

    async def rollout(self, task: dict[str, Any], model: Conversation) -> float:
        if self._answer is not None and self._answer not in task:
            raise ValueError(
                f"the prompts have no column {self._answer!r}: name it in options.answer, or set that to null"
            )
        answer, left = await model.answer(), self._all_seconds
        while answer.calls and answer.finished:
            results = []
            for number, call in enumerate(answer.calls):
                start = time.monotonic()
                text = (
                    await self._result(call, left)
                    if number < self._calls
                    else f"error: an answer may have {self._calls} calls"
                )
                left -= time.monotonic() - start if call.name == "python" else 0
                results.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text})
            answer = await model.answer(*results)
        return float(is_right(answer.text, str(task[self._answer]))) if self._answer is not None else 0.0

    async def _result(self, call: Call, left: float) -> str:
        schema = next(
            (tool["function"] for tool in self.tools if tool["function"]["name"] == call.name), None
        )
        if call.wrong or schema is None:
            return f"error: {call.wrong or f'there is no tool {call.name!r}'}"
        (argument,) = schema["parameters"]["required"]
        value = call.arguments.get(argument)
        if not isinstance(value, str | int | float):
            return f"error: give {argument!r}, a text"
        if call.name == "calculator":
            return calculate(str(value))
        if left <= 0:
            return "error: the programs of this conversation have used up their time"
        seconds = min(self._seconds, left)
        output = await sandbox.run(sandbox.python(), str(value), seconds, self._memory_mib)
        return (
            output.text if output.code is not None else f"{output.text}\nerror: stopped after {seconds:g} s"
        )


def is_right(said: str, answer: str) -> bool:
    """Returns whether a string equals the answer, or its last number equals the answer's number."""
    if " ".join(said.split()) == " ".join(answer.split()):
        return True
    numbers = NUMBER.findall(said.replace(",", ""))
    wanted = NUMBER.fullmatch(answer.strip().replace(",", ""))
    return bool(numbers and wanted and float(numbers[-1]) == float(wanted.group()))
