"""The decision table of docs/sessions.md: one test per row, and no row without its test."""

import re
from pathlib import Path
from typing import Any

from schemas.events.base import Message, TurnType
from schemas.events.next_state import NextStateKind
from tests.fixtures.conversations import assistant, call, system, tool, user
from tests.fixtures.turn_tree import TurnTree, is_side

TABLE = Path(__file__).parents[4] / "docs" / "sessions.md"
LONG = "Canberra is the capital of Australia, chosen in 1908 as a compromise between Sydney and Melbourne."
OTHER = "The compromise was reached because neither of the two large cities would accept the other one."
CARRIER = user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nclock 15:01\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
SYSTEM = system("You are a personal assistant running inside OpenClaw.")


def test_every_row_of_the_table_has_its_test() -> None:
    rows = re.findall(r"`(test_\w+)`", TABLE.read_text(encoding="utf-8"))
    tests = [
        name for name in globals() if name.startswith("test_") and name != "test_every_row_of_the_table_has_its_test"
    ]
    assert sorted(rows) == sorted(tests)


# ---- identity


def test_reply_without_headers() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], "Canberra")
    second = tree.answer([user("capital?"), assistant(" Canberra\n"), user("sure?")], "Yes")
    assert (second.parent_turn_id, second.session_id, second.depth) == (first.turn_id, first.session_id, 1)
    assert second.parent_evidence.rule == "answer"
    assert tree.followed(first) == [[user("sure?")]]


def test_no_answer_of_ours() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], "Canberra")
    second = tree.answer([user("capital of France?"), assistant("Paris, as everybody knows"), user("sure?")], "Yes")
    assert second.session_id != first.session_id
    assert second.parent_evidence.rule == "none"
    assert tree.next_states == {}


def test_answer_of_another_principal() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG, principal="alice")
    second = tree.answer([user("capital?"), assistant(LONG), user("sure?")], "Yes", principal="bob")
    assert second.session_id != first.session_id
    assert tree.next_states == {}


def test_short_answer_with_nothing_in_common() -> None:
    tree = TurnTree()
    first = tree.answer([user("delete the file")], "Done.")
    second = tree.answer([user("water the plants"), assistant("Done."), user("thanks")], "Welcome")
    assert second.session_id != first.session_id
    assert second.parent_turn_id is None


def test_long_answer_with_nothing_else_in_common() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG)
    second = tree.answer([user("a rewritten question"), assistant(LONG), user("sure?")], "Yes")
    assert second.parent_turn_id == first.turn_id


def test_same_answer_in_two_chats() -> None:
    tree = TurnTree()
    one = tree.answer([user("hi")], "Hello!")
    two = tree.answer([user("hi")], "Hello!")
    history = [user("hi"), assistant("Hello!")]
    first_reply = tree.answer([*history, user("how are you?")], "Fine")
    second_reply = tree.answer([*history, user("what is new?")], "Nothing")
    assert {first_reply.session_id, second_reply.session_id} == {one.session_id, two.session_id}
    assert first_reply.parent_evidence.ambiguous
    assert first_reply.parent_evidence.candidates == 2


def test_repeated_request_that_fits_two_chats() -> None:
    tree = TurnTree()
    tree.answer([user("hi")], "Hello!")
    tree.answer([user("hi")], "Hello!")
    messages = [user("hi"), assistant("Hello!"), user("how are you?")]
    first = tree.answer(messages, "Fine")
    again = tree.answer(messages, "Well")
    assert again.parent_turn_id == first.parent_turn_id
    assert len(tree.next_states) == 1


def test_ranking_by_agreeing_ancestors() -> None:
    tree = TurnTree()
    parents = {}
    for answer in (LONG, OTHER):
        tree.answer([user("tell me"), user("now")], answer)
        parents[answer] = tree.answer([user("tell me"), user("now"), assistant(answer), user("save it")], "Done.")
    for answer in (LONG, OTHER):
        messages = [
            user("tell me"),
            user("now"),
            assistant(answer),
            user("save it"),
            assistant("Done."),
            user("thanks"),
        ]
        placed = tree.answer(messages, "Welcome")
        assert placed.parent_turn_id == parents[answer].turn_id
        assert not placed.parent_evidence.ambiguous


