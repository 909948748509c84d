"""Two gateways on one log, and two engines behind them: conversations go on across both, and both engines are moved."""

from collections.abc import Callable

import pytest

from tests.fixtures.system import BAD, GOOD, RunningSystem, wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_a_conversation_goes_on_through_another_gateway(start_system: Callable[..., RunningSystem]) -> None:
    system = start_system(gateways=2)
    answer, first, headers = system.ask("question one?", gateway=0)
    session = headers["x-clawstream-session-id"]
    wait_for(
        lambda: [turn for turn in system.events("turn-index.v1") if turn["response_id"] == first],
        "the first turn is in the index",
    )
    history = [{"role": "user", "content": "question one?"}, {"role": "assistant", "content": answer}]
    _, second, headers = system.ask(GOOD, gateway=1, history=history)

    assert headers["x-clawstream-session-id"] == session
    turns = wait_for(
        lambda: (found := {t["response_id"]: t for t in system.events("turns.v1")}).keys() >= {first, second} and found,
        "both turns are on the log",
    )
    assert turns[second]["parent_turn_id"] == turns[first]["turn_id"]
    (next_state,) = [event for event in system.events("next-states.v1") if event["turn_id"] == turns[first]["turn_id"]]
    assert [message["content"] for message in next_state["following_messages"]] == [GOOD]


def test_a_new_version_reaches_both_engines_while_both_gateways_serve(
    start_system: Callable[..., RunningSystem],
) -> None:
    system = start_system(gateways=2, engines=2, batch_size=4)
    for number in range(4):
        gateway = number % 2
        question = f"question {number}?"
        answer, _, _ = system.ask(question, gateway=gateway)
        history = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        system.ask(GOOD if number < 2 else BAD, gateway=gateway, history=history)

    wait_for(lambda: {system.engine_version(0), system.engine_version(1)} == {"1"}, "version 1 is in both engines")
    applied = [event for event in system.events("weights-applied.v1") if event["weight_version"] == 1]
    assert {event["engine"] for event in applied} == {"engine-0", "engine-1"}
    assert len({event["gate_owner"] for event in applied}) == 1, "one gateway commands the engines"

    responses = [system.ask(f"and {number}?", gateway=number % 2)[1] for number in range(8)]
    turns = wait_for(
        lambda: (found := {t["response_id"]: t for t in system.events("turns.v1")}).keys() >= set(responses) and found,
        "all turns are on the log",
    )
    spans = [span for response in responses for span in turns[response]["version_spans"]]
    assert {span["weight_version"] for span in spans} == {1}
