"""Moves one engine from one weight version to another. Every phase has a deadline, and every failure an answer.

    verify the artefact -> take the engine out of service -> pause -> load and flush -> ask for the version -> resume

- Before the pause nothing has happened: a torn artefact or a log that cannot be written leaves the engine as it is.
- `retract` and a flush, because only then no running answer keeps keys and values of the old weights, and no new
  request meets a cached prefix of theirs (measured on SGLang 0.5.23).
- After any answer to a load but success the version is unknown, whatever the engine reports: an explicit version is
  loaded again (the old one first) before the engine is used.
- An engine that loads beside its old weights serves on: it is taken out of service only when something went wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from clawstream.engine.interface import EngineClient, PauseMode
from clawstream.errors import EngineError, EngineProtocolError, EngineTimeout, WeightsError
from services.gateway.gate.settings import GateDeadlines

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class LoadableVersion:
    """A version and how to find its files."""

    weight_version: int
    directory: Callable[[], Awaitable[str]]
    """Checks the files and returns their directory as the engine sees it. Raises WeightsError."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """How an update ended."""

    weight_version: int | None
    """What the engine serves now; None when unknown."""
    error: str = ""
    """Why it is not the version that was asked for; empty when it is."""
    hold_seconds: float | None = None
    """How long the longest-waiting request was held when the engine came back; None when none was."""
    may_be_paused: bool = False
    """The engine did not confirm that it goes on."""


def _verified(weight_version: int, directory: str) -> LoadableVersion:
    """A version whose files were checked already."""

    async def as_checked() -> str:
        return directory

    return LoadableVersion(weight_version, as_checked)


async def within(seconds: float, phase: str, awaitable: Awaitable[Answer]) -> Answer:
    """`awaitable`'s result. Raises EngineTimeout, which names the phase, past `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except EngineTimeout:
        raise
    except TimeoutError as error:
        raise EngineTimeout(f"{phase} took longer than {seconds:g} s") from error


class EngineUpdate:
    """One update of one engine. Use once."""

    def __init__(
        self,
        engine: EngineClient,
        *,
        serving: int | None,
        loads_beside: bool,
        deadlines: GateDeadlines,
        take_out_of_service: Callable[[int], Awaitable[None]],
        longest_wait_seconds: Callable[[], float | None],
        may_still_command: Callable[[], bool],
    ) -> None:
        """`serving` is what the engine serves; None when it serves nothing yet.

        `take_out_of_service` gets the version that is coming and returns when no new request goes to the engine and
        the log says so; it raises when this gateway may not, or cannot, command the engine.
        """
        self._engine = engine
        self._serving = serving
        self._loads_beside = loads_beside
        self._deadlines = deadlines
        self._take_out_of_service = take_out_of_service
        self._longest_wait_seconds = longest_wait_seconds
        self._may_still_command = may_still_command
        self._is_out = False
        self._asked_to_pause = False
        self.weights_touched = False
        """Whether a load was asked for: from then on the version is unknown until one succeeds."""

    async def run(self, target: LoadableVersion, fallbacks: Sequence[LoadableVersion]) -> UpdateResult:
        """Loads `target`, or else the first of `fallbacks` that loads. Never raises EngineError or WeightsError."""
        errors: list[str] = []
        attempts = list(fallbacks)
        try:
            # Before anybody is held: reading every byte may take longer than the load itself.
            directory = await within(self._deadlines.verify_seconds, "verifying the artefact", target.directory())
            attempts.insert(0, _verified(target.weight_version, directory))
        except (WeightsError, EngineTimeout) as error:
            errors.append(f"version {target.weight_version} was not loaded: {error}")
            if self._serving is not None:
                return UpdateResult(self._serving, errors[0])
        if not attempts:
            return UpdateResult(None, errors[0])
        loaded: int | None = None
        may_be_paused = False
        try:
            if not (self._loads_beside and self._serving is not None):
                await self._stop(attempts[0].weight_version)
            loaded = await self._load_first(attempts, errors)
        except EngineError as error:
            errors.append(f"could not be paused: {error}")
        finally:
            if self._asked_to_pause and self._may_still_command():
                may_be_paused = not await self._resume(errors)
        if not self.weights_touched and self._serving is not None:
            loaded = await self._reported_version(self._serving)
        hold_seconds = self._longest_wait_seconds() if self._is_out else None
        is_target = loaded == target.weight_version and not may_be_paused
        return UpdateResult(loaded, "" if is_target else "; ".join(errors), hold_seconds, may_be_paused)

    async def _stop(self, coming_version: int) -> None:
        if not self._is_out:
            await self._take_out_of_service(coming_version)
            self._is_out = True
        if not self._loads_beside:
            self._asked_to_pause = True
            await within(self._deadlines.pause_seconds, "pausing", self._engine.pause(PauseMode.RETRACT))

    async def _load_first(self, attempts: Sequence[LoadableVersion], errors: list[str]) -> int | None:
        for attempt in attempts:
            version = attempt.weight_version
            try:
                directory = await within(self._deadlines.verify_seconds, "verifying the artefact", attempt.directory())
                self.weights_touched = True
                await within(
                    self._deadlines.load_seconds,
                    "loading",
                    self._engine.load_weights(directory, version, flush_cache=True),
                )
                information = await within(
                    self._deadlines.probe_seconds, "asking for the version", self._engine.model_information()
                )
                if information.weight_version != version:
                    raise EngineProtocolError(f"the engine reports version {information.weight_version} after the load")
            except (EngineError, WeightsError) as error:
                errors.append(f"version {version} was not loaded: {error}")
                if not self._is_out:
                    await self._stop(version)
            else:
                return version
        return None

    async def _resume(self, errors: list[str]) -> bool:
        try:
            await within(self._deadlines.resume_seconds, "resuming", self._engine.resume())
        except EngineError as error:
            errors.append(f"may still be paused: {error}")
            return False
        return True

    async def _reported_version(self, expected: int) -> int | None:
        """`expected` if the engine says so: it was paused and resumed, but not loaded."""
        try:
            information = await within(
                self._deadlines.probe_seconds, "asking for the version", self._engine.model_information()
            )
        except EngineError:
            return None
        return expected if information.weight_version == expected else None
