"""Settings of one engine process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from clawstream.errors import WeightsError
from clawstream.memory_need import MemoryNeed, model_size
from clawstream.settings import LogSettings, ModelDirectory, ProcessSettings
from services.engine.architecture import read_architecture

_TORCH_BYTES = 450 * 1024**2
_CACHED_NUMBER_BYTES = 4


class EngineSettings(ProcessSettings):
    """The section `[engine]`, or another one that `--section` names: several engines may run side by side."""

    name: str = Field(default="engine", pattern=r"^[a-z][a-z0-9-]*$")
    """Name of this process in logs."""
    log: LogSettings = LogSettings()
    """Logging."""
    model_path: ModelDirectory = Path("models/smollm2")
    """A Hugging Face directory: config.json, safetensors, tokenizer.json. Llama, Qwen2 or Qwen3."""
    served_model_name: str | None = None
    """Id in /v1/models; the model path when absent."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=30000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one, which the log names."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights; keys and values stay fp32. bfloat16 is about 1.5 times as fast, its log-probs are off by 0.02."""
    threads: int = Field(default=1, ge=1)
    """Threads for arithmetic. Beside a trainer on two cores: 1."""
    max_slots: int = Field(default=16, ge=1, le=256)
    """Requests that are answered at the same time; further ones queue."""
    max_context_tokens: int = Field(default=4096, ge=2)
    """Longest prompt and answer together; never more than the model was made for."""
    max_queued_requests: int = Field(default=256, ge=1)
    """Requests that wait for a slot; the next one is refused with 503."""
    max_prefill_tokens_per_step: int = Field(default=256, ge=1)
    """Prompt tokens computed between two tokens of running answers: larger fills faster, smaller stalls them less."""
    incremental_streaming_output: bool = False
    """Streamed chunks carry only what is new, as SGLang's do with the flag of this name; else everything so far."""
    weight_version: str = Field(default="default", min_length=1)
    """What the weights at start are called."""
    seed: int = 0
    """Of the random numbers of requests that bring no seed of their own."""

    def problems(self, environment: Mapping[str, str]) -> list[str]:
        """Also a model of another architecture than those that this engine computes."""
        found = super().problems(environment)
        if found:
            return found
        try:
            read_architecture(self.model_path)
        except WeightsError as error:
            return [f"model_path: {error}"]
        return []

    def memory_need(self) -> MemoryNeed:
        """Weights; while they change, the next ones beside them; keys and values once every slot is full."""
        size = model_size(self.model_path)
        if size is None:
            return MemoryNeed(_TORCH_BYTES)
        number_bytes = 4 if self.dtype == "float32" else 2
        cached = self.max_slots * self.max_context_tokens * size.layers * 2 * size.key_value_width
        return MemoryNeed(
            fixed_bytes=_TORCH_BYTES + size.parameters * number_bytes,
            working_bytes=size.parameters * number_bytes + cached * _CACHED_NUMBER_BYTES,
        )
