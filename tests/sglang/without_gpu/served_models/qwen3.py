"""SGLang finds a module's models by the name `EntryClass`."""

from sglang.srt.models.qwen3 import EntryClass  # pyright: ignore[reportMissingImports] - it is in another environment

__all__ = ["EntryClass"]
