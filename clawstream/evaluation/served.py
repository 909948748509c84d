"""An engine that is started for the time of a measurement."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from clawstream.engine.client import HttpEngineClient
from clawstream.errors import EngineUnavailable
from clawstream.process_identity import ProcessIdentity, free_ports

_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 15.0


@asynccontextmanager
async def served_engine(
    name: str, directory: Path, *, threads: int, slots: int, startup_seconds: float, log_file: Path
) -> AsyncGenerator[HttpEngineClient]:
    """The CPU engine (`services.engine`) on a free port, over the model in `directory`; ended with the block.

    Raises EngineUnavailable with the end of its log when it does not become ready.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "services.engine", "--model-path", str(directory), "--port", str(port)]
    command += ["--threads", str(threads), "--max-slots", str(slots), "--max-queued-requests", "100000"]
    command += ["--weight-version", "0", "--incremental-streaming-output"]
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
        )
    identity = ProcessIdentity.of(process.pid)
    client = HttpEngineClient(name, f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(startup_seconds):
            while not await client.is_healthy():
                if process.returncode is not None:
                    raise EngineUnavailable(f"the engine for {directory} ended with {process.returncode}")
                await asyncio.sleep(_POLL_SECONDS)
    except (TimeoutError, EngineUnavailable) as error:
        tail = (await asyncio.to_thread(log_file.read_text, errors="replace"))[-1500:]
        reason = str(error) or f"the engine for {directory} was not ready after {startup_seconds:.0f} s"
        raise EngineUnavailable(f"{reason}; {log_file}: {tail}") from error
    else:
        yield client
    finally:
        await client.close()
        await asyncio.to_thread(identity.terminate, _STOP_SECONDS)
        await process.wait()
