"""Episodes of environments that fail in every way, against engines that answer at once: tried again, counted,
and never scored 0."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Prompt
from rlhf_core.environments.episode_contract import Episode, EpisodeRequest
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.stages.ppo.sampling.rollout_group import of_episode
from rlhf_core.system.processes import raised_by_us
from tests.support.templates import save_tokenizer
from tests.support.text_rows import rows_of_text

SAMPLING = Sampling(n=1, temperature=1.0, max_new_tokens=50, stop_token_ids=[])
LIMIT = 8.0  # seconds; other tests may keep the machine busy
LIMITS = Limits(turns=3, prompt_tokens=100, tokens=200, answer_tokens=50)
CODE = """
import asyncio, os, random, sys, time
from pathlib import Path

class World:
    def __init__(self, share=0.0):
        self.share = share

    async def rollout(self, task, model):
        first = await model.answer()
        fault = task.get("fault") or (random.choice(task["faults"]) if random.random() < self.share else "")
        if fault == "raise": raise KeyError("planted")
        if fault == "wait": await asyncio.sleep(1000)
        if fault == "block": time.sleep(1000)
        if fault == "exit": os._exit(3)
        if fault == "leave": sys.exit(1)
        if fault == "fork": os.fork()
        if fault == "text": return "a lot"
        if fault == "nan": return float("nan")
        if fault == "nothing": return None
        if fault == "large":
            model.reward(1e308)
            await model.answer("and now?")
            return -1e308
        if fault == "message": await model.answer({"role": "user", "content": 3})
        if fault == "once":
            mark = Path(task["mark"])
            if not mark.exists():
                mark.write_text(first.text)
                raise RuntimeError("the first attempt")
        if fault == "half":
            await model.answer("half of a character: \\ud800")
        if fault == "cancel":
            try: await asyncio.wait_for(model.answer("one"), 1e-6)
            except TimeoutError: pass
            await model.answer("two")
        if fault == "many":
            while True: await model.answer("again")
        print("a line on stdout that is no message")
        model.reward(0.25)
        second = await model.answer("and now?")
        return len(second.text) / 10
