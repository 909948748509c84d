"""The log: one interface, Kafka and an in-memory twin."""
