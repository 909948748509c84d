"""Fixtures for all lanes."""

from hypothesis import HealthCheck, settings

# A time limit per example asserts something about the machine, not about the code; how long a test may hang is
# pytest-timeout's business.
settings.register_profile("clawstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clawstream")

pytest_plugins = [
    "tests.fixtures.broker",  # The next one imports it.
    "tests.fixtures.system",
    "tests.fixtures.service_process",
    "tests.fixtures.tokenizers",
    "tests.fixtures.gateway_app",
]