"""


class AtOnce:
    """In place of engines: answers `ok` and a number that the seed decides, and counts what it was asked."""

    def __init__(self, renderer: Renderer):
        self._renderer = renderer
        self.asked = list[tuple[int, int]]()

    def reserve(self, requests: int = 1) -> int:
        return 0

    def release(self, engine: int, requests: int = 1) -> None: ...

    async def ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Any = ()
    ) -> SampledAnswer:
        await asyncio.sleep(0)
        self.asked.append((len(tokens), seed))
        said = self._renderer.tokenizer(f"ok{seed % 1000}", add_special_tokens=False).input_ids
        return SampledAnswer([*said, self._renderer.end_token_id], [-1.0] * (len(said) + 1), True)


Make = Callable[..., Episodes]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(load_tokenizer(str(save_tokenizer("hermes", tmp_path_factory.mktemp("hermes")))), "chat")


@pytest.fixture
def make(renderer: Renderer, tmp_path: Path) -> Iterator[Make]:
    (tmp_path / "world.py").write_text(CODE)
    made: list[Episodes] = []
    background = Background()

    def build(path: str = "world.py:World", **fields: Any) -> Episodes:
        config = Environment(path=str(tmp_path / path), **{"timeout": LIMIT, "max_attempts": 2, **fields})
        made.append(Episodes(config, renderer, LIMITS, background, AtOnce(renderer)))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for episodes in made:
        episodes.close()
    background.close()


def run(
    episodes: Episodes, renderer: Renderer, rows: Sequence[dict[str, Any]], said: Sequence[str] = ()
) -> list[Episode]:
    prompts = [({"role": "user", "content": text},) for text in said or ["Go"] * len(rows)]
    asked = [
        EpisodeRequest(Prompt(messages, renderer.prompt(messages), row, False), 100 * i, i)
        for i, (row, messages) in enumerate(zip(rows, prompts, strict=True))
    ]
    return episodes._background.start(episodes.run(asked, SAMPLING)).result(timeout=300)


def test_rewards_and_messages(make: Make, renderer: Renderer) -> None:
    (found,) = run(make(), renderer, [{}])
    assert found.failure == "" and found.attempts == 1 and found.trajectory.turns == 2
    second = found.trajectory.messages[-1]["content"]
    assert found.rewards == [0.25, len(second) / 10]
    said = [message["content"] for message in found.trajectory.messages]
    assert said[:3] == ["Go", "ok0", "and now?"] and second.startswith("ok") and second != "ok0", (
        "each answer has a seed of its own"
    )


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "KeyError: 'planted'"),
        ("wait", f"took more than {LIMIT:g} s"),
        ("block", f"kept its process busy for {LIMIT:g} s"),
        ("exit", "ended its process, which exited with status 3"),
        ("leave", "SystemExit: 1"),
        ("text", "returned 'a lot', no number"),
        ("nan", "not finite"),
        ("nothing", "returned None and gave no reward"),
        ("message", "takes texts"),
        ("cancel", "a wait for an answer was cancelled"),
    ],
)
def test_a_fault_is_counted_and_others_go_on(make: Make, renderer: Renderer, fault: str, told: str) -> None:
    rows = [{"fault": fault} if i == 3 else {} for i in range(8)]
    found = run(make(), renderer, rows)
    assert [episode.rewards == [] for episode in found] == [i == 3 for i in range(8)]
    assert told in found[3].failure and found[3].attempts == 2
    assert all(episode.attempts == 1 for i, episode in enumerate(found) if i != 3), "others are not blamed"


def test_an_attempt_is_begun_anew(make: Make, renderer: Renderer, tmp_path: Path) -> None:
    (found,) = run(make(), renderer, [{"fault": "once", "mark": str(tmp_path / "mark")}])
    assert found.attempts == 2 and found.rewards
    assert found.trajectory.messages[1]["content"] != (tmp_path / "mark").read_text(), (
        "with other random numbers"
    )


def test_a_third_of_all_fails_and_nothing_is_lost(make: Make, renderer: Renderer) -> None:
    faults = ["raise", "wait", "block", "exit", "text", "nan"]
    start = time.monotonic()
    found = run(
        make(options={"share": 0.3}, max_attempts=12, timeout=3.0, processes=2),
        renderer,
        [{"faults": faults} for _ in range(40)],
    )
    assert len(found) == 40 and all(episode.rewards and not episode.failure for episode in found)
    assert 40 < sum(episode.attempts for episode in found) < 120
    assert time.monotonic() - start < 200


def test_episodes_that_end_their_process_do_not_stop_the_others(make: Make, renderer: Renderer) -> None:
    rows: list[dict[str, Any]] = [{"faults": ["exit"], "number": i} for i in range(48)]
    found = run(make(options={"share": 0.3}, max_attempts=14, timeout=120.0), renderer, rows)
    assert all(episode.rewards for episode in found), (
        "each runs alone before another ends its process for the tenth time"
    )


def test_a_large_reward_is_bounded(make: Make, renderer: Renderer) -> None:
    (found,) = run(make(), renderer, [{"fault": "large"}])
    rollout = of_episode(found)
    assert found.rewards == [1e30, -1e30] and rollout.own is not None and rollout.own.early is not None
    assert rollout.own.reward == 0 and rollout.own.early.max() == np.float32(1e30)


BROKEN = """
class World:
    async def rollout(self, task, model):
        first = await model.answer()
        if task["number"] % task["every"] == 0:
            return scor(first.text)
        return 1.0
"""


def test_an_error_of_the_code_in_all_episodes_stops_at_once_with_its_line(
    make: Make, renderer: Renderer, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    episodes = make("broken.py:World", max_attempts=1000)
    told = (
        r"environment World: each episode raised NameError: name 'scor' is not defined \(.*broken\.py, line"
        r" 6\); correct it"
    )
    with pytest.raises(ValueError, match=told) as caught:
        run(episodes, renderer, [{"number": i, "every": 1} for i in range(40)])
    assert raised_by_us(caught.value), "a user's mistake: the stage is not retried"
    found = run(make("broken.py:World"), renderer, [{"number": i, "every": 2} for i in range(40)])
    assert [bool(episode.rewards) for episode in found] == [i % 2 == 1 for i in range(40)]
    assert found[0].failure.startswith("NameError: ") and found[0].failure.endswith("broken.py, line 6)")


def test_a_process_that_an_episode_forks_says_nothing(make: Make, renderer: Renderer) -> None:
    found = run(make(processes=1), renderer, [{"fault": "fork"} if i % 2 else {} for i in range(8)])
    assert all(len(episode.rewards) == 2 and episode.attempts == 1 for episode in found)


def test_turns_end(make: Make, renderer: Renderer) -> None:
    (found,) = run(make(), renderer, [{"fault": "many"}])
    assert found.trajectory.turns == 3 and found.rewards == [0.0, 0.0, 0.0] and not found.failure


@pytest.mark.parametrize(
    ("fault", "finished"), [("", True), ("many", False), ("wait", False), ("block", False), ("raise", True)]
)
def test_an_episode_that_a_limit_ends_is_cut(
    make: Make, renderer: Renderer, fault: str, finished: bool
) -> None:
    """By its turns, or by its time, which also has no reward; what failed otherwise met no limit."""
    (found,) = run(
        make(max_attempts=1, timeout=1.0 if fault in ("wait", "block") else 60.0),
        renderer,
        [{"fault": fault}],
    )
    rollout = of_episode(found)
    assert rollout.finished is finished and (rollout.own is not None and bool(rollout.own.failure)) == (
        fault not in ("", "many")
    )
    assert rollout.own.ended_by == {"many": "turns", "wait": "time", "block": "time"}.get(fault)


def test_half_a_character_is_replaced(make: Make, renderer: Renderer) -> None:
    (found,) = run(make(), renderer, [{"fault": "half"}])
    assert found.rewards and found.trajectory.messages[2]["content"] == "half of a character: ?"


GIVES_UP = """
import asyncio

