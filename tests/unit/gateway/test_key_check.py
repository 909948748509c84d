"""The check of the master key at the gateway's start: nothing that it raises ends unheard."""

import asyncio
from functools import partial

import pytest

from clawstream.errors import BrokerUnavailable, DecodeError, SettingsError
from clawstream.log import get_logger
from services.gateway import server


@pytest.mark.parametrize(
    "error",
    [SettingsError("other key"), DecodeError("keys[0]@3: not JSON"), UnicodeDecodeError("utf-8", b"", 0, 1, "")],
)
async def test_whatever_the_check_raises_ends_the_gateway(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_KEY_CHECK_SECONDS", 0.0)
    answers: list[Exception] = [BrokerUnavailable("not yet"), error]
    failures: list[Exception] = []

    def check() -> None:
        raise answers.pop(0)

    task = asyncio.create_task(server._check_keys(check, get_logger()))  # pyright: ignore[reportPrivateUsage]
    task.add_done_callback(partial(server._fail_if_broken, failures.append))  # pyright: ignore[reportPrivateUsage]
    await asyncio.wait({task})
    assert failures == [error]
    assert answers == [], "while no broker answers it is asked again"
