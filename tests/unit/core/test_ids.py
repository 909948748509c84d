"""Ids are the uuid5 of RFC 9562 of what caused them, made without the library's detours."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from clawstream import ids


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.integers(), max_size=5),
)
def test_a_derived_id_is_the_librarys_uuid5(kind: str, causes: list[str | int]) -> None:
    expected = uuid.uuid5(ids.NAMESPACE, "\x1f".join([kind, *map(str, causes)]))
    found = ids.derive(kind, *causes)
    assert found == str(expected)
    assert (uuid.UUID(found).version, uuid.UUID(found).variant) == (5, uuid.RFC_4122)


def test_ids_that_are_on_logs_already_never_change() -> None:
    assert ids.call_id("n", "s", "verdict", 0) == "137e9121-c54c-5791-901b-20644c157343"
    assert ids.score_id("n", "s") == "72537307-1acb-50f0-8645-90ea4e1f82a6"
