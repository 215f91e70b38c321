"""Prompts with images: rendered once as the start of conversations, dropped if an image or the limit is
wrong, and refused by stages that read none."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO, Data, EngineConfig, Preferences, StageConfig
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Prompt, as_text, compact
from rlhf_core.data.pictures.picture_source import PictureSource
from rlhf_core.data.prompt_rows import has_pictures, picture_refusal
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.data.sources import maker_of, prompts, sft_documents
from rlhf_core.data.survey import Loaded
from rlhf_core.preflight.rows.template_rows import render_rows
from rlhf_core.stages.ppo.ppo_setup import PROBE_TOKENS, probe_of
from rlhf_core.stages.ppo.rollout_records import Rollout, restored, stored
from rlhf_core.stages.ppo.sampling.stored import answers_prompt
from rlhf_core.stages.ppo.sampling.validation import load_validation
from tests.support.pictured_models import FAMILIES, asked, make_pictured, square, write_rows

TEXT = {"type": "text", "text": "Colour?"}


@pytest.fixture(scope="module", params=FAMILIES)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = make_pictured(request.param, tmp_path_factory.mktemp("models") / request.param)
    return Renderer(load_tokenizer(str(folder)), "chat")


def question(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": list(parts)}], **more}


def of_file(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def save(folder: Path, rows: list[dict[str, Any]], name: str = "asks.jsonl") -> Data:
    (folder / "a.png").write_bytes(square("red"))
    (folder / "b.png").write_bytes(square("blue"))
    return Data(sources=str(write_rows(folder / name, rows)))


def load(folder: Path, rows: list[dict[str, Any]], renderer: Renderer, limit: int = 200) -> Loaded[Prompt]:
    data = save(folder, rows)
    check_columns(data, "prompt")
    return prompts(data, renderer, limit, 0)


def test_a_prompt_is_the_start_of_its_conversation(reader: Renderer, tmp_path: Path) -> None:
    found = load(tmp_path, [question(of_file("a.png"), TEXT, of_file("b.png"))], reader)
    (prompt,) = found.items
    chats = write_rows(tmp_path / "chats.jsonl", [asked([of_file("a.png"), TEXT, of_file("b.png")], "red")])
    (whole,) = sft_documents(Data(sources=str(chats)), reader, 200, 0).items
    start = whole.answer_start
    assert prompt.tokens == list(whole.tokens[:start])
    same = [(picture.start, picture.stop, picture.source.encoded()) for picture in prompt.pictures]
    assert same == [(picture.start, picture.stop, picture.source.encoded()) for picture in whole.pictures]
    assert found.report.survey.images == 2
    assert prompt.messages[0]["content"] == [of_file("a.png"), TEXT, of_file("b.png")]
    assert as_text(prompt.messages) == "<image a.png>Colour?<image b.png>"


def test_columns_and_bytes_are_read_as_for_sft(reader: Renderer, tmp_path: Path) -> None:
    rows = [
        {"prompt": "Colour?", "image": "a.png"},
        {"prompt": "<image>Colour?", "images": ["a.png"]},
        question({"type": "image", "base64": "data"}, TEXT),
    ]
    first, second = load(tmp_path, rows, reader).items  # the third is no image
    assert first.tokens == second.tokens and first.key == second.key
    assert first.messages[0]["content"][0] == of_file("a.png")


def test_images_are_read_from_any_folder_and_sent_as_paths(
    reader: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, [question(of_file("a.png"), TEXT)])
    (prompt,) = prompts(Data(sources="asks.jsonl"), reader, 96, 0).items
    os.chdir("/")
    received = pickle.loads(pickle.dumps([compact(prompt.tokens, [5], pictures=prompt.pictures)] * 64))
    assert received[0].pictures[0].source.encoded() == square("red")
    assert len(pickle.dumps(prompt.pictures)) < 600


def test_the_answers_to_a_prompt_share_its_bytes(reader: Renderer) -> None:
    content = [{"type": "image", "picture": PictureSource("", None, square("red"))}]
    (picture,) = reader.prompt_document([{"role": "user", "content": content}]).pictures
    large = picture._replace(source=picture.source._replace(data=bytes(100_000)))
    documents = [compact([5, 6], [7], pictures=(large,)) for _ in range(32)]
    assert len(pickle.dumps(documents)) < 200_000


HOSTILE = {
    "gone.png": (None, "image missing"),
    "../a.png": (None, "image outside of the data's folder"),
    "text.png": (b"no image at all", "image in another format"),
    "half.png": (square("red", 64, 64)[:60], "image damaged"),
}


def test_prompts_whose_image_cannot_be_used_are_dropped_and_counted(reader: Renderer, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, (content, _) in HOSTILE.items():
        if content is not None:
            (folder / name).write_bytes(content)
    rows = [question(of_file(name), TEXT) for name in (*HOSTILE, "a.png")]
    found = load(folder, [*rows, {"prompt": "Hello."}], reader)
    assert [len(prompt.pictures) for prompt in found.items] == [1, 0]
    survey = found.report.survey
    assert survey.dropped == {fact: 1 for _, fact in HOSTILE.values()} and survey.kept == 2
    examples = {finding.name: finding.example for finding in survey.findings}
    for number, (_, fact) in enumerate(HOSTILE.values(), 1):
        assert examples[fact].endswith(f"asks.jsonl, row {number}")
    with pytest.raises(ValueError, match=r"all prompts were dropped \(image missing: 1"):
        load(folder, rows[:1], reader)


def test_a_prompt_that_does_not_fit_is_dropped_whole(reader: Renderer, tmp_path: Path) -> None:
    rows = [question(of_file("a.png"), TEXT), question(of_file("a.png"), {"type": "text", "text": "x" * 60})]
    exact = len(load(tmp_path, rows[:1], reader).items[0].tokens)
    found = load(tmp_path, rows, reader, exact + 30)
    assert [prompt.row for prompt in found.items] == rows[:1]
    assert found.report.survey.dropped == {"prompt with images too long": 1}
    assert len(load(tmp_path, rows[:1], reader, exact).items) == 1
    with pytest.raises(ValueError, match="prompt with images too long: 1"):
        load(tmp_path, rows[:1], reader, exact - 1)
    told = render_rows(reader, save(tmp_path, rows), "prompt", "prompt_max_len", exact - 1)
    assert "raise prompt_max_len" in told.refused and told.images
    built = maker_of("prompt", reader, exact)
    assert len(built(next(iter_located(tmp_path, rows))).items) == 1


def iter_located(folder: Path, rows: list[dict[str, Any]]) -> Any:
    from rlhf_core.data.rows.mixture import checked_rows

    return checked_rows(save(folder, rows), "prompt")


def config_of(**fields: Any) -> PPO:
    return PPO.model_validate(
        {
            **dict(actor="base", prompts={"sources": "a.jsonl"}, reward={"function": "a.py:f"}),
            **dict(advantage_estimator="grpo", n_samples_per_prompt=2),
            **dict(train_batch_size=8, micro_train_batch_size=1, rollout_batch_size=8),
            "engine": EngineConfig(kind="transformers"),
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (config_of(), ""),
        (config_of(engine=EngineConfig()), "set engine.kind to transformers"),
        (config_of(sequence_parallel_size=2, actor_ranks={"num_ranks_per_node": 2}), "set sequence_parallel"),
        (config_of(environment="a.py:f", reward="environment"), ""),
        (config_of(reward="other"), ""),
        (Preferences(policy="base", prompts={"sources": "a"}, reward="other"), "engine.kind to transformers"),
    ],
)
def test_stages_say_what_they_do_not_read(config: StageConfig, told: str) -> None:
    found = picture_refusal(config)
    assert told in found and bool(found) == bool(told)


def test_validation_knows_prompts_by_their_images(
    reader: Renderer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = save(tmp_path, [question(of_file("a.png"), TEXT)])
    training = prompts(data, reader, 96, 0).items
    rows = [question(of_file(name), TEXT) for name in ("a.png", "b.png", "gone.png")]
    config = config_of(eval_prompts=save(tmp_path, rows, "held_out.jsonl"), prompt_max_len=96)
    found = load_validation(config, reader, training, [], [], 0)
    assert found is not None and [prompt.pictures[0].source.name for prompt in found.prompts] == ["b.png"]
    assert "1 eval_prompts of" in (told := capsys.readouterr().out) and "image missing" in told
    assert has_pictures(config, found.prompts)
    with pytest.raises(ValueError, match=r"set engine\.pipeline_parallel_size to 1"):
        has_pictures(config_of(engine=EngineConfig(pipeline_parallel_size=2)), found.prompts)


def test_images_of_an_environment_are_refused_like_those_of_rows(reader: Renderer) -> None:
    messages = ({"role": "user", "content": "Look."},)
    items = [Prompt(messages, reader.prompt(messages), {}, False)]
    quiet, sends = ({"environment": {"path": "a.py:f", "images": images}} for images in (False, True))
    assert not has_pictures(config_of(**quiet, engine=EngineConfig()), items)
    assert has_pictures(config_of(**sends), items)
    several = {"environments": {"a": {"path": "a.py:f"}, "b": {"path": "b.py:f", "images": True}}}
    assert has_pictures(config_of(**several), items)
    alone = EngineConfig(adapters="alone")
    told = r"may send images \(images: true\), which these engines do not read: leave engine.adapters out"
    with pytest.raises(ValueError, match=told):
        has_pictures(config_of(**sends, engine=alone, lora={"rank": 4}), items)
    with pytest.raises(ValueError, match=r"\(images: true\), and the reward model rm has another tokenizer"):
        has_pictures(config_of(**sends), items, ["rm"])


def test_a_resumed_run_has_the_same_documents(reader: Renderer, tmp_path: Path) -> None:
    first, second = load(
        tmp_path, [question(of_file("a.png"), TEXT), question(of_file("b.png"), TEXT)], reader
    ).items
    document = compact(first.tokens, [5, 6], pictures=first.pictures)
    logprobs = np.where(document.mask_array, np.float32(-1), np.float32(0))
    row = stored(Rollout(first, document, logprobs, True))
    assert restored(row, first, None).document == document
    assert answers_prompt(row, first, None)
    assert second.tokens == first.tokens and not answers_prompt(row, second, None)


def test_the_probe_keeps_images_whole(reader: Renderer, tmp_path: Path) -> None:
    rows = [question(of_file("a.png"), {"type": "text", "text": "x" * 200}), {"prompt": "x" * 200}]
    pictured, plain = load(tmp_path, rows, reader, 300).items
    assert probe_of(pictured).tokens == pictured.tokens
    assert probe_of(pictured).pictures == pictured.pictures
    assert len(probe_of(plain)) == PROBE_TOKENS
