"""From records to rows. Reads values as plain JSON: an audit must not lean on the code that it judges."""

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import orjson

from clawstream import topics
from clawstream.audit.log import LogRecord
from clawstream.audit.memory import Memory
from clawstream.stages import STAGES
from clawstream.topics import full_name

Document = Mapping[str, Any]
_REPLAYS: Final = "replay"
"""How the source of scores starts that another judgement of history wrote: they come beside the judge's own."""
_MARKER: Final = "redrive.marker"


class Intake:
    """Takes records in."""

    def __init__(self, memory: Memory, namespace: str) -> None:
        self._memory = memory
        self._stage_of_input = {full_name(namespace, stage.input_topic): stage.name for stage in STAGES.values()}
        self._stage_of_letters = {stage.dead_letter_topic: stage for stage in STAGES.values()}
        self._takers: Mapping[str, Callable[[LogRecord, Document], None]] = {
            topics.TURNS: self._turn,
            topics.NEXT_STATES: self._next_state,
            topics.SCORES: self._score,
            topics.SAMPLES: self._sample,
            topics.SKIPS: self._skips,
            topics.TRAIN_STEPS: self._step,
            topics.WEIGHTS: self._weights,
            topics.WEIGHTS_APPLIED: self._applied,
        }

    def take(self, record: LogRecord) -> None:
        """Takes in one record; those of topics that promise nothing are passed over."""
        if record.topic in self._stage_of_letters:
            self._letter(record)
            return
        taker = self._takers.get(record.topic)
        if taker is None:
            return
        if record.value is None:
            self._tombstone(record)
            return
        try:
            document: Any = orjson.loads(record.value)
            if not isinstance(document, dict):
                raise TypeError(f"a JSON {type(document).__name__} where an object was expected")
            taker(record, cast("Document", document))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            self._unreadable(record, f"{type(error).__name__}: {error}")

    def _unreadable(self, record: LogRecord, problem: str) -> None:
        """Inputs of a stage still need an end, as a dead letter; what nobody dead-letters is a fault of its writer."""
        where = (record.partition, record.offset)
        if record.topic == topics.NEXT_STATES:
            self._memory.add("next_states", *where, record.timestamp_milliseconds, *(None,) * 6)
        elif record.topic == topics.SCORES:
            self._memory.add("scores", *where, record.timestamp_milliseconds, *(None,) * 4, None, 1, None, None)
        elif record.topic == topics.SAMPLES:
            self._memory.add("samples", *where, record.timestamp_milliseconds, *(None,) * 6)
        else:
            self._memory.add("malformed", record.topic, *where, problem)

    def _tombstone(self, record: LogRecord) -> None:
        key = (record.key or b"").decode(errors="replace")
        if record.topic == topics.SAMPLES:
            self._memory.add("tombstones", record.partition, record.offset, key)
        elif record.topic == topics.WEIGHTS:
            policy, _, number = key.rpartition("/")
            if number.isdecimal():
                self._memory.add("versions", record.offset, policy, int(number), None, None, 1)
        elif record.topic != topics.WEIGHTS_APPLIED:
            self._unreadable(record, "a tombstone where an event was expected")

    def _turn(self, record: LogRecord, turn: Document) -> None:
        where = (record.partition, record.offset)
        self._memory.add("turns", *where, turn["turn_id"], turn["session_id"], turn.get("parent_turn_id"))
        for span in turn["version_spans"]:
            self._served(record, turn["policy"], span["weight_version"])

    def _next_state(self, record: LogRecord, event: Document) -> None:
        skip = None
        if event["kind"] == "session_end":
            skip = "session_end"
        elif not event.get("turn_trainable", True):
            skip = "untrainable_turn"
        reference = event["turn_ref"]
        self._memory.add(
            "next_states",
            record.partition,
            record.offset,
            record.timestamp_milliseconds,
            event["next_state_id"],
            event["turn_id"],
            int(reference["partition"]),
            int(reference["offset"]),
            event["session_id"],
            skip,
        )

    def _score(self, record: LogRecord, event: Document) -> None:
        reference, spec = event["next_state_ref"], event["judge_spec_hash"]
        partition, offset = int(reference["partition"]), int(reference["offset"])
        live = int(not (record.header("ce_source") or "").startswith(_REPLAYS))
        self._memory.add(
            "scores",
            record.partition,
            record.offset,
            record.timestamp_milliseconds,
            event["score_id"],
            event["next_state_id"],
            partition,
            offset,
            spec,
            live,
            event["session_id"],
            event["turn_id"],
        )
        where = (record.topic, record.partition, record.offset)
        self._memory.add("ends", "judge", partition, offset, "output", spec, live, None, *where)

    def _sample(self, record: LogRecord, event: Document) -> None:
        reference = event["next_state_ref"]
        self._memory.add(
            "samples",
            record.partition,
            record.offset,
            record.timestamp_milliseconds,
            event["sample_id"],
            event["turn_id"],
            int(reference["partition"]),
            int(reference["offset"]),
            event["judge_spec_hash"],
            event["session_id"],
        )

    def _skips(self, record: LogRecord, event: Document) -> None:
        stage = self._stage_of_input.get(event["topic"])
        if stage != event["stage"]:
            raise ValueError(f"stage {event['stage']} does not read {event['topic']}")
        where = (record.topic, record.partition, record.offset)
        for reason, offsets in event["offsets_by_reason"].items():
            for offset in offsets:
                self._memory.add("ends", stage, event["partition"], int(offset), "skip", None, 1, reason, *where)

    def _letter(self, record: LogRecord) -> None:
        if record.header(_MARKER) is not None:
            return
        stage = self._stage_of_letters[record.topic]
        partition, offset = record.header("dlq.partition"), record.header("dlq.offset")
        input_stage = self._stage_of_input.get(record.header("dlq.topic") or "")
        where = (record.topic, record.partition, record.offset)
        if input_stage != stage.name or not (partition or "").isdecimal() or not (offset or "").isdecimal():
            self._memory.add("malformed", *where, "its dlq.* headers do not say which input of this stage it was")
            return
        reason = record.header("dlq.reason")
        self._memory.add(
            "ends", stage.name, int(partition or 0), int(offset or 0), "dead letter", None, 1, reason, *where
        )

    def _step(self, record: LogRecord, event: Document) -> None:
        lineage, policy, step = event["lineage"], event["policy"], event["step"]
        self._memory.add(
            "steps",
            record.offset,
            record.timestamp_milliseconds,
            event["train_step_id"],
            lineage,
            policy,
            step,
            event["base_version"],
            event["weight_version"],
            event.get("batch_uri") or None,
            event.get("batch_sha256") or None,
            len(event["samples"]),
        )
        for partition, offset in event.get("next_offsets", {}).items():
            self._memory.add("step_offsets", record.offset, lineage, policy, step, int(partition), int(offset))
        for kind in ("samples", "drops"):
            for each in event[kind]:
                self._memory.add(
                    "listed",
                    record.offset,
                    lineage,
                    policy,
                    "trained" if kind == "samples" else "dropped",
                    each.get("reason"),
                    each["sample_id"],
                    each["turn_id"],
                    int(each["ref"]["partition"]),
                    int(each["ref"]["offset"]),
                )

    def _weights(self, record: LogRecord, event: Document) -> None:
        policy, version = event["policy"], event["weight_version"]
        if record.header("ce_type") == "clawstream.weight-pointer":
            self._memory.add("pointers", record.offset, policy, version, int(event.get("rollback", False)))
            return
        base, manifest = event["base_version"], event["manifest_sha256"]
        self._memory.add("versions", record.offset, policy, version, base, manifest, 0)

    def _applied(self, record: LogRecord, event: Document) -> None:
        version = event.get("weight_version")
        if event["state"] == "ready" and version is not None:
            self._served(record, event["policy"], version)

    def _served(self, record: LogRecord, policy: str, version: int) -> None:
        self._memory.add("served", policy, version, record.topic, record.partition, record.offset)
