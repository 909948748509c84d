"""What a command's sandbox can be made of on this machine."""

import asyncio

import pytest

from clawstream.errors import SandboxError
from examples.environments.terminal.sandbox import Isolation, choose_isolation
from tests.fixtures.broker import missing


@pytest.fixture(scope="session")
def isolation() -> Isolation:
    """Namespaces: nothing less is chosen unless it is asked for."""
    try:
        return asyncio.run(choose_isolation(allow_unsandboxed=False))[0]
    except SandboxError as error:
        missing(f"this machine has no namespaces for the sandbox: {error}")
