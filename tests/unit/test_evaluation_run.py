"""The evaluation stage from questions to report, with vLLM played by a double; tokenizer, reward model and files are real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from evaluation.__main__ import WORK, main
from evaluation.answers import file_name, read_answers
from evaluation.chat_client import ChatClient
from evaluation.judge import Match
from evaluation.judges import judge_names
from evaluation.questions import load_questions
from evaluation.reward_eval import RewardReports
from evaluation.run import run
from evaluation.style import markdown
from rlhf_core.config import Endpoint, Evaluation, OpenAIJudge, RewardJudge, RuleJudge, Source
from rlhf_core.config.metrics import has_metric
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.models.scoring import RewardScorer
from rlhf_core.rollout.engine import Answer
from rlhf_core.stage import RunDir, StageRequest, run_stage
from rlhf_core.types import EvalReport, Game, Judgment
from tests.chat_endpoint import Reply, completion, serving

ARENA_HARD = Path(__file__).parents[3] / "shared" / "data" / "arena-hard"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SKILL = "skill.txt"  # in a model's folder: what share of the questions the double answers rightly
COUNT = 20


def make_tokenizer(folder: Path) -> None:
    """Bytes as tokens, and four special ones."""
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def make_model(folder: Path, skill: float, hidden: int = 16) -> str:
    folder.mkdir()
    make_tokenizer(folder)
    Qwen2Config(
        vocab_size=260, hidden_size=hidden, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256, dtype="float32",
    ).save_pretrained(folder)  # fmt: skip
    (folder / SKILL).write_text(str(skill))
    return str(folder)


def make_reward_model(setting: Setting, name: str, seed: int) -> Path:
    folder = setting.folder / name
    make_model(folder, 0)
    torch.manual_seed(seed)
    config = Qwen2Config.from_pretrained(folder, num_labels=1, pad_token_id=257)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    setting.inputs[name] = str(folder)
    return folder


class Double:
    """Stands for `rlhf_core.rollout.engine.Sampler`: knows the answers, gives as many as its folder says, and cuts at the limit."""

    log: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, model: str, **settings: Any):
        assert settings["dtype"] == "float32" and settings["max_model_len"] == 128 + 24
        self.model = model
        self.log.append(("open", Path(model).name))

    def load(self, model: str) -> None:
        self.model = model
        self.log.append(("load", Path(model).name))

    def close(self) -> None:
        self.log.append(("close", Path(self.model).name))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        n: int,
    ) -> list[list[Answer]]:
        assert n == 1 and len(set(seeds)) == len(prompts)
        self.log.append(("generate", Path(self.model).name))
        tokenizer = load_tokenizer(self.model)
        skill = float((Path(self.model) / SKILL).read_text())
        answers = []
        for prompt in prompts:
            word = tokenizer.decode(prompt).split("<|im_end|>")[0].split()[-1]
            right = int(word[1:]) < skill * COUNT
            text = word[::-1] if right else "no idea"
            tokens = [*tokenizer.encode(text, add_special_tokens=False), stop_token_ids[-1]]
            answers.append([Answer(tokens[:max_new_tokens], [0.0] * len(tokens[:max_new_tokens]), len(tokens) <= max_new_tokens)])
        return answers


@dataclass(frozen=True)
class Setting:
    folder: Path
    inputs: dict[str, str]
    questions: str


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr("rlhf_core.rollout.engine.Sampler", Double)
    Double.log.clear()
    skills = {"sft": 0.5, "dpo": 0.7, "ppo": 0.9}
    inputs = {name: make_model(tmp_path / name, skill) for name, skill in skills.items()}
    questions = tmp_path / "questions.jsonl"
    rows = [
        {"uid": f"q{n}", "category": "even" if n % 2 == 0 else "odd", "prompt": f"Reverse w{n:02d}", "answer": f"w{n:02d}"[::-1]}
        for n in range(COUNT)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Setting(tmp_path, inputs, str(questions))


def request(setting: Setting, **changes: Any) -> StageRequest:
    fields = {"models": ("dpo", "ppo"), "questions": Source(path=setting.questions), "prompt_max_len": 128, "generate_max_len": 24}
    config = Evaluation(**{**fields, "bootstrap_rounds": 200, **changes})
    return StageRequest(name="evaluation", digest="0", config=config, inputs=setting.inputs, seed=1)


def evaluate(setting: Setting, name: str = "run", **changes: Any) -> tuple[RunDir, EvalReport, dict[str, float]]:
    directory = RunDir(setting.folder / name)
    directory.prepare(request(setting, **changes))
    outcome = run(directory.request(), directory)
    assert outcome.outputs == {"report": "report"}
    config = request(setting, **changes).config
    assert [name for name in outcome.metrics if not has_metric(config, name)] == []  # type: ignore[arg-type]
    return directory, EvalReport.model_validate_json((directory / "report/eval.json").read_text()), outcome.metrics


def test_the_rule_decides_and_the_report_says_by_how_much(setting: Setting) -> None:
    directory, report, metrics = evaluate(setting)
    assert report.right == pytest.approx({"sft": 0.5, "dpo": 0.7, "ppo": 0.9})
    rates = {rate.model: rate for rate in report.win_rates}
    # dpo wins the 4 questions that only it gets right, ppo 8; all others tie.
    assert rates["dpo"].win_rate == pytest.approx((4 + 16 / 2) / 20)
    assert rates["ppo"].win_rate == pytest.approx((8 + 12 / 2) / 20)
    assert rates["ppo"].ci_low > 0.5 and rates["ppo"].ci_high < 0.9
    assert rates["ppo"].by_category == pytest.approx({"even": 0.7, "odd": 0.7})
    assert (rates["ppo"].swap_consistency, rates["ppo"].num_failed, rates["ppo"].num_questions) == (1.0, 0, 20)
    assert report.mean_tokens["sft"] == pytest.approx((10 * 3 + 10 * 7) / 20) and report.truncated["sft"] == 0
    for model in ("dpo", "ppo"):
        rate = rates[model]
        values = [metrics[f"{name}/{model}"] for name in ("win_rate", "ci_low", "ci_high", "right", "length")]
        assert values == [rate.win_rate, rate.ci_low, rate.ci_high, report.right[model], report.mean_tokens[model]]
    assert metrics["right/sft"] == 0.5 and "win_rate/sft" not in metrics and "judge_agreement" not in metrics
    judged = [Judgment.model_validate_json(line) for line in (directory / "report/judgments/rule.jsonl").read_text().splitlines()]
    assert len(judged) == 40 and {judgment.baseline for judgment in judged} == {"sft"}
    assert json.loads((directory / "metrics.jsonl").read_text())["win_rate/ppo"] == rates["ppo"].win_rate


def test_checkpoints_of_one_architecture_share_an_engine_and_others_get_their_own(setting: Setting) -> None:
    setting.inputs["ppo"] = make_model(setting.folder / "wide", 0.9, hidden=32)
    evaluate(setting)
    assert [entry for entry in Double.log if entry[0] != "generate"] == [
        ("open", "sft"), ("load", "dpo"), ("close", "dpo"), ("open", "wide"), ("close", "wide"),
    ]  # fmt: skip


def test_whole_answers_are_not_generated_again(setting: Setting) -> None:
    directory, first, _ = evaluate(setting)
    (directory / "report/answers/dpo.jsonl").unlink()
    (directory / "report/eval.json").unlink()
    Double.log.clear()
    _, second, _ = evaluate(setting)
    assert Double.log == [("open", "dpo"), ("generate", "dpo"), ("close", "dpo")]
    assert first == second


def test_answers_are_written_in_arena_hards_format(setting: Setting) -> None:
    directory, _, _ = evaluate(setting)
    rows = [json.loads(line) for line in (directory / "report/answers/ppo.jsonl").read_text().splitlines()]
    assert [row["uid"] for row in rows] == [f"q{n}" for n in range(COUNT)]
    assert rows[3]["model"] == "ppo"
    assert rows[3]["messages"] == [{"role": "user", "content": "Reverse w03"}, {"role": "assistant", "content": {"answer": "30w"}}]
    assert rows[3]["metadata"]["token_len"] == 3
    assert list(rows[3]["metadata"]) == ["token_len", "header_count", "list_count", "bold_count"]  # arena-hard-auto counts its columns


def test_the_order_of_models_changes_nothing(setting: Setting) -> None:
    _, one, _ = evaluate(setting, "one", temperature=0.7)
    _, other, _ = evaluate(setting, "other", temperature=0.7, models=("ppo", "sft", "dpo", "ppo"))
    assert {rate.model: rate for rate in one.win_rates} == {rate.model: rate for rate in other.win_rates}
    assert [rate.model for rate in other.win_rates] == ["ppo", "dpo"]  # the baseline does not battle itself
    assert one.right == other.right


def test_limits_are_applied_and_counted(setting: Setting) -> None:
    text = "x" * 500 + " w00"
    Path(setting.questions).write_text(
        json.dumps({"prompt": text, "answer": "00w"}) + "\n" + json.dumps({"prompt": "w19", "answer": "91w"})
    )
    _, report, metrics = evaluate(setting, generate_max_len=24)
    assert metrics["prompt_truncated/sft"] == 0.5 and report.right["sft"] == 0.5
    with pytest.raises(AssertionError):  # the double sees the engine's length: prompts and answers together
        evaluate(setting, "other", generate_max_len=5)


def test_cut_answers_are_counted(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Double.generate
    monkeypatch.setattr(Double, "generate", lambda self, prompts, **named: whole(self, prompts, **{**named, "max_new_tokens": 5}))
    _, report, metrics = evaluate(setting)
    assert report.truncated == pytest.approx({"sft": 0.5, "dpo": 0.3, "ppo": 0.1})  # "no idea" is cut
    assert report.mean_tokens["sft"] == pytest.approx((10 * 3 + 10 * 5) / 20)
    assert metrics["truncated/sft"] == 0.5


def test_a_reward_model_gives_a_second_opinion(setting: Setting) -> None:
    folder = make_reward_model(setting, "reward_model", seed=0)
    directory, report, metrics = evaluate(setting, judges=(RuleJudge(), RewardJudge()))
    (second,) = TypeAdapter(list[EvalReport]).validate_json((directory / "report/second_opinions.json").read_text())
    assert (report.judge, second.judge) == ("rule", "reward_model")
    assert report.agreement == {"reward_model": metrics["judge_agreement"]} and second.agreement == {"rule": metrics["judge_agreement"]}

    questions = load_questions(Source(path=setting.questions), None, 0)
    renderer, scorer = Renderer(load_tokenizer(str(folder)), "chat"), RewardScorer(str(folder), "float32", 4)

    def rewards(model: str) -> list[float]:
        given = read_answers(directory / f"report/answers/{model}.jsonl", questions)
        assert given is not None
        return scorer.score([renderer.answer(q.messages, a.text) for q, a in zip(questions, given, strict=True)])

    for rate in second.win_rates:
        better = [(ours > theirs) + 0.5 * (ours == theirs) for ours, theirs in zip(rewards(rate.model), rewards("sft"), strict=True)]
        assert rate.win_rate == pytest.approx(sum(better) / COUNT)
    lines = (directory / "report/judgments/reward_model.jsonl").read_text().splitlines()
    assert len(lines) == 40 and Judgment.model_validate_json(lines[0]).judge == "reward_model"


def test_the_first_judge_decides(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.inputs["reward_model"] = setting.inputs["sft"]

    class Against:
        """Scores right answers (3 characters) below wrong ones."""

        def __init__(self, *_: Any):
            pass

        def score(self, documents: Sequence[Any]) -> list[float]:
            return [float(len(document.tokens)) for document in documents]

    monkeypatch.setattr("rlhf_core.models.scoring.RewardScorer", Against)
    _, report, metrics = evaluate(setting, judges=(RewardJudge(), RuleJudge()))
    assert report.judge == "reward_model" and metrics["win_rate/ppo"] == pytest.approx(0.3)
    assert metrics["right/ppo"] == pytest.approx(0.9)  # the rule still counts right answers
    assert metrics["judge_agreement"] == pytest.approx(28 / 40)  # they agree on the ties


def test_a_missing_known_answer_is_told_before_any_model_is_asked(setting: Setting) -> None:
    with pytest.raises(ValueError, match="question q0 has no 'solution'"):
        evaluate(setting, judges=(RuleJudge(answer_key="solution"),))
    assert Double.log == []


def test_a_model_with_too_few_positions_is_refused_before_it_is_loaded(setting: Setting) -> None:
    with pytest.raises(ValueError, match="has 256 positions, prompt_max_len \\+ generate_max_len = 300"):
        evaluate(setting, prompt_max_len=200, generate_max_len=100)
    assert Double.log == []


def test_a_finished_evaluation_is_not_done_again(setting: Setting) -> None:
    directory = RunDir(setting.folder / "run")
    directory.prepare(request(setting))
    result = run_stage(directory.path, run)
    assert {"report/eval.json", "report/answers/sft.jsonl", "report/judgments/rule.jsonl"} <= set(result.files)
    assert result.metrics["questions"] == COUNT
    Double.log.clear()
    assert run_stage(directory.path, run) == result and Double.log == []


def test_the_process_tells_the_user_in_one_line(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDir(setting.folder / "run")
    directory.prepare(request(setting, judges=(RuleJudge(answer_key="solution"),)))
    assert main([str(directory.path)], WORK) == 2
    told = capsys.readouterr().err
    assert told.startswith("question q0 has no 'solution'") and told.count("\n") == 1
    (directory / "config.json").write_text("{}")
    assert main([str(directory.path)], WORK) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_the_process_succeeds_and_wants_a_run_directory(setting: Setting) -> None:
    directory = RunDir(setting.folder / "run")
    directory.prepare(request(setting))
    assert main([str(directory.path)], WORK) == 0 and directory.result() is not None
    command = [sys.executable, "-m", "evaluation", str(setting.folder / "nowhere")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert process.returncode == 2 and "is no run directory" in process.stderr


# --- parents, lengths, reward models, sequential judges ---


def test_every_model_also_plays_its_parent(setting: Setting) -> None:
    directory, report, metrics = evaluate(setting, parents={"ppo": "dpo", "dpo": "sft"})
    assert [(rate.model, rate.baseline) for rate in report.win_rates] == [("dpo", "sft"), ("ppo", "sft")]
    (rate,) = report.against_parent  # dpo's parent is the baseline: once is enough
    assert (rate.model, rate.baseline) == ("ppo", "dpo")
    assert rate.win_rate == pytest.approx((4 + 16 / 2) / 20)  # ppo alone is right on 4 questions
    assert metrics["win_rate_vs_parent/ppo"] == rate.win_rate and metrics["win_rate/ppo"] == pytest.approx(0.7)
    judged = [Judgment.model_validate_json(line) for line in (directory / "report/judgments/rule.jsonl").read_text().splitlines()]
    assert len(judged) == 60 and report.judging is not None and report.judging.games == 120 and report.judging.questions == COUNT


def test_a_parent_that_is_not_judged_itself_still_answers(setting: Setting) -> None:
    directory, report, _ = evaluate(setting, models=("ppo",), parents={"ppo": "dpo"})
    assert [rate.model for rate in report.win_rates] == ["ppo"] and report.right["dpo"] == pytest.approx(0.7)
    assert (directory / "report/answers/dpo.jsonl").is_file()


def test_rates_come_raw_and_length_controlled(setting: Setting) -> None:
    """Right answers have 3 tokens and wrong ones 7: what length explains, control takes away."""
    _, report, metrics = evaluate(setting)
    for rate in report.win_rates:
        assert rate.length_controlled is not None and rate.lc_low is not None and rate.lc_high is not None
        assert rate.lc_low <= rate.length_controlled <= rate.lc_high and rate.length_controlled < rate.win_rate - 0.05
        assert metrics[f"length_controlled/{rate.model}"] == rate.length_controlled
    effects = {effect.feature: effect for effect in report.style}
    assert set(effects) == {"length", "headers", "lists", "bold"} and effects["length"].effect < 0 == effects["bold"].effect


def test_lengths_can_be_counted_by_one_tokenizer_for_all(setting: Setting) -> None:
    make_tokenizer(setting.folder / "counter")
    with_own, with_one = (evaluate(setting, name, **changes)[1] for name, changes in (
        ("own", {}), ("one", {"style_tokenizer": str(setting.folder / "counter")}),
    ))  # fmt: skip
    assert with_one.mean_tokens == pytest.approx(with_own.mean_tokens)  # the same tokens
    with pytest.raises(Exception, match="nowhere"):
        evaluate(setting, "none", style_tokenizer=str(setting.folder / "nowhere"))


def test_reward_models_are_evaluated_on_held_out_pairs(setting: Setting) -> None:
    for number, name in enumerate(("rm", "rm2")):
        make_reward_model(setting, name, seed=number)
    pairs = setting.folder / "pairs.jsonl"
    rows = [{"prompt": f"Reverse w{n:02d}", "chosen": f"w{n:02d}"[::-1], "rejected": "no idea", "subset": "ab"[n % 2]} for n in range(20)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "x", "chosen": "same", "rejected": "same"}]))
    wanted = {"models": ["rm", "rm2"], "data": {"sources": str(pairs)}}
    directory, _, metrics = evaluate(setting, reward_evaluation=wanted)
    found = RewardReports.model_validate_json((directory / "report/reward_models.json").read_text())
    assert [report.model for report in found.models] == ["rm", "rm2"] and found.models[0].overall.pairs == 20
    assert {name: part.pairs for name, part in found.models[0].by_subset.items()} == {"a": 10, "b": 10}
    assert found.models[0].longer_chosen == 0.0 and found.models[0].accuracy_longer is None
    assert metrics["reward_accuracy/rm"] == found.models[0].overall.accuracy and "reward_agreement/rm/rm2" in metrics
    # The model itself, asked directly, ranks the pairs as the report says.
    scorer, renderer = RewardScorer(setting.inputs["rm"], "float32", 4), Renderer(load_tokenizer(setting.inputs["rm"]), "chat")
    documents = [renderer.answer(asked(row["prompt"]), row[side]) for row in rows for side in ("chosen", "rejected")]
    scores = scorer.score(documents)
    assert found.models[0].overall.accuracy == pytest.approx(sum(a > b for a, b in zip(scores[::2], scores[1::2], strict=True)) / 20)


def asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


class Scripted:
    """Stands for `evaluation.judges.OpenAIJudge`: the longer answer wins; says what it was made with and asked."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, name: str, client: ChatClient, cache: Path, **settings: Any):
        self.name, self.requests, self.input_tokens, self.output_tokens, self.asked = name, 0, 0, 0, 0
        self.made.append({"client": client, "cache": cache, **settings})

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        self.requests += len(matches)
        self.input_tokens += 1000 * len(matches)
        self.output_tokens += 100 * len(matches)
        differences = [len(match.answer_a) - len(match.answer_b) for match in matches]
        return [Game(score="A>B" if d > 0 else "B>A" if d < 0 else "A=B", judgment={"answer": "."}) for d in differences]


