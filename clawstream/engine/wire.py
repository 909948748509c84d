"""SGLang's `/generate` answers as our types: pure, no I/O. Sources: SGLang 0.5.23, measured.

A streamed chunk holds `output_ids` and `meta_info` with `output_token_logprobs` (`[log-prob, id, text]` each),
`completion_tokens` (always cumulative), `finish_reason`, `output_top_logprobs` where asked for (rows of such entries)
and, in the last chunk, `weight_versions`. Ids and log-probs are cumulative by default and incremental with
`--incremental-streaming-output`; which one it is, is found here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from clawstream.engine.interface import GenerationChunk, ScoredTokens, TopLogprobs
from clawstream.errors import EngineProtocolError
from schemas.events.base import VersionSpan

Json = Mapping[str, Any]


def parse_weight_version(value: object) -> int | None:
    """A weight version, or None when it is not a number (SGLang says `default` before the first update)."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() else None


def parse_version_spans(meta: Json) -> list[VersionSpan]:
    """Spans of `weight_versions`; empty when there are none or one of them has no numeric version."""
    spans: list[VersionSpan] = []
    for entry in cast("Sequence[Json]", meta.get("weight_versions") or ()):
        version = parse_weight_version(entry.get("version"))
        if version is None:
            return []
        spans.append(VersionSpan(weight_version=version, start=int(entry["start"]), end=int(entry["end"])))
    return spans


def parse_finish(meta: Json) -> tuple[str | None, Json]:
    """Finish reason and the engine's record of it."""
    record = meta.get("finish_reason")
    if record is None:
        return None, {}
    if isinstance(record, str):
        return record, {"type": record}
    if isinstance(record, Mapping):
        detail = cast("Json", record)
        return str(detail.get("type")), detail
    raise EngineProtocolError(f"meta_info.finish_reason is neither null, text nor an object: {record!r}")


@dataclass(slots=True)
class ChunkReader:
    """Turns the chunks of one streamed answer into what each of them added.

    A chunk is cumulative when it holds as many ids as `completion_tokens` says were sampled so far, and incremental
    when it holds as many as are new. Log-probs are read separately: some versions accumulate only one of the two.
    A log-prob that is null, or stands beside another id than the one sampled, becomes None. Missing or surplus
    log-probs are passed on as they are: the caller must compare lengths.
    """

    engine: str
    _ids: list[int] = field(default_factory=list[int])
    _logprobs_seen: int = 0
    _ids_cumulative: bool | None = None
    _logprobs_cumulative: bool | None = None

    def read(self, chunk: Json) -> GenerationChunk:
        """What `chunk` added. Raises EngineProtocolError when it is not the next chunk of this answer."""
        meta = cast("Json | None", chunk.get("meta_info"))
        output_ids = cast("list[int] | None", chunk.get("output_ids"))
        if meta is None or output_ids is None:
            raise EngineProtocolError(
                f"engine {self.engine}: a chunk without meta_info or output_ids; it cannot give exact ids"
            )
        finish_reason, finish_detail = parse_finish(meta)
        new_ids = self._new_ids(output_ids, meta.get("completion_tokens"))
        new_logprobs = self._new_logprobs(
            cast("Sequence[Sequence[Any]]", meta.get("output_token_logprobs") or ()), new_ids
        )
        self._ids += new_ids
        return GenerationChunk(
            token_ids=new_ids,
            logprobs=new_logprobs,
            top_logprobs=_new_top_logprobs(meta.get("output_top_logprobs"), len(new_ids)),
            finish_reason=finish_reason,
            finish_detail=finish_detail,
            version_spans=parse_version_spans(meta) if finish_reason is not None else [],
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )

    def _new_ids(self, output_ids: list[int], completion_tokens: int | None) -> list[int]:
        seen = len(self._ids)
        if seen == 0:
            return list(output_ids)
        if self._ids_cumulative is None and output_ids:
            if completion_tokens == len(output_ids):
                self._ids_cumulative = True
            elif completion_tokens == seen + len(output_ids):
                self._ids_cumulative = False
            else:
                raise EngineProtocolError(
                    f"engine {self.engine}: {len(output_ids)} ids in a chunk after {seen}, but completion_tokens is "
                    f"{completion_tokens}: neither cumulative nor incremental"
                )
        if not self._ids_cumulative:
            return list(output_ids)
        if output_ids[:seen] != self._ids:
            raise EngineProtocolError(f"engine {self.engine}: a cumulative chunk changed ids that were already sent")
        return output_ids[seen:]

    def _new_logprobs(self, entries: Sequence[Sequence[Any]], new_ids: list[int]) -> list[float | None]:
        if self._logprobs_cumulative is None and self._logprobs_seen and entries:
            echoed = [entry[1] for entry in entries[: self._logprobs_seen]]
            self._logprobs_cumulative = len(entries) > len(new_ids) and echoed == self._ids[: self._logprobs_seen]
        if self._logprobs_cumulative:
            entries = entries[self._logprobs_seen :]
        self._logprobs_seen += len(entries)
        same_length = len(entries) == len(new_ids)
        return [
            None if entry[0] is None or (same_length and entry[1] != new_ids[index]) else float(entry[0])
            for index, entry in enumerate(entries)
        ]


