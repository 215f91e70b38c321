"""The calibration stage from labels to report: a chat judge at an endpoint played here, a real tiny reward
model, real files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.calibration.calibration_report import CalibrationReport, calibration_tables
from evaluation.calibration.calibration_stage import run
from rlhf_core.config import Calibration, Gate
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.labels import load_labels
from rlhf_core.recipe.gate_checks import check, meaning_of
from rlhf_core.records import Judgment
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from tests.support.chat_endpoint import Reply, completion, error, serving
from tests.support.evaluations import Setting, make_reward_model, make_setting
from tests.support.labels import label, write_labels
from tests.support.micro import WAIT_SECONDS, wait_until
from tests.support.stage_request import stage_request

pytestmark = pytest.mark.usefixtures("judge_key")

VERDICTS = ("A>B", "B>>A", "A=B", "A>>B", "B>A")
COUNT = 40
CONCURRENCY = 4


def labels(folder: Path) -> Path:
    return write_labels(
        folder / "labels.jsonl", *(label(i, VERDICTS[i % 5], uid=f"q{i}") for i in range(COUNT))
    )


def calibration(url: str, file: Path, **changes: Any) -> Calibration:
    judge = {
        "kind": "openai",
        "model": "judge",
        "base_url": url,
        "api_key_env": "JUDGE_KEY",
        "max_failed": 0.1,
        "concurrency": CONCURRENCY,
    }
    return Calibration.model_validate(
        {"judge": judge, "labels": str(file), "bootstrap_rounds": 300, **changes}
    )


def prepared(folder: Path, config: Calibration, inputs: dict[str, str] | None = None) -> RunDir:
    directory = RunDir(folder / "run")
    directory.prepare(stage_request(config, inputs or {}, seed=1))
    return directory


def calibrate(
    folder: Path, config: Calibration, inputs: dict[str, str] | None = None
) -> tuple[CalibrationReport, dict[str, float]]:
    directory = prepared(folder, config, inputs)
    outcome = run(directory.request(), directory)
    assert outcome.outputs == {"report": "report"}
    assert [name for name in outcome.metrics if not has_metric(config, name)] == []
    return (
        CalibrationReport.model_validate_json((directory / "report/calibration.json").read_text()),
        outcome.metrics,
    )


def asked(request: dict[str, Any]) -> tuple[str, bool]:
    """The uid of a game, and whether the label's answer A is shown first."""
    text = request["messages"][1]["content"]
    first, uid = re.findall(r"\n([ab]) of (q\d+)\n", text)[0]
    return uid, first == "a"


def copying(
    file: Path, favour: Callable[[str], bool] = lambda uid: False
) -> Callable[[int, dict[str, Any]], Reply]:
    """A judge that says what people said, except where `favour(uid)`: there the answer shown first wins."""
    signs = {pair.uid: pair.sign for pair in load_labels(file)}

    def script(_: int, request: dict[str, Any]) -> Reply:
        uid, a_first = asked(request)
        sign = 1 if favour(uid) else signs[uid] * (1 if a_first else -1)
        return completion({1: "[[A>B]]", 0: "[[A=B]]", -1: "[[B>A]]"}[sign])

    return script


def test_a_judge_that_copies_people_has_kappa_one(tmp_path: Path) -> None:
    file = labels(tmp_path)
    with serving(copying(file)) as endpoint:
        report, metrics = calibrate(tmp_path, calibration(endpoint.url, file))
    assert len(endpoint.requests) == 2 * COUNT  # both orders of each pair
    assert metrics["kappa"] == metrics["agreement"] == metrics["swap_consistency"] == 1.0
    assert metrics["position_bias"] == 0.0
    assert metrics["kappa/ci_low"] < 1.0 == metrics["kappa/ci_high"]
    assert report.confusion == ((16, 0, 0), (0, 8, 0), (0, 0, 16))
    assert report.judge == "judge"
    assert report.pairs == COUNT
    assert report.labels == COUNT
    assert report.annotators == 1
    assert report.unjudged == 0
    assert report.strength == "almost perfect" and metrics["judge_input_tokens"] == 10 * 2 * COUNT
    judged = [
        Judgment.model_validate_json(line)
        for line in (tmp_path / "run/report/judgments/judge.jsonl").read_text().splitlines()
    ]
    assert len(judged) == COUNT and (judged[0].baseline, judged[0].model) == ("a", "b")
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["kappa"] == 1.0
    shown = calibration_tables(report)
    assert shown == (tmp_path / "run/report/calibration.md").read_text()
    assert "| Cohen's kappa | 1.000 |" in shown and "| people: tie | 0 | 8 | 0 |" in shown


def test_a_planted_position_bias_fails_its_gate(tmp_path: Path) -> None:
    file = labels(tmp_path)
    gates = (
        Gate(metric="position_bias/ci_high", max=0.1),
        Gate(metric="position_bias/ci_low", min=-0.1),
        Gate(metric="kappa", min=0.2),
    )
    with serving(copying(file, lambda uid: int(uid[1:]) % 2 == 0)) as endpoint:
        config = calibration(endpoint.url, file, gates=gates)
        result = run_in_directory(prepared(tmp_path, config).path, run)
    assert result.metrics["position_bias"] == pytest.approx(0.5)
    assert result.metrics["swap_consistency"] == pytest.approx(0.5)
    high, low, kappa = check("calibration", config, result)
    assert (high.passed, low.passed, kappa.passed) == (False, True, True)
    assert high.meaning.startswith("The judge favours a position")
    assert meaning_of("calibration", "kappa/ci_low")


