"""The HTTP surface: the part of SGLang's API that clawstream uses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from clawstream import __version__
from clawstream.clock import Clock
from clawstream.errors import EngineRejected, EngineUnavailable, WeightsError
from services.engine.engine import Engine, last_body, rejected
from services.engine.requests import (
    AbortBody,
    GenerateBody,
    PauseBody,
    RequestBody,
    SamplingParameters,
    UpdateWeightsBody,
)
from services.engine.settings import EngineSettings

Body = TypeVar("Body", bound=RequestBody)

RETRY_AFTER_SECONDS = 1
"""Sent with 503: a slot is usually free by then."""


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response by orjson."""
    return Response(orjson.dumps(content), status_code=status, headers=headers, media_type="application/json")


def error_response(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """SGLang's error body."""
    return json_response({"error": {"message": message, "code": status}}, status, headers)


async def read_body(request: Request, model: type[Body]) -> Body:
    """The parsed body; an empty one has all defaults. Raises `EngineRejected` naming every wrong field."""
    raw = await request.body()
    try:
        return model.model_validate(orjson.loads(raw) if raw else {})
    except orjson.JSONDecodeError as error:
        raise rejected(f"the body is not JSON: {error}") from error
    except ValidationError as error:
        problems = (
            f"{'.'.join(str(part) for part in problem['loc']) or 'body'}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        )
        raise rejected("; ".join(problems)) from error


async def wait_for_disconnect(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def generate_whole(engine: Engine, request: Request, body: GenerateBody, prompt_ids: list[int]) -> Response:
    """One response at the end, a list when several answers are asked for; a client that goes away ends its answers."""
    several = body.sampling_params.n > 1
    generation: asyncio.Task[object] = asyncio.create_task(
        engine.generate_several(body, prompt_ids) if several else last_body(engine.generate(body, prompt_ids))
    )
    disconnect = asyncio.create_task(wait_for_disconnect(request))
    try:
        await asyncio.wait({generation, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if generation.done():
            return json_response(generation.result())
        return Response(status_code=499)  # nobody reads it
    finally:
        generation.cancel()
        disconnect.cancel()
        await asyncio.gather(generation, disconnect, return_exceptions=True)


async def generate_stream(engine: Engine, body: GenerateBody, prompt_ids: list[int]) -> AsyncIterator[bytes]:
    """Server-sent events; when the client goes away, the iterator is closed and with it the answer."""
    async with aclosing(engine.generate(body, prompt_ids)) as bodies:
        async for event in bodies:
            yield b"data: " + orjson.dumps(event) + b"\n\n"
    yield b"data: [DONE]\n\n"


def create_app(engine: Engine, settings: EngineSettings, clock: Clock) -> FastAPI:
    """The application around a started engine."""
    app = FastAPI(title="clawstream engine", version=__version__, openapi_url=None)
    served_model_name = settings.served_model_name or str(settings.model_path)
    started_at = int(clock.now().timestamp())

    @app.exception_handler(EngineRejected)
    async def _(_request: Request, error: EngineRejected) -> Response:
        return error_response(str(error), error.status)

    @app.exception_handler(EngineUnavailable)
    async def _(_request: Request, error: EngineUnavailable) -> Response:
        return error_response(str(error), 503, {"retry-after": str(RETRY_AFTER_SECONDS)})

    @app.post("/generate")
    async def _(request: Request) -> Response:
        body = await read_body(request, GenerateBody)
        prompt_ids = engine.check(body)
        if not body.stream:
            return await generate_whole(engine, request, body, prompt_ids)
        return StreamingResponse(generate_stream(engine, body, prompt_ids), media_type="text/event-stream")

    @app.get("/v1/models")
    async def _() -> Response:
        model = {
            "id": served_model_name,
            "object": "model",
            "created": started_at,
            "owned_by": "clawstream",
            "root": served_model_name,
            "parent": None,
            "max_model_len": engine.context_tokens,
        }
        return json_response({"object": "list", "data": [model]})

    @app.get("/ready")
    async def _() -> Response:
        """Whether new requests run now, as SGLang says it: not while generation is paused."""
        return Response(status_code=200 if engine.worker.is_alive and not engine.worker.is_paused else 503)

    @app.get("/health")
    async def _() -> Response:
        return Response(status_code=200 if engine.worker.is_alive else 503)

    @app.get("/health_generate")
    async def _() -> Response:
        body = GenerateBody(input_ids=[0], sampling_params=SamplingParameters(max_new_tokens=1, temperature=0.0))
        await last_body(engine.generate(body, engine.check(body)))
        return Response(status_code=200)

    @app.get("/model_info")
    async def _() -> Response:
        return json_response(
            {
                "model_path": engine.model_path,
                "tokenizer_path": str(settings.model_path),
                "is_generation": True,
                "weight_version": engine.worker.weight_version,
                "model_type": engine.architecture.model_type,
                "max_context_tokens": engine.context_tokens,
            }
        )

    @app.get("/server_info")
    async def _() -> Response:
        return json_response(
            {
                **settings.model_dump(mode="json"),
                "version": __version__,
                "status": "paused" if engine.worker.is_paused else "ready",
                "weight_version": engine.worker.weight_version,
                "context_length": engine.context_tokens,
                "num_requests": engine.worker.num_requests,
                "num_waiting": engine.worker.num_waiting,
            }
        )

    @app.post("/pause_generation")
    async def _(request: Request) -> Response:
        body = await read_body(request, PauseBody)
        await engine.pause(body.mode)
        return json_response({"status": "ok", "message": f"Generation paused, mode {body.mode.value}."})

    @app.post("/continue_generation")
    async def _() -> Response:
        await engine.resume()
        return json_response({"status": "ok", "message": "Generation continued."})

    @app.post("/update_weights_from_disk")
    async def _(request: Request) -> Response:
        body = await read_body(request, UpdateWeightsBody)
        if body.abort_all_requests:
            await engine.abort_all("aborted for a weight update")
        try:
            in_flight = await engine.update_weights(Path(body.model_path), body.weight_version)
        except WeightsError as error:
            message = f"Failed to update weights: {error}. The weights in service have not changed."
            return json_response({"success": False, "message": message, "num_paused_requests": 0}, 400)
        message = f"Succeeded to update model weights to version {engine.worker.weight_version}."
        return json_response({"success": True, "message": message, "num_paused_requests": in_flight})

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def _() -> Response:
        await engine.forget_prefixes()
        return json_response({"success": True, "message": "Cache flushed."})

    @app.post("/abort_request")
    async def _(request: Request) -> Response:
        body = await read_body(request, AbortBody)
        if body.abort_all:
            await engine.abort_all("aborted by request")
        else:
            engine.abort(body.rid, "aborted by request")
        return Response(status_code=200)

    return app