def _new_top_logprobs(rows: Sequence[Sequence[Sequence[Any]] | None] | None, new_tokens: int) -> list[TopLogprobs]:
    """The newest rows, whether a chunk holds all or only those. They are for people to look at, so that what is missing
    is left empty: a row cannot be checked against the sampled id, which need not be in it.
    """
    if not rows or not new_tokens:
        return []
    newest = [
        [(int(entry[1]), float(entry[0])) for entry in row or () if entry[0] is not None] for row in rows[-new_tokens:]
    ]
    return newest + [[] for _ in range(new_tokens - len(newest))]


def parse_scores(
    answer: Json,
    response_ids: Sequence[int],
    engine: str,
    *,
    top_k: int = 0,
    given_ids: Sequence[int] = (),
    last_prompt_id: int | None = None,
) -> ScoredTokens:
    """Log-probs of given tokens, from a call with `logprob_start_len` at the last token before them.

    The first entry is always null: nothing precedes it. Every echoed id is compared, that of the first entry too when
    `last_prompt_id` is given, so that nothing can be off by one. Raises EngineProtocolError, which names the position,
    when an echoed id differs, a log-prob is missing or not finite, or the numbers of entries do not fit.
    """
    meta = cast("Json", answer.get("meta_info") or {})
    entries = cast("Sequence[Sequence[Any]]", meta.get("input_token_logprobs") or ())
    if len(entries) != len(response_ids) + 1:
        raise EngineProtocolError(
            f"engine {engine}: asked to score {len(response_ids)} tokens, got {max(len(entries) - 1, 0)} log-probs"
        )
    if last_prompt_id is not None and entries[0][1] != last_prompt_id:
        raise EngineProtocolError(
            f"engine {engine}: scoring began after id {entries[0][1]}, but the prompt ends with {last_prompt_id}"
        )
    logprobs: list[float] = []
    for index, (entry, expected_id) in enumerate(zip(entries[1:], response_ids, strict=True)):
        # SGLang 0.5.23 echoes the vocabulary's last id as 0 (it takes it for an image's padding); nothing is above it.
        is_last_id = entry[1] == 0 and expected_id == max(response_ids)
        if entry[1] != expected_id and not is_last_id:
            raise EngineProtocolError(
                f"engine {engine}: scored id {entry[1]} at token {index}, asked for {expected_id}"
            )
        logprobs.append(_finite(entry[0], index, engine))
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    if top_k:
        rows = _rows(meta, "input_top_logprobs", len(response_ids), top_k, engine)
        top_ids = [[int(entry[1]) for entry in row] for row in rows]
        top_logprobs = [[_finite(entry[0], index, engine) for entry in row] for index, row in enumerate(rows)]
    given_logprobs: list[list[float]] | None = None
    if given_ids:
        rows = _rows(meta, "input_token_ids_logprobs", len(response_ids), len(given_ids), engine)
        by_id = [{int(entry[1]): _finite(entry[0], index, engine) for entry in row} for index, row in enumerate(rows)]
        missing = next((index for index, row in enumerate(by_id) if not row.keys() >= set(given_ids)), None)
        if missing is not None:
            raise EngineProtocolError(f"engine {engine}: log-probs of other ids than the given ones at token {missing}")
        given_logprobs = [[row[token_id] for token_id in given_ids] for row in by_id]
    return ScoredTokens(
        token_ids=list(response_ids),
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        weight_version=parse_weight_version(meta.get("weight_version")),
        given_logprobs=given_logprobs,
        engine=engine,
    )


def parse_token_texts(answer: Json, token_ids: Sequence[int], engine: str) -> list[str | None]:
    """Third fields of the log-prob entries of all input tokens. Raises EngineProtocolError when ids differ."""
    meta = cast("Json", answer.get("meta_info") or {})
    entries = cast("Sequence[Sequence[Any]]", meta.get("input_token_logprobs") or ())
    echoed = [entry[1] for entry in entries]
    if echoed != list(token_ids):
        raise EngineProtocolError(
            f"engine {engine}: it gives no log-probs of prompt tokens: {len(token_ids)} ids were sent, "
            f"{len(echoed)} came back{'' if len(echoed) != len(token_ids) else ', others'}"
        )
    return [entry[2] if len(entry) > 2 and isinstance(entry[2], str) else None for entry in entries]


def _finite(value: float | None, index: int, engine: str) -> float:
    if value is None or not math.isfinite(value):
        raise EngineProtocolError(f"engine {engine}: log-prob of token {index} is {value}")
    return float(value)


def _rows(meta: Json, field_name: str, tokens: int, width: int, engine: str) -> Sequence[Sequence[Sequence[Any]]]:
    """Rows of several entries for each response token: those after the null one of the last prompt token."""
    rows = cast("Sequence[Sequence[Sequence[Any]] | None]", meta.get(field_name) or ())[1:]
    found = [row for row in rows if row is not None and len(row) == width]
    if len(found) != tokens or len(rows) != tokens:
        raise EngineProtocolError(
            f"engine {engine}: {field_name}: expected {tokens} rows of {width} entries, got {len(rows)} rows, of which "
            f"{len(found)} are whole"
        )
    return found