def test_same_answer_several_times_in_one_conversation() -> None:
    tree = TurnTree()
    history = [user("look around")]
    parents = []
    for number in range(3):
        parents.append(tree.answer(history, call("ls", "{}")))
        history = [*history, call("ls", "{}"), tool(f"file {number}")]
    assert tree.answer(history, "that is all").parent_turn_id == parents[2].turn_id
    rewound = [user("look around"), call("ls", "{}"), tool("file 0, seen again")]
    assert tree.answer(rewound, "so it is").parent_turn_id == parents[0].turn_id


def test_ranking_by_messages_in_common() -> None:
    tree = TurnTree()
    long_chat = [user(f"step {number}") for number in range(6)]
    longer = tree.answer(long_chat, "Done.")
    tree.answer(long_chat[:1], "Done.")
    shortened = tree.answer([*long_chat[:3], assistant("Done."), user("thanks")], "Welcome")
    assert shortened.parent_turn_id == longer.turn_id, "three in common outweigh three that are missing"
    tree = TurnTree()
    tree.answer([user("one"), user("two"), user("three")], "Done.")
    exact = tree.answer([user("one"), user("two")], "Done.")
    placed = tree.answer([user("one"), user("two"), assistant("Done."), user("thanks")], "Welcome")
    assert placed.parent_turn_id == exact.turn_id, "of equally many in common, fewer missing ones win"
    assert not placed.parent_evidence.ambiguous


def test_ranking_by_trace() -> None:
    tree = TurnTree()
    one = tree.answer([user("hi")], call("ls", "{}"), trace_id="1" * 32)
    two = tree.answer([user("hi")], call("ls", "{}"), trace_id="2" * 32)
    history = [user("hi"), call("ls", "{}"), tool("empty")]
    assert tree.answer(history, "a", trace_id="1" * 32).parent_turn_id == one.turn_id
    assert tree.answer(history, "b", trace_id="2" * 32).parent_turn_id == two.turn_id


def test_session_header() -> None:
    tree = TurnTree()
    first = tree.answer([user("hi")], "Hello!", session="chat-1")
    other = tree.answer([user("hi")], "Hello!", session="chat-2")
    second = tree.answer([user("hi"), assistant("Hello!"), user("how are you?")], "Fine", session="chat-1")
    assert (first.session_id, other.session_id) == ("chat-1", "chat-2")
    assert (second.session_id, second.parent_turn_id) == ("chat-1", first.turn_id)


def test_odd_session_header() -> None:
    tree = TurnTree()
    ids = [
        tree.answer([user(f"q{number}")], "a", session=value).session_id
        for number, value in enumerate(["", "  ", "x" * 4096, "a:b c", "é\ud83d"])
    ]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[0-9a-f-]{36}", one) for one in ids)
    again = tree.answer([user("q")], "a", session="a:b c")
    assert again.session_id == ids[3]


def test_header_of_a_fork() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG, session="chat-1")
    fork = tree.answer([user("capital?"), assistant(LONG), user("sure?")], "Yes", session="chat-2")
    assert (fork.session_id, fork.parent_turn_id) == ("chat-2", first.turn_id)
    assert tree.followed(first) == [[user("sure?")]]


def test_concurrent_requests_under_one_header() -> None:
    tree = TurnTree()
    placed = [tree.answer([user(f"task {number}")], f"result {number}", session="shared") for number in range(8)]
    assert {one.session_id for one in placed} == {"shared"}
    assert len({one.turn_id for one in placed}) == 8
    assert {one.parent_turn_id for one in placed} == {None}
    follow = [user("task 3"), assistant("result 3"), user("and then?")]
    assert tree.answer(follow, "x", session="shared").parent_turn_id == placed[3].turn_id


def test_hint_alone() -> None:
    tree = TurnTree()
    first = tree.answer([user("q1")], "a", hint="my-app")
    second = tree.answer([user("q2")], "b", hint="my-app")
    assert first.session_id != second.session_id


def test_hint_with_something_in_common() -> None:
    tree = TurnTree()
    first = tree.answer([user("q1")], "a", hint="s1:0")
    retry = tree.answer([user("q1")], "b", hint="s1:1")
    assert retry.session_id == first.session_id
    assert retry.parent_turn_id is None
    assert retry.parent_evidence.rule == "session_hint"


# ---- retries, edits, forks


