"""Decode rows are dealt to threads by length, and none is lost."""

from random import Random

import pytest

from services.engine.answer import Answer
from services.engine.requests import GenerateBody, SamplingParameters
from services.engine.scheduler import PlannedChunk, dealt, plan_chunk
from services.engine.stops import IncrementalText, StopStrings


def planned(slot: int, keys: int) -> PlannedChunk:
    """The next token of an answer whose slot holds all but the last of `keys` tokens."""
    answer = Answer(
        rid=str(slot),
        body=GenerateBody(input_ids=[1] * keys, sampling_params=SamplingParameters(max_new_tokens=4)),
        prompt_ids=[1] * keys,
        stop_ids={},
        text=IncrementalText(lambda _: ""),
        stops=StopStrings(()),
        random=Random(0),
        publish=lambda _: None,
        slot=slot,
        filled=keys - 1,
    )
    return plan_chunk(answer, 1)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_thread_gets_about_as_many_keys(threads: int) -> None:
    lengths = list(range(93, 173, 5))  # 16 answers
    Random(threads).shuffle(lengths)
    rows = [row.chunk for row in dealt([planned(slot, keys) for slot, keys in enumerate(lengths)], threads)]
    assert sorted(row.slot for row in rows) == list(range(16))
    assert all(row.start == lengths[row.slot] - 1 for row in rows)
    each = 16 // threads
    shares = [sum(row.start for row in rows[first * each : (first + 1) * each]) for first in range(threads)]
    assert max(shares) < 1.15 * min(shares)


def test_fewer_rows_than_threads_and_none_at_all() -> None:
    assert [row.chunk.slot for row in dealt([planned(0, 9), planned(1, 5)], 4)] == [1, 0]
    assert dealt([], 2) == []
