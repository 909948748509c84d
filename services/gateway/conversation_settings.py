"""Settings of conversations: section `[gateway.conversations]`."""

from pathlib import Path
from typing import Protocol

from pydantic import Field

from clawstream.settings import ConfigPath, KafkaSettings, Section


class ConversationSettings(Section):
    """How sessions are recognised and how turns reach the log."""

    index_secret_file: ConfigPath | None = None
    """Secret of the keyed hashes in the turn index. All gateways of a system must share it. Made at the first start;
    by default `gateway-index-secret` in the data directory. Losing it makes every conversation start anew."""
    profiles_directory: ConfigPath | None = None
    """Folder of further client profiles (TOML). One named like a shipped profile replaces it."""
    idle_limit_seconds: float = Field(default=1800.0, gt=0)
    """A session without requests for so long is closed: its unanswered turns get a next state of kind session_end."""
    idle_check_seconds: float = Field(default=30.0, gt=0)
    """How often idle sessions are looked for."""
    index_retention_seconds: float = Field(default=7 * 86400.0, gt=0)
    """A turn older than this is not found any more. Equal to the retention of the turn-index topic."""
    index_cache_bytes: int = Field(default=32 * 1024 * 1024, ge=128 * 1024)
    """Memory for the turn index, which itself is on disk."""
    outbox_max_bytes: int = Field(default=1024 * 1024 * 1024, ge=1024)
    """What may wait on disk for the log. When it is full, turns are served unrecorded."""
    outbox_segment_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Size at which a new outbox file is begun."""
    blob_store_url: str | None = None
    """Folder for number arrays over 256 KiB (a long turn's ids and log-probs): a path, or an fsspec URL such as
    `s3://bucket/blobs`. The trainer must reach it under the same name. By default `blobs` in the data directory."""
    drain_linger_seconds: float = Field(default=0.0, ge=0, le=1)
    """How long a transaction waits for more entries when there are few. Entries that come while one is under way share
    the next one anyway: more than 0 spares the broker work and makes every turn later."""
    close_drain_seconds: float = Field(default=10.0, ge=0)
    """How long a stopping gateway goes on draining. What is left stays on disk and is drained at the next start."""
    other_gateway_wait_seconds: float = Field(default=0.25, ge=0, le=5)
    """How long an unknown answer is waited for when another gateway was active lately: it may be on its way."""
    max_event_bytes: int = Field(default=2_000_000, ge=10_000)
    """A next state larger than this leaves out the oldest messages of the request. Below the topic's limit."""


class GatewayLikeSettings(Protocol):
    """What conversations need of the gateway's settings."""

    @property
    def name(self) -> str:
        """Name of this gateway."""
        ...

    @property
    def data_directory(self) -> Path:
        """Where its files are."""
        ...

    @property
    def kafka(self) -> KafkaSettings:
        """The log."""
        ...

    @property
    def conversations(self) -> ConversationSettings:
        """These settings."""
        ...