def test_repeated_first_request() -> None:
    tree = TurnTree()
    lost = tree.answer([user("capital?")], "The capital is Canberra")
    delivered = tree.answer([user("capital?")], "It is Canberra of course")
    reply = tree.answer([user("capital?"), assistant("It is Canberra of course"), user("thanks")], "Welcome")
    assert delivered.session_id != lost.session_id
    assert tree.followed(lost) == []
    assert (reply.parent_turn_id, reply.session_id) == (delivered.turn_id, delivered.session_id)


def test_repeated_later_request() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG)
    messages = [user("capital?"), assistant(LONG), user("sure?")]
    lost = tree.answer(messages, "Yes, certainly so")
    delivered = tree.answer(messages, "Absolutely, no doubt")
    reply = tree.answer([*messages, assistant("Absolutely, no doubt"), user("thanks")], "Welcome")
    assert [lost.parent_turn_id, delivered.parent_turn_id] == [first.turn_id] * 2
    assert tree.followed(first) == [[user("sure?")]]
    assert tree.followed(lost) == []
    assert reply.parent_turn_id == delivered.turn_id


def test_failed_request_and_its_retry() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG)
    messages = [user("capital?"), assistant(LONG), user("sure?")]
    tree.answer(messages, "", recorded=False)
    second = tree.answer(messages, "Yes")
    assert second.parent_turn_id == first.turn_id
    assert len(tree.next_states) == 1


def test_retry_with_wrapped_text() -> None:
    tree = TurnTree()
    first = tree.answer([SYSTEM, user("[Sun 2026-11-29 15:01 UTC] capital?"), CARRIER], LONG)
    history = [SYSTEM, user("[Sun 2026-11-29 15:01 UTC] capital?"), assistant(LONG)]
    stamped = "[Sun 2026-11-29 15:02 UTC] too long"
    marker = "[Queued user message from a previous active turn; preserved as context only. Continue below.]\n"
    cut = tree.answer([*history, user(stamped), CARRIER], "Canber", recorded=False)
    retry = tree.answer([*history, user(f"{marker}{stamped}\n\n{stamped}"), CARRIER], "Canberra.")
    assert cut.parent_turn_id == retry.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("too long")]]


def test_edited_message() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG)
    history = [user("capital?"), assistant(LONG)]
    abandoned = tree.answer([*history, user("shorter")], OTHER)
    edited = tree.answer([*history, user("in one word")], "Canberra")
    reply = tree.answer([*history, user("in one word"), assistant("Canberra"), user("good")], "Thanks")
    assert abandoned.parent_turn_id == edited.parent_turn_id == first.turn_id
    assert edited.session_id == abandoned.session_id
    assert tree.followed(first) == [[user("shorter")], [user("in one word")]]
    assert tree.followed(abandoned) == []
    assert reply.parent_turn_id == edited.turn_id


def test_request_that_ends_in_our_answer() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG)
    second = tree.answer([user("capital?"), assistant(LONG)], "and so on")
    assert second.parent_turn_id == first.turn_id
    assert tree.next_states == {}


# ---- rewriting clients


def test_rewritten_system_prompt_and_vanishing_context() -> None:
    tree = TurnTree()
    first = tree.answer([SYSTEM, user("[Sun 2026-11-29 15:01 UTC] capital?"), CARRIER], LONG)
    other_system = system("running inside OpenClaw, another day")
    messages = [other_system, user("[Sun 2026-11-29 16:01 GMT+1] capital?"), assistant(LONG), user("sure?"), CARRIER]
    second = tree.answer(messages, "Yes")
    assert second.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("sure?")]]


def test_tool_turn_with_rewritten_ids_and_arguments() -> None:
    tree = TurnTree()
    first = tree.answer([user("read it")], call("read", '{"path": "x", "lines": 10.0}', "call_1"))
    echoed = {**call("read", '{"lines":10,"path":"x"}', "call1"), "content": ""}
    second = tree.answer([user("read it"), echoed, tool("text", "call1")], "It says text")
    assert second.parent_turn_id == first.turn_id
    (state,) = tree.next_states.values()
    assert state.kind is NextStateKind.TOOL_RESULT
    assert state.following_messages == [tool("text", "call1")]


def test_reasoning_cut_from_the_echo() -> None:
    tree = TurnTree()
    first = tree.answer([user("q")], f"<think>let me see</think>\n\n{LONG}")
    second = tree.answer([user("q"), assistant(f"\n\n{LONG}"), user("ok")], "x")
    assert second.parent_turn_id == first.turn_id


