"""Waiting for a broker and its topics at start: patiently, with a line every few seconds, until told to stop."""

import threading
from collections.abc import Sequence

from clawstream.bus.interface import Bus
from clawstream.errors import BrokerUnavailable
from clawstream.log import Logger

_PAUSE_SECONDS = 2.0
"""Between two attempts; an attempt without a broker takes some seconds itself."""


def wait_for_topics(bus: Bus, topics: Sequence[str], *, stop: threading.Event, logger: Logger) -> bool:
    """Returns True once the broker has all `topics`, False once `stop` is set."""
    while not stop.is_set():
        admin = bus.admin()
        try:
            missing = sorted(set(topics) - admin.describe_topics(topics).keys())
        except BrokerUnavailable as error:
            logger.warning("waiting for the broker", error=str(error))
        else:
            if not missing:
                return True
            logger.warning("waiting for topics; `clawstream topics apply` makes them", missing=missing)
        finally:
            admin.close()
        stop.wait(_PAUSE_SECONDS)
    return False
