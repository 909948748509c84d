"""The pure parts of the surface: keys, headers, bodies, sampling, settings."""

from http import HTTPStatus
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import (
    ClawstreamError,
    ContractError,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
    NoEngineReady,
    OutboxError,
    RequestRefused,
    SettingsError,
)
from clawstream.rendering.renderer import PackageRenderer
from clawstream.settings import load_settings
from schemas.events.base import TurnType
from services.gateway.auth import LOCAL_PRINCIPAL, Authenticator, hash_key
from services.gateway.errors import error_body, error_headers, to_refusal
from services.gateway.feedback import read_feedback
from services.gateway.ports import RolloutOutcome
from services.gateway.request_headers import (
    SESSION_HINT_HEADERS,
    clean_identifier,
    rollout_position,
    session_done,
    session_hint,
    trace_id,
    turn_type,
)
from services.gateway.request_json import MAX_DEPTH, parse_json_object
from services.gateway.sampling import SamplingPlan, plan_sampling
from services.gateway.settings import GatewaySettings
from services.gateway.surfaces.answer_request import AnswerRequest
from services.gateway.surfaces.chat.request import read_chat_request
from tests.fixtures.gateway_app import running_gateway

CANARY = "sk-CANARY-0123456789"


# Keys


def test_keys_name_principals() -> None:
    authenticator = Authenticator({"ada": [hash_key("k1"), hash_key("k2")], "bob": [hash_key(CANARY).upper()]})
    assert authenticator.principal({"authorization": "Bearer k2"}) == "ada"
    assert authenticator.principal({"authorization": f"bearer {CANARY}"}) == "bob"
    assert authenticator.principal({"x-api-key": "k1"}) == "ada"


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer "}, {"authorization": f"Basic {CANARY}"}, {"authorization": "Bearer no"}]
)
def test_other_keys_are_refused_without_repeating_them(headers: dict[str, str]) -> None:
    with pytest.raises(RequestRefused) as caught:
        Authenticator({"ada": [hash_key("k1")]}).principal(headers)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert CANARY not in str(caught.value)


def test_without_keys_everyone_is_local() -> None:
    assert Authenticator({}).principal({"authorization": f"Bearer {CANARY}"}) == LOCAL_PRINCIPAL


