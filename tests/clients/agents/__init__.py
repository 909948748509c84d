"""Whole agents and SDKs from npm and PyPI, unchanged, through a gateway process and a real broker."""
