"""Writes each next state once, however often its request is repeated, and forgets what could not be written."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from clawstream.errors import OutboxError
from clawstream.log import Logger
from clawstream.metrics import Metrics
from services.gateway.next_states import NextStateDraft
from services.gateway.outbox import Outbox

_REMEMBERED = 20_000
"""Ids of written next states that are remembered, so that a repeated request does not write the same one again."""

Encode = Callable[[NextStateDraft, str | None], Awaitable[bytes]]
"""Makes the outbox entry of a draft with a trace id, off the event loop."""


class NextStateWriter:
    """Used on the event loop only.

    An id counts as written when its entry is durable, not before: whoever repeats the request after a disk refused the
    first writes it again.
    """

    def __init__(
        self,
        *,
        outbox: Outbox,
        encode: Encode,
        on_submitted: Callable[[NextStateDraft], Callable[[], None]],
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        """`on_submitted` is told of a next state once; what it returns is called if that is not written after all."""
        self._outbox = outbox
        self._encode = encode
        self._on_submitted = on_submitted
        self._metrics = metrics
        self._logger = logger
        self._written: OrderedDict[str, None] = OrderedDict()
        self._under_way: dict[str, asyncio.Future[None]] = {}

    def remember(self, next_state_id: str) -> None:
        """A next state was written by an earlier process."""
        self._written[next_state_id] = None
        while len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)

    async def submit(self, draft: NextStateDraft, trace_id: str | None) -> asyncio.Future[None]:
        """Hands a next state to the outbox, unless it is there. Does not wait for the disk.

        The future ends when the next state is durable, and raises OutboxError when it will not be: then nothing of it
        is left behind, and it may be submitted again. It need not be awaited.
        """
        next_state_id = draft.event.next_state_id
        if (under_way := self._under_way.get(next_state_id)) is not None:
            return under_way  # A twin of this request was faster.
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if next_state_id in self._written:
            self._written.move_to_end(next_state_id)
            done.set_result(None)
            return done
        self._under_way[next_state_id] = done
        undo = self._on_submitted(draft)
        try:
            payload = await self._encode(draft, trace_id)
            durable = asyncio.wrap_future(self._outbox.submit([payload]))
        except OutboxError as error:
            self._failed(draft, done, undo, error)
        except BaseException:
            self._failed(draft, done, undo, OutboxError(f"next state {next_state_id}: its request was given up"))
            raise
        else:
            durable.add_done_callback(lambda ended: self._ended(draft, ended, done, undo))
        return done

    async def write(self, draft: NextStateDraft, trace_id: str | None) -> None:
        """Returns when the next state is durable. Raises OutboxError."""
        # Shielded: twins wait for the same future, and one that gives up must not end it for the others.
        await asyncio.shield(await self.submit(draft, trace_id))

    def _ended(
        self,
        draft: NextStateDraft,
        durable: "asyncio.Future[int]",
        done: "asyncio.Future[None]",
        undo: Callable[[], None],
    ) -> None:
        error = durable.exception()
        if isinstance(error, OutboxError):
            self._failed(draft, done, undo, error)
            return
        del self._under_way[draft.event.next_state_id]
        self.remember(draft.event.next_state_id)
        self._metrics.increment("next_states_total", kind=draft.event.kind.value)
        done.set_result(None)

    def _failed(
        self, draft: NextStateDraft, done: "asyncio.Future[None]", undo: Callable[[], None], error: OutboxError
    ) -> None:
        del self._under_way[draft.event.next_state_id]
        undo()
        self._logger.warning("a next state is not written", turn_id=draft.event.turn_id, error=str(error))
        done.set_exception(error)
        done.exception()  # Somebody may wait for it or nobody: both are in order.