def test_invented_assistant_message_last() -> None:
    tree = TurnTree()
    first = tree.answer([user("edit it")], LONG)
    messages = [user("edit it"), assistant(LONG), user("I applied it"), assistant("Ok."), user("now test")]
    second = tree.answer(messages, "x")
    assert second.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("I applied it"), assistant("Ok."), user("now test")]]


def test_dropped_answer() -> None:
    tree = TurnTree()
    first = tree.answer([user("one")], LONG)
    dropped = tree.answer([user("one"), assistant(LONG), user("two")], "this will be dropped by the client")
    third = tree.answer([user("one"), assistant(LONG), user("two"), user("three")], "x")
    assert third.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("two")], [user("two"), user("three")]]
    assert tree.followed(dropped) == []


def test_orphan_and_invented_tool_results() -> None:
    tree = TurnTree()
    first = tree.answer([user("read it")], call("read", '{"path": "a rather long path, so that it is distinctive"}'))
    echoed = call("read", '{"path": "a rather long path, so that it is distinctive"}')
    repaired = tool("[openclaw] missing tool result in session history; inserted synthetic error result")
    second = tree.answer([user("read it"), echoed, repaired], "x")
    assert second.parent_turn_id == first.turn_id
    assert not is_side(second)
    assert tree.next_states == {}
    third = tree.answer([user("read it"), echoed, repaired, user("try again")], "y")
    assert third.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("try again")]]


def test_concurrent_duplicates() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG)
    messages = [user("capital?"), assistant(LONG), user("sure?")]
    unfinished = [tree.answer(messages, "", recorded=False) for _ in range(3)]
    delivered = tree.answer(messages, OTHER)
    assert {one.parent_turn_id for one in (*unfinished, delivered)} == {first.turn_id}
    assert {one.session_id for one in (*unfinished, delivered)} == {first.session_id}
    assert tree.followed(first) == [[user("sure?")]]


def test_partial_answer_merged_by_the_client() -> None:
    tree = TurnTree()
    first = tree.answer([user("one")], LONG)
    history = [user("one"), assistant(LONG), user("two")]
    tree.answer(history, OTHER[:20])
    tree.answer(history, OTHER)
    merged = tree.answer([*history, assistant(OTHER[:20] + OTHER), user("three")], "x")
    assert (merged.parent_turn_id, merged.session_id) == (first.turn_id, first.session_id)
    ends_in_it = tree.answer([*history, assistant(f"a partial text of {OTHER[:20]}")], "x")
    assert ends_in_it.parent_turn_id == first.turn_id


def test_reminder_that_moves() -> None:
    tree = TurnTree()
    reminder = "\n<system-reminder>\nPlan mode is active. Do not edit.\n</system-reminder>"
    how: dict[str, Any] = {"user_agent": "opencode/1.18.33", "session": "ses_1"}
    first = tree.answer([user(f"one{reminder}")], "Done.", **how)
    second = tree.answer([user("one"), assistant("Done."), user(f"two{reminder}")], "OK", **how)
    tool_turn = tree.answer(
        [user("one"), assistant("Done."), user("two"), call("ls", ""), tool(f"empty{reminder}")], "x", **how
    )
    assert second.parent_turn_id == tool_turn.parent_turn_id == first.turn_id
    assert tree.followed(first)[0] == [user("two")]
    assert all("reminder" not in str(following) for following in tree.followed(first))


def test_reports_and_reminders_of_an_editor() -> None:
    tree = TurnTree()
    how: dict[str, Any] = {"user_agent": "aider/0.86.2"}
    rules = "\n\n# *SEARCH/REPLACE block* Rules:\n\nEvery *SEARCH/REPLACE block* must use this format:"
    files = user("I have *added these files to the chat* so you can go ahead and edit them.\n\nf.py")
    ready = assistant("Ok, any changes I propose will be to those files.")
    first = tree.answer([files, ready, user(f"rename it{rules}")], LONG, **how)
    report = user("I committed the changes with git hash 1a2b3c4 & commit msg: refactor: rename it")
    history = [user("rename it"), assistant(LONG), report, assistant("Ok.")]
    second = tree.answer([*history, files, ready, user(f"not like that{rules}")], OTHER, **how)
    assert second.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("not like that")]]


