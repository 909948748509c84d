"""What the teacher says about a response: its own ids, unchanged, scored under a prompt that holds the hint.

Log-probs are always at temperature 1. Nothing is padded or shifted: the engine client compares every echoed id.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from clawstream.blobs import BlobReader
from clawstream.engine.interface import ScoredTokens
from clawstream.engine.pool import EnginePool
from clawstream.errors import ContractError, EngineRejected, EngineUnavailable
from clawstream.log import Logger
from clawstream.rendering.interface import ChatRenderer
from schemas.arrays import NumberArray, float32_array, int32_array
from schemas.events import TurnEvent
from schemas.events.base import Message
from schemas.events.sample import TeacherRequest, TeacherSignal
from schemas.events.score import Hint
from services.teacher.assembly import NoSignal, Signal
from services.teacher.hints import hinted_messages
from services.teacher.selection import Ids, OptimalSelection, hint_of_token, overlap, shortest_first, text_selector
from services.teacher.settings import HintSettings, TeacherModelSettings

SUPPORT_WINDOW_TOKENS: Final = 64
"""Given ids are the same for every position of one call, so positions are asked about in windows: with k ids a position
a window of n costs n * n * k log-probs on the wire, and the window before it comes out of the engine's prefix cache."""


class SignalMaker(Protocol):
    """Says what a teacher has to say about a turn."""

    async def make(self, turn: TurnEvent, hints: Sequence[Hint]) -> Signal:
        """`hints` are those that may be used.

        Raises EngineUnavailable or EngineTimeout (try again later) and EngineProtocolError, which names the position,
        when an engine's answer is not what its contract promises.
        """
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...


@dataclass(frozen=True, slots=True)
class HintedPrompt:
    """A hint and the prompt that it is part of."""

    hint: Hint
    prompt_ids: list[int]
    """[hinted_prompt_tokens]"""


async def _with_arrays(turn: TurnEvent, blobs: BlobReader) -> TurnEvent:
    """The turn with its ids inside it, read on a thread: a store may take its time.

    Raises BlobError when they are gone, BlobUnavailable while their store does not answer.
    """
    if turn.prompt_ids.blob is None and turn.response_ids.blob is None:
        return turn

    def read() -> TurnEvent:
        ids = {name: blobs.inlined(getattr(turn, name)) for name in ("prompt_ids", "response_ids")}
        return turn.model_copy(update=ids)

    return await asyncio.to_thread(read)


class HintedPrompts:
    """Renders hinted prompts as the gateway rendered the turn's own."""

    def __init__(self, renderer: ChatRenderer, settings: HintSettings, *, context_tokens: int) -> None:
        self._renderer = renderer
        self._settings = settings
        self._context_tokens = context_tokens

    def of(self, turn: TurnEvent, hints: Sequence[Hint], response_tokens: int) -> list[HintedPrompt] | NoSignal:
        """Those that fit into the teacher's context with the response, at least one; else why there is none.

        The turn's own messages must render to the turn's own ids: else the hint would not be the only difference.
        """
        if not hints:
            return NoSignal()
        if turn.tokenizer_fingerprint != self._renderer.tokenizer_fingerprint:
            return NoSignal("other_tokenizer")
        try:
            tools = self._shown_tools(turn)
            if tools is None:
                return NoSignal("prompt_not_reproduced")
            prompts = [
                HintedPrompt(hint, self._renderer.render(messages, tools).token_ids)
                for hint in hints
                for messages in [hinted_messages(turn.request_messages, hint.text, self._settings.form)]
            ]
        except ContractError:
            return NoSignal("cannot_be_rendered")
        fitting = [each for each in prompts if len(each.prompt_ids) + response_tokens <= self._context_tokens]
        return fitting or NoSignal("hint_too_long")

    def _shown_tools(self, turn: TurnEvent) -> Sequence[Message] | None:
        """The tools that the model was shown: those of the request, or none (`tool_choice: none`). None when the turn's
        own messages render to other ids than its own with either."""
        own_ids: list[int] = turn.prompt_ids.to_numpy().tolist()
        choices: list[list[Message]] = [turn.tools, []] if turn.tools else [[]]
        for tools in choices:
            if self._renderer.render(turn.request_messages, tools).token_ids == own_ids:
                return tools
        return None


