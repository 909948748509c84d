"""librdkafka's errors in our tree."""

from confluent_kafka import KafkaError, KafkaException

from clawstream.errors import (
    BrokerUnavailable,
    BusError,
    FatalBusError,
    Fenced,
    TransactionAbortable,
)

_FENCED = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.PRODUCER_FENCED,
        KafkaError.UNRELEASED_INSTANCE_ID,
    }
)
_AWAY = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._TRANSPORT,
        KafkaError._WAIT_COORD,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
    }
)
PURGED = frozenset({KafkaError._PURGE_INFLIGHT, KafkaError._PURGE_QUEUE})
"""Delivery reports of what an abort threw away: not failures."""
TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE})


def kafka_error(exception: KafkaException) -> KafkaError:
    """The error inside an exception."""
    error = exception.args[0] if exception.args else None
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def translate(error: KafkaError, doing: str) -> BusError:
    """The error of our tree for what went wrong while `doing` (which says what and where)."""
    message = f"{doing}: {error.str()} ({error.name()})"
    code = error.code()
    # A consumer reports a fatal error with the code _FATAL, without the flag; only the text names the cause.
    is_fatal = error.fatal() or code == KafkaError._FATAL
    if code in _FENCED or (is_fatal and "fenced" in error.str().lower()):
        return Fenced(f"{message}; another process with the same name took over: is it started twice?")
    if is_fatal:
        return FatalBusError(message)
    if error.txn_requires_abort():
        return TransactionAbortable(message)
    if code in _AWAY or error.retriable():
        return BrokerUnavailable(message)
    return BusError(message)


def is_invalid_transaction_state(error: BusError) -> bool:
    """Whether it was translated from the coordinator's word that there is no transaction that could do this."""
    cause = error.__cause__
    return isinstance(cause, KafkaException) and kafka_error(cause).code() == KafkaError.INVALID_TXN_STATE
