"""Several votes in one call: each keeps its own entry, and what is missing is asked for in ones."""

from collections.abc import Mapping, Sequence

import pytest
from pydantic import JsonValue

from clawstream import ids
from clawstream.clock import ManualClock
from clawstream.errors import (
    BrokerUnavailable,
    EngineBusy,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
)
from clawstream.metrics import Metrics
from schemas.judge_spec import JudgeSpec
from services.judge.answers import ONE_BY_ONE_SECONDS, SINGLY_FOR_NOW_SECONDS
from services.judge.backends.generated import hint_backend
from services.judge.backends.interface import ModelAnswer
from services.judge.judging import ActiveJudge
from services.judge.settings import JudgeSettings
from services.judge.specs import completed
from services.judge.wiring import model_caller
from tests.unit.judge.examples import REFERENCE, reply
from tests.unit.judge.test_judging import SPEC, ScriptedBackend, Setting, verdicts

GOOD, BAD = r"\boxed{1}", r"\boxed{-1}"


class SeveralBackend(ScriptedBackend):
    """Gives or raises one thing per call; a list is as many answers. Writes down how many each call asked for."""

    def __init__(self, *script: Sequence[str | dict[str, str]] | Exception) -> None:
        super().__init__("")
        self._steps = list(script)
        self.asked: list[int] = []

    def request(self, messages: Sequence[Mapping[str, JsonValue]]) -> Mapping[str, JsonValue]:
        return {"messages": [str(message["content"]) for message in messages]}

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        step = self._steps[min(len(self.asked), len(self._steps) - 1)]
        self.asked.append(answers)
        if isinstance(step, Exception):
            raise step
        responses: list[JsonValue] = [
            {"text": each, "finish_reason": "stop"} if isinstance(each, str) else {**each} for each in step
        ]
        return [ModelAnswer(response, prompt_tokens=5, completion_tokens=2) for response in responses[:answers]]


def several(
    *script: Sequence[str | dict[str, str]] | Exception, max_concurrent_calls: int = 8
) -> tuple[Setting, SeveralBackend]:
    setting = Setting("", several_answers=True, max_concurrent_calls=max_concurrent_calls)
    backend = SeveralBackend(*script)
    setting.backend = backend
    return setting, backend


async def test_all_votes_are_asked_for_in_one_call_and_each_has_its_own_entry() -> None:
    setting, backend = several([GOOD, BAD, GOOD])
    score = await setting.score(reply("Thanks"))
    assert backend.asked == [3]
    assert verdicts(score) == [1, -1, 1]
    expected = [ids.call_id("next-state-1", SPEC.spec_hash, "verdict", number) for number in range(3)]
    assert setting.ledger.written == expected == [vote.call_id for vote in score.votes]
    entries = [setting.ledger.entries[call_id] for call_id in expected]
    assert [entry.vote for entry in entries] == [0, 1, 2]
    assert [entry.response for entry in entries] == [
        {"text": text, "finish_reason": "stop"} for text in (GOOD, BAD, GOOD)
    ]


async def test_every_vote_of_a_call_abstains_for_its_own_reason() -> None:
    setting, _ = several([{"text": GOOD, "finish_reason": "length"}, "no idea", GOOD])
    assert verdicts(await setting.score(reply("Thanks"))) == ["truncated", "unparsable", 1]


async def test_only_votes_that_are_not_in_the_ledger_are_asked_for() -> None:
    setting, backend = several([GOOD, BAD, BAD])
    await setting.score(reply("Thanks"))
    lost = [ids.call_id("next-state-1", SPEC.spec_hash, "verdict", number) for number in (0, 2)]
    for call_id in lost:
        del setting.ledger.entries[call_id]
    score = await setting.score(reply("Thanks"))
    assert backend.asked == [3, 2]
    assert verdicts(score) == [1, -1, -1]
    assert setting.ledger.written[3:] == lost
    assert b"clawstream_ledger_hits_total 1.0" in setting.metrics.exposition()


async def test_what_a_call_leaves_out_is_asked_for_vote_by_vote() -> None:
    setting, backend = several([GOOD, GOOD], [BAD])
    score = await setting.score(reply("Thanks"))
    assert backend.asked == [3, 1]
    assert verdicts(score) == [1, 1, -1]
    await setting.score(reply("Again"))
    assert backend.asked == [3, 1, 3, 1, 1], "two of three do not say that it gives one only"


@pytest.mark.parametrize("refusal", [EngineRejected("n", status=400), EngineProtocolError("n")])
async def test_a_model_that_refuses_several_is_asked_vote_by_vote_for_a_while(refusal: Exception) -> None:
    clock = ManualClock()
    setting = Setting("", several_answers=True, clock=clock)
    backend = SeveralBackend(refusal, [GOOD], [BAD], [GOOD])
    setting.backend = backend
    assert verdicts(await setting.score(reply("Thanks"))) == [1, -1, 1]
    assert backend.asked == [3, 1, 1, 1]
    await setting.score(reply("Again"))
    assert backend.asked[4:] == [1, 1, 1]
    clock.advance(ONE_BY_ONE_SECONDS)
    await setting.score(reply("Later"))
    assert backend.asked[7] == 3


async def test_a_model_that_ignores_n_is_asked_vote_by_vote_and_its_answer_counts() -> None:
    setting, backend = several([GOOD])
    assert verdicts(await setting.score(reply("Thanks"))) == [1, 1, 1]
    await setting.score(reply("Again"))
    assert backend.asked == [3, 1, 1, 1, 1, 1]
    assert len(setting.ledger.written) == 6


