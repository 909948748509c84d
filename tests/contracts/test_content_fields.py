"""Which fields of which event are content: decided for every field, so that none is forgotten when one is added."""

import pytest

from schemas.events import EVENT_MODELS, Event

READABLE = {
    "clawstream.turn": """turn_id session_id parent_turn_id parent_evidence depth principal turn_type turn_type_reason
        client_profile response_id policy version_spans finish_reason truncated trainable untrainable_reason
        untrainable_detail tokenizer_fingerprint renderer engine imported_from rollout started_at first_token_at
        finished_at""",
    "clawstream.next-state": """next_state_id turn_id turn_ref session_id principal kind turn_trainable child_turn_id
        rollout observed_at""",
    "clawstream.score": """score_id next_state_id next_state_ref turn_id turn_ref session_id principal judge_spec_hash
        promotion_epoch explicit status verdict reward step_reward rollout tied votes hint_votes judged_at
        judge_seconds""",
    "clawstream.llm-call": """call_id next_state_id session_id judge_spec_hash purpose vote model prompt_tokens
        completion_tokens seconds called_at""",
    "clawstream.sample": """sample_id turn_id session_id principal policy revision turn_ref next_state_ref score_id
        judge_spec_hash sampling_temperature version_spans truncated reward step_reward rollout tokenizer_fingerprint
        created_at""",
}
READABLE["clawstream.replay-score"] = READABLE["clawstream.score"] + " replay_id"
"""Ids, references, numbers and words of fixed sets: a field that is neither here nor content is not decided yet."""

CONTENT_TYPES = (
    "NumberArray",
    "dict[str, JsonValue]",
    "JsonValue",
    "Hint]",
    "TeacherSignal",
    "TeacherRequest",
    "Feedback",
)


@pytest.mark.parametrize("model", EVENT_MODELS.values(), ids=lambda model: model.event_type)
def test_every_field_that_can_hold_content_is_declared_as_content(model: type[Event]) -> None:
    suspicious = {
        name
        for name, field in model.model_fields.items()
        if any(each in str(field.annotation) for each in CONTENT_TYPES)
    }
    assert suspicious <= model.content_fields
    assert model.content_fields <= set(model.model_fields)
    if model.content_fields:
        assert "session_id" in set(model.model_fields) - model.content_fields


@pytest.mark.parametrize("event_type", [name for name, model in EVENT_MODELS.items() if model.content_fields])
def test_every_other_field_is_known_to_be_none(event_type: str) -> None:
    model = EVENT_MODELS[event_type]
    assert set(model.model_fields) - model.content_fields == set(READABLE[event_type].split())
