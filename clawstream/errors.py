"""Every error that clawstream raises on purpose, in one tree.

    ClawstreamError
    ├── SettingsError            a configuration value is missing or wrong (all of them named at once)
    │   ├── WrongValues          values of one file; carries each with its field
    │   └── NamespaceTaken       the topics of the namespace belong to another system
    ├── MissingDependencyError   a program or package that is needed is not installed
    ├── ContractError            data breaks a contract
    │   ├── DecodeError          a record cannot be decoded (goes to the dead-letter topic)
    │   │   ├── UntrainableSample  a sample whose numbers cannot be trained on: the same
    │   │   └── ForgottenContent   its session's key was deleted (skipped and counted, no dead letter)
    │   ├── ArchiveError         an archive of topics is damaged, or does not fit where it should go
    │   ├── BlobError            a content-addressed blob is missing or has another checksum
    │   ├── MissingTurn          a score's turn is not where the score says
    │   ├── PromptTooLong        a conversation has more tokens than may be; carries how many at least
    │   └── TopicDefinitionError a topic on the broker differs from its YAML file
    ├── BusError                 the log could not be read or written
    │   ├── BrokerUnavailable    no broker answers; try again
    │   ├── OffsetNotRetained    an offset to be read is not on the log (any more)
    │   ├── TransactionAbortable the open transaction must be aborted, then tried again
    │   │   └── RecordRejected   because of one record: too large
    │   ├── TransactionOutcomeUnknown  the end of a transaction was not answered in time
    │   ├── Fenced               another process took our place; exit
    │   │   ├── TransactionTimedOut  or our transaction was open for longer than its timeout: the log tells
    │   │   └── Overtaken        of two commands that people ran the later one goes first; run it again
    │   └── FatalBusError        the client cannot go on; exit and let the supervisor restart
    ├── EngineError              an inference engine's answer
    │   ├── EngineUnavailable    refused, unreachable or 5xx: try another engine or later
    │   │   └── EngineBusy       429 or 503: it says that it has too much to do; may carry retry_after_seconds
    │   ├── EngineRejected       4xx: the request itself is wrong
    │   │   └── TokenIdRefused   it holds an id outside the vocabulary: not even sent
    │   ├── EngineTimeout        a deadline passed
    │   ├── EngineProtocolError  the engine answered what its contract does not allow
    │   └── NoEngineReady        no engine may serve now; carries retry_after_seconds
    ├── RequestRefused           a client's request cannot be served; carries the OpenAI-shaped answer
    ├── TeacherUnfit             an engine cannot be the teacher of this policy
    ├── WeightsError             published weights are torn, missing or cannot be loaded
    ├── RankLost                 a process of a trainer of several ranks went away; the others end too
    ├── StepInterrupted          a training step was given up before it changed anything: the process is to end
    ├── GateDeposed              another gateway commands the engines by now; stop commanding
    ├── RetryLater               an input cannot be handled now (an outage); it stays unresolved
    │   └── BlobUnavailable      the store that holds a blob does not answer
    ├── HandlerCancelled         what a worker's handler awaited was cancelled under it
    ├── TooManyDeadLetters       a worker stopped because most of its inputs could not be handled
    ├── OutboxError              the gateway's outbox on disk is damaged, locked or cannot be written
    │   └── OutboxFull           it holds as much as it may: turns are served unrecorded
    ├── TurnLedgerError          what the trainer remembers of turns is damaged, or cannot be written
    ├── DirectoryInUse           another process uses a directory that only one may
    ├── SandboxError             commands cannot be isolated, or a sandbox could not be started
    └── SupervisorError          a process could not be started, found or stopped

Messages say what happened, where (`topic[partition]@offset`, sample id, field) and what to do.
"""

from collections.abc import Sequence
from pathlib import Path


class ClawstreamError(Exception):
    """The root. Catch it at a process boundary only."""


class SettingsError(ClawstreamError, ValueError):
    """A configuration value is missing, unknown or wrong. Names every such field at once."""


class WrongValues(SettingsError):  # noqa: N818 - reads as the condition it names
    """Values of one file are wrong. `problems` holds each as `section.field: what is wrong`."""

    def __init__(self, file: Path | None, problems: Sequence[str], *, consequence: str = "") -> None:
        listed = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{file or 'settings'}: {len(problems)} wrong value(s){consequence}:\n{listed}")
        self.problems = tuple(problems)


