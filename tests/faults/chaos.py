"""What the fault tests count, and the audit that ends each of them."""

import time
from dataclasses import dataclass

import pytest

from clawstream.audit.archives import sha256_of_url
from clawstream.audit.kafka_log import KafkaLog
from clawstream.audit.report import summary
from clawstream.audit.run import AuditReport, audit

COUNTS = pytest.StashKey["ChaosCounts"]()


@dataclass
class ChaosCounts:
    """Over a whole run."""

    crashes_survived: int = 0
    faults_survived: int = 0
    """Everything else that was done to a process or to its connections."""
    records_checked: int = 0
    violations: int = 0


class Chaos:
    """Counts, and audits."""

    def __init__(self, counts: ChaosCounts) -> None:
        self.counts = counts

    def audited(self, servers: str, namespace: str) -> AuditReport:
        """The report, after asserting that every promise is kept."""
        log = KafkaLog(servers, namespace)
        try:
            report = audit(
                log,
                checksum=sha256_of_url,
                max_examples=5,
                directory=None,
                pause=lambda: time.sleep(0.1),
                progress=lambda doing, done, of: None,
            )
        finally:
            log.close()
        self.counts.records_checked += report.records_read
        self.counts.violations += report.violations
        assert report.holds, summary(report)
        return report
