"""The partition of a key, against the client that shares no code with ours."""

import hypothesis.strategies as st
from hypothesis import example, given
from kafka.partitioner.default import murmur2 as reference_murmur2

from clawstream.topics import full_name, murmur2, partition_for


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff\xff\xff")
@example(b"\x80" * 7)
def test_murmur2_is_kafkas(data: bytes) -> None:
    assert murmur2(data) == reference_murmur2(data)


@given(key=st.text(min_size=1), partitions=st.integers(1, 48))
def test_a_key_belongs_to_the_partition_that_java_chooses(key: str, partitions: int) -> None:
    assert partition_for(key, partitions) == (reference_murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def test_names_carry_the_namespace() -> None:
    assert full_name("clawstream", "turns.v1") == "clawstream.turns.v1"
