"""`python -m services.trainer.launch_ranks --ranks 2 --config clawstream.toml --process trainer`: ranks on one machine.

Torchrun starts ranks as well, but makes exit code 1 of whatever a rank ends with: a supervisor would start again and
again what only other settings can mend. Here the exit code of the ranks is the exit code of the whole. They stay in one
process group, so that whoever ends it ends them all, and are told to end when this process is killed.
"""

import argparse
import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence

from clawstream.parent_death import ending_with_parent
from clawstream.process_identity import free_port
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS

_PEERS_SECONDS = 10.0
"""When a rank has failed, the others lose it and end by themselves, with exit codes of their own: so long they may."""


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Train on several ranks of one machine.")
    parser.add_argument("--ranks", type=int, required=True, help="number of processes")
    parser.add_argument(
        "--stop-timeout-seconds", type=float, default=30.0, help="then a rank that was told to stop is killed"
    )
    own, arguments = parser.parse_known_args()
    command = [sys.executable, "-m", "services.trainer", *arguments]
    return asyncio.run(
        launch(command, own.ranks, stop_timeout_seconds=own.stop_timeout_seconds, environment=os.environ)
    )


async def launch(
    command: Sequence[str],
    ranks: int,
    *,
    stop_timeout_seconds: float,
    environment: Mapping[str, str],
    peers_seconds: float = _PEERS_SECONDS,
) -> int:
    """Runs `command` once for each rank and returns what they end with, as `exit_code` sums it up.

    SIGTERM and SIGINT are passed on. When one rank fails the others are ended, too; so are all when the calling thread
    ends without a word, as after SIGKILL (see `ending_with_parent`).
    """
    stop, failed = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    codes: list[int] = []

    async def watch(process: Process) -> None:
        code = await process.wait()
        codes.append(code)
        if code:
            failed.set()

    port = free_port()
    processes = [
        await asyncio.create_subprocess_exec(
            *ending_with_parent(command), env=rank_environment(environment, rank, ranks, port)
        )
        for rank in range(ranks)
    ]
    ended = asyncio.gather(*(watch(process) for process in processes))
    stopping, failing = asyncio.create_task(stop.wait()), asyncio.create_task(failed.wait())
    await asyncio.wait({ended, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        await asyncio.wait({ended, stopping}, timeout=peers_seconds, return_when=asyncio.FIRST_COMPLETED)
    for process in processes:
        if process.returncode is None:
            process.terminate()
    await asyncio.wait({ended}, timeout=stop_timeout_seconds)
    for process in processes:
        if process.returncode is None:
            process.kill()
    await ended
    stopping.cancel()
    failing.cancel()
    return exit_code(codes)


def rank_environment(environment: Mapping[str, str], rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torch.distributed and Megatron-Core read, as torchrun sets it."""
    return {
        "OMP_NUM_THREADS": "1",  # All ranks together would else start as many threads as each of them finds cores.
        **environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def exit_code(codes: Sequence[int]) -> int:
    """Of the whole, by those of the ranks in the order in which they ended (negative: by that signal).

    Wrong settings count before anything else: a rank that finds them takes the others' peer away, which may end first.
    Else the first failure, a signal as shells tell it.
    """
    failures = [code for code in codes if code]
    if EXIT_CODE_WRONG_SETTINGS in failures:
        return EXIT_CODE_WRONG_SETTINGS
    first = failures[0] if failures else 0
    return 128 - first if first < 0 else first


if __name__ == "__main__":
    sys.exit(main())
