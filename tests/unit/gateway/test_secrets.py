"""An API key, sent in every place where a client may put it, is found in no log, event, metric, answer or error."""

import base64
import hmac
from itertools import product
from typing import Any
from unittest import mock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import RequestRefused
from clawstream.rendering.renderer import PackageRenderer
from services.gateway.auth import Authenticator, hash_key
from services.gateway.redaction import presented_secrets, redact, redacted_headers, redacted_refusal
from tests.fixtures.gateway_app import running_gateway
from tests.fixtures.stub_engine import StubAnswer

KEYS = ("sk-CANARY-0123456789", "canary.key+of/another=form")
"""One in the usual form, and one that only shows itself as a key by where it stands."""
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def placements(key: str) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Path, headers and body fields of a request that carries `key` somewhere; always with the valid key too."""
    basic = base64.b64encode(f"user:{key}".encode()).decode()
    headers: list[dict[str, str]] = [
        {"authorization": f"Bearer {key}"},
        {"authorization": key},
        {"authorization": f"Basic {basic}"},
        {"x-api-key": key},
        {"api-key": key, "x-api-key": key},
        {"cookie": f"key={key}", "x-api-key": key},
        *(
            {"x-api-key": key, name: key}
            for name in (
                "x-session-id",
                "session_id",
                "x-session-affinity",
                "x-turn-type",
                "user-agent",
                "traceparent",
                "idempotency-key",
                "x-clawstream-store",
                "anthropic-version",
            )
        ),
        {"x-api-key": key, "x-task-id": key, "x-group-id": key, "x-rollout-id": key, "x-step-index": key},
        {"x-api-key": key, "x-task-id": key, "x-group-id": key, "x-rollout-id": key, "x-step-index": "1"},
    ]
    fields: list[dict[str, Any]] = [
        {},
        *({name: key} for name in ("model", "user", "api_key", "prompt_cache_key", "session_id", "tool_choice")),
        {"metadata": {"session_id": key, "user_id": f"x_session_{key}"}},
        {"response_format": {"type": key}},
        {"messages": [{"role": "user", "content": [{"type": key}]}]},
        {"input": [{"type": key}]},
        {"response_id": key, "score": 1, "feedback_id": key},
        {"stream": True},
    ]
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/feedback")
    found = [(path, header, {}) for path, header in product(paths, headers)]
    found += [(path, {"x-api-key": key}, field) for path, field in product(paths, fields)]
    found += [
        (f"/v1/chat/completions?{name}={httpx.QueryParams({'k': key})['k']}", {"x-api-key": key}, {})
        for name in ("key", "api_key", "access_token")
    ]
    found += [(f"/v1/{key}/none", {"x-api-key": key}, {}), (f"/v1/models/{key}", {"x-api-key": key}, {})]
    return found


@pytest.mark.parametrize("key", KEYS)
async def test_a_key_is_found_nowhere(
    tiny_renderer: PackageRenderer, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    seen: list[str] = []
    async with (
        running_gateway(tiny_renderer, authenticator=Authenticator({"ada": [hash_key(key)]})) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url) as client,
    ):
        statuses: set[int] = set()
        for path, headers, fields in placements(key):
            body = {"messages": MESSAGES, "input": "hi", **fields}
            answer = await client.post(path, json=body, headers=headers)
            seen.append(answer.text + str(answer.headers))
            statuses.add(answer.status_code)
        for error in (RuntimeError("broken"), RequestRefused(f"refused {key}")):
            gateway.conversations.place_error = error
            for path, stream in product(("/v1/chat/completions", "/v1/responses", "/v1/messages"), (True, False)):
                body = {"messages": MESSAGES, "input": "hi", "stream": stream}
                answer = await client.post(f"{path}?key={key}", json=body, headers={"x-api-key": key})
                seen.append(answer.text + str(answer.headers))
                statuses.add(answer.status_code)
        gateway.conversations.place_error = None
        gateway.engine.enqueue(*(StubAnswer(status=400, error_body=f'{{"error": "{key}"}}') for _ in range(2)))
        for stream in (True, False):
            answer = await client.post(
                "/v1/chat/completions", json={"messages": MESSAGES, "stream": stream}, headers={"x-api-key": key}
            )
            seen.append(answer.text)
        assert {200, 400, 401, 404, 500} <= statuses
        recorded = [turn.model_dump_json() for turn in gateway.conversations.turns]
        recorded += [repr(request) for request in gateway.conversations.placed]
        recorded += [repr(said) for said in gateway.conversations.said]
        recorded += [str(request) for request in gateway.engine.requests]
        seen.append((await client.get("/metrics", headers={"x-api-key": key})).text)
        seen.append((await client.get("/status", headers={"x-api-key": key})).text)
    assert len(recorded) > 50
    texts = [*seen, *recorded, *capfd.readouterr()]
    assert not [text for text in texts if key in text or hash_key(key) in text]


def test_every_known_key_is_compared_in_constant_time() -> None:
    """Neither the first match nor a wrong first letter ends the comparison early."""
    keys = {"ada": [hash_key("k1"), hash_key("k2")], "bob": [hash_key("k3")]}
    with mock.patch("services.gateway.auth.hmac.compare_digest", wraps=hmac.compare_digest) as compare:
        assert Authenticator(keys).principal({"x-api-key": "k1"}) == "ada"
        with pytest.raises(RequestRefused):
            Authenticator(keys).principal({"x-api-key": "other"})
    assert compare.call_count == 6


KEYS = st.text(min_size=8, max_size=30).filter(lambda text: len(text.strip()) >= 8)
"""Shorter ones are placeholders; HTTP cuts the space around a header's value."""


@given(before=st.text(max_size=20), secret=KEYS, after=st.text(max_size=20))
def test_no_secret_survives(before: str, secret: str, after: str) -> None:
    headers = {"authorization": f"Bearer {secret}", "x-session-id": before + secret + after}
    secrets = presented_secrets(headers, {})
    left = redacted_headers(headers, secrets)
    assert set(left) == {"x-session-id"}
    assert secret.strip() not in left["x-session-id"] or secret.strip() in before + after
    assert redact(before, ()) == before or "sk-" in before


def test_placeholders_are_no_secrets_and_refusals_keep_their_meaning() -> None:
    assert presented_secrets({"authorization": "Bearer x"}, {"key": "short"}) == ("Bearer x",)
    assert redact("extra x", presented_secrets({"authorization": "Bearer EMPTY"}, {})) == "extra x"
    told = redacted_refusal(
        RequestRefused("no sk-abcdefghijklmnop", status=404, code="c", parameter="p", retry_after_seconds=2.0), ()
    )
    assert "sk-" not in str(told)
    assert (told.status, told.code, told.parameter, told.retry_after_seconds) == (404, "c", "p", 2.0)
