"""A process to be killed: a gateway's conversations, three sessions at once, each acknowledged turn on standard output.

    python -m tests.flow.gateway.chatting_gateway BOOTSTRAP_SERVERS NAMESPACE DIRECTORY [TURNS]

With TURNS it ends, drained, after so many per session.
"""

import asyncio
import sys
import uuid
from pathlib import Path

from clawstream.bus.kafka import KafkaBus
from clawstream.settings import KafkaSettings
from schemas.events.base import Message
from tests.fixtures.conversations import GatewayUnderTest, assistant, running_gateway, user

SESSIONS = 3


async def chat(gateway: GatewayUnderTest, number: int, turns: int | None) -> None:
    """One conversation; every process begins a new one in the same session."""
    messages: list[Message] = [user(f"{uuid.uuid4()}")]
    count = 0
    while turns is None or count < turns:
        reply = f"an answer of its own, long enough to be told from any other: {uuid.uuid4()}"
        turn = await gateway.answer(messages, reply, session=f"session-{number}")
        sys.stdout.write(f"{turn.session_id} {turn.turn_id} {turn.parent_turn_id}\n")
        sys.stdout.flush()
        messages = [*messages, assistant(reply), user(f"go on {count}")]
        count += 1
        await asyncio.sleep(0.002)


async def main(bootstrap_servers: str, namespace: str, directory: str, turns: int | None) -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers, namespace=namespace), client_id="chatting")
    async with running_gateway(
        bus, Path(directory), name="chatting", namespace=namespace, close_drain_seconds=60, outbox_segment_bytes=20_000
    ) as gateway:
        await asyncio.gather(*(chat(gateway, number, turns) for number in range(SESSIONS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4]) if len(sys.argv) > 4 else None))