class TrainerSignals:
    """For a teacher inside the trainer: the hinted prompt instead of log-probs."""

    def __init__(self, prompts: HintedPrompts, settings: HintSettings) -> None:
        """Raises SettingsError when the selection does not exist."""
        self._prompts = prompts
        self._blobs = BlobReader()
        self._selection = settings.selection
        self._select = text_selector(settings.selection)

    async def make(self, turn: TurnEvent, hints: Sequence[Hint]) -> Signal:
        """See `SignalMaker`. Asks no engine."""
        turn = await _with_arrays(turn, self._blobs)
        prompts = self._prompts.of(turn, hints, turn.response_ids.element_count)
        if isinstance(prompts, NoSignal):
            return prompts
        chosen = await self._select([each.hint for each in prompts], turn)
        if chosen is None:
            return NoSignal("none_selected")
        found = next((each for each in prompts if each.hint == chosen), None)
        if found is None:
            rendered = self._prompts.of(turn, [chosen], turn.response_ids.element_count)
            if isinstance(rendered, NoSignal):
                return rendered
            found = rendered[0]
        return TeacherRequest(
            prompt_ids=int32_array(found.prompt_ids),
            hint=found.hint.text,
            hint_source=found.hint.source,
            selection=self._selection,
        )

    async def close(self) -> None:
        """Nothing to close."""


