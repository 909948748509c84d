"""The loop closes: a conversation becomes a weight version that answers the next conversation."""

from collections import Counter
from collections.abc import Callable

import pytest

from tests.fixtures.system import RunningSystem, wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_conversations_become_a_new_version_in_service(start_system: Callable[..., RunningSystem]) -> None:
    system = start_system(batch_size=4)
    responses = [system.converse(number) for number in range(4)]

    wait_for(lambda: system.engine_version() == "1", "version 1 is in service")
    _, last_response, _ = system.ask("and now?")

    turns = {turn["turn_id"]: turn for turn in system.events("turns.v1")}
    by_response = {turn["response_id"]: turn for turn in turns.values()}
    assert [span["weight_version"] for span in by_response[last_response]["version_spans"]] == [1]

    judged = {by_response[response]["turn_id"] for response in responses}
    next_states = [event for event in system.events("next-states.v1") if event["turn_id"] in judged]
    assert Counter(event["turn_id"] for event in next_states) == dict.fromkeys(judged, 1)
    scores = [event for event in system.events("scores.v1") if event["turn_id"] in judged]
    assert Counter(score["next_state_id"] for score in scores) == {s["next_state_id"]: 1 for s in next_states}
    assert sorted(score["verdict"] for score in scores) == [-1, -1, 1, 1]
    samples = [event for event in system.events("samples.v1") if event["turn_id"] in judged]
    assert {sample["turn_id"] for sample in samples} == judged

    (step,) = system.events("train-steps.v1")
    assert {sample["turn_id"] for sample in step["samples"]} == judged
    assert (step["base_version"], step["weight_version"]) == (0, 1)
    for sample in samples:
        turn = turns[sample["turn_id"]]
        assert sample["response_ids"] == turn["response_ids"]
        assert sample["behaviour_logprobs"] == turn["response_logprobs"]
