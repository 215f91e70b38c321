"""Which conversation a call with a whole list of messages continues."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.environments.joined_calls import CallPlace, JoinedCalls, plain_message

TOOL = {"type": "function", "function": {"name": "look"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def answered(calls: JoinedCalls, messages: list[dict[str, Any]], text: str, tools: Any = ()) -> CallPlace:
    place = calls.place(messages, list(tools))
    calls.answered(place.conversation, said(text))
    return place


def test_a_call_with_the_answer_so_far_continues() -> None:
    calls = JoinedCalls()
    first = answered(calls, [user("a")], " one\n")
    second = answered(calls, [user("a"), said("one"), user("b")], "two")
    third = calls.place([user("a"), said("one"), user("b"), said("two"), user("c"), user("d")], [])
    numbers = [place.conversation.number for place in (first, second, third)]
    assert numbers == [1, 1, 1] and not any(place.fork for place in (first, second, third))
    assert first.new == [user("a")] and second.new == [user("b")] and third.new == [user("c"), user("d")]


def test_another_history_or_other_tools_begin_a_conversation() -> None:
    calls = JoinedCalls()
    answered(calls, [user("a")], "one")
    shorter = answered(calls, [user("so far: one"), user("b")], "two")
    changed = answered(calls, [user("a"), said("another"), user("b")], "three")
    equipped = answered(calls, [user("a"), said("one"), user("b")], "four", [TOOL])
    assert [place.conversation.number for place in (shorter, changed, equipped)] == [2, 3, 4]
    assert changed.new == [user("a"), said("another"), user("b")], "all of it is rendered"


def test_a_second_call_from_one_point_forks_it() -> None:
    calls = JoinedCalls()
    answered(calls, [user("a")], "one")
    begun = [user("a"), said("one")]
    first = calls.place([*begun, user("b")], [])
    while_it_waits = calls.place([*begun, user("c")], [])
    calls.answered(first.conversation, said("two"))
    from_before = calls.place([*begun, user("d")], [])
    on = calls.place([*begun, user("b"), said("two"), user("e")], [])
    assert first.fork is None and while_it_waits.fork == (1, 1) == from_before.fork
    assert while_it_waits.new == [user("c")]
    assert (on.conversation.number, on.fork) == (1, None)
    calls.answered(while_it_waits.conversation, said("three"))
    fork_on = calls.place([*begun, user("c"), said("three"), user("f")], [])
    assert (fork_on.conversation.number, fork_on.new) == (2, [user("f")]), "a fork goes on as others do"


def test_a_call_that_was_given_up_is_not_continued() -> None:
    calls = JoinedCalls()
    answered(calls, [user("a")], "one")
    calls.place([user("a"), said("one"), user("b")], [])  # its client is gone
    again = calls.place([user("a"), said("one"), user("b")], [])
    assert again.fork == (1, 1) and again.new == [user("b")]


def test_the_same_first_messages_are_conversations_of_their_own() -> None:
    calls = JoinedCalls()
    found = [answered(calls, [user("a")], "one") for _ in range(3)]
    assert [place.conversation.number for place in found] == [1, 2, 3]
    on = calls.place([user("a"), said("one"), user("b")], [])
    assert on.fork is None


def test_messages_have_one_form() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    plain = plain_message({"role": "assistant", "content": None, "tool_calls": [call], "refusal": None})
    function = {"name": "look", "arguments": {"at": 1}}
    assert plain == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "c1", "function": function}],
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}]
    assert plain_message({"role": "developer", "content": parts}) == {"role": "system", "content": "ab?"}
    result = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert plain_message(result) == result


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "need a last one"),
        ([user("a"), said("b")], "not the assistant's"),
        (["a"], "an object with a role"),
        ([{"content": "a"}], "an object with a role"),
        ([user("a") | {"content": [{"type": "image_url", "image_url": {}}]}], "set images: true"),
        ([user("a") | {"tool_calls": [{"function": "look"}]}], "a function with a name"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: list[Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        JoinedCalls().place(messages, [])


def test_a_refused_call_is_taken_back() -> None:
    calls = JoinedCalls()
    answered(calls, [user("a")], "one")
    long = calls.place([user("a"), said("one"), user("long")], [])
    calls.refused(long)
    short = calls.place([user("a"), said("one"), user("short")], [])
    assert short.fork is None and short.conversation is long.conversation
    calls.refused(short)
    for text in "bc":
        begun = calls.place([user(text)], [])
        calls.refused(begun)
    first = calls.place([user("a"), said("one"), user("b")], [])
    fork = calls.place([user("a"), said("one"), user("c")], [])
    calls.refused(fork)
    calls.answered(first.conversation, said("two"))
    assert len(calls._known) == 1, "what was refused is forgotten"


def test_nesting_is_bounded() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="64 levels"):
        JoinedCalls().place([user("a")], [TOOL | {"parameters": deep}])
    call = {"id": "c", "function": {"name": "look", "arguments": "[" * 5000}}
    place = JoinedCalls().place([user("a"), said("") | {"tool_calls": [call]}, user("b")], [])
    assert place.new[1]["tool_calls"][0]["function"]["arguments"] == {"": "[" * 5000}
