"""One request of any API, from its body to a running generation."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawstream.clock import Clock
from clawstream.errors import PromptTooLong, RequestRefused
from clawstream.ids import IdSource
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.rendering.interface import ChatRenderer, RenderedPrompt
from services.gateway.generation import Generation, GenerationPlan
from services.gateway.ports import Conversations, EngineRouter, IncomingRequest
from services.gateway.redaction import redact, redacted_headers
from services.gateway.request_headers import (
    rollout_position,
    session_done,
    session_header,
    session_hint,
    trace_id,
    turn_type,
)
from services.gateway.request_json import parse_json_object
from services.gateway.sampling import context_exceeded, longest_prompt, plan_sampling
from services.gateway.surfaces.answer_request import AnswerRequest
from services.gateway.surfaces.surface import AnswerContext, AnswerFormat, Surface, SurfaceRequest
from services.gateway.unrecorded import UnrecordedTurns, is_opted_out

_LARGE_BODY_BYTES = 64 * 1024
"""Above it, parsing and rendering leave the event loop to other requests."""


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """What requests may ask for, and what they get when they ask for nothing."""

    served_model: str
    model_names: frozenset[str]
    """Names that requests may use."""
    policy: str
    max_context_tokens: Callable[[], int]
    """Longest prompt and answer together, as far as it is known by now."""
    default_max_tokens: int
    default_temperature: float
    session_hint_headers: Sequence[str]


@dataclass(frozen=True, slots=True)
class StartedAnswer:
    """A request that is being answered."""

    request: AnswerRequest
    prompt_tokens: int
    open_format: Callable[[AnswerContext], AnswerFormat]
    """Writes the answer as the client's API does."""
    error_body: Callable[[RequestRefused], dict[str, Any]]
    """Writes a failure as the client's API does."""
    generation: Generation


