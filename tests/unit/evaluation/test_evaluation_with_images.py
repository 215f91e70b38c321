"""Questions with images: local models answer them with transformers' engine, endpoints and judges get them in
base64, the page shows them."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

import rlhf_core.stages.reward_model
from evaluation.answers.kl import log_ratios
from evaluation.answers.question_pictures import (
    chat_messages,
    small_picture,
    store_pictures,
    stored_messages,
)
from evaluation.drift.source import read_evaluation
from evaluation.evaluation_stage import run
from evaluation.report.example_battles import examples
from evaluation.report.summary import Evaluated, Evidence
from rlhf_core.config import Endpoint, EngineConfig, Evaluation, OpenAIJudge, RewardModel, RuleJudge, Source
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.questions import load_questions
from rlhf_core.data.rows.columns import Located, pictured_prompt_of
from rlhf_core.objectives.picture_reader import PictureReader
from rlhf_core.preflight.question_checks import _plain, question_problems
from rlhf_core.records import EvalReport
from rlhf_core.rollout.engine_kinds import open_engine
from rlhf_core.runs.run_dir import RunDir
from tests.support.chat_endpoint import Reply, completion, serving
from tests.support.pictured_models import COLOURS, STAGED, make_pictured, square, write_rows
from tests.support.pictured_pairs import colour_pairs, whole_outputs
from tests.support.stage_request import stage_request

pytestmark = pytest.mark.usefixtures("judge_key")


def write_questions(folder: Path) -> Path:
    """One question per colour, the image in a part of the message or in the row's column."""
    rows: list[dict[str, Any]] = []
    for number, colour in enumerate(COLOURS):
        (folder / f"{colour}.png").write_bytes(square(colour))
        image = {"type": "image", "image": f"{colour}.png"}
        asked = [{"role": "user", "content": [image, {"type": "text", "text": "Colour?"}]}]
        row = {"prompt": asked} if number else {"prompt": "Colour?", "image": f"{colour}.png"}
        rows.append({**row, "answer": colour})
    return write_rows(folder / "questions.jsonl", rows)


def seen_colour(url: str) -> str:
    """The colour of an image in base64."""
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    names = {rgb: name for name, rgb in COLOURS.items()}
    return names[image.convert("RGB").getpixel((3, 3))]  # type: ignore[index]


