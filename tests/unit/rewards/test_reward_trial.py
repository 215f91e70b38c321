"""The call of each reward function with a made-up answer, before engines start: what it refuses, what it
warns of, what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewarding.verifiers import CodeReward, MathReward, VerifierReward
from rlhf_core.config.rewards import FunctionReward, HttpReward
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Prompt
from rlhf_core.rewards.reward_server import application
from rlhf_core.rewards.reward_trial import ANSWER, made_up_answer, require_references, sample_of, try_rewards
from rlhf_core.system.processes import raised_by_us
from tests.support.asgi import served
from tests.support.templates import save_tokenizer

CODE = """
import json, math, sys

def misspelt(responses): return [scor(r) for r in responses]
def module(responses): return [json.lods(r) for r in responses]
def imports(responses):
    import no_such_module
def one(response): return float(response)
def arguments(responses): return [one(r, 2) for r in responses]
def of_wrong_ones(responses, rows): return [1.0 if r == str(row["answer"]) else respone for r, row in zip(responses, rows)]
def other_name(answers): return [0.0 for _ in answers]
def nothing(responses): return None
async def waits(responses): return [0.0 for _ in responses]

def strict(responses): return [float(json.loads(r)["score"]) for r in responses]
def column(rows): return [float(row["misspelt"]) for row in rows]
def unpacks(responses): return [one(*r.split()) for r in responses]
def unset(responses):
    for word in responses[0]:
        if word == "#":
            found = 1.0
    return found
def closed_over(responses):
    for word in responses[0]:
        if word == "#":
            found = 1.0
    return [found for _ in responses]
def text(responses): return [r.split("=")[1].nothing for r in responses]
def leaves(responses): sys.exit(3)
def short(responses): return []
def raises(responses): raise ValueError("no score")
def network(responses): raise ConnectionError("no route")

def good(responses, rows): return [float(r == str(row["answer"])) - 1 for r, row in zip(responses, rows)]
def fails(responses): return [None for _ in responses]
"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(load_tokenizer(str(save_tokenizer("hermes", tmp_path_factory.mktemp("hermes")))), "chat")


@pytest.fixture
def prompt(renderer: Renderer) -> Prompt:
    messages = ({"role": "user", "content": "6 times 7"},)
    return Prompt(messages, renderer.prompt(messages), {"prompt": "6 times 7", "answer": 42}, False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("code") / "checks.py"
    written.write_text(CODE)
    return written


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(CODE.splitlines(), 1) if line.startswith(text))


@pytest.mark.parametrize(
    ("name", "told", "line"),
    [
        ("misspelt", "NameError: name 'scor' is not defined", "def misspelt"),
        ("module", "AttributeError: module 'json' has no attribute 'lods'", "def module"),
        ("imports", "ModuleNotFoundError: No module named 'no_such_module'", "    import no_such"),
        ("arguments", r"TypeError: one\(\) takes 1 positional argument but 2 were given", "def arguments"),
        ("of_wrong_ones", "NameError: name 'respone' is not defined", "def of_wrong_ones"),
        ("nothing", r"TypeError: nothing\(\) returned None, no list of rewards", "def nothing"),
        ("waits", r"TypeError: waits\(\) returned <coroutine .*, no list of rewards", "async def waits"),
    ],
)
def test_code_that_is_wrong_for_every_answer_is_refused_with_its_line(
    file: Path, renderer: Renderer, prompt: Prompt, name: str, told: str, line: str
) -> None:
    found = (
        rf"the reward function {name}: a call with a made-up answer raised {told} \(.*checks\.py, line"
        rf" {line_of(line)}\); correct it"
    )
    with pytest.raises(ValueError, match=found) as caught:
        try_rewards([FunctionReward(function=f"{file}:{name}")], [prompt], renderer)
    assert raised_by_us(caught.value), "a user's mistake: the stage is not retried"


