"""A chat model behind an OpenAI-compatible endpoint as judge: remote, or a local vLLM server that we start.

Every verdict is appended to a cache the moment it is there, keyed by (question, answers A and B, judge, prompt version), so a
killed stage asks nothing twice. A reply without a verdict is asked for one once more. What still fails is counted, never cached, and
above `max_failed` of the games it stops the stage. How an endpoint is asked, again and again if need be: `chat_client`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evaluation.chat_client import NO_REPLY, Asking, ChatClient, Reply, appending, records_of
from evaluation.judge import Match
from evaluation.judge_prompt import PROMPT_VERSION, REMINDER, judge_prompt, parse_verdict
from rlhf_core.stage import digest
from rlhf_core.types import Frozen, Game


class Entry(Frozen):
    """One line of the cache. Tokens as the endpoint counts them, over both questions when the judge had to be reminded."""

    key: str
    game: Game
    input_tokens: int
    output_tokens: int


class OpenAIJudge:
    """Asks for a verdict on each match.

    `cache` is the file of verdicts; `identity` stands for the judge in its keys: the endpoint's name of a remote model, the digest of
    a local one's weights. Tokens are those of all verdicts used, also of the cached ones.
    """

    def __init__(self, name: str, client: ChatClient, cache: Path, *, identity: str, max_failed: float):
        self.name = name
        self.client = client
        self.cache = cache
        self.identity = identity
        self.max_failed = max_failed
        self.used: dict[str, Entry] = {}
        self.games = self.failed = 0

    @property
    def requests(self) -> int:
        return self.client.requests

    @property
    def input_tokens(self) -> int:
        return sum(entry.input_tokens for entry in self.used.values())

    @property
    def output_tokens(self) -> int:
        return sum(entry.output_tokens for entry in self.used.values())

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        """Raises ValueError when the endpoint refuses the judge, or more than `max_failed` of all games so far fail."""
        keys = [self._key(match) for match in matches]
        known = read_cache(self.cache)
        missing = {key: match for key, match in zip(keys, matches, strict=True) if key not in known}
        print(f"judge {self.name}: {len(matches)} games, {len(missing)} to ask", flush=True)
        self.games += len(keys)
        with appending(self.cache) as file:

            def done(key: str, entry: Entry) -> None:
                known[key] = entry.model_copy(update={"key": key})
                if entry.game.score is not None:
                    file.write(known[key].model_dump_json() + "\n")
                    file.flush()
                    return
                self.failed += keys.count(key)
                if self.failed > self.max_failed * self.games:
                    last = entry.game.judgment["answer"][-200:].strip()
                    raise ValueError(
                        f"judge {self.name}: {self.failed} of {self.games} games have no verdict, more than "
                        f"max_failed={self.max_failed:g} allows (the last: {last!r}): look at the endpoint, then run again; "
                        f"the verdicts so far are kept"
                    )

            self.client.each(missing, self._game, done)
        self.used |= {key: known[key] for key in keys}
        return [known[key].game for key in keys]

    def _key(self, match: Match) -> str:
        return digest([list(match.question.messages), match.answer_a, match.answer_b, self.identity, PROMPT_VERSION])

    async def _game(self, asking: Asking, match: Match) -> Entry:
        prompt = judge_prompt(match)
        replies: list[Reply] = []
        try:
            replies.append(await asking.ask(prompt))
            if parse_verdict(replies[0].text) is None:
                said = ({"role": "assistant", "content": replies[0].text},) if replies[0].text.strip() else ()
                replies.append(await asking.ask((*prompt, *said, {"role": "user", "content": REMINDER})))
            words = "\n".join(reply.text for reply in replies)
            score = parse_verdict(replies[-1].text)
        except NO_REPLY as error:
            words, score = "\n".join([*(reply.text for reply in replies), asking.reason(error)]), None
        return Entry(
            key="",
            game=Game(score=score, judgment={"answer": words}, prompt=prompt),
            input_tokens=sum(reply.input_tokens for reply in replies),
            output_tokens=sum(reply.output_tokens for reply in replies),
        )


def read_cache(file: Path) -> dict[str, Entry]:
    """The verdicts of a cache by their keys."""
    return {entry.key: entry for entry in records_of(file, Entry)}