def test_startup_context_rebuilt() -> None:
    tree = TurnTree()
    how: dict[str, Any] = {"user_agent": "QwenCode/0.15.10 (linux; x64)"}

    def startup(day: str) -> list[Message]:
        context = f"This is the Qwen Code. We are setting up the context for our chat.\nToday's date is {day}."
        return [user(context), assistant("Got it. Thanks for the context!")]

    first = tree.answer([*startup("Sunday"), user("one")], f"{LONG}\n", **how)
    resumed = tree.answer([*startup("Monday"), user("one"), assistant(LONG), user("two")], OTHER, **how)
    assert resumed.parent_turn_id == first.turn_id
    assert not is_side(first)
    assert tree.followed(first) == [[user("two")]]


# ---- compaction


def test_compaction_that_keeps_the_last_answer() -> None:
    tree = TurnTree()
    tree.answer([user("one")], LONG)
    last = tree.answer([user("one"), assistant(LONG), user("two")], OTHER)
    summary = user("The conversation history before this point was compacted into the following summary: cities")
    third = tree.answer([SYSTEM, summary, assistant(OTHER), user("three")], "x")
    assert third.parent_turn_id == last.turn_id
    assert tree.followed(last) == [[user("three")]]


def test_compaction_without_any_answer() -> None:
    tree = TurnTree()
    first = tree.answer([SYSTEM, user("one")], LONG, hint="s1:0")
    summary = user("The conversation history before this point was compacted into the following summary: cities")
    second = tree.answer([SYSTEM, summary, user("three")], "x", hint="s1:1")
    assert (second.parent_turn_id, second.session_id) == (first.turn_id, first.session_id)
    assert tree.next_states == {}


def test_compaction_found_by_its_summary() -> None:
    """As qwen-code 0.24.4 and codex 0.171.0 put it, the latter as if it sent no hint."""
    snapshot = f"<state_snapshot>\n<overall_goal>{OTHER}</overall_goal>\n</state_snapshot>"
    resume = (
        "Resume the prior task using the summary above. Continue from the last in-flight step; do not greet the user."
    )
    directive = user("First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.")
    introduction = (
        "Another language model started to solve this problem and produced a summary of its thinking process. Use:"
    )
    codex_directive = user("You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.")
    for agent, asked, said, summary in (
        (
            "QwenCode/0.24.4 (linux; x64)",
            directive,
            f"<analysis>\nmuch\n</analysis>\n{snapshot}",
            f"{snapshot}\n\n{resume}",
        ),
        ("codex_exec/0.171.0", codex_directive, f"{OTHER} {OTHER}", f"{introduction}\n{OTHER} {OTHER}"),
    ):
        tree = TurnTree()
        how: dict[str, Any] = {"user_agent": agent}
        tree.answer([user("one")], LONG, **how)
        last = tree.answer([user("one"), assistant(LONG), user("two")], OTHER, **how)
        history = [user("one"), assistant(LONG), user("two"), assistant(OTHER)]
        side = tree.answer([*history, asked], said, **how)
        compacted = [user(summary), assistant("Got it. Thanks for the additional context!"), user("three")]
        reply = tree.answer(compacted, "x", **how)
        stranger = tree.answer(compacted, "x", principal="bob", **how)
        assert is_side(side)
        assert not is_side(reply)
        assert (reply.session_id, reply.parent_turn_id) == (last.session_id, last.turn_id)
        assert reply.parent_evidence.rule == "summary"
        assert tree.followed(last) == []
        assert stranger.session_id != reply.session_id
        apart = TurnTree()
        apart.answer([user("one")], LONG, **how)
        of_a_text = apart.answer(
            [system("You are a context summarization agent."), user("one and two"), asked], said, **how
        )
        assert apart.answer(compacted, "x", **how).session_id != of_a_text.session_id


def test_compaction_whose_summary_is_an_answer() -> None:
    tree = TurnTree()
    how: dict[str, Any] = {"user_agent": "opencode/1.18.33", "session": "ses_1"}
    first = tree.answer([user("one")], LONG, **how)
    ask = user("Provide a detailed prompt for continuing our conversation above. Focus on what matters.")
    summary = tree.answer([user("one"), assistant(LONG), ask], OTHER, **how)
    question = user("What did we do so far?")
    go_on = user("Continue if you have next steps, or stop and ask for clarification.")
    work = tree.answer([question, assistant(OTHER), go_on], call("ls", '{"path": "src"}'), **how)
    more = tree.answer([question, assistant(OTHER), go_on, call("ls", '{"path": "src"}'), tool("f.py")], "x", **how)
    assert is_side(summary)
    assert summary.turn_type_reason == "compaction-request"
    assert not is_side(work), "what an agent does after its own summary is its work"
    assert (work.parent_turn_id, work.session_id) == (first.turn_id, first.session_id)
    assert more.parent_turn_id == work.turn_id
    assert tree.followed(first) == []
    assert tree.followed(work) == [[tool("f.py")]]


