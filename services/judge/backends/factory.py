"""Makes the backend that a judge spec names."""

from collections.abc import Callable
from pathlib import Path

from pydantic import SecretStr

from clawstream.engine.interface import EngineClient
from clawstream.engine.pool import EnginePool
from clawstream.errors import ContractError, SettingsError
from clawstream.rendering.interface import ChatRenderer
from schemas.judge_spec import JudgeSpec
from services.judge.backends.imported import import_judge
from services.judge.backends.interface import Backend
from services.judge.backends.likelihood import LikelihoodBackend
from services.judge.backends.openai import OpenAIBackend
from services.judge.backends.rules import RulesBackend
from services.judge.backends.sglang import SglangBackend
from services.judge.prompts import load_likelihood_prompt, load_prompt
from services.judge.settings import JudgeModelSettings


class BackendFactory:
    """Knows how to reach models, so that a promoted spec can be put to work without a restart."""

    def __init__(
        self,
        settings: JudgeModelSettings,
        *,
        api_key: SecretStr | None,
        make_engine: Callable[[str, str, float, int], EngineClient],
        load_renderer: Callable[[Path], ChatRenderer],
    ) -> None:
        """`make_engine` takes name, base URL, timeout in seconds and size of the vocabulary; `load_renderer` a
        tokenizer's folder.
        """
        self._settings = settings
        self._api_key = api_key
        self._make_engine = make_engine
        self._load_renderer = load_renderer

    def make(self, spec: JudgeSpec) -> Backend:
        """The backend of a completed spec. Raises SettingsError when something that it needs is not configured."""
        lacking = self._settings.lacks_for(spec.backend)
        if lacking:
            raise SettingsError("; ".join(f"judge.{problem}" for problem in lacking))
        if spec.backend == "rules":
            return RulesBackend(spec.rules)
        if spec.backend == "likelihood":
            prompt, renderer = load_likelihood_prompt(spec.prompt), self._renderer()
            return LikelihoodBackend(spec, prompt, self._pool(renderer), renderer)
        if spec.backend == "sglang":
            renderer = self._renderer()
            return SglangBackend(spec, load_prompt(spec.prompt), self._pool(renderer), renderer)
        if spec.backend == "openai":
            (url,) = self._settings.urls
            return OpenAIBackend(
                spec,
                load_prompt(spec.prompt),
                base_url=url,
                api_key=self._api_key,
                timeout_seconds=self._settings.call_timeout_seconds,
            )
        return import_judge(spec.backend)

    def _pool(self, renderer: ChatRenderer) -> EnginePool:
        seconds, size = self._settings.call_timeout_seconds, renderer.vocabulary_size
        return EnginePool(
            [self._make_engine(f"judge-{number}", url, seconds, size) for number, url in enumerate(self._settings.urls)]
        )

    def _renderer(self) -> ChatRenderer:
        assert self._settings.directory is not None  # `lacks_for` asks for it.
        try:
            return self._load_renderer(self._settings.directory)
        except ContractError as error:
            raise SettingsError(f"judge.model.directory: {error}") from error