class World:
    async def rollout(self, task, model):
        await model.answer()
        try: await asyncio.wait_for(model.answer("slow"), 3)
        except TimeoutError: pass
        if task["raises"]: raise RuntimeError("the model is too slow")
        return 1.0
"""


class Slow(AtOnce):
    """Never answers a question; notes which waits are over."""

    cancelled = 0

    async def ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Any = ()
    ) -> SampledAnswer:
        if not self.asked:
            return await super().ask(engine, tokens, seed, sampling, pictures)
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError("nobody waits so long")


@pytest.mark.parametrize(
    ("raises", "told"), [(True, "the model is too slow"), (False, "the environment cancelled model.answer()")]
)
def test_an_engine_answers_no_further_when_the_environment_does_not_wait(
    make: Make, renderer: Renderer, tmp_path: Path, raises: bool, told: str
) -> None:
    (tmp_path / "hasty.py").write_text(GIVES_UP)
    episodes = make("hasty.py:World", max_attempts=1)
    episodes._engines = engines = Slow(renderer)  # type: ignore[assignment]
    (found,) = run(episodes, renderer, [{"raises": raises}])
    assert told in found.failure and found.rewards == [] and engines.cancelled == 1


@pytest.mark.parametrize("fault", ["", "block", "thread"])
def test_a_killed_parent_leaves_nothing_behind(tmp_path: Path, fault: str) -> None:
    """Not even where a step blocks the process, a thread of the environment hangs, or it has started a
    program."""
    (tmp_path / "world.py").write_text(
        "import asyncio, subprocess, time\n"
        "subprocess.Popen(['sleep', '987'])\n"
        "class World:\n"
        "    async def rollout(self, task, model):\n"
        f"        {'time.sleep(1000)' if fault == 'block' else 'await asyncio.to_thread(time.sleep, 1000)'}\n"
    )
    page = os.memfd_create("page")
    os.ftruncate(page, 16)
    started = (
        "import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-m',"
        f" 'rlhf_core.environments.environment_worker', {str(tmp_path / 'world.py')!r}, 'World', '{{}}', '{page}'],"
        f" stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=({page},),"
        ' start_new_session=True)\np.stdout.readline()\np.stdin.write(b\'{"start": 1, "task": {},'
        ' "messages": [], "seed": 1}\\n\'); p.stdin.flush()\nprint(p.pid, flush=True);'
        " time.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", started], stdout=subprocess.PIPE, pass_fds=(page,))
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    family = [worker, *worker.children()]
    assert len(family) == 2
    time.sleep(0.5)
    if fault:
        parent.kill()
    else:
        parent.terminate()
    parent.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_thousands_at_once(make: Make, renderer: Renderer) -> None:
    found = run(make(timeout=120.0), renderer, [{}] * 1500)
    assert all(episode.rewards for episode in found)


def test_close_leaves_nothing_behind(make: Make, renderer: Renderer) -> None:
    episodes = make(timeout=100.0)
    asked = EpisodeRequest(Prompt(({"role": "user", "content": "Go"},), [5], {"fault": "wait"}, False), 0, 0)
    waiting = episodes._background.start(episodes.run([asked], SAMPLING))
    children = [
        child.pid
        for child in psutil.Process(os.getpid()).children()
        if "environments.environment_worker" in " ".join(child.cmdline())
    ]
    assert children
    episodes.close()
    episodes._background.close()
    assert not any(psutil.pid_exists(pid) for pid in children) and waiting.done()


@pytest.mark.parametrize(
    ("text", "path", "told"),
    rows_of_text(
        r"""
    x = 1 | bad.py:World | has no class 'World' with `async def rollout
    import nowhere | bad.py:World | cannot be imported: ModuleNotFoundError
    "class World:\n    def rollout(self, task, model): pass" | bad.py:World | async def rollout
    "class World:\n    def __init__(self, size): pass\n    async def rollout(self, task, model): pass" | bad.py:World | its options
    import os; os._exit(1) | bad.py:World | exited with status 1; look at the log above
    """,
        yaml_columns={0},
    ),
)
def test_a_wrong_environment_is_one_sentence(
    make: Make, tmp_path: Path, text: str, path: str, told: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.py") as raised:
        make(path)
    assert told in str(raised.value) and "\n" not in str(raised.value)