def test_compaction_that_keeps_only_what_the_user_said() -> None:
    tree = TurnTree()
    how: dict[str, Any] = {"user_agent": "codex_exec/0.171.0", "hint": "thread-1"}
    context = user("<environment_context>\n  <cwd>/project</cwd>\n</environment_context>")
    tree.answer([context, user("one")], LONG, **how)
    last = tree.answer([context, user("one"), assistant(LONG), user("two")], OTHER, **how)
    ask = user("You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.")
    side = tree.answer(
        [context, user("one"), assistant(LONG), user("two"), assistant(OTHER), ask], "They spoke of cities", **how
    )
    summary = user("Another language model started to solve this problem and produced a summary: cities")
    after = tree.answer([user("one"), user("two"), summary, context, user("three")], "x", **how)
    assert is_side(side)
    assert (after.parent_turn_id, after.session_id) == (last.turn_id, last.session_id)
    assert tree.followed(last) == []


# ---- side turns


def test_memory_flush() -> None:
    tree = TurnTree()
    first = tree.answer([SYSTEM, user("one")], LONG)
    flush = user("Pre-compaction memory flush. Store durable memories only in memory/2026-05-01.md.")
    history = [SYSTEM, user("one"), assistant(LONG)]
    write = call("write", '{"path": "memory/2026-05-01.md"}')
    side = tree.answer([*history, flush, CARRIER], write)
    more = tree.answer([*history, flush, write, tool("written"), CARRIER], "NO_REPLY")
    reply = tree.answer([*history, flush, write, tool("written"), assistant("NO_REPLY"), user("two"), CARRIER], "x")
    assert is_side(side)
    assert side.turn_type_reason == "memory-flush"
    assert is_side(more)
    assert more.turn_type_reason == "side_parent"
    assert reply.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("two")]]


def test_heartbeat() -> None:
    tree = TurnTree()
    first = tree.answer([SYSTEM, user("one")], LONG)
    poll = user("Read HEARTBEAT.md if it exists. If nothing needs attention, reply HEARTBEAT_OK.")
    side = tree.answer([SYSTEM, user("one"), assistant(LONG), poll], "HEARTBEAT_OK")
    messages = [SYSTEM, user("one"), assistant(LONG), poll, assistant("HEARTBEAT_OK"), user("no, wrong")]
    reply = tree.answer(messages, "x")
    assert is_side(side)
    assert reply.parent_turn_id == first.turn_id
    assert not is_side(reply)
    assert tree.followed(first) == [[user("no, wrong")]]


def test_silent_answer() -> None:
    tree = TurnTree()
    first = tree.answer([user("one")], LONG)
    silent = tree.answer([user("one"), assistant(LONG), user("fyi")], "NO_REPLY")
    third = tree.answer([user("one"), assistant(LONG), user("fyi"), assistant("NO_REPLY"), user("so?")], "x")
    assert third.parent_turn_id == first.turn_id
    assert tree.followed(silent) == []


def test_title_request() -> None:
    tree = TurnTree()
    first = tree.answer([user("capital?")], LONG, session="s")
    generator = system("You are a title generator. You output ONLY a thread title.")
    title = tree.answer([generator, user("capital?")], "Capitals", session="s")
    assert is_side(title)
    assert title.turn_type_reason == "title-request"
    assert tree.followed(first) == []
    assert not is_side(tree.answer([user("Write a title for my book about cats")], "Cats"))


def test_summary_request() -> None:
    tree = TurnTree()
    first = tree.answer([user("one")], LONG)
    summariser = system("You are a helpful AI assistant tasked with summarizing conversations.")
    summary = tree.answer([summariser, user("one"), assistant(LONG), user("Summarize now")], "They spoke of cities")
    assert is_side(summary)
    assert tree.followed(first) == []


