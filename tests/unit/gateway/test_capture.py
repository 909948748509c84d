"""A turn is trainable exactly when its arrays hold what they promise."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from clawstream.engine.interface import GenerationChunk
from schemas.events.base import TurnType, VersionSpan
from schemas.events.turn import SamplingParameters, UntrainableReason
from services.gateway.capture import Capture, Untrainable, covered_tokens, why_untrainable

PLAIN = SamplingParameters(temperature=1.0, max_new_tokens=9)

finite = st.floats(min_value=-1e30, max_value=0.0)
broken = st.sampled_from([None, math.nan, -math.inf, -1e300])


def spans_from(cuts: list[int]) -> list[VersionSpan]:
    edges = sorted({0, *cuts})
    return [
        VersionSpan(weight_version=version, start=a, end=b) for version, (a, b) in enumerate(itertools.pairwise(edges))
    ]


def judge(
    capture: Capture, sampling: SamplingParameters = PLAIN, turn_type: TurnType = TurnType.MAIN
) -> Untrainable | None:
    return why_untrainable(capture, client_gone=False, sampling=sampling, repaired="", turn_type=turn_type)


@given(data=st.data())
def test_chunks_add_up_and_a_sound_answer_is_trainable(data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.lists(st.tuples(st.integers(0, 99), finite), max_size=4), min_size=1, max_size=6))
    pairs = [pair for chunk in chunks for pair in chunk]
    cuts = data.draw(st.lists(st.integers(0, len(pairs)), max_size=3))
    capture = Capture()
    for chunk in chunks:
        capture.add(GenerationChunk([token for token, _ in chunk], [value for _, value in chunk]))
    capture.add(GenerationChunk([], [], finish_reason="stop", version_spans=spans_from([*cuts, len(pairs)])))
    assert list(zip(capture.token_ids, capture.logprobs, strict=True)) == pairs
    reason = judge(capture)
    assert (reason is None) == bool(pairs)


@given(
    ids=st.lists(st.integers(0, 99), min_size=1, max_size=8),
    logprobs=st.lists(st.one_of(finite, broken), max_size=10),
    spans=st.lists(st.builds(VersionSpan, weight_version=st.just(1), start=st.integers(0, 9), end=st.integers(0, 9))),
)
def test_whatever_is_wrong_is_found_and_never_mended(
    ids: list[int], logprobs: list[float | None], spans: list[VersionSpan]
) -> None:
    capture = Capture(list(ids), list(logprobs), version_spans=list(spans), finish_reason="stop")
    sound = (
        len(ids) == len(logprobs)
        and all(value is not None and value >= -1e30 for value in logprobs)
        and [index for span in spans for index in range(span.start, span.end)] == list(range(len(ids)))
        and all(span.end > span.start for span in spans)
    )
    assert (judge(capture) is None) == sound
    assert capture.token_ids == ids
    assert len(capture.recorded_logprobs()) == len(logprobs)


def test_spans_with_gaps_or_overlaps_cover_nothing() -> None:
    def span(start: int, end: int) -> VersionSpan:
        return VersionSpan(weight_version=1, start=start, end=end)

    assert covered_tokens([span(0, 2), span(2, 5)]) == 5
    assert covered_tokens([]) == 0
    assert covered_tokens([span(0, 2), span(3, 5)]) is None
    assert covered_tokens([span(0, 2), span(1, 5)]) is None
    assert covered_tokens([span(0, 0)]) is None


def test_faults_of_the_data_come_before_choices_of_the_client() -> None:
    greedy = PLAIN.model_copy(update={"temperature": 0.0, "top_k": 5})
    sound = Capture([1], [-1.0], version_spans=[VersionSpan(weight_version=0, start=0, end=1)], finish_reason="stop")
    found = judge(sound, greedy, TurnType.SIDE)
    assert found == Untrainable(UntrainableReason.ALTERED_DISTRIBUTION, "temperature=0, top_k=5")
    assert judge(Capture([1], finish_reason="stop"), greedy, TurnType.SIDE) == Untrainable(
        UntrainableReason.NO_LOGPROBS, "1 ids without log-probs"
    )
    side = judge(sound, PLAIN, TurnType.SIDE)
    assert side is not None
    assert side.reason is UntrainableReason.SIDE_TURN
    assert judge(sound) is None
    unfinished = judge(Capture([1], [-1.0]))
    assert unfinished is not None
    assert unfinished.reason is UntrainableReason.ENGINE_ABORTED
