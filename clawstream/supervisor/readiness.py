"""Asking a process whether it is ready. Every probe answers within two seconds and never raises for "not yet"."""

import httpx
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from clawstream.supervisor.launch import Launch
from clawstream.supervisor.log_files import LogFollower, has_line_matching

_PROBE_SECONDS = 2.0


class ReadinessProbe:
    """Whether one run of one process is ready. Called from one thread at a time."""

    def __init__(self, launch: Launch, log: LogFollower) -> None:
        self._launch = launch
        self._log = log
        self._seen_in_log = False
        self._http: httpx.Client | None = None

    def is_ready(self) -> bool:
        """A launch without any condition is ready as soon as it runs."""
        launch = self._launch
        if launch.ready_url is not None:
            return self._answers(launch.ready_url)
        if launch.ready_kafka is not None:
            return lists_topics(launch.ready_kafka)
        if launch.ready_file is not None:
            return launch.ready_file.exists()
        if launch.ready_log_pattern is not None and not self._seen_in_log:
            self._seen_in_log = has_line_matching(self._log, launch.ready_log_pattern)
            return self._seen_in_log
        return True

    def _answers(self, url: str) -> bool:
        if self._http is None:
            # Kept: to make one reads all certificates, 24 ms of a processor, which every probe of every process paid.
            # Proxies of the environment are for the outside world, not for loopback.
            no_connection_is_kept = httpx.Limits(max_keepalive_connections=0)
            self._http = httpx.Client(timeout=_PROBE_SECONDS, trust_env=False, limits=no_connection_is_kept)
        try:
            return self._http.get(url).is_success
        except httpx.HTTPError:
            return False


def lists_topics(bootstrap_servers: str, timeout_seconds: float = _PROBE_SECONDS) -> bool:
    """Whether a broker answers."""
    # librdkafka would print each failed attempt, and those are expected here.
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    try:
        admin.list_topics(timeout=timeout_seconds)
    except KafkaException:
        return False
    return True
