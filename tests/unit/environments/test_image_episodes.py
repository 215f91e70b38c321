"""Episodes whose environment answers with images: tokens are those of the model's own processor, the trainer sees
what the sampler saw, and an image that cannot be used never scores 0."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config import Data, EngineConfig
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.data.pictures.environment_content import in_base64
from rlhf_core.data.pictures.message_parts import content_text, with_sources
from rlhf_core.data.sources import prompts
from rlhf_core.environments.conversation import Conversation, LimitReached
from rlhf_core.environments.episode_contract import Episode
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_kinds import open_engine
from rlhf_core.stages.ppo.rollout_records import restored, stored
from rlhf_core.stages.ppo.sampling.rollout_group import of_episode
from tests.support.pictured_models import COLOURS, STAGED, make_pictured, square, write_rows
from tests.support.pictured_pairs import whole_outputs
from tests.support.screenshots import OneEngine, Scripted, opened
from tests.support.templates import save_tokenizer
from tests.unit.data.pictures.test_hostile_pictures import HOSTILE
from tests.unit.data.pictures.test_picture_rendering import own_tokens

STATEFUL = re.compile("qwen3_5")  # families whose layers carry a state along a row
FORMS = ("path", "data", "bytes", "dict", "pillow", "base64")


@pytest.fixture(scope="module", params=STAGED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured("qwen3_vl", tmp_path_factory.mktemp("models") / "qwen3_vl")


def renderer_of(folder: Path) -> Renderer:
    return Renderer(load_tokenizer(str(folder)), "chat")


@pytest.fixture
def screens(tmp_path: Path) -> Iterator[Path]:
    for name in COLOURS:
        (tmp_path / f"{name}.png").write_bytes(square(name, 40 if name == "red" else 16, 16))
    yield tmp_path


def prompt_of(renderer: Renderer, *shown: tuple[str, str]) -> Prompt:
    messages = ({"role": "user", "content": "Look."},)
    return Prompt(messages, renderer.prompt(messages), {"shown": [list(one) for one in shown]}, False)


def whole(episode: Episode) -> list[dict[str, Any]]:
    """The messages of an episode with its images."""
    path = episode.trajectory
    return with_sources(path.messages, [picture.source for picture in path.document.pictures])


def test_tokens_are_those_of_the_processor_for_the_whole_conversation(model: Path, screens: Path) -> None:
    renderer = renderer_of(model)
    engines = Scripted(renderer)
    with opened(screens, renderer, engines) as run:
        episode = run(prompt_of(renderer, ("red.png", "path"), ("blue.png", "pillow")))
    assert episode.failure == "" and episode.trajectory.turns == 3
    document = episode.trajectory.document
    tokens, found = own_tokens(renderer, whole(episode))
    assert list(document.tokens) == tokens[: len(document)] and len(document) > len(tokens) - 3
    own = np.asarray(document.tokens) == renderer.pictures.token_id
    assert not (document.mask_array & own).any() and document.mask_array.sum() == 9
    inside = np.zeros(len(document), bool)
    for start, stop, _ in document.pictures:
        inside[start:stop] = True
        assert own[start] and own[stop - 1]
    assert (own <= inside).all() and len(document.pictures) == 2 and found
    # each request has the images of the conversation so far, and the tokens before are never changed
    assert [len(pictures) for _, pictures in engines.asked] == [0, 2, 2]
    for before, after in zip(engines.asked, engines.asked[1:], strict=False):
        assert after[0][: len(before[0])] == before[0]
    shown = content_text(episode.trajectory.messages[2]["content"])
    assert shown.count("<image ") == 2 and shown.endswith("Now?")
    json.dumps(episode.trajectory.messages)


def test_all_forms_of_an_image_are_the_same_image(qwen: Path, screens: Path) -> None:
    renderer = renderer_of(qwen)
    with opened(screens, renderer, Scripted(renderer)) as run:
        episode = run(prompt_of(renderer, *(("red.png", form) for form in FORMS)))
    assert episode.failure == ""
    pictures = episode.trajectory.document.pictures
    tensors = [renderer.pictures.tensors(picture.source) for picture in pictures]
    assert len(tensors) == len(FORMS)
    for name, values in tensors[0].items():
        assert all(np.array_equal(other[name], values) for other in tensors)


@torch.no_grad()
def test_the_trainer_sees_what_the_sampler_saw(model: Path, screens: Path) -> None:
    renderer = renderer_of(model)
    config = EngineConfig(kind="transformers")
    prompt = prompt_of(renderer, ("red.png", "bytes"), ("green.png", "data"))
    with closing(open_engine(str(model), config, seed=0, max_model_len=512)) as engine:
        with opened(screens, renderer, OneEngine(renderer, engine)) as run:
            episodes = [run(prompt, seed) for seed in (3, 4, 5, 6)]
    policy = load_policy(str(model)).eval()
    reader = reads_pictures(policy, str(model), renderer.tokenizer, "float32", 1)
    documents = [episode.trajectory.document for episode in episodes]
    rows = [
        [Document(list(document.tokens), [True] * len(document), pictures=document.pictures)]
        for document in documents
    ]
    packed = [[row for (row,) in rows]]  # all episodes in one row
    compared = 0
    media = {
        number
        for number, token in renderer.tokenizer.added_tokens_decoder.items()
        if re.search("image|audio|video|vision|IMG", token.content)
    }
    batches = [collate(rows, 0, reader=reader)]
    if not STATEFUL.search(model.name):
        batches.append(collate(packed, 0, reader=reader))
    for batch in batches:
        found = masked_logprobs(policy, batch).logprobs
        own = [found[batch.documents == i] for i in range(len(episodes))]
        for episode, logprobs in zip(episodes, own, strict=True):
            path = episode.trajectory
            assert path.turns == 3 and len(path.document.pictures) == 2
            mask = torch.tensor(path.document.mask_array)
            expected = torch.tensor(path.logprobs)
            torch.testing.assert_close(logprobs[mask], expected[mask], atol=1e-5, rtol=1e-5)
            if media & set(path.document.token_array[path.document.mask_array].tolist()):
                continue  # transformers' whole model takes a sampled image token for an image
            _, theirs = whole_outputs(model, reader, path.document)
            torch.testing.assert_close(logprobs[1:], theirs, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", HOSTILE)
def test_an_image_that_cannot_be_used_is_a_failed_episode(name: str, qwen: Path, screens: Path) -> None:
    (screens / "hostile").write_bytes(HOSTILE[name][0])
    renderer = renderer_of(qwen)
    with opened(screens, renderer, Scripted(renderer)) as run:
        episode = run(prompt_of(renderer, ("red.png", "path"), ("hostile", "bytes")))
        good = run(prompt_of(renderer, ("red.png", "path")))
    assert "image" in episode.failure and "\n" not in episode.failure and episode.rewards == []
    rollout = of_episode(episode)
    assert rollout.own is not None and np.isnan(rollout.own.reward) and not rollout.document.pictures
    assert good.failure == "" and sum(good.rewards) == 1.25, "the process still runs episodes"


def test_a_file_outside_the_environments_folder_is_not_read(qwen: Path, screens: Path) -> None:
    renderer = renderer_of(qwen)
    (screens / "inner").mkdir()
    with opened(screens / "inner", renderer, Scripted(renderer)) as run:
        episode = run(prompt_of(renderer, ("../red.png", "path")))
    assert "is not in the data's folder" in episode.failure


def test_an_image_that_does_not_fit_ends_the_episode(qwen: Path, screens: Path) -> None:
    renderer = renderer_of(qwen)
    alone = len(renderer.prompt([{"role": "user", "content": "Look."}]))
    few = Limits(turns=4, prompt_tokens=alone + 2, tokens=20, answer_tokens=6)
    with opened(screens, renderer, Scripted(renderer), limits=few) as run:
        episode = run(prompt_of(renderer, ("red.png", "path"), ("blue.png", "path")))
    path = episode.trajectory
    assert episode.failure == "" and episode.rewards == [0.25]
    assert path.ended_by == "tokens" and not path.finished and path.turns == 1
    assert not path.document.pictures and len(path.document) == alone + 3
    rollout = of_episode(episode)
    assert rollout.own is not None and rollout.own.ended_by == "tokens" and rollout.own.reward == 0.25


def test_a_stage_that_reads_no_images_says_so(qwen: Path, screens: Path) -> None:
    renderer = renderer_of(qwen)
    with opened(screens, renderer, Scripted(renderer), images=False) as run:
        episode = run(prompt_of(renderer, ("red.png", "path")))
    assert "set images: true in the stage's environment" in episode.failure and episode.rewards == []


def test_a_model_that_reads_no_images_says_so(screens: Path) -> None:
    renderer = renderer_of(save_tokenizer("hermes", screens / "hermes"))
    with opened(screens, renderer, Scripted(renderer)) as run:
        episode = run(prompt_of(renderer, ("red.png", "path")))
    assert "cannot be trained on any: name a model of the families" in episode.failure


def pictured_prompt(renderer: Renderer, folder: Path) -> Prompt:
    content = [{"type": "image", "image": "red.png"}, {"type": "text", "text": "Colour?"}]
    rows = [{"prompt": [{"role": "user", "content": content}]}]
    data = Data(sources=str(write_rows(folder / "rows.jsonl", rows)))
    return prompts(data, renderer, 200, 0).items[0]


def test_a_prompt_may_have_images_which_the_environment_can_open(model: Path, screens: Path) -> None:
    """The first image is the prompt's; the environment sends its file back."""
    renderer = renderer_of(model)
    prompt = pictured_prompt(renderer, screens)
    with opened(screens, renderer, Scripted(renderer), kind="Looker", images=False) as run:
        episode = run(prompt)
    assert episode.failure == "" and episode.trajectory.turns == 2
    document = episode.trajectory.document
    tokens, _ = own_tokens(renderer, [_loaded(message) for message in whole(episode)])
    assert list(document.tokens) == tokens[: len(document)]
    assert [picture.source.encoded() for picture in document.pictures] == [square("red", 40, 16)] * 2
    assert episode.trajectory.prompt.pictures == prompt.pictures == document.pictures[:1]


