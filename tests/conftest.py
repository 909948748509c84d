"""Fixtures for all lanes."""

pytest_plugins = [
    "tests.fixtures.system",
    "tests.fixtures.broker",
    "tests.fixtures.service_process",
    "tests.fixtures.tokenizers",
    "tests.fixtures.gateway_app",
]
