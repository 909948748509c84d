"""An HTTP proxy that lets nothing through and remembers what a client wanted of other machines."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

REFUSAL = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class ClosedProxy:
    """Clients of `environment` reach this machine alone."""

    port: int = 0
    asked: list[str] = field(default_factory=list[str])
    """The first line of every request that came."""

    @property
    def environment(self) -> Mapping[str, str]:
        """By which Node, Bun, Python and Rust programs use it."""
        url = f"http://127.0.0.1:{self.port}"
        here = "127.0.0.1,localhost"
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        proxies = {spelt: url for name in names for spelt in (name, name.lower())}
        return {**proxies, "NO_PROXY": here, "no_proxy": here, "NODE_USE_ENV_PROXY": "1"}


@asynccontextmanager
async def closed_proxy() -> AsyncIterator[ClosedProxy]:
    """On a free port."""
    proxy = ClosedProxy()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        proxy.asked.append(line.decode(errors="replace").strip())
        writer.write(REFUSAL)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        proxy.port = server.sockets[0].getsockname()[1]
        yield proxy
