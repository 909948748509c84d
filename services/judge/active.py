"""Which judge counts: the spec of the settings, until the `config` topic has promoted another."""

from collections.abc import Callable

from clawstream.bus.interface import Record
from clawstream.codec import decode
from clawstream.errors import SettingsError, UnusableJudgeSpec
from clawstream.log import Logger
from schemas.events import ActiveJudgeSpecEvent
from schemas.judge_spec import JudgeSpec
from services.judge.backends.generated import hint_backend
from services.judge.backends.interface import Backend
from services.judge.judging import ActiveJudge
from services.judge.specs import completed


class ActiveJudges:
    """A fold over `config`. `apply` runs on one thread; `current` may be read from any."""

    def __init__(self, default: JudgeSpec, make_backend: Callable[[JudgeSpec], Backend], *, logger: Logger) -> None:
        """Raises SettingsError when the default spec cannot be put to work."""
        self._make_backend = make_backend
        self._logger = logger
        self._backends: list[Backend] = []
        self._current = self._judge(default, promotion_epoch=0)

    @property
    def current(self) -> ActiveJudge:
        """The judge that counts now. An input keeps the one that it began with."""
        return self._current

    def apply(self, record: Record) -> None:
        """Takes a promotion in. One that is not newer than what counts is ignored.

        Raises DecodeError, and UnusableJudgeSpec when this process cannot judge by the promoted spec: it must then
        stop, for to go on under the old one would contradict the log.
        """
        if record.value is None:
            return
        event = decode(record)
        if not isinstance(event, ActiveJudgeSpecEvent) or event.promotion_epoch <= self._current.promotion_epoch:
            return
        try:
            self._current = self._judge(event.spec, promotion_epoch=event.promotion_epoch)
        except SettingsError as error:
            raise UnusableJudgeSpec(f"the judge spec of promotion epoch {event.promotion_epoch}: {error}") from error
        self._logger.info(
            "another judge spec counts from now on",
            spec_hash=self._current.spec.spec_hash,
            promotion_epoch=event.promotion_epoch,
            reason=event.reason,
        )

    async def close(self) -> None:
        """Closes every backend that was ever active: inputs may have kept an earlier one until now."""
        for backend in self._backends:
            await backend.close()

    def _judge(self, spec: JudgeSpec, promotion_epoch: int) -> ActiveJudge:
        whole = completed(spec)
        backend = self._make_backend(whole)
        self._backends.append(backend)
        return ActiveJudge(
            spec=whole, promotion_epoch=promotion_epoch, backend=backend, hints=hint_backend(whole, backend)
        )