def colours_of(request: dict[str, Any]) -> list[str]:
    parts = request["messages"][-1]["content"]
    return [seen_colour(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]


@pytest.mark.parametrize("family", STAGED)
def test_models_endpoints_and_judges_see_the_images(family: str, tmp_path: Path) -> None:
    """The endpoint answers by the image it got, and the judge decides by the one that it got."""

    def script(_: int, request: dict[str, Any]) -> Reply:
        (colour,) = colours_of(request)
        if request["model"] == "remote":
            return completion(colour)
        text = request["messages"][-1]["content"][-1]["text"]
        first = text.split("<|Start of assistant A's answer|>\n")[1].split("\n")[0]
        assert "<image>" in text or "Colour?" in text
        return completion("[[A>>B]]" if first == colour else "[[B>>A]]")

    base = make_pictured(family, tmp_path / "base")
    questions = write_questions(tmp_path)
    with serving(script) as endpoint:
        config = Evaluation(
            models=("remote",),
            baseline="base",
            endpoints={"remote": Endpoint(base_url=endpoint.url, model="remote", api_key_env="JUDGE_KEY")},
            judges=(
                RuleJudge(),
                OpenAIJudge(model="judge", base_url=endpoint.url, api_key_env="JUDGE_KEY", max_tokens=32),
            ),
            questions=Source(path=str(questions)),
            engine=EngineConfig(kind="transformers"),
            prompt_max_len=96,
            generate_max_len=4,
            bootstrap_rounds=50,
        )
        directory = RunDir(tmp_path / "run")
        directory.prepare(stage_request(config, {"base": str(base)}))
        outcome = run(directory.request(), directory)
    report = EvalReport.model_validate_json((directory / "report/eval.json").read_text())
    assert report.right["remote"] == 1 and report.right["base"] == 0
    second = json.loads((directory / "report/second_opinions.json").read_text())[0]
    assert second["win_rates"][0]["win_rate"] == 1
    assert sorted(colour for asked in endpoint.requests for colour in colours_of(asked)) == sorted(
        [*COLOURS, *COLOURS, *COLOURS]
    )
    texts = [file.read_text() for file in (directory / "report").rglob("*.json*")]
    assert not any("base64" in text for text in texts), "images are stored once, as files"
    rows = [json.loads(line) for line in (directory / "report/answers/base.jsonl").read_text().splitlines()]
    named = [part["image"] for row in rows for part in row["messages"][0]["content"] if "image" in part]
    assert [Image.open(directory / "report" / name).getpixel((3, 3)) for name in named] == [*COLOURS.values()]
    assert outcome.metrics["questions"] == 3

    evidence = cast(Evidence, None)  # not read here
    evaluated = Evaluated(evidence, (report,), "remote", directory / "report")
    shown = [example for group in examples(evaluated) for example in group.examples]
    assert {seen_colour(example.pictures[0]) for example in shown} == set(COLOURS)
    assert all(example.prompt == "Colour?" for example in shown)


def test_questions_are_told_apart_by_their_images(tmp_path: Path) -> None:
    questions = load_questions(Source(path=str(write_questions(tmp_path))), None, 0)
    assert len({question.uid for question in questions}) == 3
    assert {question.prompt for question in questions} == {"<image>Colour?"}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    again = load_questions(Source(path=str(write_questions(moved))), None, 0)
    assert [question.uid for question in again] == [question.uid for question in questions]


@pytest.mark.parametrize("content", [None, b"no image"])
def test_a_question_whose_image_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = write_questions(tmp_path)
    (tmp_path / "green.png").unlink()
    if content is not None:
        (tmp_path / "green.png").write_bytes(content)
        questions = load_questions(Source(path=str(file)), None, 0)
        with pytest.raises(ValueError, match="is not JPEG, PNG"):
            chat_messages(questions[1].messages)
        return
    with pytest.raises(ValueError, match=r"questions.jsonl, row 2: the image 'green.png' cannot be read"):
        load_questions(Source(path=str(file)), None, 0)


def test_parts_that_read_no_images_are_told_before_any_work(tmp_path: Path) -> None:
    questions = write_questions(tmp_path)
    judges = [{"kind": "rule"}, {"kind": "vllm", "model": "org/judge"}]
    fields = {"models": ["sft"], "baseline": "base", "questions": {"path": str(questions)}, "judges": judges}

    def told(**changes: Any) -> list[str]:
        node: Any = SimpleNamespace(name="eval", config=Evaluation.model_validate(fields | changes))
        return question_problems(node, 0)

    engine, judge = told()
    assert engine.startswith("stages.eval.questions: they have images") and "engine.kind to trans" in engine
    assert judge == engine[: engine.index("which ")] + (
        "which judges of kind vllm do not read: use rule, reward or openai judges"
    )
    seeing = {"engine": {"kind": "transformers"}, "judges": judges[:1]}
    assert told(**seeing) == []
    (tmp_path / "blue.png").write_bytes(square("blue")[:60])
    (damaged,) = told(**seeing)
    assert "questions.jsonl, row 3" in damaged and "damaged" in damaged


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_vl", marks=pytest.mark.long)])
def test_reward_models_and_the_kl_see_the_images(family: str, tmp_path: Path) -> None:
    base = make_pictured(family, tmp_path / "base")
    data = colour_pairs(tmp_path, 8)
    training = RewardModel(
        model="base", data=data, train_batch_size=8, micro_train_batch_size=4, max_len=96, dtype="float32"
    )
    (tmp_path / "rm").mkdir()
    rlhf_core.stages.reward_model.run(stage_request(training, base), RunDir(tmp_path / "rm"))
    other = make_pictured(family, tmp_path / "other", initializer_range=0.1)
    inputs = {"base": str(base), "other": str(other), "rm": str(tmp_path / "rm" / "checkpoint")}
    config = Evaluation.model_validate(
        {
            "models": ["other"],
            "baseline": "base",
            "judges": [{"kind": "rule"}, {"kind": "reward", "reward": "rm"}],
            "temperature": 1.0,
            "proxy": "rm",
            "reward_evaluation": {"models": ["rm"], "data": data},
            "questions": {"path": str(write_questions(tmp_path))},
            "engine": {"kind": "transformers"},
            "prompt_max_len": 96,
            "generate_max_len": 4,
            "bootstrap_rounds": 50,
        }
    )
    directory = RunDir(tmp_path / "run")
    directory.prepare(stage_request(config, inputs))
    outcome = run(directory.request(), directory)
    seen = json.loads((directory / "report/reward_models.json").read_text())
    assert seen["models"][0]["overall"]["pairs"] == 8
    assert outcome.metrics["kl/other"] > 0

    questions = load_questions(config.questions, None, 0)
    answers = {"base": ["red"] * 3, "other": ["red"] * 3}
    ratios = log_ratios(questions, answers, inputs, config)["other"]
    renderer = Renderer(load_tokenizer(str(base)), "chat")
    images = renderer.pictures
    reader = PictureReader(images.token_id, images.tensors)
    for question, ratio in zip(questions, ratios, strict=True):
        prompt, _ = renderer.document_within(question.messages, 96)
        document = replace(renderer.answer_tokens(list(prompt.tokens), "red"), pictures=prompt.pictures)
        mask = torch.tensor(list(document.mask)[1:])
        theirs, ours = (
            float(whole_outputs(folder, reader, document)[1][mask].sum()) for folder in (other, base)
        )
        assert ratio == pytest.approx(theirs - ours, abs=1e-4)
    assert len({round(float(ratio), 4) for ratio in ratios}) == 3, "the images decide"

    # drift reads the questions from the report, whose images are its own
    (tmp_path / "red.png").unlink()
    judged = read_evaluation(directory / "report", inputs, "other", "base")
    again = log_ratios(judged.questions, answers, inputs, config)["other"]
    assert sorted(again) == pytest.approx(sorted(ratios), abs=1e-5)


def test_a_models_own_processor_reads_the_images(tmp_path: Path) -> None:
    """Also when one engine loads one checkpoint after another."""
    first = make_pictured("qwen3_vl", tmp_path / "first")
    second = make_pictured("qwen3_vl", tmp_path / "second")
    about = json.loads((second / "preprocessor_config.json").read_text())
    (second / "preprocessor_config.json").write_text(json.dumps(about | {"image_mean": [0.1, 0.4, 0.9]}))
    questions = load_questions(Source(path=str(write_questions(tmp_path))), None, 0)
    renderer = Renderer(load_tokenizer(str(first)), "chat")
    documents = [renderer.document_within(question.messages, 96)[0] for question in questions]

    def logprobs(*folders: Path) -> list[list[float]]:
        engine = open_engine(str(folders[0]), EngineConfig(kind="transformers"), seed=0, max_model_len=128)
        for folder in folders[1:]:
            engine.prompt_logprobs([documents[0].tokens], [documents[0].pictures])
            engine.load(str(folder))
        found = engine.prompt_logprobs(
            [document.tokens for document in documents], [document.pictures for document in documents]
        )
        engine.close()
        return found

    alone = logprobs(second)
    assert logprobs(first, second) == alone != logprobs(first)


def test_shared_questions_are_told_by_the_content_of_images(tmp_path: Path) -> None:
    rows = [{"prompt": "Colour?", "image": name} for name in ("red.png", "copy.png", "green.png")]
    write_questions(tmp_path)
    (tmp_path / "copy.png").write_bytes((tmp_path / "red.png").read_bytes())
    plain = [_plain(pictured_prompt_of(Located("row", row, folder=str(tmp_path)))) for row in rows]
    assert plain[0] == plain[1] != plain[2]


def test_large_photos_are_shown_small_and_sent_without_comments(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1200, 1500, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.jpg", quality=95, comment=b"hidden note")
    asked = {"prompt": "What?", "image": "photo.jpg"}
    (question,) = load_questions(Source(path=str(write_rows(tmp_path / "questions.jsonl", [asked]))), None, 0)
    (name,) = [part["image"] for part in stored_messages(question)[0]["content"] if part["type"] == "image"]
    store_pictures(tmp_path / "report", [question])
    assert (tmp_path / "report" / name).read_bytes() == (tmp_path / "photo.jpg").read_bytes()
    small = base64.b64decode(small_picture(tmp_path / "report" / name).partition(",")[2])
    assert max(Image.open(io.BytesIO(small)).size) == 320
    url = chat_messages(question.messages)[0]["content"][0]["image_url"]["url"]
    sent = base64.b64decode(url.partition(",")[2])
    assert url.startswith("data:image/jpeg") and b"hidden note" not in sent
    assert Image.open(io.BytesIO(sent)).size == (1500, 1200)
