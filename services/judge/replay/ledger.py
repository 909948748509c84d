"""The judge's ledger for a replay: what the local store has is free, what it has not is paid once and written down."""

from collections.abc import Mapping, Sequence

from clawstream import ids
from clawstream.bus.interface import Bus, TopicPartition
from clawstream.errors import BusError
from clawstream.log import Logger
from schemas.events import LlmCallEvent, NextStateEvent
from schemas.judge_spec import JudgeSpec
from services.judge.ledger import Ledger
from services.judge.ledger_writer import LedgerWriter
from services.judge.replay.call_store import CallStore


class ReplayLedger(Ledger):
    """Used on one event loop."""

    def __init__(
        self,
        bus: Bus,
        writer: LedgerWriter,
        store: CallStore,
        spec: JudgeSpec,
        *,
        namespace: str,
        source: str,
        logger: Logger,
    ) -> None:
        super().__init__(bus, writer, namespace=namespace, source=source, logger=logger)
        self._store = store
        self._spec = spec
        self._asked: dict[str, tuple[str, str, int]] = {}
        self._calls_of_input: dict[str, list[str]] = {}
        self.reused = 0
        """Answers that came from the store."""
        self.paid = 0
        """Answers that came from a model."""

    def expect(self, next_state: NextStateEvent) -> None:
        """This input will be asked about: names its calls, which other specs may have made under other ids."""
        votes = [("verdict", number) for number in range(self._spec.votes)]
        votes += [("hint", number) for number in range(self._spec.hint_votes if self._spec.judge_gives_hints else 0)]
        calls = {
            ids.call_id(next_state.next_state_id, self._spec.spec_hash, purpose, number): (
                next_state.next_state_id,
                purpose,
                number,
            )
            for purpose, number in votes
        }
        self._asked.update(calls)
        self._calls_of_input[next_state.next_state_id] = list(calls)

    def find(self, call_id: str, request_sha256: str) -> LlmCallEvent | None:
        found = super().find(call_id, request_sha256)
        if found is not None:
            return found
        found = self._store.find(call_id, request_sha256)
        if found is None and call_id in self._asked:
            next_state_id, purpose, vote = self._asked[call_id]
            found = self._store.find_same(
                next_state_id=next_state_id,
                purpose=purpose,
                vote=vote,
                model=self._spec.model,
                request_sha256=request_sha256,
            )
        self.reused += found is not None
        return found

    async def record(self, events: Sequence[LlmCallEvent]) -> list[LlmCallEvent | BusError]:
        recorded = await super().record(events)
        written = [event for event in recorded if isinstance(event, LlmCallEvent)]
        self._store.add(written)
        self.paid += len(written)
        return recorded

    async def read_back(self, inputs: Mapping[TopicPartition, int | None]) -> int:
        """The store has read everything before the replay began."""
        return 0

    def forget(self, next_state_id: str) -> None:
        super().forget(next_state_id)
        for call_id in self._calls_of_input.pop(next_state_id, ()):
            self._asked.pop(call_id, None)
