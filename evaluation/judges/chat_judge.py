"""Judges with a chat model at an OpenAI-compatible endpoint: a remote endpoint, or a local vLLM server.

Every verdict is cached when it arrives, keyed by the judge prompt, the request's settings, the judge and the
prompt version, so a resumed stage never requests the same verdict twice. If a reply has no verdict,
contradicts itself, or was truncated by the length limit, one reminder follows. Games that still fail are
counted but not cached, and stop the stage when their share exceeds `max_failed`.
`rlhf_core/judging/chat_client.py` sends the requests and retries them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.answers.question_pictures import with_images_of
from evaluation.judges.judge_prompt import PROMPT_VERSION, judge_prompt, reminder
from evaluation.judges.offline import Match
from rlhf_core.judging.chat_client import NO_REPLY, ChatClient, ChatReply
from rlhf_core.judging.judge_reply import JudgeVerdict, read_verdict
from rlhf_core.judging.record_lines import appending, records_of
from rlhf_core.records import Frozen, Game
from rlhf_core.system.files import digest


class CachedVerdict(Frozen):
    """One line of the cache. Token counts come from the endpoint and include the reminder, if a reminder was
    sent."""

    key: str
    game: Game
    input_tokens: int
    output_tokens: int


@dataclass
class LlmJudge:
    """Requests a verdict on each match.

    `cache`: file of verdicts; `identity`: the judge's part of the cache's keys, which is a remote model's
    name or the digest of a local model's files. `used`: all verdicts used, including cached verdicts.
    `games`: the number of games; `failed`: the number of games without a verdict.
    """

    name: str
    client: ChatClient
    cache: Path
    identity: str
    max_failed: float
    used: dict[str, CachedVerdict] = field(default_factory=dict)
    games: int = 0
    failed: int = 0

    @property
    def tokens(self) -> tuple[int, int]:
        """Returns the numbers of input and output tokens of all verdicts used."""
        return sum(entry.input_tokens for entry in self.used.values()), sum(
            entry.output_tokens for entry in self.used.values()
        )

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        """Returns one game for each match, in order.

        Raises ValueError when the endpoint rejects the request, or when the fraction of all games so far that
        have no verdict exceeds `max_failed`.
        """
        keys = [self._key(match) for match in matches]
        known = {entry.key: entry for entry in records_of(self.cache, CachedVerdict)}
        missing = {key: match for key, match in zip(keys, matches, strict=True) if key not in known}
        print(f"judge {self.name}: {len(matches)} games, {len(missing)} to ask", flush=True)
        self.games += len(keys)
        with appending(self.cache) as file:

            def done(key: str, entry: CachedVerdict) -> None:
                known[key] = entry.model_copy(update={"key": key})
                if entry.game.score is not None:
                    file.write(known[key].model_dump_json() + "\n")
                    file.flush()
                    return
                self.failed += keys.count(key)
                if self.failed > self.max_failed * self.games:
                    last = entry.game.judgment["answer"][-200:].strip()
                    raise ValueError(
                        f"judge {self.name}: {self.failed} of {self.games} games have no verdict, more than"
                        f" max_failed={self.max_failed:g} allows (the last: {last!r}): check the endpoint,"
                        " then run again; the verdicts so far are kept"
                    )

            self.client.each(missing, self._game, done)
        self.used |= {key: known[key] for key in keys}
        return [known[key].game for key in keys]

    def _key(self, match: Match) -> str:
        seen = [source.content_digest for source in match.question.pictures]
        asked = [list(judge_prompt(match)), self.client.asked, self.identity, PROMPT_VERSION]
        return digest([*asked, seen] if seen else asked)

    async def _game(self, match: Match) -> CachedVerdict:
        prompt = judge_prompt(match)
        sent = with_images_of(match.question, prompt)
        replies: list[ChatReply] = []
        try:
            replies.append(await self.client.ask(sent))
            verdict = _verdict(replies[-1], match)
            if verdict.label is None:
                said = replies[0].text
                first = ({"role": "assistant", "content": said},) if said.strip() else ()
                again = {"role": "user", "content": reminder(verdict.problem)}
                replies.append(await self.client.ask((*sent, *first, again)))
                verdict = _verdict(replies[-1], match)
            score = verdict.label
            failure = "" if score is not None else f"(no verdict: {verdict.problem})"
        except NO_REPLY as error:
            score = None
            failure = self.client.reason(error)
        words = "\n".join([*(reply.text for reply in replies), *([failure] if failure else [])])
        return CachedVerdict(
            key="",
            game=Game(score=score, judgment={"answer": words}, prompt=prompt),
            input_tokens=sum(reply.input_tokens for reply in replies),
            output_tokens=sum(reply.output_tokens for reply in replies),
        )


def _verdict(reply: ChatReply, match: Match) -> JudgeVerdict:
    return read_verdict(reply.text, (match.answer_a, match.answer_b), reply.cut)
