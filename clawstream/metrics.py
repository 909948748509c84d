"""Every metric of every process: names, kinds, units and labels in one typed list.

A name that is not in the list fails type checking. All carry the prefix `clawstream_`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

Metric = TypeVar("Metric", Counter, Gauge, Histogram)

CounterName = Literal[
    "turns_total",
    "turns_untrainable_total",
    "turns_unrecorded_total",
    "turns_opted_out_total",
    "next_states_total",
    "next_states_unrecorded_total",
    "outbox_entries_dropped_total",
    "blob_errors_total",
    "gateway_errors_total",
    "worker_inputs_total",
    "worker_late_results_total",
    "worker_transactions_total",
    "dead_letters_total",
    "redriven_inputs_total",
    "votes_total",
    "hint_votes_total",
    "teacher_signals_total",
    "ledger_hits_total",
    "samples_dropped_total",
    "train_steps_total",
    "weight_updates_total",
    "orphaned_pauses_total",
    "guard_actions_total",
]
GaugeName = Literal[
    "outbox_entries",
    "outbox_bytes",
    "requests_in_flight",
    "engine_weight_version",
    "worker_in_flight",
    "worker_oldest_unresolved_seconds",
    "batch_have",
    "batch_need",
    "weight_version",
    "train_step",
    "train_metric",
    "guard_knob",
]
HistogramName = Literal[
    "first_token_seconds",
    "hold_seconds",
    "outbox_drain_seconds",
    "outbox_drain_phase_seconds",
    "worker_handle_seconds",
    "worker_flush_seconds",
    "model_call_seconds",
    "train_step_seconds",
    "snapshot_seconds",
    "publish_seconds",
    "checkpoint_seconds",
    "weight_update_seconds",
]


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """What a metric means."""

    help: str
    labels: tuple[str, ...] = ()


COUNTERS: Final[dict[CounterName, MetricDefinition]] = {
    "turns_total": MetricDefinition("Turns served.", ("turn_type", "finish_reason")),
    "turns_untrainable_total": MetricDefinition("Turns that must not be trained.", ("reason",)),
    "turns_unrecorded_total": MetricDefinition("Turns served while the outbox was full.", ()),
    "turns_opted_out_total": MetricDefinition("Turns that clients asked not to be written down."),
    "next_states_total": MetricDefinition("Next states observed.", ("kind",)),
    "next_states_unrecorded_total": MetricDefinition("Next states that no disk took.", ()),
    "outbox_entries_dropped_total": MetricDefinition("Turns and next states too large for the log.", ("kind",)),
    "blob_errors_total": MetricDefinition("Turns whose arrays the blob store refused.", ()),
    "gateway_errors_total": MetricDefinition("Requests that ended in an error.", ("code",)),
    "worker_inputs_total": MetricDefinition("Inputs resolved by a worker.", ("result", "reason")),
    "worker_late_results_total": MetricDefinition("Results dropped because their partition was lost.", ()),
    "worker_transactions_total": MetricDefinition("Transactions ended.", ("result",)),
    "dead_letters_total": MetricDefinition("Records sent to a dead-letter topic.", ("reason",)),
    "redriven_inputs_total": MetricDefinition("Dead letters that were sent back and resolved again.", ("result",)),
    "votes_total": MetricDefinition("Judge votes.", ("verdict",)),
    "hint_votes_total": MetricDefinition("Hint votes of judges.", ("answer",)),
    "teacher_signals_total": MetricDefinition("Scores that a teacher was wanted for.", ("result",)),
    "ledger_hits_total": MetricDefinition("Model calls answered by the ledger.", ()),
    "samples_dropped_total": MetricDefinition("Samples read and not trained.", ("reason",)),
    "train_steps_total": MetricDefinition("Training steps.", ("result",)),
    "weight_updates_total": MetricDefinition("Updates of an engine: loaded or failed.", ("engine", "result")),
    "orphaned_pauses_total": MetricDefinition("Engines that were paused although nobody updated them.", ("engine",)),
    "guard_actions_total": MetricDefinition("What guards of the trainer found and did.", ("guard", "action")),
}
GAUGES: Final[dict[GaugeName, MetricDefinition]] = {
    "outbox_entries": MetricDefinition("Entries of the outbox that are not on the log yet."),
    "outbox_bytes": MetricDefinition("Bytes of those entries."),
    "requests_in_flight": MetricDefinition("Chat requests being served."),
    "engine_weight_version": MetricDefinition("Weight version that an engine serves; -1 when unknown.", ("engine",)),
    "worker_in_flight": MetricDefinition("Inputs being handled."),
    "worker_oldest_unresolved_seconds": MetricDefinition("Age of the oldest unresolved input."),
    "batch_have": MetricDefinition("Effective samples waiting for the next step."),
    "batch_need": MetricDefinition("Effective samples that close a batch."),
    "weight_version": MetricDefinition("Newest published weight version."),
    "train_step": MetricDefinition("Steps that the trainer has made."),
    "train_metric": MetricDefinition("Measurements of the last training step.", ("measurement",)),
    "guard_knob": MetricDefinition("What guards of the trainer may turn.", ("knob",)),
}
HISTOGRAMS: Final[dict[HistogramName, MetricDefinition]] = {
    "first_token_seconds": MetricDefinition("Request to first token."),
    "hold_seconds": MetricDefinition("How long a request was held for a weight update."),
    "outbox_drain_seconds": MetricDefinition("One drain of the outbox."),
    "outbox_drain_phase_seconds": MetricDefinition("A part of a drain: turns, dependants, commit.", ("phase",)),
    "worker_handle_seconds": MetricDefinition("Handling one input."),
    "worker_flush_seconds": MetricDefinition("One transaction, from begin to commit."),
    "model_call_seconds": MetricDefinition("One call to a judge or teacher model."),
    "train_step_seconds": MetricDefinition("One training step."),
    "snapshot_seconds": MetricDefinition("Copying the state of which a checkpoint and a version are made."),
    "publish_seconds": MetricDefinition("Exporting and publishing one version."),
    "checkpoint_seconds": MetricDefinition("Writing one checkpoint."),
    "weight_update_seconds": MetricDefinition("One update of one engine, from verifying to resuming."),
}


class Metrics:
    """The metrics of one process, in a registry of its own. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"clawstream_{name}", definition.help, definition.labels, registry=self._registry)
            for name, definition in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"clawstream_{name}", definition.help, definition.labels, registry=self._registry)
            for name, definition in GAUGES.items()
        }
        self._histograms = {
            name: Histogram(f"clawstream_{name}", definition.help, definition.labels, registry=self._registry)
            for name, definition in HISTOGRAMS.items()
        }
        self._labelled: dict[tuple[str, *tuple[tuple[str, str], ...]], MetricWrapperBase] = {}
        """Those that were asked for. To find one by its labels takes the library as long as to count ten times."""

    def increment(self, name: CounterName, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter. All labels of its definition are needed."""
        self._one_of(self._counters[name], name, labels).inc(amount)

    def set(self, name: GaugeName, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._one_of(self._gauges[name], name, labels).set(value)

    def observe(self, name: HistogramName, value: float, **labels: str) -> None:
        """Adds an observation to a histogram, in the unit that its name ends in."""
        self._one_of(self._histograms[name], name, labels).observe(value)

    def _one_of(self, metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
        """The one with these labels. No two metrics have one name, whatever their kinds."""
        if not labels:
            return metric
        key = (name, *labels.items())
        found = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = metric.labels(**labels)
        return cast("Metric", found)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
