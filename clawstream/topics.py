"""The topics, read from `schemas/topics/*.yaml`, and the partition that a key belongs to.

Topic names carry a namespace (`clawstream` in production), so that several systems, or tests, share a broker:
the full name of `turns.v1` is `clawstream.turns.v1`.
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict, Field

TURNS: Final = "turns.v1"
NEXT_STATES: Final = "next-states.v1"
SCORES: Final = "scores.v1"
SCORES_REPLAY: Final = "scores-replay.v1"
SAMPLES: Final = "samples.v1"
SKIPS: Final = "skips.v1"
WEIGHTS: Final = "weights.v1"
WEIGHTS_APPLIED: Final = "weights-applied.v1"
TRAIN_STEPS: Final = "train-steps.v1"
TURN_INDEX: Final = "turn-index.v1"
OUTBOX: Final = "outbox.v1"
LLM_CALLS: Final = "llm-calls.v1"
CONFIG: Final = "config.v1"
FORGOTTEN: Final = "forgotten.v1"
SESSION_KEYS: Final = "session-keys.v1"
DEPLOYMENT: Final = "deployment.v1"
IMPORTS: Final = "imports.v1"
JUDGE_DLQ: Final = "judge.dlq.v1"
TEACHER_DLQ: Final = "teacher.dlq.v1"
TRAINER_DLQ: Final = "trainer.dlq.v1"


class TopicDefinition(BaseModel):
    """One topic's YAML file. An unknown field is an error: a misspelt one must not pass."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    topic: str = Field(pattern=r"^[a-z][a-z-]*(\.[a-z][a-z-]*)*\.v[1-9][0-9]*$")
    """Name without namespace."""
    description: str = Field(min_length=20)
    """What it holds, in a sentence or two."""
    events: list[str]
    """CloudEvents types that may be on it; empty for dead-letter topics, which hold original records."""
    key: str
    """What the record key is made of."""
    partition_by: str
    """What decides the partition; `none` for topics of one partition."""
    partitions: int = Field(ge=1)
    """Number of partitions. Never changes: keys would move."""
    producers: list[str] = Field(min_length=1)
    """Which processes write it."""
    consumers: list[str] = Field(min_length=1)
    """Which processes read it."""
    config: dict[str, str]
    """Kafka's topic settings."""


@cache
def topic_definitions() -> Mapping[str, TopicDefinition]:
    """All topics by name without namespace. Raises pydantic.ValidationError for a malformed file."""
    files = sorted(
        (file for file in resources.files("schemas.topics").iterdir() if file.name.endswith(".yaml")),
        key=lambda file: file.name,
    )
    definitions = [TopicDefinition.model_validate(yaml.safe_load(file.read_text(encoding="utf-8"))) for file in files]
    return MappingProxyType({definition.topic: definition for definition in definitions})


def full_name(namespace: str, topic: str) -> str:
    """The name on the broker of `topic` (one of this module's constants)."""
    return f"{namespace}.{topic}"


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 hash of `data` as an unsigned 32-bit number (Austin Appleby's MurmurHash2, seed 0x9747b28c)."""
    mask = 0xFFFFFFFF
    multiplier = 0x5BD1E995
    value = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for start in range(0, whole, 4):
        block = int.from_bytes(data[start : start + 4], "little")
        block = (block * multiplier) & mask
        block ^= block >> 24
        block = (block * multiplier) & mask
        value = ((value * multiplier) & mask) ^ block
    rest = data[whole:]
    if rest:
        value ^= int.from_bytes(rest, "little")
        value = (value * multiplier) & mask
    value ^= value >> 13
    value = (value * multiplier) & mask
    return value ^ (value >> 15)


def partition_for(key: str, partitions: int) -> int:
    """The partition that Java's default partitioner and librdkafka's `murmur2_random` choose for `key`.

    Used where the record key and the partition key differ: a sample's key is its turn, its partition its session's.
    """
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partitions
