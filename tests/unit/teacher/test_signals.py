"""What the teacher says: the response's own ids under the hinted prompt, aligned, at temperature 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from clawstream.engine.interface import EngineClient, ScoredTokens
from clawstream.engine.pool import EnginePool
from clawstream.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from clawstream.log import get_logger
from clawstream.rendering.renderer import PackageRenderer, load_renderer
from schemas.arrays import int32_array
from schemas.events import TurnEvent
from schemas.events.base import Message
from schemas.events.sample import TeacherRequest, TeacherSignal
from schemas.events.score import Hint
from services.teacher.assembly import NoSignal
from services.teacher.hints import hinted_messages
from services.teacher.settings import HintSettings, TeacherModelSettings
from services.teacher.signals import EngineSignals, HintedPrompts, TrainerSignals
from tests.fixtures.judged_log import turn_event

MESSAGES: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
LONG, SHORT = Hint(text="Too long, please answer in one sentence.", source="user"), Hint(text="Brief!", source="judge")
RESPONSE = [40, 41, 42, 43, 44]


class ScriptedEngine:
    """Likes, at every position, the ids that the hint of its prompt names; log-probs tell position and prompt apart."""

    def __init__(self, renderer: PackageRenderer, tops: dict[str, list[list[int]]] | None = None) -> None:
        self.name = "teacher-0"
        self._renderer = renderer
        self._tops = tops or {}
        self.calls: list[tuple[list[int], list[int], int, list[int]]] = []
        self.error: Exception | None = None
        self.closed = False

    def base(self, prompt: Sequence[int]) -> float:
        return -float(len(prompt))

    async def score(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], *, top_k: int = 0, given_ids: Sequence[int] = ()
    ) -> ScoredTokens:
        self.calls.append((list(prompt_ids), list(response_ids), top_k, list(given_ids)))
        if self.error is not None:
            raise self.error
        text = self._renderer.decode(prompt_ids)
        rows = next((rows for hint, rows in self._tops.items() if hint in text), [[9, 8, 7, 6]] * len(response_ids))
        logprobs = [self.base(prompt_ids) - index / 100 for index in range(len(response_ids))]
        return ScoredTokens(
            token_ids=list(response_ids),
            logprobs=logprobs,
            top_ids=[row[:top_k] for row in rows] if top_k else None,
            top_logprobs=[[logprob - rank for rank in range(top_k)] for logprob in logprobs] if top_k else None,
            weight_version=3,
            given_logprobs=[[-float(token) / 1000 for token in given_ids] for _ in response_ids] if given_ids else None,
            engine=self.name,
        )

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def renderer(tiny_model_directory: Path) -> PackageRenderer:
    return load_renderer(tiny_model_directory)


def turn_of(renderer: PackageRenderer, **values: Any) -> TurnEvent:
    return turn_event(
        1,
        **{
            "request_messages": MESSAGES,
            "prompt_ids": int32_array(renderer.render(MESSAGES).token_ids),
            "response_ids": int32_array(RESPONSE),
            "response_logprobs": turn_event(1).response_logprobs.from_numpy(np.full(5, -0.5, np.float32)),
            "version_spans": [{"weight_version": 0, "start": 0, "end": 5}],
            "tokenizer_fingerprint": renderer.tokenizer_fingerprint,
            **values,
        },
    )


def hinted_ids(renderer: PackageRenderer, hint: Hint) -> list[int]:
    return renderer.render(hinted_messages(MESSAGES, hint.text, "last_user_message")).token_ids


def signals_of(
    renderer: PackageRenderer,
    engine: ScriptedEngine,
    *,
    student: ScriptedEngine | None = None,
    selection: str = "longest",
    **model: Any,
) -> EngineSignals:
    hint, settings = HintSettings(selection=selection, overlap_k=2), TeacherModelSettings(name="frozen", **model)
    return EngineSignals(
        HintedPrompts(renderer, hint, context_tokens=settings.context_tokens),
        EnginePool([cast("EngineClient", engine)]),
        None if student is None else EnginePool([cast("EngineClient", student)]),
        hint=hint,
        model=settings,
        logger=get_logger(),
    )


async def made(signals: EngineSignals, turn: TurnEvent, *hints: Hint) -> TeacherSignal:
    signal = await signals.make(turn, hints)
    assert isinstance(signal, TeacherSignal)
    return signal


async def test_the_responses_own_ids_are_scored_under_the_hinted_prompt(renderer: PackageRenderer) -> None:
    engine = ScriptedEngine(renderer)
    signals = signals_of(renderer, engine, top_k=3)
    signal = await made(signals, turn_of(renderer), SHORT, LONG)
    prompt = hinted_ids(renderer, LONG)
    assert engine.calls == [(prompt, RESPONSE, 3, [])]
    assert signal.logprobs.to_numpy() == pytest.approx([-len(prompt) - index / 100 for index in range(5)])
    assert signal.top_ids is not None
    assert signal.top_logprobs is not None
    assert signal.top_ids.to_numpy().tolist() == [[9, 8, 7]] * 5
    assert signal.top_logprobs.to_numpy()[2] == pytest.approx([-len(prompt) - 0.02 - rank for rank in range(3)])
    assert (signal.hint, signal.hint_source, signal.selection) == (LONG.text, "user", "longest")
    assert (signal.model, signal.engine) == ("frozen", "teacher-0, weights 3")
    assert (signal.hints, signal.hint_of_token, signal.support_ids) == ([], None, None)
    await signals.close()
    assert engine.closed


async def test_without_a_hint_nobody_is_asked(renderer: PackageRenderer) -> None:
    engine = ScriptedEngine(renderer)
    assert await signals_of(renderer, engine).make(turn_of(renderer), []) == NoSignal("no_hint")
    assert engine.calls == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tokenizer_fingerprint": "another"}, "other_tokenizer"),
        ({"prompt_ids": int32_array([1, 2, 3])}, "prompt_not_reproduced"),
        ({"request_messages": []}, "cannot_be_rendered"),
    ],
)
async def test_a_turn_whose_prompt_is_not_ours_to_hint_gets_no_signal(
    renderer: PackageRenderer, values: dict[str, Any], reason: str
) -> None:
    engine = ScriptedEngine(renderer)
    assert await signals_of(renderer, engine).make(turn_of(renderer, **values), [LONG]) == NoSignal(reason)
    assert engine.calls == []


async def test_a_hint_that_does_not_fit_leaves_the_place_to_one_that_does(renderer: PackageRenderer) -> None:
    fits = len(hinted_ids(renderer, SHORT)) + len(RESPONSE)
    engine = ScriptedEngine(renderer)
    assert (
        await made(signals_of(renderer, engine, context_tokens=fits), turn_of(renderer), LONG, SHORT)
    ).hint == "Brief!"
    none = await signals_of(renderer, engine, context_tokens=fits - 1).make(turn_of(renderer), [LONG, SHORT])
    assert none == NoSignal("hint_too_long")


async def test_what_an_engine_refuses_for_good_costs_the_signal_and_what_can_be_mended_waits(
    renderer: PackageRenderer,
) -> None:
    engine = ScriptedEngine(renderer)
    engine.error = EngineRejected("too long", status=400)
    assert await signals_of(renderer, engine).make(turn_of(renderer), [LONG]) == NoSignal("rejected")
    engine.error = EngineRejected("key", status=401)
    with pytest.raises(EngineUnavailable):
        await signals_of(renderer, engine).make(turn_of(renderer), [LONG])
    engine.error = EngineProtocolError("scored id 5 at token 2")
    with pytest.raises(EngineProtocolError):
        await signals_of(renderer, engine).make(turn_of(renderer), [LONG])


STUDENT_TOPS = {"France": [[1, 2], [1, 2], [3, 4], [5, 6], [5, 6]]}
TEACHER_TOPS = {
    "Brief!": [[1, 2], [1, 2], [8, 9], [8, 9], [8, 9]],
    "Too long": [[8, 9], [1, 9], [3, 4], [5, 6], [6, 5]],
}


async def test_sequence_optimal_takes_the_hint_with_the_most_overlap(renderer: PackageRenderer) -> None:
    student, teacher = ScriptedEngine(renderer, STUDENT_TOPS), ScriptedEngine(renderer, TEACHER_TOPS)
    signals = signals_of(renderer, teacher, student=student, selection="sequence_optimal")
    signal = await made(signals, turn_of(renderer), SHORT, LONG)
    assert (signal.hint, signal.hint_of_token, signal.top_ids) == (LONG.text, None, None)
    assert signal.logprobs.to_numpy()[0] == -len(hinted_ids(renderer, LONG))
    assert student.calls == [(renderer.render(MESSAGES).token_ids, RESPONSE, 2, [])]
    assert [call[2] for call in teacher.calls] == [2, 2]


async def test_token_optimal_takes_the_best_hint_at_every_token(renderer: PackageRenderer) -> None:
    student, teacher = ScriptedEngine(renderer, STUDENT_TOPS), ScriptedEngine(renderer, TEACHER_TOPS)
    signals = signals_of(renderer, teacher, student=student, selection="token_optimal", top_k=1)
    signal = await made(signals, turn_of(renderer), LONG, SHORT)
    assert signal.hint_of_token is not None
    assert signal.hints == [SHORT.text, LONG.text]
    assert signal.hint_of_token.to_numpy().tolist() == [0, 0, 1, 1, 1]
    assert (signal.hint, signal.hint_source) == (LONG.text, "user"), "the hint of the most tokens"
    lengths = [len(hinted_ids(renderer, hint)) for hint in (SHORT, LONG)]
    assert signal.logprobs.to_numpy() == pytest.approx([-lengths[h] - i / 100 for i, h in enumerate([0, 0, 1, 1, 1])])
    assert signal.top_ids is not None
    assert signal.top_ids.to_numpy().tolist() == [[1], [1], [3], [5], [6]]


async def test_one_candidate_needs_no_comparison(renderer: PackageRenderer) -> None:
    student, teacher = ScriptedEngine(renderer), ScriptedEngine(renderer)
    signal = await made(
        signals_of(renderer, teacher, student=student, selection="sequence_optimal"), turn_of(renderer), LONG
    )
    assert signal.hint == LONG.text
    assert student.calls == []


async def test_without_student_engines_the_teacher_without_a_hint_is_the_student(renderer: PackageRenderer) -> None:
    teacher = ScriptedEngine(renderer, {**TEACHER_TOPS, **STUDENT_TOPS})
    await made(signals_of(renderer, teacher, selection="sequence_optimal"), turn_of(renderer), LONG, SHORT)
    assert teacher.calls[0][0] == renderer.render(MESSAGES).token_ids


async def test_log_probs_at_the_students_ids(renderer: PackageRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.teacher.signals.SUPPORT_WINDOW_TOKENS", 2)
    student, teacher = ScriptedEngine(renderer, STUDENT_TOPS), ScriptedEngine(renderer)
    signal = await made(signals_of(renderer, teacher, student=student, support_k=2), turn_of(renderer), LONG)
    assert signal.support_ids is not None
    assert signal.support_logprobs is not None
    assert signal.support_ids.to_numpy().tolist() == STUDENT_TOPS["France"]
    assert signal.support_logprobs.to_numpy() == pytest.approx(-signal.support_ids.to_numpy() / 1000)
    prompt = hinted_ids(renderer, LONG)
    assert teacher.calls[1:] == [
        (prompt, RESPONSE[:2], 0, [1, 2]),
        (prompt + RESPONSE[:2], RESPONSE[2:4], 0, [3, 4, 5, 6]),
        (prompt + RESPONSE[:4], RESPONSE[4:], 0, [5, 6]),
    ]


async def test_a_teacher_inside_the_trainer_is_asked_by_the_sample(renderer: PackageRenderer) -> None:
    settings = HintSettings(selection="shortest")
    signals = TrainerSignals(HintedPrompts(renderer, settings, context_tokens=512), settings)
    request = await signals.make(turn_of(renderer), [LONG, SHORT])
    assert isinstance(request, TeacherRequest)
    assert request.prompt_ids.to_numpy().tolist() == hinted_ids(renderer, SHORT)
    assert (request.hint, request.hint_source, request.selection) == ("Brief!", "judge", "shortest")
    assert await signals.make(turn_of(renderer), []) == NoSignal("no_hint")
