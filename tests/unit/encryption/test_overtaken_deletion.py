"""`clawstream forget` beside a rotation or another `forget`: who is overtaken is told by whom, and what to do."""

import os
import uuid
from collections.abc import Callable

import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.encryption.deletion import delete_keys, keys_of_session
from clawstream.encryption.master_key import MasterKey, MasterKeys
from clawstream.encryption.rotation import Rotation
from clawstream.encryption.session_keys import SessionKeys
from clawstream.errors import Overtaken
from clawstream.forgetting.batches import BatchTreatment
from clawstream.forgetting.forget import Forgetting
from clawstream.forgetting.survey import Subject
from clawstream.topics import topic_definitions
from clawstream.topics_admin import apply_topics
from schemas.events.forgotten import ForgottenKind

NAMESPACE = "test"
OLD, NEW = MasterKey(b"o" * 32), MasterKey(b"n" * 32)


def once_before(bus: MemoryBus, operation: str, what: Callable[[], object]) -> None:
    """Does this in the middle of somebody else's transaction."""
    done: list[bool] = []

    def fault(name: str, when: str) -> None:
        if (name, when) == (operation, "before") and not done:
            done.append(True)
            what()

    bus.set_fault(fault)


@pytest.mark.parametrize("operation", ["produce", "commit"])
def test_a_deletion_that_a_rotation_overtakes_says_so(
    bus: MemoryBus, process: Callable[..., SessionKeys], operation: str
) -> None:
    key_id, _ = process(OLD).for_writing("session", "alice")
    masters = MasterKeys(lambda: (OLD, NEW))
    rotation = Rotation(bus, NAMESPACE, masters, clock=ManualClock(), random_bytes=os.urandom, settle_seconds=0.0)
    once_before(bus, operation, lambda: rotation.run(NEW))
    with pytest.raises(Overtaken) as raised:
        delete_keys(bus, NAMESPACE, keys_of_session(bus, NAMESPACE, "session"), "tests")
    words = str(raised.value)
    assert "`clawstream keys rotate`, or another `clawstream forget`, began meanwhile" in words
    assert "run `clawstream forget` again" in words
    assert "started twice" not in words
    assert keys_of_session(bus, NAMESPACE, "session") == [key_id.encode()]
    delete_keys(bus, NAMESPACE, keys_of_session(bus, NAMESPACE, "session"), "tests")
    assert keys_of_session(bus, NAMESPACE, "session") == []


def test_a_request_that_another_overtakes_says_so() -> None:
    bus = MemoryBus()
    apply_topics(bus.admin(), NAMESPACE, 1, topic_definitions().values())

    def forgetting() -> Forgetting:
        return Forgetting(bus, NAMESPACE, ManualClock())

    subject = Subject(ForgottenKind.SESSION, str(uuid.UUID(int=1)))
    once_before(bus, "produce", lambda: forgetting().run(subject, BatchTreatment.KEEP))
    with pytest.raises(Overtaken, match=r"another `clawstream forget` began meanwhile.*run it again"):
        forgetting().run(subject, BatchTreatment.KEEP)
    assert forgetting().request(subject) is not None
