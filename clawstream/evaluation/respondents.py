"""Who can be asked: an inference engine by token ids, or any OpenAI-compatible endpoint."""

from dataclasses import dataclass
from typing import Protocol

from clawstream.chat_client import ChatClient
from clawstream.engine.interface import EngineClient, GenerationRequest
from clawstream.ids import derive
from clawstream.rendering.interface import ChatRenderer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn."""

    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Response:
    """One answer."""

    text: str
    finished: bool
    """False when the token cap ended it."""
    tokens: int
    """Its length."""
    entropy_nats: float | None
    """Mean negative log-prob of the sampled tokens, an estimate of the entropy per token; None without log-probs."""


class Respondent(Protocol):
    """Answers single questions. The same seed asks for the same random numbers."""

    async def answer(self, question: str, sampling: Sampling, seed: int) -> Response: ...


class EngineRespondent:
    """An engine, directly: what is only measured is neither logged nor trained."""

    def __init__(self, engine: EngineClient, renderer: ChatRenderer) -> None:
        self._engine = engine
        self._renderer = renderer

    async def answer(self, question: str, sampling: Sampling, seed: int) -> Response:
        """Raises the errors of EngineClient.generate."""
        prompt = self._renderer.render([{"role": "user", "content": question}])
        parameters = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": self._renderer.stop_token_ids,
            "sampling_seed": seed,
        }
        ids: list[int] = []
        logprobs: list[float] = []
        finish_reason = None
        request = GenerationRequest(derive("evaluation", seed, question), prompt.token_ids, parameters)
        async for chunk in self._engine.generate(request):
            ids += chunk.token_ids
            logprobs += [logprob for logprob in chunk.logprobs if logprob is not None]
            finish_reason = chunk.finish_reason or finish_reason
        return Response(
            text=self._renderer.parse(ids).content or "",
            finished=finish_reason == "stop",
            tokens=len(ids),
            entropy_nats=-sum(logprobs) / len(logprobs) if logprobs else None,
        )


class ChatRespondent:
    """An OpenAI-compatible endpoint. A gateway logs what it is asked as side turns: they are never trained."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client

    async def answer(self, question: str, sampling: Sampling, seed: int) -> Response:
        """Raises the errors of ChatClient.chat."""
        answer = await self._client.chat(
            [{"role": "user", "content": question}],
            headers={"X-Turn-Type": "side"},
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=seed,
        )
        return Response(answer.text, answer.finish_reason == "stop", answer.tokens, None)