class UnusableJudgeSpec(ClawstreamError, RuntimeError):  # noqa: N818 - reads as the condition it names
    """A promoted judge spec cannot be put to work by this process. Another promotion, or its settings, mend it."""


class NamespaceTaken(SettingsError):  # noqa: N818 - reads as the condition it names
    """The topics of the namespace belong to another system: its data directory and ours are named."""


class MissingDependencyError(ClawstreamError, RuntimeError):
    """A program or a Python package that this command needs is not installed. Says how to get it."""


class ContractError(ClawstreamError, ValueError):
    """Data breaks a contract between processes."""


class DecodeError(ContractError):
    """A record cannot be decoded: not JSON, an unknown event type, or a schema violation. Never retried."""


class UntrainableSample(DecodeError):  # noqa: N818
    """A sample that no trainer can use: lengths that disagree, numbers that are not finite, tokens without a known
    weight version, or more tokens than fit. Names the sample and all lengths."""


class ForgottenContent(DecodeError):  # noqa: N818 - reads as the condition it names
    """A record's content was encrypted under a key that was deleted: it can never be read again. No fault of anybody:
    who meets it goes on without it."""


class ArchiveError(ContractError):
    """An archive of topics is incomplete or damaged, or the topics it should go to are not empty or others."""


class BlobError(ContractError):
    """A content-addressed blob is missing or its bytes do not have the checksum in their name."""


class MissingTurn(ContractError):  # noqa: N818
    """A score refers to a turn that is not on the log (any more), or is another one. Goes to the dead-letter topic."""


class PromptTooLong(ContractError):  # noqa: N818
    """A conversation has more tokens than it may have. `least_tokens` of them are certain; the rest was not counted."""

    def __init__(self, message: str, *, least_tokens: int) -> None:
        super().__init__(message)
        self.least_tokens = least_tokens


class TopicDefinitionError(ContractError):
    """A topic on the broker differs from its definition in a way that cannot be changed in place."""


class BusError(ClawstreamError):
    """The log could not be read or written."""


class BrokerUnavailable(BusError, ConnectionError):  # noqa: N818 - reads as the condition it names
    """No broker answers. The caller may try again."""


class TransactionAbortable(BusError):  # noqa: N818
    """The open transaction must be aborted; its outputs are to be sent again in the next one."""


class RecordRejected(TransactionAbortable):
    """One record cannot be written as it is: larger than its topic allows. Sending it again cannot help.

    `record` is the `OutgoingRecord`. Outside a transaction there is nothing to abort.
    """

    def __init__(self, message: str, *, record: object) -> None:
        super().__init__(message)
        self.record = record


class TransactionOutcomeUnknown(BusError):  # noqa: N818
    """Nobody answered the end of a transaction in time: it may have committed or not."""


class OpenTransaction(BusError):  # noqa: N818 - reads as the condition it names
    """A transaction stays open longer than any may, and hides what comes after it from every reader."""


