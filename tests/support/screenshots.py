"""An environment that answers with images, and engines in this process that sample its episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Prompt
from rlhf_core.environments.episode_contract import Episode, EpisodeRequest
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer, Sampling, answer_of

# The second message has the row's `shown` images, each in the form that the row names.
CODE = """
import base64, io
from pathlib import Path
from PIL import Image

def in_form(name, form):
    file = Path(__file__).parent / name
    content = file.read_bytes()
    if form == "path": return {"image": name}
    if form == "data": return {"image": "data:image/png;base64," + base64.b64encode(content).decode()}
    if form == "bytes": return {"image": content}
    if form == "dict": return {"image": {"bytes": content, "path": None}}
    if form == "pillow": return {"image": Image.open(io.BytesIO(content))}
    if form == "base64": return {"base64": base64.b64encode(content).decode()}

class Screen:
    async def rollout(self, task, model):
        first = await model.answer()
        model.reward(0.25)
        images = [{"type": "image", **in_form(*shown)} for shown in task["shown"]]
        await model.answer({"role": "user", "content": [*images, {"type": "text", "text": "Now?"}]})
        await model.answer("And then?")
        return 1.0

class Asker:
    async def rollout(self, task, model):
        # as an agent does
        part = {"type": "image_url", "image_url": {"url": task["named"]}}
        await model.complete([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}])
        model.reward(1.0)

class Looker:
    async def rollout(self, task, model):
        part = task["messages"][0]["content"][0]
        assert model.images and Path(part["image"]).read_bytes(), part
        await model.answer()
        await model.answer({"role": "user", "content": [part, {"type": "text", "text": "Again?"}]})
        return 1.0
"""
LIMITS = Limits(turns=4, prompt_tokens=200, tokens=400, answer_tokens=6)
SAMPLING = Sampling(n=1, temperature=1.0, max_new_tokens=6, stop_token_ids=[])


class Scripted:
    """In place of engines: the answers of an episode are `texts`, then `ok`. Keeps the prompts and their
    images."""

    def __init__(self, renderer: Renderer, *texts: str):
        said = [renderer.tokenizer(text, add_special_tokens=False).input_ids for text in (*texts, "ok")]
        *self._first, self.answer = [[*tokens, renderer.end_token_id] for tokens in said]
        self.asked = list[tuple[list[int], Pictures]]()

    def reserve(self, requests: int = 1) -> int:
        return 0

    def release(self, engine: int, requests: int = 1) -> None: ...

    async def ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Pictures
    ) -> SampledAnswer:
        self.asked.append((list(tokens), pictures))
        answer = self._first.pop(0) if self._first else self.answer
        return answer_of(answer, [-1.0] * len(answer), True)


class OneEngine(Scripted):
    """In place of a group of engines: one of transformers, which samples each request alone."""

    def __init__(self, renderer: Renderer, engine: Any):
        super().__init__(renderer)
        self._engine = engine

    async def ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Pictures
    ) -> SampledAnswer:
        self.asked.append((list(tokens), pictures))
        ((answer,),) = self._engine.generate([tokens], [seed], sampling, [pictures] if pictures else ())
        return answer


@contextmanager
def opened(
    folder: Path,
    renderer: Renderer,
    engines: Any,
    kind: str = "Screen",
    limits: Limits = LIMITS,
    **fields: Any,
) -> Iterator[Any]:
    """Yields a function that runs an episode with a prompt and the seed of its answers. `folder`: of the
    environment's file and its images."""
    (folder / "screen.py").write_text(CODE)
    background = Background()
    own = {"path": f"{folder / 'screen.py'}:{kind}", "images": True, "max_attempts": 1, "timeout": 60.0}
    config = Environment.model_validate({**own, **fields})
    episodes = Episodes(config, renderer, limits, background, engines)

    def run(prompt: Prompt, seed: int = 3) -> Episode:
        return background.run(episodes.run([EpisodeRequest(prompt, seed, seed)], SAMPLING))[0]

    try:
        yield run
    finally:
        episodes.close()
        background.close()
