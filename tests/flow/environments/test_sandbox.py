"""The sandbox's limits really hold. Where this machine has no namespaces, the tests that need them say so."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from clawstream.errors import SandboxError
from examples.environments.terminal import sandbox as sandbox_module
from examples.environments.terminal.limits import MEGABYTE, Limits
from examples.environments.terminal.sandbox import Isolation, Sandbox, choose_isolation, open_sandbox

LIMITS = Limits(timeout_seconds=60.0, processes=24)


def exists(place: Path) -> bool:
    return place.exists()


@pytest.fixture
def sandbox(isolation: Isolation) -> Iterator[Sandbox]:
    with open_sandbox(isolation, LIMITS) as opened:
        yield opened


@pytest.fixture
def limited(isolation: Isolation) -> Callable[..., AbstractContextManager[Sandbox]]:
    return lambda **changed: open_sandbox(isolation, replace(LIMITS, **changed))


async def test_files_last_from_command_to_command_and_exit_codes_are_told(sandbox: Sandbox) -> None:
    sandbox.write("folder/greeting.txt", "hello\n")
    shown = await sandbox.run("cat folder/greeting.txt; echo more >> folder/greeting.txt; echo problem >&2; exit 3")
    assert (shown.exit_code, shown.output) == (3, "hello\nproblem\n")
    again = await sandbox.run("pwd; cat folder/greeting.txt")
    assert again.output == "/work\nhello\nmore\n"
    assert again.report == "exit code 0\n/work\nhello\nmore"


async def test_a_name_that_leads_out_of_the_folder_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="leads out"):
        sandbox.write("../escaped.txt", "")


async def test_there_is_no_network(sandbox: Sandbox) -> None:
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connect = f"exec 3<> /dev/tcp/127.0.0.1/{port} && echo connected"
        result = await sandbox.run(f"{connect}; cat /proc/net/dev")
        with open_sandbox(Isolation.LIMITS_ONLY, LIMITS) as open_to_all:
            control = await open_to_all.run(connect)
    assert control.output == "connected\n", "the test itself must be able to connect"
    assert "connected" not in result.output
    interfaces = [line.split(":")[0].strip() for line in result.output.splitlines() if ":" in line and "/" not in line]
    assert interfaces == ["lo"]


async def test_nothing_outside_the_folder_can_be_written_or_is_even_there(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    os.chmod(tmp_path, 0o777)  # noqa: PTH101 - the sandbox's user may come in, if it could see it
    attempts = (
        f"cat {tmp_path}/secret.txt; echo x > {tmp_path}/planted; ls /root /home; "
        "echo x > /planted; echo x > /usr/planted; echo x > /etc/passwd; rm -f /usr/bin/env; ls /usr/bin/env"
    )
    result = await sandbox.run(attempts)
    assert "secret\n" not in result.output
    assert result.output.endswith("/usr/bin/env\n")
    assert not any(exists(place) for place in (tmp_path / "planted", Path("/planted"), Path("/usr/planted")))
    kept = await sandbox.run("cd /tmp && echo x > planted && cat planted")
    assert kept.output == "x\n"
    assert not exists(Path("/tmp") / "planted")
    assert (await sandbox.run("ls /tmp")).output == "", "every command has a /tmp of its own"


async def test_privileges_cannot_be_had(sandbox: Sandbox) -> None:
    result = await sandbox.run(
        "grep -E 'Cap(Prm|Eff|Bnd)|NoNewPrivs' /proc/self/status; mount -t tmpfs none /tmp; echo $?"
    )
    lines = result.output.splitlines()
    assert [line.split()[1].strip("0") for line in lines if line.startswith("Cap")] == ["", "", ""]
    assert "NoNewPrivs:\t1" in lines
    assert lines[-1] != "0"


async def test_the_environment_is_scrubbed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-5d1f")
    with open_sandbox(Isolation.LIMITS_ONLY, LIMITS) as open_to_all:
        for one in (sandbox, open_to_all):
            result = await one.run("env; cat /proc/self/environ /proc/1/environ 2> /dev/null", environment={"A": "b"})
            assert "A=b" in result.output
            assert "canary-5d1f" not in result.output


async def test_a_fork_bomb_is_bounded_and_ends(limited: Callable[..., AbstractContextManager[Sandbox]]) -> None:
    with limited(timeout_seconds=5.0, processes=24) as sandbox:
        running = asyncio.create_task(sandbox.run("echo here; bomb() { bomb | bomb & }; bomb; sleep 600"))
        most = 0
        while not running.done():
            most = max(most, len(_processes_in(sandbox)))
            await asyncio.sleep(0.05)
        result = await running
        assert result.timed_out
        assert "Resource temporarily unavailable" in result.output
        assert 2 < most <= 24 + 3, "the processes of the sandbox itself come on top"
        assert _processes_in(sandbox) == []


async def test_what_is_left_in_the_background_ends_with_the_command(sandbox: Sandbox) -> None:
    result = await sandbox.run("setsid sleep 600 & (sleep 600 &) ; nohup sleep 600 > /dev/null & echo away")
    assert result.exit_code == 0
    assert "away" in result.output
    assert _processes_in(sandbox) == []


async def test_time_is_limited(limited: Callable[..., AbstractContextManager[Sandbox]]) -> None:
    with limited(timeout_seconds=6.0) as sandbox:
        result = await sandbox.run("trap '' TERM INT HUP; echo begun; while true; do sleep 0.1; done")
    assert (result.exit_code, result.timed_out, result.output) == (124, True, "begun\n")
    assert "its time was over" in result.report


async def test_processor_time_is_limited(limited: Callable[..., AbstractContextManager[Sandbox]]) -> None:
    with limited(cpu_seconds=1) as sandbox:
        result = await sandbox.run("while true; do :; done")
    assert result.exit_code in (128 + 9, 128 + 24)
    assert not result.timed_out


async def test_memory_is_limited(limited: Callable[..., AbstractContextManager[Sandbox]]) -> None:
    hungry = "head -c 200000000 /dev/zero | tail -c 150000000 | wc -c"
    with limited(memory_bytes=64 * MEGABYTE) as sandbox:
        assert (await sandbox.run(hungry)).output.split()[-1] != "150000000"
    with limited(memory_bytes=512 * MEGABYTE) as sandbox:
        assert (await sandbox.run(hungry)).output == "150000000\n", "the same is possible with more memory"


async def test_a_flood_of_output_is_cut_and_ended(limited: Callable[..., AbstractContextManager[Sandbox]]) -> None:
    with limited(output_bytes=1000, flood_bytes=MEGABYTE) as sandbox:
        result = await sandbox.run("yes flood")
        assert result.flooded
        assert len(result.output) < 1100
        assert MEGABYTE < result.output_bytes < 3 * MEGABYTE
        assert "too much output" in result.report
        short = await sandbox.run("seq 1 2000")
    assert short.exit_code == 0
    assert short.output.startswith("1\n2\n3\n")
    assert short.output.endswith("1999\n2000\n")
    assert f"[... {short.output_bytes - 1000} bytes left out ...]" in short.output


async def test_files_and_folders_are_limited(limited: Callable[..., AbstractContextManager[Sandbox]]) -> None:
    with limited(file_bytes=MEGABYTE, folder_bytes=2 * MEGABYTE, temporary_bytes=MEGABYTE) as sandbox:
        await sandbox.run("head -c 5000000 /dev/zero > large")
        assert (sandbox.folder / "large").stat().st_size == MEGABYTE
        assert not sandbox.is_too_large()
        await sandbox.run("cp large second; cp large third")
        assert sandbox.is_too_large()
        filled = await sandbox.run(
            "cd /tmp; for i in 1 2 3; do head -c 900000 /dev/zero > $i; done; du -sb . | cut -f 1"
        )
        assert int(filled.output.split()[-1]) <= MEGABYTE + 4096


async def test_odd_commands_do_no_harm(sandbox: Sandbox) -> None:
    assert (await sandbox.run("echo a\0b")).exit_code == 126
    assert (await sandbox.run("echo " + "x" * 200_000)).exit_code == 126
    assert (await sandbox.run("printf '\\377\\376'")).output == "\ufffd\ufffd"
    assert (await sandbox.run("echo 'ä € 𝄞'")).output == "ä € 𝄞\n"
    assert (await sandbox.run("cat")).output == "", "standard input is empty"
    assert (await sandbox.run("kill -SEGV $$")).exit_code == 128 + 11


async def test_the_folder_is_removed_whatever_was_done_to_it(isolation: Isolation) -> None:
    with open_sandbox(isolation, LIMITS) as sandbox:
        await sandbox.run("mkdir -p a/b && touch a/b/c && ln -s / a/link && chmod 000 a/b a")
        folder = sandbox.folder
    assert not folder.parent.exists()


async def test_without_namespaces_it_is_refused_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda program: None)
    with pytest.raises(SandboxError, match=r"unshare .* is not installed.*--allow-unsandboxed"):
        await choose_isolation(allow_unsandboxed=False)
    isolation, in_words = await choose_isolation(allow_unsandboxed=True)
    assert isolation is Isolation.LIMITS_ONLY
    assert "NO protection" in in_words


async def test_with_limits_only_time_output_and_background_are_still_bounded() -> None:
    with open_sandbox(Isolation.LIMITS_ONLY, replace(LIMITS, timeout_seconds=4.0, flood_bytes=MEGABYTE)) as sandbox:
        assert (await sandbox.run("sleep 600 & echo away")).output == "away\n"
        assert (await sandbox.run("yes")).flooded
        assert _processes_in(sandbox) == []
    with open_sandbox(Isolation.LIMITS_ONLY, replace(LIMITS, timeout_seconds=0.5)) as sandbox:
        assert (await sandbox.run("sleep 600")).timed_out
        assert _processes_in(sandbox) == []


def _processes_in(sandbox: Sandbox) -> list[int]:
    """Processes whose command line, or an ancestor's, names the sandbox's folder."""
    marked = set[int]()
    folder = str(sandbox.folder)
    for process in psutil.process_iter(["cmdline", "status"]):
        if folder in " ".join(process.info["cmdline"] or ()):
            marked.add(process.pid)
            try:
                marked.update(child.pid for child in process.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
    return sorted(pid for pid in marked if psutil.pid_exists(pid))