def test_no_game_is_asked_for_twice_after_a_kill(tmp_path: Path) -> None:
    file = labels(tmp_path)
    whole = copying(file)

    def failing(number: int, request: dict[str, Any]) -> Reply:
        return whole(number, request) if number < 30 else error(401)  # the endpoint refuses: the stage ends

    with serving(failing) as endpoint:
        directory = prepared(tmp_path, calibration(endpoint.url, file))
        with pytest.raises(ValueError, match="401"):
            run(directory.request(), directory)
        first = [asked(request) for request in endpoint.requests[:30]]
        endpoint.script = whole
        before = len(endpoint.requests)
        outcome = run(directory.request(), directory)
        second = [asked(request) for request in endpoint.requests[before:]]
    assert len(set(first)) == 30 and len(second) == 2 * COUNT - 30 and not set(first) & set(second)
    assert outcome.metrics["kappa"] == 1.0
    with serving(whole) as endpoint:
        assert run(directory.request(), directory).metrics == outcome.metrics
    assert endpoint.requests == []


def test_a_killed_process_goes_on_where_it_was(tmp_path: Path) -> None:
    file = labels(tmp_path)
    whole = copying(file)
    released = threading.Event()

    def stuck(number: int, request: dict[str, Any]) -> Reply:
        if number >= 20:
            released.wait(WAIT_SECONDS)
        return whole(number, request)

    with serving(stuck) as endpoint:
        directory = prepared(tmp_path, calibration(endpoint.url, file))
        command = [sys.executable, "-m", "evaluation", str(directory.path)]
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[4], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        cache = directory / "judge_cache" / "judge.jsonl"

        def stuck_after_20() -> bool:
            """And no request is on its way, which would come after the kill."""
            assert process.poll() is None, "20 verdicts were not cached"
            cached = cache.exists() and cache.read_bytes().count(b"\n") == 20
            return cached and len(endpoint.requests) == 20 + CONCURRENCY

        wait_until(stuck_after_20, "20 verdicts to be cached")
        process.kill()
        process.wait()
        released.set()
        first = [asked(request) for request in endpoint.requests[:20]]
        before = len(endpoint.requests)
        assert directory.result() is None
        outcome = run(directory.request(), directory)
        second = [asked(request) for request in endpoint.requests[before:]]
    assert len(second) == 2 * COUNT - 20 and not set(first) & set(second)
    assert outcome.metrics["kappa"] == 1.0 and outcome.metrics["failed_games"] == 0


def test_failed_games_are_counted_and_their_pairs_left_out(tmp_path: Path) -> None:
    file = labels(tmp_path)
    whole = copying(file)

    def script(number: int, request: dict[str, Any]) -> Reply:
        return (
            completion("I cannot decide.")
            if asked({"messages": request["messages"][:2]})[0] in ("q0", "q1")
            else whole(number, request)
        )

    with serving(script) as endpoint:
        report, metrics = calibrate(tmp_path, calibration(endpoint.url, file))
    assert metrics["failed_games"] == 4 and metrics["unjudged"] == report.unjudged == 2
    assert sum(map(sum, report.confusion)) == COUNT - 2 and metrics["kappa"] == 1.0


def test_a_reward_model_is_calibrated_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting: Setting = make_setting(tmp_path, monkeypatch)
    make_reward_model(setting, "reward_model", seed=0)
    config = Calibration.model_validate(
        {
            "judge": {"kind": "reward"},
            "labels": str(labels(tmp_path)),
            "prompt_max_len": 128,
            "generate_max_len": 24,
            "bootstrap_rounds": 200,
        }
    )
    report, metrics = calibrate(tmp_path, config, setting.inputs)
    assert report.judge == "reward_model"
    assert metrics["swap_consistency"] == 1.0
    assert metrics["position_bias"] == 0.0
    assert "judge_input_tokens" not in metrics and metrics["failed_games"] == 0


def test_longer_and_marked_up_answers_are_seen(tmp_path: Path) -> None:
    rows = [
        label(i, "B>A", uid=f"q{i}", answer_a=f"- **a** of q{i}\n\nand **more**", answer_b=f"b of q{i}")
        for i in range(10)
    ]
    file = write_labels(tmp_path / "labels.jsonl", *rows)

    def script(_: int, request: dict[str, Any]) -> Reply:
        first, second = re.findall(
            r"Start of assistant .'s answer\|>\n(.*?)\n<\|End", request["messages"][1]["content"], re.DOTALL
        )
        return completion("[[A>B]]" if len(first) > len(second) else "[[B>A]]")

    with serving(script) as endpoint:
        _, metrics = calibrate(tmp_path, calibration(endpoint.url, file))
    assert metrics["length_bias"] == metrics["markdown_bias"] == 1.0 and metrics["agreement"] == 0.0


def test_wrong_labels_are_told_before_the_judge_is_asked(tmp_path: Path) -> None:
    file = write_labels(tmp_path / "labels.jsonl", label(1, "C>A"), label(2), label(2))
    with (
        serving(lambda *_: completion("[[A>B]]")) as endpoint,
        pytest.raises(ValueError, match=r"line 1: verdict .*; line 3: has the id"),
    ):
        calibrate(tmp_path, calibration(endpoint.url, file))
    assert endpoint.requests == []
