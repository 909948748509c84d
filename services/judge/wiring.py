"""What the judge's processes and commands make of the settings."""

from collections.abc import Mapping

from clawstream.clock import Clock
from clawstream.engine.client import EngineTimeouts, HttpEngineClient
from clawstream.metrics import Metrics
from clawstream.rendering.renderer import load_renderer
from services.judge.backends.factory import BackendFactory
from services.judge.calls import ModelCaller, RetryPolicy
from services.judge.settings import JudgeSettings


def backend_factory(settings: JudgeSettings, environment: Mapping[str, str]) -> BackendFactory:
    """Raises SettingsError when an API key is configured and missing."""
    return BackendFactory(
        settings.model,
        api_key=settings.model.api_key(environment),
        make_engine=lambda name, url, seconds, vocabulary_size: HttpEngineClient(
            name, url, timeouts=EngineTimeouts(call_seconds=seconds), vocabulary_size=vocabulary_size
        ),
        load_renderer=load_renderer,
    )


def model_caller(settings: JudgeSettings, *, clock: Clock, metrics: Metrics) -> ModelCaller:
    """Calls of one process: bounded in number, tried again a few times."""
    return ModelCaller(
        RetryPolicy(
            attempts=settings.model.call_attempts,
            first_delay_seconds=settings.model.first_retry_seconds,
            longest_delay_seconds=settings.model.longest_retry_seconds,
        ),
        max_concurrent_calls=settings.model.max_concurrent_calls,
        several_answers=settings.model.several_answers_per_call,
        clock=clock,
        metrics=metrics,
    )