def test_a_function_with_another_signature_is_refused(file: Path, renderer: Renderer, prompt: Prompt) -> None:
    with pytest.raises(ValueError, match="other_name needs answers"):
        try_rewards([FunctionReward(function=f"{file}:other_name")], [prompt], renderer)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("strict", "raised TypeError: 'int' object is not subscriptable (%s, line %d)"),
        ("column", "raised KeyError: 'misspelt' (%s, line %d)"),
        ("text", "raised IndexError: list index out of range (%s, line %d)"),
        ("raises", "raised ValueError: no score (%s, line %d)"),
        ("network", "failed: ConnectionError: no route (%s, line %d)"),
        ("leaves", "failed: its process exited with status 3"),
        ("short", "failed: it gave 0 rewards for 2 answers"),
    ],
)
def test_what_the_made_up_answer_may_have_caused_is_a_warning(
    file: Path, renderer: Renderer, prompt: Prompt, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    try_rewards([FunctionReward(function=f"{file}:{name}")], [prompt], renderer)
    where = told % (file, line_of(f"def {name}")) if "%s" in told else told
    assert (
        f"warning: the reward function {name}: a call with a made-up answer {where}; the stage goes on"
        in capsys.readouterr().out
    )


def test_errors_of_single_answers_stop_no_stage(
    file: Path, renderer: Renderer, prompt: Prompt, capsys: pytest.CaptureFixture[str]
) -> None:
    worded = Prompt(prompt.messages, prompt.tokens, {"answer": "of three words"}, False)
    try_rewards(
        [FunctionReward(function=f"{file}:{name}") for name in ("unpacks", "unset", "closed_over")],
        [worded],
        renderer,
    )
    told = capsys.readouterr().out
    assert (
        "raised TypeError: one() takes 1 positional argument but 3 were given" in told
        and "raised UnboundLocalError" in told
    )
    assert "raised NameError: cannot access free variable 'found'" in told


def test_a_good_function_and_a_failed_reward_say_nothing(
    file: Path, renderer: Renderer, prompt: Prompt, capsys: pytest.CaptureFixture[str]
) -> None:
    try_rewards([FunctionReward(function=f"{file}:{name}") for name in ("good", "fails")], [prompt], renderer)
    assert capsys.readouterr().out == ""


def test_the_answer_is_the_row_s_own_where_it_has_one(renderer: Renderer, prompt: Prompt) -> None:
    sample = sample_of(prompt, made_up_answer(prompt.row), renderer)
    assert (sample.response, sample.row, sample.finished) == (
        "42",
        prompt.row,
        True,
    ) and "6 times 7" in sample.query
    assert (
        made_up_answer({"solution": "so"}) == "so" and made_up_answer({"answer": " ", "gold": [1]}) == ANSWER
    )


def test_a_function_that_hangs_costs_its_time_limit(
    tmp_path: Path, renderer: Renderer, prompt: Prompt, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef slow(responses): time.sleep(100)\n")
    try_rewards([FunctionReward(function=f"{tmp_path}/slow.py:slow", timeout=0.5)], [prompt], renderer)
    assert "failed: no answer within 0.5 s" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [MathReward, CodeReward])
def test_the_code_of_a_verifier_is_there(kind: type[VerifierReward]) -> None:
    source = kind()
    assert source.file.is_file() and f"def {source.function_name}(" in source.file.read_text()


def test_a_verifier_is_called_once(
    renderer: Renderer,
    prompt: Prompt,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("math_verify", reason="needs math-verify: make setup")
    try_rewards([MathReward()], [prompt], renderer)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(VerifierReward, "file", tmp_path / "math_verifier.py")
    (tmp_path / "math_verifier.py").write_text(
        "def verify_answers(responses, column='', seconds=0.0): return [no]\n"
    )
    with pytest.raises(ValueError, match=r"the reward function math: .*NameError: name 'no' is not defined"):
        try_rewards([MathReward()], [prompt], renderer)


def test_each_row_has_the_reference_of_a_judge() -> None:
    source = JudgeReward.model_validate({"judge": {"model": "m"}, "rubric": "r", "reference": "gold"})
    rows = [{"gold": "1"}, {"gold": "2"}, {"other": "3"}]
    prompts = [Prompt((), [1], row, False) for row in rows]
    require_references(source, "prompts", prompts[:2])
    with pytest.raises(
        ValueError, match=r"^prompts: number 3: the reward m finds .* 'gold'; .* are other: set"
    ):
        require_references(source, "prompts", prompts)


def test_a_server_is_not_asked_for_rewards(renderer: Renderer, prompt: Prompt) -> None:
    scored: list[object] = []
    with served(application(lambda answers: scored.append(answers) or [0.0], {})) as url:  # type: ignore[func-returns-value]
        try_rewards([HttpReward(url=url)], [prompt], renderer)
    assert scored == []
