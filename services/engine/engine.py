"""The engine as the HTTP surface sees it: requests in, reports out; asyncio outside, a thread inside."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path
from random import Random

import torch

from clawstream.engine.interface import PauseMode
from clawstream.errors import EngineRejected, EngineUnavailable
from clawstream.log import Logger
from services.engine.answer import Answer, Progress
from services.engine.architecture import read_stop_token_ids
from services.engine.huge_pages import HugePageMover
from services.engine.linear import packing_works
from services.engine.requests import GenerateBody
from services.engine.responses import ResponseBuilder
from services.engine.scheduler import Scheduler
from services.engine.settings import EngineSettings
from services.engine.stops import IncrementalText, StopStrings
from services.engine.tokens import TokenCodec
from services.engine.transformer import Transformer
from services.engine.weights import load_weights
from services.engine.worker import EngineWorker

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def rejected(message: str) -> EngineRejected:
    """The error for a request that can never succeed as it is. The message is for the client."""
    return EngineRejected(message, status=400)


async def last_body(bodies: AsyncGenerator[dict[str, object]]) -> dict[str, object]:
    """The last response body."""
    last: dict[str, object] = {}
    async with aclosing(bodies):
        async for body in bodies:
            last = body
    return last


class Engine:
    """One model in service."""

    def __init__(self, settings: EngineSettings, *, log: Logger, on_failure: Callable[[], None]) -> None:
        """Loads the model. Raises `WeightsError` when the directory cannot be served.

        `on_failure` is called from another thread when a step raised: the process should exit.
        """
        self._settings = settings
        self._log = log
        self._dtype = DTYPES[settings.dtype]
        self._packed = packing_works(self._dtype)
        if not self._packed:
            log.warning("packed linear layers do not work here; using plain ones, which are slower")
        self.model_path = str(settings.model_path)
        weights = load_weights(settings.model_path, dtype=self._dtype, packed=self._packed)
        self.architecture = weights.architecture
        self.context_tokens = min(settings.max_context_tokens, self.architecture.max_context_tokens)
        self._codec = TokenCodec(settings.model_path)
        self._eos_ids = read_stop_token_ids(settings.model_path)
        transformer = Transformer(self.architecture, settings.max_slots, self.context_tokens, self._dtype)
        scheduler = Scheduler(
            transformer,
            weights,
            weight_version=settings.weight_version,
            max_slots=settings.max_slots,
            max_prefill_tokens_per_step=settings.max_prefill_tokens_per_step,
        )
        self.worker = EngineWorker(scheduler, log=log, on_failure=on_failure)
        self._seeds = Random(settings.seed)
        self._in_flight: dict[str, list[str]] = {}
        """Requests, each with the names of its answers."""
        self._update_lock = asyncio.Lock()
        self._huge_pages = HugePageMover()
        self._huge_pages.begin(weights.linears)

    @property
    def num_in_flight(self) -> int:
        """Answers that were asked for and are not finished."""
        return sum(map(len, self._in_flight.values()))

    def check(self, body: GenerateBody) -> list[int]:
        """The prompt's ids.

        Raises `EngineRejected` for what can never be answered, `EngineUnavailable` for what cannot be now.
        """
        prompt_ids = self._codec.encode(body.text) if body.text is not None else list(body.input_ids or ())
        vocabulary = self.architecture.vocabulary_size
        if not prompt_ids:
            raise rejected("the prompt is empty")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise rejected(f"input_ids must lie in [0, {vocabulary}), the vocabulary of the model")
        if max(body.token_ids_logprob or [0]) >= vocabulary:
            raise rejected(f"token_ids_logprob must lie in [0, {vocabulary}), the vocabulary of the model")
        requested = len(prompt_ids) + body.sampling_params.max_new_tokens
        if requested > self.context_tokens:
            raise rejected(
                f"Requested token count exceeds the model's maximum context length of {self.context_tokens} tokens. "
                f"You requested a total of {requested} tokens: {len(prompt_ids)} tokens from the input messages and "
                f"{body.sampling_params.max_new_tokens} tokens for the completion."
            )
        if body.return_logprob and body.logprob_start_len >= len(prompt_ids):
            raise rejected(
                f"logprob_start_len {body.logprob_start_len} is no position in the prompt of {len(prompt_ids)} tokens"
            )
        if body.rid is not None and body.rid in self._in_flight:
            raise rejected(f"a request with rid {body.rid!r} is in flight")
        answers, places = body.sampling_params.n, self._settings.max_slots + self._settings.max_queued_requests
        if answers > places:
            raise rejected(f"sampling_params.n is {answers}, but this engine has places for {places} answers in all")
        if self.num_in_flight + answers > places:
            raise EngineUnavailable(
                f"The request queue is full: {self._settings.max_queued_requests} requests wait already."
            )
        return prompt_ids

    async def generate(self, body: GenerateBody, prompt_ids: list[int]) -> AsyncGenerator[dict[str, object]]:
        """Response bodies, at least one; the last has a finish reason. Closing the generator early ends the answer."""
        rid = body.rid or uuid.uuid4().hex
        with self._accepted(rid, [rid]):
            async with aclosing(self._one(rid, body, prompt_ids)) as bodies:
                async for response in bodies:
                    yield response

    async def generate_several(self, body: GenerateBody, prompt_ids: list[int]) -> list[dict[str, object]]:
        """The last response bodies of as many answers as are asked for. Cancelling it ends them."""
        rid = body.rid or uuid.uuid4().hex
        names = [uuid.uuid4().hex for _ in range(body.sampling_params.n)]
        with self._accepted(rid, names):
            async with asyncio.TaskGroup() as answers:
                tasks = [answers.create_task(last_body(self._one(name, body, prompt_ids))) for name in names]
        return [task.result() for task in tasks]

    def abort(self, rid: str, message: str) -> None:
        """End a request with what it has; unknown ones are ignored."""
        for name in self._in_flight.get(rid, ()):
            self.worker.abort(name, message)

    @contextmanager
    def _accepted(self, rid: str, names: list[str]) -> Generator[None]:
        self._in_flight[rid] = names
        try:
            yield
        finally:
            self._in_flight.pop(rid, None)

    async def _one(self, name: str, body: GenerateBody, prompt_ids: list[int]) -> AsyncGenerator[dict[str, object]]:
        loop = asyncio.get_running_loop()
        reports: asyncio.Queue[Progress] = asyncio.Queue()

        def publish(report: Progress) -> None:
            loop.call_soon_threadsafe(reports.put_nowait, report)

        answer = self._answer(name, body, prompt_ids, publish)
        builder = ResponseBuilder(
            name,
            prompt_ids,
            return_logprob=body.return_logprob,
            top_logprobs=body.return_logprob and body.top_logprobs_num > 0,
            incremental=self._settings.incremental_streaming_output and body.stream,
            token_text=self._token_text if body.return_text_in_logprobs else lambda _: None,
        )
        finished = False
        try:
            self.worker.submit(answer)
            while not finished:
                report = await reports.get()
                finished = report.finish_reason is not None
                yield builder.add(report)
        finally:
            if not finished:
                self.worker.abort(name, "the client disconnected")

    def _answer(
        self, rid: str, body: GenerateBody, prompt_ids: list[int], publish: Callable[[Progress], None]
    ) -> Answer:
        parameters = body.sampling_params
        stop_ids: dict[int, int | str] = {token_id: token_id for token_id in parameters.stop_token_ids}
        if not parameters.ignore_eos:
            stop_ids |= {token_id: token_id for token_id in self._eos_ids}
        for stop in parameters.stop:
            # Special tokens leave no text for the stop string to be found in.
            token_id = self._codec.special_token_id(stop)
            if token_id is not None:
                stop_ids[token_id] = stop
        skip_special_tokens = parameters.skip_special_tokens
        return Answer(
            rid=rid,
            body=body,
            prompt_ids=prompt_ids,
            stop_ids=stop_ids,
            text=IncrementalText(lambda ids: self._codec.decode(ids, skip_special_tokens=skip_special_tokens)),
            stops=StopStrings(parameters.stop),
            random=Random(
                self._seeds.getrandbits(64) if parameters.sampling_seed is None else parameters.sampling_seed
            ),
            publish=publish,
        )

    def _token_text(self, token_id: int) -> str:
        return self._codec.decode([token_id], skip_special_tokens=False)

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no step runs any more."""
        await asyncio.wrap_future(self.worker.pause(mode))

    async def resume(self) -> None:
        """Undo `pause`."""
        await asyncio.wrap_future(self.worker.resume())

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        await asyncio.wrap_future(self.worker.forget_prefixes())

    async def abort_all(self, message: str) -> None:
        """End every request with what it has."""
        await asyncio.wrap_future(self.worker.abort_all(message))

    async def update_weights(self, directory: Path, weight_version: str | None) -> int:
        """Load weights beside those in service, then swap; the result is the number of requests in flight.

        LoRA adapters are merged with the model that the engine was started with.

        Raises `WeightsError` when they cannot be loaded; then nothing has changed.
        """
        async with self._update_lock:
            weights = await asyncio.to_thread(
                load_weights,
                directory,
                dtype=self._dtype,
                packed=self._packed,
                expected=self.architecture,
                base_directory=self._settings.model_path,
            )
            version = self.worker.weight_version if weight_version is None else weight_version
            in_flight = await asyncio.wrap_future(self.worker.swap_weights(weights, version))
            self.model_path = str(directory)
            await asyncio.to_thread(self._huge_pages.begin, weights.linears)
        self._log.info("weights swapped", directory=str(directory), weight_version=version, in_flight=in_flight)
        return in_flight
