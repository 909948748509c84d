"""Settings of a worker: a section inside a service's own."""

from pydantic import Field

from clawstream.settings import Section


class WorkerSettings(Section):
    """How much at once, and how long."""

    max_in_flight: int = Field(default=256, ge=1)
    """Inputs that are handled at once, over all partitions; a quarter of them (of fewer than four, none) is
    for others than the busiest partition: its inputs may all hang."""
    window_per_partition: int = Field(default=192, ge=1)
    """Inputs of one partition between the oldest unresolved and the newest that is handled. What is done behind an
    unresolved one waits in memory. Not far fewer than are handled at once: a backlog comes partition by partition."""
    deadline_seconds: float = Field(default=90.0, gt=0)
    """One attempt to handle one input. Waiting for a turn at something that all inputs share does not count."""
    flush_ceiling_seconds: float = Field(default=0.25, gt=0)
    """The longest that a finished input waits for its transaction."""
    flush_results: int = Field(default=200, ge=1)
    """Finished inputs that end the wait."""
    max_results_per_transaction: int = Field(default=500, ge=1)
    """Keeps transactions short."""
    retry_initial_seconds: float = Field(default=0.5, gt=0)
    """First wait in an outage; doubles up to `retry_max_seconds`."""
    retry_max_seconds: float = Field(default=30.0, gt=0)
    """Longest wait between two attempts in an outage."""
    shutdown_grace_seconds: float = Field(default=10.0, ge=0)
    """After the first SIGTERM: how long inputs under way may take. Those that are not done are given back."""
    max_dead_letter_share: float = Field(default=0.5, gt=0, le=1)
    """The worker stops when more of its last inputs than this share became dead letters."""
    dead_letter_window: int = Field(default=200, ge=1)
    """How many last inputs the share is taken over. It is not judged before so many were seen."""