class OffsetNotRetained(BusError):  # noqa: N818
    """An offset to be read is not on the log: removed by retention or compaction, or beyond the end.

    `offset` was asked for; `first` and `end` bound what the partition holds.
    """

    def __init__(self, message: str, *, offset: int, first: int, end: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.first = first
        self.end = end


class Fenced(BusError):  # noqa: N818
    """Another process with the same transactional id or group instance id took over. The process must exit."""


class TransactionTimedOut(Fenced):
    """Fenced after a transaction was open for longer than its timeout: then the broker ends and fences it by itself.

    A new producer with the same id may go on, but only where something on the log shows that no other process took the
    id: that looks just the same. Who has no such sign exits.
    """


class NameTaken(Fenced):
    """Fenced, and the log shows that another process has written under our name since. The process must exit."""


class Overtaken(Fenced):
    """A command's transaction was fenced by another command. Says which ones that may be; it may be run again."""


class FatalBusError(BusError):
    """The client can never be used again. The process must exit; a supervisor restarts it."""


class EngineError(ClawstreamError):
    """A call to an inference engine failed."""


class EngineUnavailable(EngineError, ConnectionError):  # noqa: N818
    """The engine refused the connection, could not be reached or answered 5xx. Another engine may serve."""


class EngineUnreachable(EngineUnavailable):
    """The connection could not be made, or broke. The message names the engine's address: for logs, not for users."""


class EngineBusy(EngineUnavailable):
    """The engine has too much to do (429, 503). `retry_after_seconds` is its own advice, None when it gave none."""

    def __init__(self, message: str, *, retry_after_seconds: float | None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineRejected(EngineError, ValueError):  # noqa: N818
    """The engine answered 4xx: the request can never succeed as it is.

    `status` is the HTTP status and `body` the engine's own message.
    """

    def __init__(self, message: str, *, status: int, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body

    @property
    def may_be_mended(self) -> bool:
        """Whether the status says nothing about the request: a wrong key, a spent budget, a missing model, too much at
        once. Somebody will mend it, and the same request can then succeed."""
        return self.status in (401, 402, 403, 404, 408, 409, 425, 429)


class TokenIdRefused(EngineRejected):
    """A request holds a token id outside the model's vocabulary. It was not sent: such an id ends SGLang."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=400, body=message)


class EngineTimeout(EngineError, TimeoutError):  # noqa: N818
    """A deadline passed while the engine was connecting, silent or busy."""


class EngineProtocolError(EngineError):
    """The engine's answer lacks what its contract promises, for example log-probs of another length than ids."""


class NoEngineReady(EngineError, ConnectionError):  # noqa: N818
    """No engine serves a known version within the bound. `retry_after_seconds` says when to ask again."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RequestRefused(ClawstreamError):  # noqa: N818
    """A client's request cannot be served. Carries what the client is told, in OpenAI's terms.

    `status` is the HTTP status; `error_type`, `code` and `parameter` are OpenAI's error fields;
    `retry_after_seconds` is set where trying again may help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        error_type: str = "invalid_request_error",
        code: str | None = None,
        parameter: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.code = code
        self.parameter = parameter
        self.retry_after_seconds = retry_after_seconds


class TeacherUnfit(ClawstreamError):  # noqa: N818
    """An engine cannot be the teacher of this policy: another vocabulary, no prompt log-probs, too short a context."""


class WeightsError(ClawstreamError):
    """Published weights are torn, missing, of another model, or cannot be loaded. Names the file."""


class RankLost(ClawstreamError):  # noqa: N818
    """A trainer of several ranks cannot reach all of them. Every rank ends; together they start again."""


class StepInterrupted(ClawstreamError):  # noqa: N818 - reads as the condition it names
    """A training step was given up, before it changed anything, because the process is to end."""


class GateDeposed(ClawstreamError):  # noqa: N818
    """A later owner of the weight gate has written to the log: the earlier one must stop commanding engines."""


class LineageError(ClawstreamError):
    """Nothing on the log has this id, or what a lineage needs (a batch, the weights it began with) is gone."""


class ReplayError(ClawstreamError):
    """A replay cannot be made, continued or promoted as it was asked for. Says what does not fit."""


class SupervisorError(ClawstreamError):
    """A supervised process could not be started, found or stopped."""


class RetryLater(ClawstreamError):  # noqa: N818
    """What handling an input needs is away for now. The input is not at fault: it stays unresolved and is tried again.

    `retry_after_seconds`: the least time to wait, when the other side named one.
    """

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class BlobUnavailable(RetryLater):
    """The store of a blob does not answer, or is not there (an unmounted disk). The blob itself may well be."""


class HandlerCancelled(ClawstreamError):  # noqa: N818
    """What a worker's handler awaited was cancelled under it, though nobody stops the worker: a defect."""


class TooManyDeadLetters(ClawstreamError):  # noqa: N818
    """Most of a worker's recent inputs became dead letters: more likely our fault than theirs. The worker stops."""


class OutboxError(ClawstreamError):
    """The outbox between gateway and log is damaged, used by another process, or its disk refuses writes."""


class OutboxFull(OutboxError):  # noqa: N818 - reads as the condition it names
    """The outbox holds as much as it may because the log is out of reach. What is offered now is not recorded."""


class TurnIndexUnwritable(ClawstreamError):  # noqa: N818 - reads as the condition it names
    """The disk refuses what is to be written into the turn index: it is full, or broken. The topic still holds it."""


class TurnLedgerError(ClawstreamError):
    """The trainer's file of turns that left does not hold what a checkpoint counts, or its disk refuses it."""


class TurnLedgerUnreadable(ClawstreamError):  # noqa: N818 - reads as the condition it names
    """The trainer's file of turns that left cannot be read now (its disk, a lock, a permission): nothing is known."""


class DirectoryInUse(ClawstreamError):  # noqa: N818 - reads as the condition it names
    """Another process works in a directory that only one may use. It may be about to end."""


class SandboxError(ClawstreamError):
    """Commands cannot be isolated on this machine, or a sandbox could not be set up. The command did not run."""