def test_relative_paths_of_an_environment_are_those_of_its_folder(tmp_path: Path) -> None:
    """Although its row has an image of the same path."""
    sent = list[dict[str, Any]]()

    async def ask(request: dict[str, Any]) -> dict[str, Any]:
        sent.extend(request["ask"])
        raise LimitReached("enough")

    for name, colour in (("data", "red"), ("environment", "blue")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(square(colour))
    file = str(tmp_path / "data" / "1.png")
    own = {"1.png": file, file: file}
    for path in own:
        conversation = Conversation([], 0, ask, True, str(tmp_path / "environment"), own)
        with pytest.raises(LimitReached):
            asyncio.run(conversation.answer({"role": "user", "content": [{"type": "image", "image": path}]}))
    shown = [part["image"] for message in sent for part in message["content"]]
    assert shown == [in_base64(square("blue")), in_base64(square("red"))]


def _loaded(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose images are bytes."""
    if isinstance(message["content"], str):
        return message
    parts = [
        {**part, "picture": part["picture"]._replace(data=part["picture"].encoded())}
        if "picture" in part
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def test_a_prompt_whose_images_exceed_the_limit_ends_before_the_first_answer(
    qwen: Path, screens: Path
) -> None:
    renderer = renderer_of(qwen)
    prompt = pictured_prompt(renderer, screens)
    long = Prompt(prompt.messages, [], prompt.row, False, prompt.pictures)
    few = Limits(turns=4, prompt_tokens=len(prompt.tokens) - 1, tokens=400, answer_tokens=6)
    with opened(screens, renderer, Scripted(renderer), kind="Looker", limits=few) as run:
        episode = run(long)
    assert episode.trajectory.turns == 0 and episode.trajectory.ended_by == "tokens"


def test_resume_states_and_kept_rollouts_keep_the_images(qwen: Path, screens: Path) -> None:
    renderer = renderer_of(qwen)
    with opened(screens, renderer, Scripted(renderer), kind="Looker") as run:
        of_file = of_episode(run(pictured_prompt(renderer, screens)))
    with opened(screens, renderer, Scripted(renderer)) as run:
        of_bytes = of_episode(run(prompt_of(renderer, ("red.png", "path"), ("blue.png", "data"))))
    for rollout in (of_file, of_bytes):
        row = json.loads(json.dumps(stored(rollout)))
        again = restored(row, rollout.prompt, None)
        assert again.document == rollout.document and len(again.document.pictures) == 2
        assert again.prompt == rollout.prompt and list(again.messages) == list(rollout.messages)
        np.testing.assert_array_equal(again.sampler_logprobs, rollout.sampler_logprobs)
