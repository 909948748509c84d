"""Fixtures for all lanes."""

pytest_plugins = ["tests.fixtures.broker", "tests.fixtures.tokenizers"]