async def test_a_request_that_is_refused_for_good_abstains_and_says_nothing_about_several() -> None:
    setting, backend = several(*[EngineRejected("too long", status=400)] * 4, [GOOD, GOOD, GOOD])
    assert verdicts(await setting.score(reply("Thanks"))) == ["error"] * 3
    await setting.score(reply("Shorter"))
    assert backend.asked == [3, 1, 1, 1, 3]


@pytest.mark.parametrize(
    ("outage", "calls"),
    [
        (EngineBusy("slow down", retry_after_seconds=None), [3]),
        (EngineUnreachable("nobody there"), [3]),
        (EngineTimeout("silent"), [3]),
        (EngineUnavailable("500"), [3]),
        (EngineRejected("who are you", status=401), [3]),
    ],
)
async def test_an_outage_is_not_asked_again_by_every_vote(outage: Exception, calls: list[int]) -> None:
    setting, backend = several(outage)
    with pytest.raises((EngineUnavailable, EngineTimeout)):
        await setting.score(reply("Thanks"))
    assert backend.asked == calls
    assert setting.ledger.written == []


@pytest.mark.parametrize("failure", [EngineTimeout("slow"), EngineUnavailable("500: one choice only")])
async def test_a_model_that_cannot_do_several_in_time_is_asked_vote_by_vote_when_the_input_comes_again(
    failure: Exception,
) -> None:
    """Else one slow answer of three would cost all three, each time."""
    clock = ManualClock()
    setting = Setting("", several_answers=True, clock=clock)
    setting.backend = backend = SeveralBackend(failure, [GOOD])
    with pytest.raises((EngineUnavailable, EngineTimeout)):
        await setting.score(reply("Thanks"))
    assert verdicts(await setting.score(reply("Thanks"))) == [1, 1, 1]
    assert backend.asked == [3, 1, 1, 1]
    clock.advance(SINGLY_FOR_NOW_SECONDS)
    await setting.score(reply("Later"))
    assert backend.asked[4] == 3


async def test_an_answer_that_is_not_on_the_log_counts_for_nothing_when_time_is_over() -> None:
    setting, _ = several([GOOD, BAD, GOOD])
    setting.ledger.failures = 1
    with pytest.raises(BrokerUnavailable):
        await setting.score(reply("Thanks"))
    assert verdicts(setting.score_of_ledger(reply("Thanks"))) == ["timeout", -1, 1]


async def test_silence_of_a_call_is_the_silence_of_its_votes() -> None:
    setting, backend = several([GOOD], EngineTimeout("silent"))
    # One answer, and silence when the others are asked for.
    assert verdicts(await setting.score(reply("Thanks"))) == [1, "timeout", "timeout"]
    setting, backend = several(EngineTimeout("silent"))
    assert verdicts(await setting.score(reply("Thanks"), accept_timeouts=True)) == ["timeout"] * 3
    assert backend.asked == [3]


async def test_a_ledger_that_is_away_keeps_what_one_call_paid_for() -> None:
    setting, backend = several([GOOD, BAD, GOOD])
    setting.ledger.failures = 2
    with pytest.raises(BrokerUnavailable):
        await setting.score(reply("Thanks"))
    assert verdicts(await setting.score(reply("Thanks"))) == [1, -1, 1]
    assert backend.asked == [3]
    assert sorted(setting.ledger.written) == sorted(setting.ledger.entries)


async def test_a_call_asks_for_no_more_answers_than_there_are_places() -> None:
    setting, backend = several([GOOD] * 9, max_concurrent_calls=2)
    score = await setting.score(reply("Thanks"), spec=SPEC.model_copy(update={"votes": 5}))
    assert verdicts(score) == [1] * 5
    assert sorted(backend.asked) == [1, 2, 2]


async def test_hint_votes_share_a_call_of_their_own() -> None:
    spec = completed(JudgeSpec(backend="openai", model="m", votes=3, hints="judge", hint_votes=2))
    setting, backend = several([GOOD, GOOD, GOOD])
    judge = ActiveJudge(spec=spec, promotion_epoch=0, backend=backend, hints=hint_backend(spec, backend))
    score = await setting.judging.score(reply("Thanks"), REFERENCE, judge, accept_timeouts=False)
    assert backend.asked == [3, 2]
    assert [vote.abstention for vote in score.hint_votes] == ["no_hint"] * 2
    purposes = [setting.ledger.entries[call_id].purpose for call_id in setting.ledger.written]
    assert purposes == ["verdict"] * 3 + ["hint"] * 2


async def test_when_time_is_over_nothing_is_asked() -> None:
    setting, backend = several([GOOD, GOOD, GOOD])
    await setting.score(reply("Thanks"))
    del setting.ledger.entries[ids.call_id("next-state-1", SPEC.spec_hash, "verdict", 1)]
    judge = ActiveJudge(spec=SPEC, promotion_epoch=0, backend=backend)
    score = setting.judging.score_of_ledger(reply("Thanks"), REFERENCE, judge)
    assert verdicts(score) == [1, "timeout", 1]
    assert backend.asked == [3]


def test_settings_decide_whether_a_call_asks_for_several() -> None:
    def most(**values: object) -> int:
        settings = JudgeSettings.model_validate({"name": "judge", "model": values})
        return model_caller(settings, clock=ManualClock(), metrics=Metrics()).most_answers

    assert (most(), most(max_concurrent_calls=5), most(several_answers_per_call=False)) == (64, 5, 1)
