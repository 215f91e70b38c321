"""Remote models that answer: asked as configured, never twice, counted, and part of an evaluation like any
other model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.answers.remote_answers import StoredReply, answer_remotely, answering_metrics
from rlhf_core.config import Endpoint, Evaluation, Source
from rlhf_core.data.questions import Question
from rlhf_core.judging.record_lines import records_of
from rlhf_core.recipe.digest import deciding
from rlhf_core.recipe.load_recipe import recipe_of
from rlhf_core.system.files import Digests
from tests.support.chat_endpoint import SECRET, Reply, completion, error, serving
from tests.support.text_rows import rows_of_text


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSWER_KEY", SECRET)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def questions(count: int) -> list[Question]:
    return [
        Question(f"q{n}", "sums", ({"role": "user", "content": f"Question {n}?"},), {}) for n in range(count)
    ]


def endpoint(url: str, **changes: Any) -> Endpoint:
    fields = dict(
        model="gpt-x", base_url=url, api_key_env="ANSWER_KEY", concurrency=3, timeout=60.0, max_attempts=3
    )
    return Endpoint.model_validate(fields | changes)


def ask(folder: Path, asked: Endpoint, number: int = 6, **changes: Any) -> Any:
    fields = dict(models=("remote",), questions=Source(path="q.jsonl"), temperature=0.5, generate_max_len=40)
    config = Evaluation.model_validate(fields | {"endpoints": {"remote": asked}})
    options: dict[str, Any] = {"count": None, "pause": 0.01}
    return answer_remotely(
        "remote", config, questions(number), folder / "answers.jsonl", **(options | changes)
    )


def echo(_: int, request: dict[str, Any]) -> Reply:
    return completion("to " + request["messages"][-1]["content"])


def test_questions_are_asked_as_configured_and_answers_come_back_in_order(tmp_path: Path) -> None:
    with serving(echo) as server:
        answers, use = ask(
            tmp_path,
            endpoint(server.url, system="Be brief.", more={"top_k": 5}, input_price=2.0, output_price=8.0),
        )
    assert [(a.uid, a.text, a.tokens) for a in answers] == [
        (f"q{n}", f"to Question {n}?", 3) for n in range(6)
    ]
    request = server.requests[0]
    assert request["model"] == "gpt-x"
    assert request["temperature"] == 0.5
    assert request["max_tokens"] == 40
    assert request["top_k"] == 5
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert set(server.keys) == {f"Bearer {SECRET}"}
    assert server.most_busy <= 3
    assert use.settings == {"max_tokens": 40, "temperature": 0.5, "top_k": 5, "system": "Be brief."}
    assert (use.requests, use.failed, use.input_tokens, use.output_tokens) == (6, 0, 60, 18)
    assert use.cost == pytest.approx((60 * 2 + 18 * 8) / 1e6)
    assert answering_metrics({"gpt": use})["answer_cost/gpt"] == use.cost
    assert SECRET not in (tmp_path / "answers.jsonl").read_text()


def test_its_own_limits_come_before_the_evaluations(tmp_path: Path) -> None:
    with serving(
        lambda *_: completion("cut he", "length", completion_tokens_details={"reasoning_tokens": 1})
    ) as server:
        answers, use = ask(tmp_path, endpoint(server.url, temperature=0.0, max_tokens=7), 1)
    assert (server.requests[0]["temperature"], server.requests[0]["max_tokens"]) == (0.0, 7)
    # reasoning is paid for, not read
    assert answers[0].answer_truncated and answers[0].tokens == 2 and use.output_tokens == 3
    with serving(echo) as server:
        answers, _ = ask(tmp_path, endpoint(server.url), 1, count=lambda text: 100 + len(text))
    assert answers[0].tokens == 100 + len("to Question 0?") and not answers[0].answer_truncated


def test_what_was_answered_is_not_asked_again_even_after_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with serving(echo) as server:
        ask(tmp_path, endpoint(server.url), 4)
        written = file.read_bytes()
        file.write_bytes(written[:-9])  # the process died within the last line
        assert len(list(records_of(file, StoredReply))) == 3
        answers, use = ask(tmp_path, endpoint(server.url), 4)
        assert use.requests == 1 and use.input_tokens == 40 and len(answers) == 4
        assert ask(tmp_path, endpoint(server.url), 4)[1].requests == 0
        # asked otherwise: other answers
        assert ask(tmp_path, endpoint(server.url, temperature=0.9), 4)[1].requests == 4
        assert ask(tmp_path, endpoint(server.url, model="gpt-y"), 4)[1].requests == 4
    assert len(server.requests) == 4 + 1 + 4 + 4


def test_a_busy_endpoint_is_asked_again_and_a_dead_one_keeps_what_came(tmp_path: Path) -> None:
    with serving(lambda number, request: error(429) if number < 2 else echo(number, request)) as server:
        answers, use = ask(tmp_path, endpoint(server.url), 2)
    assert [a.text for a in answers] == ["to Question 0?", "to Question 1?"] and use.requests == 4
    with (
        serving(
            lambda n, request: error(500) if "Question 5" in str(request) else echo(n, request)
        ) as server,
        pytest.raises(
            ValueError,
            match=(
                r"^remote: 1 of 6 questions have no answer, more than max_failed=0 allows \(the last: .*500\)"
            ),
        ),
    ):
        ask(tmp_path, endpoint(server.url, concurrency=1), 6)
    assert len(list(records_of(tmp_path / "answers.jsonl", StoredReply))) == 2 + 5  # another url, other keys


def test_failures_within_the_allowed_share_are_empty_answers_and_asked_again_next_time(
    tmp_path: Path,
) -> None:
    with serving(
        lambda n, request: error(400) if "Question 1" in str(request) else echo(n, request)
    ) as server:
        answers, use = ask(tmp_path, endpoint(server.url, max_failed=0.2), 6)
        assert (answers[1].text, answers[1].tokens, use.failed) == ("", 0, 1)
        assert answering_metrics({"m": use})["answer_failed/m"] == 1.0
        assert ask(tmp_path, endpoint(server.url, max_failed=0.2), 6)[1].requests == 1


def test_a_refused_key_names_the_variable_and_not_the_key(tmp_path: Path) -> None:
    with (
        serving(lambda *_: error(401)) as server,
        pytest.raises(ValueError, match=r"remote: .* answers 401 .*ANSWER_KEY") as caught,
    ):
        ask(tmp_path, endpoint(server.url, concurrency=1))
    assert SECRET not in str(caught.value) and len(server.requests) == 1


# --- in a recipe ---


def recipe(**changes: Any) -> dict[str, Any]:
    evaluation = {
        "models": ["sft", "gpt"],
        "baseline": "base",
        "endpoints": {"gpt": {"model": "gpt-x"}},
        "questions": {"path": "q.jsonl"},
    }
    return {
        "name": "r",
        "base_model": "org/base",
        "stages": {"sft": {"data": {"sources": "s.jsonl"}}, "evaluation": evaluation | changes},
    }


def planned(raw: dict[str, Any]) -> Any:
    from rlhf_core.recipe.plan import plan

    return plan(recipe_of(raw))


def test_a_remote_model_is_no_stage_and_no_folder() -> None:
    node = planned(recipe())["evaluation"]
    assert node.stages == {"sft": "sft"} and set(node.models) == {"base"}
    both_remote = recipe(
        models=["gpt"], baseline="old", endpoints={"gpt": {"model": "gpt-x"}, "old": {"model": "gpt-w"}}
    )
    node = planned(both_remote)["evaluation"]
    assert node.stages == {} and node.models == {}


def test_an_endpoint_decides_the_digest_by_what_is_asked_only() -> None:
    def key(**changes: Any) -> str:
        return str(planned(recipe(endpoints={"gpt": {"model": "gpt-x"} | changes}))["evaluation"].digest)

    assert key() == key(max_failed=0.5) == key(max_attempts=9), "answers that were kept are found again"
    assert key() == key(concurrency=2) == key(api_key_env="OTHER") == key(input_price=1.0) == key(timeout=9)
    assert (
        len(
            {
                key(),
                key(model="gpt-y"),
                key(base_url="http://here/v1"),
                key(temperature=1.0),
                key(more={"top_p": 0.9}),
            }
        )
        == 5
    )


def test_endpoints_are_in_the_digest_and_their_patience_is_not() -> None:
    recipes = recipe_of(recipe(models=["sft"], endpoints={})), recipe_of(recipe())
    without, given = (json.dumps(deciding(found.stages["evaluation"], Digests())) for found in recipes)
    assert without != given
    assert "gpt" in given
    assert not any(name in given for name in ("start_timeout", '"timeout"', "max_attempts"))


@pytest.mark.parametrize(
    ("changes", "message"),
    rows_of_text(r"""
    {models: [sft, gtp]} | evaluation: the endpoint 'gpt' is not used
    {models: [base], endpoints: {}} | stages.evaluation.models: base is the baseline, and there is no other model to compare
    {endpoints: {gpt: {model: x, base_url: 'https://me:pass@gw/v1'}}} | base_url.*the address contains a password or a query
    {endpoints: {gpt: {model: x, base_url: 'https://gw/v1?key=1'}}} | base_url.*the address contains a password or a query
    {models: [sft, gpt, gtp]} | stages.evaluation.models: unknown name 'gtp'; did you mean gpt\?; .*an endpoint
    {models: [sft], endpoints: {sft: {model: x}}} | stages.evaluation.endpoints.sft: sft is also .* a stage's name
    {models: [base, sft], endpoints: {base: {model: x}}} | stages.evaluation.endpoints.base: base is also the base model's
    {endpoints: {gpt: {}}} | stages.evaluation.endpoints.gpt.model: missing \(name of the model at the endpoint\); add it
    {endpoints: {gpt: {model: x, base_ulr: y}}} | endpoints.gpt.base_ulr: unknown key 'base_ulr'; did you mean base_url
    {judges: [{kind: vllm, model: gpt}]} | stages.evaluation.judges.0.model: unknown name 'gpt'
    """),
)
def test_a_mistake_is_told_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        planned(recipe(**changes))
    assert "\n" not in str(caught.value)


def test_a_local_judge_is_a_parent_and_its_dependency_decides_the_digest() -> None:
    raw = recipe(models=["sft"], endpoints={}, judges=[{"kind": "vllm", "model": "sft", "max_tokens": 64}])
    node = planned(raw)["evaluation"]
    assert node.stages == {"sft": "sft"}
    other = planned(
        recipe(
            models=["sft"], endpoints={}, judges=[{"kind": "vllm", "model": "org/judge", "max_tokens": 64}]
        )
    )["evaluation"]
    assert other.models["org/judge"] == "org/judge" and other.digest != node.digest
    patient = [{"kind": "vllm", "model": "sft", "max_tokens": 64, "engine": {"start_timeout": 5}}]
    assert planned(recipe(models=["sft"], endpoints={}, judges=patient))["evaluation"].digest == node.digest


def test_a_missing_key_and_the_gpus_of_a_judge_are_seen_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core.preflight.machine_checks import check_machine, needs

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = planned(recipe())
    told = [p for p in check_machine(found, found.nodes) if "OPENAI_API_KEY" in p]
    assert told == [
        "stages.evaluation: the endpoint gpt needs a key in the environment variable OPENAI_API_KEY; set it"
    ]
    judge = {"kind": "vllm", "model": "sft", "engine": {"gpus": 1, "tensor_parallel_size": 2}}
    assert needs(planned(recipe(models=["sft"], endpoints={}, judges=[judge]))["evaluation"].config).gpus == 2