class EngineSignals:
    """A teacher that engines serve."""

    def __init__(
        self,
        prompts: HintedPrompts,
        teacher: EnginePool,
        student: EnginePool | None,
        *,
        hint: HintSettings,
        model: TeacherModelSettings,
        logger: Logger,
    ) -> None:
        """Without a `student` the teacher without a hint stands for it. Raises SettingsError for the selection."""
        self._prompts = prompts
        self._blobs = BlobReader()
        self._teacher = teacher
        self._student = student
        self._hint = hint
        self._model = model
        self._logger = logger
        self._optimal = next((each for each in OptimalSelection if each == hint.selection), None)
        self._select = None if self._optimal is not None else text_selector(hint.selection)

    async def make(self, turn: TurnEvent, hints: Sequence[Hint]) -> Signal:
        """See `SignalMaker`."""
        turn = await _with_arrays(turn, self._blobs)
        response_ids: list[int] = turn.response_ids.to_numpy().tolist()
        prompts = self._prompts.of(turn, hints, len(response_ids))
        if isinstance(prompts, NoSignal):
            return prompts
        if self._select is not None:
            chosen = await self._select([each.hint for each in prompts], turn)
            if chosen is None:
                return NoSignal("none_selected")
            found = [each for each in prompts if each.hint == chosen]
            rendered = found or self._prompts.of(turn, [chosen], len(response_ids))
            if isinstance(rendered, NoSignal):
                return rendered
            prompts = rendered[:1]
        else:
            prompts = sorted(prompts, key=lambda each: shortest_first(each.hint))[: self._hint.max_candidates]
        try:
            return await self._signal(turn, response_ids, prompts)
        except EngineRejected as error:
            if error.may_be_mended:
                raise EngineUnavailable(str(error)) from error
            self._logger.warning("the teacher refuses a turn", turn_id=turn.turn_id, error=str(error))
            return NoSignal("rejected")

    async def close(self) -> None:
        """Closes the engine clients."""
        await self._teacher.close()
        if self._student is not None:
            await self._student.close()

    async def _signal(self, turn: TurnEvent, response_ids: list[int], prompts: Sequence[HintedPrompt]) -> TeacherSignal:
        compares = self._optimal is not None and len(prompts) > 1
        student_top: Ids | None = None
        if compares or self._model.support_k:
            student = self._student or self._teacher
            k = max(self._hint.overlap_k if compares else 0, self._model.support_k)
            said = await student.score(turn.prompt_ids.to_numpy().tolist(), response_ids, top_k=k)
            student_top = np.asarray(said.top_ids, dtype=np.int32)  # [tokens, k]
        teacher_k = max(self._model.top_k, self._hint.overlap_k if compares else 0)
        scored = [await self._teacher.score(each.prompt_ids, response_ids, top_k=teacher_k) for each in prompts]
        chosen = np.zeros(len(response_ids), dtype=np.int32)  # [tokens]: index into prompts
        if compares and student_top is not None and self._optimal is not None:
            k = self._hint.overlap_k
            teacher_top = np.asarray([each.top_ids for each in scored], dtype=np.int32)[:, :, :k]  # [hints, tokens, k]
            chosen = hint_of_token(overlap(student_top[:, :k], teacher_top), self._optimal)
        support_ids = student_top[:, : self._model.support_k] if student_top is not None else None
        support = (
            await self._support(prompts, chosen, response_ids, support_ids)
            if support_ids is not None and self._model.support_k
            else None
        )
        most_used = prompts[int(np.bincount(chosen, minlength=len(prompts)).argmax())].hint
        per_token = len(set(chosen.tolist())) > 1
        return TeacherSignal(
            logprobs=float32_array(_picked([each.logprobs for each in scored], chosen)),
            top_ids=self._top([each.top_ids for each in scored], chosen, int32_array),
            top_logprobs=self._top([each.top_logprobs for each in scored], chosen, float32_array),
            support_ids=None if support is None or support_ids is None else int32_array(support_ids),
            support_logprobs=None if support is None else float32_array(support),
            hint=most_used.text,
            hint_source=most_used.source,
            hints=[each.hint.text for each in prompts] if per_token else [],
            hint_of_token=int32_array(chosen) if per_token else None,
            selection=self._hint.selection,
            model=self._model.name,
            engine=_engine_name(scored[0]),
        )

    def _top(
        self, rows: Sequence[list[list[int]] | list[list[float]] | None], chosen: Ids, packed: "Packer"
    ) -> NumberArray | None:
        """[tokens, k] of the chosen hints, as many as samples carry; None when they carry none."""
        if not self._model.top_k:
            return None
        return packed(_picked([each or [] for each in rows], chosen)[:, : self._model.top_k])

    async def _support(
        self, prompts: Sequence[HintedPrompt], chosen: Ids, response_ids: list[int], support_ids: Ids
    ) -> npt.NDArray[np.float64]:
        """[tokens, k]: the teacher's log-probs of `support_ids` [tokens, k], each under its token's hint."""
        found = np.zeros(support_ids.shape)
        for start in range(0, len(response_ids), SUPPORT_WINDOW_TOKENS):
            window = slice(start, min(start + SUPPORT_WINDOW_TOKENS, len(response_ids)))
            given, columns = np.unique(support_ids[window], return_inverse=True)
            columns = columns.reshape(support_ids[window].shape)
            used: list[int] = np.unique(chosen[window]).tolist()
            for index in used:
                prompt_ids = [*prompts[index].prompt_ids, *response_ids[:start]]
                scored = await self._teacher.score(prompt_ids, response_ids[window], given_ids=given.tolist())
                values = np.take_along_axis(np.asarray(scored.given_logprobs), columns, axis=1)  # [window, k]
                mine = chosen[window] == index
                found[window][mine] = values[mine]
        return found


class Packer(Protocol):
    """Packs an array for an event."""

    def __call__(self, values: npt.NDArray[np.float64], /) -> NumberArray: ...


def _picked(rows: Sequence[Sequence[object]], chosen: Ids) -> npt.NDArray[np.float64]:
    """For each token the row of its hint: `rows` is [hints, tokens, ...], the result [tokens, ...]."""
    return np.asarray(rows, dtype=np.float64)[chosen, np.arange(len(chosen))]


def _engine_name(scored: ScoredTokens) -> str:
    return scored.engine if scored.weight_version is None else f"{scored.engine}, weights {scored.weight_version}"
