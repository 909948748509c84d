"""Apache Kafka on this machine without Docker: jars from Maven Central, one KRaft node on loopback, durable data."""

from clawstream.broker.local import LocalBroker

__all__ = ["LocalBroker"]