def test_memory_extraction() -> None:
    tree = TurnTree()
    how: dict[str, Any] = {"user_agent": "QwenCode/0.15.10 (linux; x64)"}
    first = tree.answer([user("one")], LONG, **how)
    extractor = system("You are now acting as the managed memory extraction subagent for an AI coding assistant.")
    side = tree.answer([extractor, user("one"), assistant(LONG), user("Extract what is worth keeping.")], "none", **how)
    reply = tree.answer([user("one"), assistant(LONG), user("two")], "x", **how)
    assert is_side(side)
    assert reply.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("two")]]


def test_questions_of_the_client_about_our_answer() -> None:
    """As qwen-code 0.24.4 asks them: with a tool of its own for the reply, so that tools tell nothing."""
    tree = TurnTree()
    how: dict[str, Any] = {"user_agent": "QwenCode/0.24.4 (linux; x64)"}
    schema: Message = {"type": "function", "function": {"name": "respond_in_schema", "parameters": {}}}
    answer = assistant(LONG)
    first = tree.answer([user("one")], LONG, **how)
    asked = {
        "next-speaker": [
            answer,
            user("Analyze *only* the content and structure of your immediately preceding response."),
        ],
        "prompt-suggestion": [user("one"), answer, user("[SUGGESTION MODE: Suggest what the user might type next.]")],
        "session-title": [
            system("Generate a concise, sentence-case title (3-7 words) that captures what this session is about."),
            user("Conversation so far:\none\n\nGenerate the session title now."),
        ],
        "session-recap": [system("You generate session recaps for a programming assistant CLI."), user("one"), answer],
        "tool-use-label": [
            system("Write a short summary label describing what these tool calls accomplished."),
            user(f"User's intent: {LONG}\nTools completed:"),
        ],
        "memory-query": [
            system("You are selecting memories that will be useful to an AI coding assistant."),
            user("Query: one\n\nAvailable memories:"),
        ],
        "compression-request": [
            system(
                "You are the component that summarizes a conversation when its context window is about to overflow."
            ),
            user("one"),
            answer,
            user("First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."),
        ],
        "verification": [system("You are an independent Goal Verifier."), user("{}")],
    }
    for reason, messages in asked.items():
        side = tree.answer(messages, call("respond_in_schema", "{}"), tools=[schema], **how)
        assert is_side(side)
        assert side.turn_type_reason == reason
    reply = tree.answer([user("one"), answer, user("two")], "x", **how)
    assert not is_side(reply)
    assert reply.parent_turn_id == first.turn_id
    assert tree.followed(first) == [[user("two")]]


def test_commit_message_request() -> None:
    tree = TurnTree()
    first = tree.answer([user("rename it")], LONG, user_agent="aider/0.86.2")
    writer = system("You are an expert software engineer that generates concise, one-line Git commit messages.")
    side = tree.answer([writer, user(f"USER: rename it\nASSISTANT: {LONG}\n# Diffs:\n-a\n+b")], "refactor: b")
    assert is_side(side)
    assert side.turn_type_reason == "commit-message"
    assert tree.followed(first) == []


def test_sub_agent() -> None:
    tree = TurnTree()
    spawn = call("sessions_spawn", '{"task": "find the ferry that leaves first in the morning"}')
    parent = tree.answer([SYSTEM, user("when does it leave?")], spawn, trace_id="1" * 32)
    worker = system("You are a subagent of agent:main:main, running inside OpenClaw.")
    child = tree.answer([worker, user("find the ferry that leaves first")], LONG, trace_id="1" * 32)
    result = tree.answer([SYSTEM, user("when does it leave?"), spawn, tool(LONG)], "At nine", trace_id="1" * 32)
    assert child.session_id != parent.session_id
    assert child.parent_turn_id is None
    assert not is_side(child)
    assert result.parent_turn_id == parent.turn_id
    assert tree.followed(child) == []


def test_turn_type_header() -> None:
    tree = TurnTree()
    first = tree.answer([user("one")], LONG)
    side = tree.answer([user("one"), assistant(LONG), user("two")], OTHER, turn_type=TurnType.SIDE)
    assert (side.turn_type, side.turn_type_reason) == (TurnType.SIDE, "header")
    assert tree.next_states == {}
    poll = user("Read HEARTBEAT.md and reply HEARTBEAT_OK.")
    main = tree.answer([user("one"), assistant(LONG), poll], "x", turn_type=TurnType.MAIN)
    assert main.turn_type is TurnType.MAIN
    assert main.parent_turn_id == first.turn_id
