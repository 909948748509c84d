"""Status asks for metrics by name: each must be one that a process has."""

import re

from clawstream.metrics import COUNTERS, GAUGES
from tests.unit.architecture.source_tree import ROOT


def test_every_metric_that_status_asks_for_exists() -> None:
    text = "".join(file.read_text() for file in (ROOT / "clawstream" / "status").glob("*.py"))
    asked = set(re.findall(r'"clawstream_(\w+)"', text))
    assert len(asked) >= 5, "the pattern does not find them any more"
    assert asked <= set(COUNTERS) | set(GAUGES)
