"""Fixtures for all lanes."""

pytest_plugins = ["tests.fixtures.broker"]