class ChatService:
    """Starts generations and knows those that run."""

    def __init__(
        self,
        *,
        limits: ChatLimits,
        conversations: Conversations,
        router: EngineRouter,
        renderer: ChatRenderer,
        clock: Clock,
        id_source: IdSource,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self._limits = limits
        self._unrecorded = UnrecordedTurns(metrics)
        self._id_source = id_source
        self._conversations = conversations
        self._router = router
        self._renderer = renderer
        self._clock = clock
        self._metrics = metrics
        self._logger = logger
        self._running: dict[asyncio.Task[None], Generation] = {}

    @property
    def requests_in_flight(self) -> int:
        """Answers that are not recorded yet."""
        return len(self._running)

    async def start(
        self, surface: Surface, principal: str, headers: Mapping[str, str], body: bytes, *, secrets: tuple[str, ...]
    ) -> StartedAnswer:
        """Reads, checks and renders the request, then starts to answer it. Raises RequestRefused or ContractError.

        A request that is refused here leaves no trace on the log. `secrets` are credentials: nothing that is made of
        headers or ids holds them.
        """
        received_at = self._clock.now()
        headers = redacted_headers(headers, secrets)
        max_context_tokens = self._limits.max_context_tokens()
        read, prompt, beginning = await self._read(surface, body, max_context_tokens)
        request = read.answer
        body_hint = None if request.session_hint is None else redact(request.session_hint, secrets)
        plan = GenerationPlan(
            incoming=IncomingRequest(
                turn_id=str(self._id_source()),
                principal=principal,
                messages=request.messages,
                tools=request.tools,
                session_header=session_header(headers),
                session_hint=session_hint(headers, self._limits.session_hint_headers, body_hint),
                turn_type_header=turn_type(headers),
                session_done=session_done(headers),
                trace_id=trace_id(headers),
                user_agent=headers.get("user-agent", "")[:200],
                rollout=rollout_position(headers),
                received_at=received_at,
            ),
            prompt=prompt,
            answer_beginning=beginning,
            sampling=plan_sampling(
                request,
                prompt_tokens=len(prompt.token_ids),
                max_context_tokens=max_context_tokens,
                default_max_tokens=self._limits.default_max_tokens,
                default_temperature=self._limits.default_temperature,
                stop_token_ids=self._renderer.stop_token_ids,
                vocabulary_size=self._renderer.vocabulary_size,
            ),
            top_logprobs=request.top_logprobs,
            streams=request.stream,
            policy=self._limits.policy,
            response_id_prefix=surface.response_id_prefix,
        )
        generation = Generation(
            plan,
            conversations=self._unrecorded if is_opted_out(headers, request.store) else self._conversations,
            router=self._router,
            renderer=self._renderer,
            clock=self._clock,
            metrics=self._metrics,
            logger=self._logger,
        )
        task = generation.start()
        self._running[task] = generation
        self._metrics.set("requests_in_flight", len(self._running))
        task.add_done_callback(self._ended)
        return StartedAnswer(request, len(prompt.token_ids), read.open_format, surface.error_body, generation)

    async def count_tokens(self, surface: Surface, body: bytes) -> int:
        """How long the request's prompt is. Raises RequestRefused or ContractError."""
        _, prompt, _ = await self._read(surface, body, None)
        return len(prompt.token_ids)

    async def _read(
        self, surface: Surface, body: bytes, max_context_tokens: int | None
    ) -> tuple[SurfaceRequest, RenderedPrompt, list[int]]:
        if len(body) > _LARGE_BODY_BYTES:
            return await asyncio.to_thread(self._read_and_render, surface, body, max_context_tokens)
        return self._read_and_render(surface, body, max_context_tokens)

    def _read_and_render(
        self, surface: Surface, body: bytes, max_context_tokens: int | None
    ) -> tuple[SurfaceRequest, RenderedPrompt, list[int]]:
        """The request, its prompt, and how much of the prompt's end is the beginning of the answer.

        What cannot fit into `max_context_tokens` is refused without tokenising all of it.
        """
        read = surface.read(parse_json_object(body))
        request = read.answer
        self.check_model(request.model)
        tools = [] if request.tool_choice == "none" else request.tools
        max_tokens = None if max_context_tokens is None else longest_prompt(max_context_tokens)
        try:
            prompt = self._renderer.render(request.messages, tools, max_tokens=max_tokens)
        except PromptTooLong as error:
            raise context_exceeded(max_context_tokens or 0, error.least_tokens) from error
        if request.tool_choice != "required":
            return read, prompt, []
        beginning = self._renderer.tool_call_beginning(prompt.token_ids, request.named_tool)
        if beginning is None:
            raise RequestRefused(
                "tool_choice: a tool call cannot be demanded of this model; use auto",
                code="invalid_parameter",
                parameter="tool_choice",
            )
        return read, RenderedPrompt([*prompt.token_ids, *beginning], prompt.repaired), beginning

    def check_model(self, model: str | None) -> None:
        """Raises RequestRefused, status 404, for a model that is not served. No name means the one there is."""
        if model is not None and model not in self._limits.model_names:
            raise RequestRefused(
                f"the model {model[:100]!r} does not exist; this gateway serves {self._limits.served_model!r}",
                status=404,
                code="model_not_found",
                parameter="model",
            )

    def model_cards(self) -> list[dict[str, Any]]:
        """For /v1/models, of OpenAI and Anthropic. The context length stands under the names that clients read."""
        limit = self._limits.max_context_tokens()
        return [
            {
                "id": self._limits.served_model,
                "object": "model",
                "created": 0,
                "owned_by": "clawstream",
                "type": "model",
                "display_name": self._limits.served_model,
                "created_at": "1970-01-01T00:00:00Z",
                "max_model_len": limit,
                "context_length": limit,
                "context_window": limit,
            }
        ]

    async def finish(self, wait_seconds: float) -> None:
        """Lets running answers end for so long, ends the rest with an error, and waits until all are recorded."""
        if self._running:
            await asyncio.wait(self._running, timeout=wait_seconds)
        for generation in self._running.values():
            generation.shut_down()
        if self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._metrics.set("requests_in_flight", len(self._running))
