"""Settings of one gateway process."""

import ipaddress
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from clawstream.engine.client import EngineTimeouts
from clawstream.settings import ModelDirectory, Section, ServiceSettings
from services.gateway.conversation_settings import ConversationSettings
from services.gateway.gate.settings import EngineList, GateSettings
from services.gateway.request_headers import SESSION_HINT_HEADERS

KeyHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]


class EngineDeadlines(Section):
    """How long the gateway waits for an engine, in seconds."""

    connect_seconds: float = Field(default=5.0, gt=0)
    """Until the connection stands."""
    first_token_seconds: float = Field(default=300.0, gt=0)
    """Until the first token: prefill of a long prompt, or a weight update."""
    idle_seconds: float = Field(default=120.0, gt=0)
    """Between two tokens; then the answer ends with an error. The time in which an engine changes its weights does not
    count: that has deadlines of its own (`gate.deadlines`)."""

    def as_timeouts(self) -> EngineTimeouts:
        """For the engine client."""
        return EngineTimeouts(
            connect_seconds=self.connect_seconds,
            first_chunk_seconds=self.first_token_seconds,
            idle_seconds=self.idle_seconds,
        )


class GatewaySettings(ServiceSettings):
    """The section `[gateway]`."""

    host: str = "127.0.0.1"
    """Address to listen on. Another one than loopback needs `api_keys`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one, which the log names."""
    api_keys: dict[str, list[KeyHash]] = Field(default={})
    """For each principal the sha256 hashes (hexadecimal) of its keys: `printf %s "$KEY" | sha256sum`. Keys themselves
    are kept nowhere. Empty: no key is asked for, and everyone is the principal `local`."""
    model_path: ModelDirectory
    """The policy's Hugging Face directory. Only its tokenizer, chat template and configuration are read."""
    model_name: str | None = None
    """Id in /v1/models; the policy's name when absent. Requests for another model are answered 404."""
    model_aliases: list[str] = Field(default=[])
    """Further names that requests may use."""
    renderer: str = "auto"
    """`auto`, `template`, or a family of the `renderers` package."""
    engines: EngineList
    """The engines that serve the policy."""
    conversations: ConversationSettings = ConversationSettings()
    """How sessions are recognised and how turns reach the log."""
    gate: GateSettings = GateSettings()
    """How engines are watched, updated and chosen."""
    engine_deadlines: EngineDeadlines = EngineDeadlines()
    """How long to wait for an engine."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Longest prompt and answer together; absent: the smallest that the engines report at start."""
    default_max_tokens: int = Field(default=2048, ge=1)
    """Cap on sampled tokens of requests that give none."""
    default_temperature: float = Field(default=1.0, ge=0, le=2)
    """Of requests that give none. The trainer learns from what was sampled: 0.6 to 1.0 is sensible, 0 teaches
    nothing."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Larger request bodies are answered 413."""
    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    """Requests whose path, query and headers are together larger are answered 431."""
    body_stall_seconds: float = Field(default=30.0, gt=0)
    """A request body of which nothing comes for so long is answered 408."""
    keep_alive_seconds: float = Field(default=10.0, gt=0)
    """A waiting stream gets an empty chunk this often, so that clients do not give up."""
    stream_start_seconds: float = Field(default=1.0, ge=0)
    """How long after an engine took a request its stream begins although there is no token yet. Until then a failure
    has a status of its own, which clients know how to repeat; afterwards it is an event in the stream."""
    session_hint_headers: list[str] = Field(default=list(SESSION_HINT_HEADERS))
    """Headers (lower case) that hint at the session, in order of precedence, after `X-Session-Id`, which asserts it."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """On SIGTERM open answers may finish for so long; then they end with an error."""

    @property
    def served_model(self) -> str:
        """The model's public name."""
        return self.model_name or self.policy

    @model_validator(mode="after")
    def _open_only_with_keys(self) -> Self:
        if not self.api_keys and not is_loopback(self.host):
            raise ValueError(f"host is {self.host}: without api_keys the gateway listens on loopback only")
        return self


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
