"""How an engine should have been started, and what to say when it was not. Pure."""

from collections.abc import Mapping
from typing import Any

from clawstream.engine.wire import parse_weight_version


def start_flag_warnings(server_information: Mapping[str, Any]) -> list[str]:
    """What is wrong with the flags of an engine, from its `/server_info`, for people. Nothing here keeps it from
    serving; an engine that does not say gives no warning.

    - `--incremental-streaming-output`: without it every chunk repeats the whole answer, so that an answer of n tokens
      costs n * n / 2 of them on the wire (measured on SGLang 0.5.23: hundreds of megabytes for 4,000 tokens).
    - `--weight-version 0`: without it SGLang calls the weights it started with `default`, which is no number; the gate
      then loads version 0 explicitly before the first request.
    """
    warnings: list[str] = []
    if server_information.get("incremental_streaming_output") is False:
        warnings.append(
            "started without --incremental-streaming-output: every chunk repeats the whole answer, so long answers "
            "cost quadratic bytes; start it with that flag"
        )
    version = server_information.get("weight_version")
    if version is not None and parse_weight_version(version) is None:
        warnings.append(
            f"started without --weight-version 0: it calls its first weights {version!r}, which is no number; version "
            "0 is loaded explicitly before it gets traffic"
        )
    return warnings