def settings_with(**values: Any) -> GatewaySettings:
    engines = [{"name": "one", "url": "http://127.0.0.1:1"}]
    return load_settings(
        GatewaySettings,
        section="gateway",
        file=None,
        environment={},
        overrides={"model_path": "model", "engines": engines, **values},
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_an_open_address_needs_keys(host: str) -> None:
    with pytest.raises(SettingsError, match="loopback only"):
        settings_with(host=host)
    assert settings_with(host=host, api_keys={"ada": [hash_key("k")]}).host == host


def test_a_plain_key_in_the_settings_is_refused_and_loopback_needs_none() -> None:
    with pytest.raises(SettingsError, match="api_keys"):
        settings_with(api_keys={"ada": [CANARY]})
    assert settings_with(host="::1").api_keys == {}


async def test_a_key_is_found_nowhere(tiny_renderer: PackageRenderer, capfd: pytest.CaptureFixture[str]) -> None:
    authenticator = Authenticator({"ada": [hash_key(CANARY)]})
    async with running_gateway(tiny_renderer, authenticator=authenticator) as gateway:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(base_url=gateway.base_url) as client:
            seen: list[str] = []
            for headers in ({"authorization": f"Bearer {CANARY}"}, {"x-api-key": CANARY}, {"authorization": CANARY}):
                for path in (f"/v1/chat/completions?key={CANARY}", f"/v1/{CANARY}/none", "/v1/feedback"):
                    answer = await client.post(path, json=body, headers=headers)
                    if CANARY not in path.split("?")[0]:  # a client's own path is named back to it
                        seen.append(answer.text + str(answer.headers))
            seen.append((await client.get("/metrics", headers={"x-api-key": CANARY})).text)
            for path in ("/metrics", "/status", "/v1/models", "/v1/feedback", "/v1/chat/completions"):
                method = "POST" if path in ("/v1/feedback", "/v1/chat/completions") else "GET"
                assert (await client.request(method, path, json=body if method == "POST" else None)).status_code == 401
            assert (await client.get("/healthz")).status_code == 200
        assert {turn.principal for turn in gateway.conversations.turns} == {"ada"}
        seen += [turn.model_dump_json() for turn in gateway.conversations.turns]
        seen += [str(request) for request in gateway.engine.requests]
    assert not any(CANARY in text for text in [*seen, *capfd.readouterr()])


# Headers


@given(value=st.text(max_size=300))
def test_any_identifier_is_fit_for_a_key(value: str) -> None:
    found = clean_identifier(value)
    assert (found is None) == (value.strip() == "")
    if found is not None:
        assert found.isascii()
        assert found.isprintable()
        assert 0 < len(found) <= 200
        assert found == clean_identifier(f" {value} ")


def test_hints_follow_their_order() -> None:
    headers = {"x-session-affinity": "second", "session_id": "", "thread-id": "third"}
    assert session_hint(headers, SESSION_HINT_HEADERS, "body") == "second"
    assert session_hint({}, SESSION_HINT_HEADERS, "body") == "body"
    assert session_hint({}, SESSION_HINT_HEADERS, None) is None


def test_turn_type_and_end_of_session() -> None:
    assert turn_type({"x-turn-type": "Side"}) is TurnType.SIDE
    assert turn_type({}) is None
    with pytest.raises(RequestRefused, match="main or side"):
        turn_type({"x-turn-type": "other"})
    assert [session_done({"x-session-done": value}) for value in ("true", "1", "no", "")] == [True, True, False, False]


@pytest.mark.parametrize(
    "value", ["", "00-xyz", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{'A' * 32}-00f067aa0ba902b7-01"]
)
def test_a_malformed_trace_is_no_trace(value: str) -> None:
    assert trace_id({"traceparent": value}) is None


def test_a_rollout_is_whole_or_absent() -> None:
    whole = {"x-task-id": "t", "x-group-id": "g", "x-rollout-id": "r", "x-step-index": "0"}
    assert rollout_position({}) is None
    assert rollout_position(whole) is not None
    with pytest.raises(RequestRefused, match="missing: x-group-id"):
        rollout_position({**whole, "x-group-id": ""})
    with pytest.raises(RequestRefused, match="whole number"):
        rollout_position({**whole, "x-step-index": "-1"})


# Bodies


@given(body=st.binary(max_size=60))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    try:
        found = parse_json_object(body)
    except RequestRefused as refusal:
        found = {"status": refusal.status}
    assert isinstance(found, dict)
    str(found).encode()


def test_json_that_only_lenient_readers_take() -> None:
    assert parse_json_object(rb'{"a\ud800": ["\udc00x", "\ud83d\ude00"]}') == {"a\ufffd": ["\ufffdx", "😀"]}
    assert parse_json_object(b'{"a": 123456789012345678901234567890, "b": "\\ud800"}')["a"] == pytest.approx(
        1.2345678e29
    )
    for body in (b'{"a": NaN, "b": "\\ud800"}', b'{"a": 1e999}', b"\xef\xbb\xbf", b"null"):
        with pytest.raises(RequestRefused):
            parse_json_object(body)


def chat_request(**values: Any) -> AnswerRequest:
    return read_chat_request({"messages": [{"role": "user", "content": "hi"}], **values}).answer


def test_null_is_absent_and_numbers_may_be_written_as_floats() -> None:
    names = ("temperature", "top_p", "max_tokens", "stop", "tools", "seed", "stream", "response_format", "n", "model")
    assert chat_request(**dict.fromkeys(names)) == chat_request()
    assert chat_request(max_tokens=8.0, n=1.0).max_tokens == 8
    assert chat_request(max_tokens=8, max_completion_tokens=4).max_tokens == 4
    assert chat_request(stop="").stop == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("stream", "yes"),
        ("temperature", 3),
        ("temperature", True),
        ("top_p", -0.1),
        ("max_tokens", 1.5),
        ("max_completion_tokens", -1),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("tools", {"a": 1}),
        ("tools", ["x"]),
        ("logit_bias", [1]),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"the": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "much"}),
        ("top_logprobs", 21),
        ("top_logprobs", 5),
        ("n", 3),
        ("functions", [{}]),
    ],
)
def test_what_cannot_be_honoured_names_its_parameter(field: str, value: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        chat_request(**{field: value})
    assert (caught.value.status, caught.value.parameter) == (400, field)


@pytest.mark.parametrize(
    "body",
    [
        {"score": 1},
        {"response_id": "x"},
        {"response_id": "x", "score": True},
        {"response_id": "x", "score": float("nan")},
        {"response_id": "x", "score": 1, "text": 5},
        {"response_id": "x", "score": 1, "source": ""},
    ],
)
def test_feedback_that_says_nothing_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        read_feedback(body, {})


def test_the_outcome_of_a_rollout_is_read() -> None:
    read = read_feedback({"rollout_id": "r", "score": -1, "steps": 3, "step_scores": [1, None, -0.5]}, {})
    assert read == RolloutOutcome(
        rollout_id="r",
        score=-1.0,
        steps=3,
        step_scores={0: 1.0, 2: -0.5},
        text=None,
        source="environment",
        feedback_id="outcome:r",
    )


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"response_id": "x"}, "rollout_id"),
        ({"rollout_id": 7}, "rollout_id"),
        ({"rollout_id": " "}, "rollout_id"),
        ({"score": 2}, "score"),
        ({"source": "user"}, "source"),
        ({"steps": 0}, "steps"),
        ({"steps": True}, "steps"),
        ({"step_scores": 1}, "step_scores"),
        ({"step_scores": [0, "good"]}, "step_scores"),
        ({"step_scores": [float("nan")]}, "step_scores"),
    ],
)
def test_a_wrong_outcome_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_feedback({"rollout_id": "r", "score": 1, **wrong}, {})
    assert (caught.value.status, caught.value.parameter) == (400, field)


