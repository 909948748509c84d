"""SGLang's answer to `/generate`, built from the reports of an answer."""

from collections.abc import Callable, Sequence
from typing import Any

from services.engine.answer import Progress, TopLogprobs

LogprobEntry = list[float | int | str | None]
"""[log-prob or null, token id, text or null]"""


def version_spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Runs of equal versions over the output tokens: `[{version, start, end}]`, end exclusive."""
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    return spans


class ResponseBuilder:
    """Turns reports into response bodies: each with everything so far, or with only what is new (`incremental`)."""

    def __init__(
        self,
        rid: str,
        prompt_ids: Sequence[int],
        *,
        return_logprob: bool,
        top_logprobs: bool,
        incremental: bool,
        token_text: Callable[[int], str | None],
    ) -> None:
        """`token_text` gives the third field of log-prob entries."""
        self._rid = rid
        self._prompt_ids = prompt_ids
        self._return_logprob = return_logprob
        self._top_logprobs = top_logprobs
        self._incremental = incremental
        self._token_text = token_text
        self._text = ""
        self._output_ids: list[int] = []
        self._logprobs: list[LogprobEntry] = []
        self._tops: list[list[LogprobEntry] | None] = []
        self._versions: list[str] = []
        self._prompt_fields: dict[str, Any] = {}
        self._cached_tokens = 0

    def add(self, progress: Progress) -> dict[str, Any]:
        """The response body after this report."""
        logprobs = [
            self._entry(logprob, token_id)
            for logprob, token_id in zip(progress.logprobs, progress.token_ids, strict=True)
        ]
        tops = [self._top_entries(top) for top in progress.top_logprobs]
        prompt_fields = self._take_prompt(progress)
        self._versions += progress.weight_versions
        if self._incremental:
            text, output_ids = progress.text, progress.token_ids
        else:
            text = self._text = self._text + progress.text
            output_ids = self._output_ids = self._output_ids + progress.token_ids
            logprobs = self._logprobs = self._logprobs + logprobs
            tops = self._tops = self._tops + tops
            self._prompt_fields |= prompt_fields
            prompt_fields = self._prompt_fields
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": progress.finish_reason,
            "prompt_tokens": len(self._prompt_ids),
            "completion_tokens": len(self._versions),
            "cached_tokens": self._cached_tokens,
            "weight_version": progress.weight_version,
            **prompt_fields,
        }
        if self._return_logprob:
            meta["output_token_logprobs"] = logprobs
        if self._top_logprobs:
            meta["output_top_logprobs"] = tops
        if progress.finish_reason is not None:
            meta["weight_versions"] = version_spans(self._versions)
        return {"text": text, "output_ids": output_ids, "meta_info": meta}

    def _take_prompt(self, progress: Progress) -> dict[str, Any]:
        prompt = progress.prompt
        if prompt is None:
            return {}
        self._cached_tokens = prompt.cached_tokens
        fields: dict[str, Any] = {}
        if self._return_logprob:
            ids = self._prompt_ids[prompt.start : prompt.start + len(prompt.logprobs)]
            fields["input_token_logprobs"] = [
                self._entry(logprob, token_id) for logprob, token_id in zip(prompt.logprobs, ids, strict=True)
            ]
        if self._top_logprobs:
            fields["input_top_logprobs"] = [self._top_entries(top) for top in prompt.top_logprobs]
        if prompt.given_logprobs:
            fields["input_token_ids_logprobs"] = [self._top_entries(given) for given in prompt.given_logprobs]
        return fields

    def _entry(self, logprob: float | None, token_id: int) -> LogprobEntry:
        return [logprob, token_id, self._token_text(token_id)]

    def _top_entries(self, top: TopLogprobs | None) -> list[LogprobEntry] | None:
        return None if top is None else [self._entry(logprob, token_id) for logprob, token_id in top]
