"""Calls to a judge model: bounded in number, retried a few times with jitter, sorted by what a failure means."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from clawstream.clock import Clock
from clawstream.errors import EngineBusy, EngineRejected, EngineTimeout, EngineUnavailable
from clawstream.metrics import Metrics
from clawstream.worker.deadline import waiting_for_a_turn
from services.judge.backends.interface import HintBackend, ModelAnswer, ModelBackend
from services.judge.slots import Slots


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a single call is tried again before the whole input is put off."""

    attempts: int
    """Calls in all, at least 1."""
    first_delay_seconds: float
    """Ceiling of the first pause; it doubles from one to the next, and each is uniform between 0 and its ceiling."""
    longest_delay_seconds: float
    """No pause is longer. An endpoint that asks for more gets it by putting the input off."""


class ModelCaller:
    """Shared by all votes of a process."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        max_concurrent_calls: int,
        clock: Clock,
        metrics: Metrics,
        several_answers: bool = True,
        uniform: Callable[[float, float], float] = random.uniform,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`several_answers`: whether one call may ask for more than one answer."""
        self._policy = policy
        self._slots = Slots(max_concurrent_calls)
        self._clock = clock
        self._metrics = metrics
        self._several_answers = several_answers
        self._uniform = uniform
        self._sleep = sleep

    @property
    def most_answers(self) -> int:
        """How many one call may ask for."""
        return self._slots.count if self._several_answers else 1

    async def call(
        self, backend: ModelBackend | HintBackend, request: Mapping[str, JsonValue], answers: int = 1
    ) -> tuple[Sequence[ModelAnswer], float]:
        """At least one and at most `answers` answers, and how many seconds the successful call took.

        Raises EngineUnavailable for an outage (also for 4xx that are not the request's fault), EngineTimeout when no
        attempt was answered in time, EngineRejected and EngineProtocolError at once: they would only repeat.
        """
        ceiling_seconds = self._policy.first_delay_seconds
        for attempt in range(1, self._policy.attempts + 1):
            try:
                return await self._once(backend, request, answers)
            except (EngineUnavailable, EngineTimeout) as error:
                advised_seconds = (error.retry_after_seconds or 0.0) if isinstance(error, EngineBusy) else 0.0
                if attempt == self._policy.attempts or advised_seconds > self._policy.longest_delay_seconds:
                    raise
                await self._sleep(max(advised_seconds, self._uniform(0.0, ceiling_seconds)))
                ceiling_seconds = min(2 * ceiling_seconds, self._policy.longest_delay_seconds)
        raise AssertionError("a retry policy has at least one attempt")

    async def _once(
        self, backend: ModelBackend | HintBackend, request: Mapping[str, JsonValue], answers: int
    ) -> tuple[Sequence[ModelAnswer], float]:
        # An answer takes a slot, whether it shares its call with others or not: the model writes it all the same.
        if not self._slots.take_at_once(answers):
            with waiting_for_a_turn():
                await self._slots.take(answers)
        try:
            started = self._clock.monotonic_seconds()
            found = await backend.call(request, answers)
            seconds = self._clock.monotonic_seconds() - started
        except EngineRejected as error:
            if error.may_be_mended:
                raise EngineUnavailable(str(error)) from error
            raise
        finally:
            self._slots.give_back(answers)
        self._metrics.observe("model_call_seconds", seconds)
        return found, seconds