# Sampling


def plan(prompt_tokens: int = 10, **values: Any) -> SamplingPlan:
    return plan_sampling(
        chat_request(**values),
        prompt_tokens=prompt_tokens,
        max_context_tokens=100,
        default_max_tokens=50,
        default_temperature=0.7,
        stop_token_ids=[2],
        vocabulary_size=512,
    )


def test_defaults_leave_the_distribution_as_it_is() -> None:
    assert plan().engine_parameters == {"temperature": 0.7, "max_new_tokens": 50, "stop_token_ids": [2]}
    assert plan().recorded.is_exact


@pytest.mark.parametrize(
    ("field", "value", "name", "sent"),
    [
        ("top_p", 0.5, "top_p", 0.5),
        ("top_p", 0, "top_p", 1e-6),
        ("top_k", 5, "top_k", 5),
        ("min_p", 0.1, "min_p", 0.1),
        ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
        ("presence_penalty", -0.5, "presence_penalty", -0.5),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}, "logit_bias", {"5": 1}),
        ("min_tokens", 3, "min_new_tokens", 3),
        ("response_format", {"type": "json_object"}, "json_schema", '{"type": "object"}'),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}},
            "json_schema",
            '{"type":"array"}',
        ),
    ],
)
def test_what_changes_the_distribution_is_sent_and_known(field: str, value: Any, name: str, sent: Any) -> None:
    found = plan(**{field: value})
    assert found.engine_parameters[name] == sent
    assert not found.recorded.is_exact