def test_a_paid_judge_is_asked_until_the_interval_is_narrow_and_its_cost_is_told(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.judges.OpenAIJudge", Scripted)
    Scripted.made.clear()
    prices = {"input_price": 2.0, "output_price": 8.0, "requests_per_minute": 600, "verdict_cache": str(setting.folder / "verdicts")}
    judge = OpenAIJudge(model="gpt", interval_width=0.5, sequential_questions=10, **prices)
    _, report, metrics = evaluate(setting, judges=(judge, RuleJudge()), models=("ppo",))
    assert report.judging is not None and report.judging.questions == report.win_rates[0].num_questions == 10 < COUNT
    assert report.judging.cost == pytest.approx(20 * (1000 * 2 + 100 * 8) / 1e6) == metrics["judge_cost/gpt"]
    assert metrics["judge_input_tokens/gpt"] == 20_000 and report.judging.requests == 20
    (made,) = Scripted.made
    assert made["client"].pace.gap == 60 / 600 and made["identity"] == "gpt"
    assert made["cache"].parent == setting.folder / "verdicts" and made["cache"].name.startswith("gpt-")
    assert 0 <= report.agreement["rule"] <= 1  # on the questions both judged


def test_a_remote_model_plays_like_any_other_and_is_asked_once(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remote one knows every answer; the local baseline half of them. A second attempt asks it nothing."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def right(_: int, request: dict[str, Any]) -> Reply:
        return completion(request["messages"][-1]["content"].split()[-1][::-1])

    with serving(right) as server:
        remote = {"gpt": Endpoint(model="gpt-x", base_url=server.url, input_price=1.0, output_price=1.0)}
        changes: dict[str, Any] = {"models": ("gpt", "ppo"), "endpoints": remote, "temperature": 0.3}
        run, report, metrics = evaluate(setting, **changes)
        assert len(server.requests) == COUNT and {(r["temperature"], r["max_tokens"]) for r in server.requests} == {(0.3, 24)}
        _, again, repeated = evaluate(setting, **changes)
        assert len(server.requests) == COUNT
    assert report.right == {"sft": 0.5, "gpt": 1.0, "ppo": 0.9} and report.against_parent == ()
    assert {rate.model: rate.win_rate for rate in report.win_rates} == {"gpt": 0.75, "ppo": 0.7}
    assert report.answering["gpt"].input_tokens == 10 * COUNT and report.answering["gpt"].settings["temperature"] == 0.3
    assert metrics["answer_cost/gpt"] == pytest.approx(13 * COUNT / 1e6) and metrics["answer_requests/gpt"] == COUNT
    assert repeated == metrics | {"answer_requests/gpt": 0.0} and again.win_rates == report.win_rates
    line = json.loads((run / "report" / "answers" / "gpt.jsonl").read_text().split("\n")[0])
    assert line["model"] == "gpt" and line["metadata"]["token_len"] == 3  # as the endpoint counts


def test_a_remote_baseline_needs_no_model_of_ours(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(lambda *_: completion("no idea")) as server:
        remote = {"gpt": Endpoint(model="gpt-x", base_url=server.url)}
        _, report, _ = evaluate(setting, models=("ppo",), baseline="gpt", endpoints=remote)
    assert report.right["gpt"] == 0.0 and report.win_rates[0].win_rate == 0.95


# --- questions and names ---


def write(folder: Path, *rows: dict[str, Any]) -> Source:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path))


def test_both_versions_of_arena_hard_questions_are_read(tmp_path: Path) -> None:
    old = {"question_id": "old", "category": "arena-hard-v0.1", "cluster": "c", "turns": [{"content": "What?"}]}
    new = {"uid": "new", "category": "hard_prompt", "subcategory": "math", "prompt": "Why?"}
    bare = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]}
    first, second, third = load_questions(write(tmp_path, old, new, bare), None, 0)
    assert (first.uid, first.prompt, second.uid, second.category) == ("old", "What?", "new", "hard_prompt")
    assert third.category == "all" and third.prompt == "system: Be brief.\n\nuser: How?"
    (again,) = load_questions(write(tmp_path, bare), None, 0)
    assert again.uid == third.uid  # a digest of the prompt, wherever the row stands
    assert [q.uid for q in load_questions(write(tmp_path, old, new), 1, 0)] == ["old"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"uid": "a", "prompt": "x"}, {"uid": "a", "prompt": "y"}], r"row 2: has the uid 'a' of row 1"),
        ([{"prompt": "x"}, {"prompt": "x"}], r"row 2: has the uid .* of row 1 \(without a uid: the same prompt\)"),
        ([{"text": "x"}], r"row 1: there is no 'prompt'"),
        ([{"prompt": "  "}], r"row 1: the prompt is empty"),
        ([{"prompt": 3}], r"row 1: column 'prompt' must be a string"),
        ([{"turns": [3]}], r"row 1: message 1"),
    ],
)
def test_bad_questions_are_refused_with_their_row(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_questions(write(tmp_path, *rows), None, 0)


@pytest.mark.skipif(not ARENA_HARD.is_dir(), reason="the question files of arena-hard-auto are not beside the repository")
@pytest.mark.parametrize(("name", "count", "categories"), [("v0.1", 500, 1), ("v2.0", 750, 2)])
def test_the_published_question_files_are_read(name: str, count: int, categories: int) -> None:
    questions = load_questions(Source(path=str(ARENA_HARD / f"{name}-question.jsonl")), None, 0)
    assert len(questions) == count and len({question.category for question in questions}) == categories


def test_markdown_is_counted_outside_code() -> None:
    text = "# One\n## Two\n- a\n* b\n1. c\n**bold** and __bold__\n```\n# not one\n- not one\n**no**\n```\n"
    assert markdown(text) == {
        "header_count": {"h1": 1, "h2": 1, "h3": 0, "h4": 0, "h5": 0, "h6": 0},
        "list_count": {"ordered": 1, "unordered": 2},
        "bold_count": {"**": 1, "__": 1},
    }


def test_published_answers_are_read(tmp_path: Path) -> None:
    file = tmp_path / "o3.jsonl"
    row = {
        "uid": "a",
        "ans_id": "1",
        "model": "o3",
        "messages": [{"role": "user", "content": "x"}],
        "tstamp": 1.0,
        "metadata": {"token_len": 7},
    }
    row["messages"].append({"role": "assistant", "content": {"answer": "line\u2028separator"}})  # type: ignore[attr-defined]
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    questions = load_questions(write(tmp_path, {"uid": "a", "prompt": "x"}), None, 0)
    answers = read_answers(file, questions)
    assert answers is not None and (answers[0].text, answers[0].tokens) == ("line\u2028separator", 7)
    assert read_answers(file, load_questions(write(tmp_path, {"uid": "b", "prompt": "x"}), None, 0)) is None


def test_names_become_files_that_never_collide() -> None:
    names = ["sft", "dpo-1", "meta/llama", "meta_llama", "meta:llama", "../x", ".hidden"]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names) and files[:2] == ["sft", "dpo-1"]
    assert all("/" not in file and not file.startswith(".") for file in files)


def test_judges_of_the_same_name_are_told_apart() -> None:
    judges = (OpenAIJudge(model="gpt-4-turbo"), OpenAIJudge(model="gpt-4"), RuleJudge(), RewardJudge(), RewardJudge(tie=1.0), RuleJudge())
    assert list(judge_names(judges)) == ["gpt-4-turbo", "gpt-4", "rule", "reward_model", "reward_model-2", "rule-2"]
