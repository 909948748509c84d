"""Fixtures for all lanes."""

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# A time limit per example asserts something about the machine, not about the code; how long a test may hang is
# pytest-timeout's business.
settings.register_profile("clawstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clawstream")

FIXTURES = (
    "tests.fixtures.broker",  # The next one imports it.
    "tests.fixtures.system",
    "tests.fixtures.service_process",
    "tests.fixtures.tokenizers",
    "tests.fixtures.gateway_app",
    "tests.fixtures.small_disk",
)


def pytest_configure(config: pytest.Config) -> None:
    """Loads the fixtures, except in the process that only hands tests out to others: they wait for it to start."""
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    for name in () if hands_out else FIXTURES:
        config.pluginmanager.import_plugin(name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting imports, torch among it, lives as long as the process: nobody need look through it for garbage,
    neither while it grows nor in every test after it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