@pytest.mark.parametrize(
    ("field", "value"), [("top_p", 1), ("top_k", -1), ("top_k", 0), ("seed", 3), ("stop", "x"), ("min_tokens", 0)]
)
def test_what_does_not_change_it_stays_trainable(field: str, value: Any) -> None:
    assert plan(**{field: value}).recorded.is_exact


def test_the_cap_fits_the_context_or_the_request_is_refused() -> None:
    assert plan(prompt_tokens=90, max_tokens=100).recorded.max_new_tokens == 9
    assert plan(prompt_tokens=98).recorded.max_new_tokens == 1
    with pytest.raises(RequestRefused, match="100 tokens") as caught:
        plan(prompt_tokens=99)
    assert caught.value.code == "context_length_exceeded"


def test_a_bias_for_a_token_that_does_not_exist_is_refused() -> None:
    assert plan(logit_bias={"0511": 1, "7": None}).engine_parameters["logit_bias"] == {"511": 1}
    with pytest.raises(RequestRefused, match="512 is no token id") as caught:
        plan(logit_bias={"5": 1, "512": 1})
    assert (caught.value.status, caught.value.parameter) == (400, "logit_bias")


def test_an_unknown_response_format_is_refused() -> None:
    with pytest.raises(RequestRefused, match="response_format"):
        plan(response_format={"type": "xml"})


# Errors


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (EngineRejected("x", status=400, body="bad"), 400, None),
        (EngineRejected("x", status=429, body="busy"), 429, "2"),
        (EngineRejected("x", status=200, body="odd"), 400, None),
        (NoEngineReady("x", retry_after_seconds=0.3), 503, "1"),
        (EngineUnavailable("x"), 503, "2"),
        (EngineTimeout("x"), 504, "2"),
        (EngineProtocolError("x"), 502, None),
        (EngineUnreachable("x"), 503, "2"),
        (OutboxError("x"), 503, "2"),
        (ClawstreamError("x"), 500, None),
        (ContractError("x"), 400, None),
    ],
)
def test_every_error_has_a_status(error: Any, status: int, retry_after: str | None) -> None:
    refusal = to_refusal(error)
    assert refusal.status == status
    assert error_headers(refusal).get("retry-after") == retry_after
    assert set(error_body(refusal)["error"]) == {"message", "type", "param", "code"}
    # In mid-stream there is no status: agents know by these words that they may ask again.
    said = error_body(refusal)["error"]["message"]
    assert said.startswith(f"{HTTPStatus(status).phrase.lower()}: ") == (status >= 500)


def test_an_engines_own_words_about_the_context_are_recognised() -> None:
    error = EngineRejected("x", status=400, body="Requested token count exceeds the model's maximum context length")
    assert to_refusal(error).code == "context_length_exceeded"


@pytest.mark.parametrize("field", ["seed", "top_k", "min_tokens", "max_tokens", "max_completion_tokens"])
def test_a_whole_number_that_no_engine_can_hold_is_refused_and_named(field: str) -> None:
    for value in (2**63, 10**25):
        body = parse_json_object(
            b'{"messages": [{"role": "user", "content": "x"}], "%s": %d}' % (field.encode(), value)
        )
        with pytest.raises(RequestRefused, match="must be at most") as refusal:
            read_chat_request(body)
        assert (refusal.value.status, refusal.value.parameter) == (400, field)


@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_body_that_could_not_be_written_again_is_refused(opened: bytes, closed: bytes) -> None:
    for depth in (MAX_DEPTH, 200, 250, 300, 900, 100_000):
        with pytest.raises(RequestRefused) as refusal:
            parse_json_object(b'{"tools": ' + opened * depth + b"1" + closed * depth + b"}")
        assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")
    fits = MAX_DEPTH - 1
    assert parse_json_object(b'{"tools": ' + opened * fits + b"1" + closed * fits + b"}")
