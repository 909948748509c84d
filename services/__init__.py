"""The independent processes. A service imports `clawstream` and `schemas`, never another service."""
