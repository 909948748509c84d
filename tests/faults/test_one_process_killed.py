"""kill -9 of any one process in the middle of conversations: no turn is lost, none is trained twice.

Judged by kafka-python, which shares no code with the client that wrote the log.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.chaos import Chaos
from tests.fixtures.system import RunningSystem, wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

CONVERSATIONS = 16


@pytest.mark.parametrize(
    "victim",
    [
        "engine-0",
        "gateway-0",
        "trainer",
        # In every CI run a broker is killed by test_broker_away, and workers by test_crash_points.
        *(pytest.param(each, marks=pytest.mark.chaos_full) for each in ("broker", "judge", "teacher")),
    ],
)
def test_nothing_is_lost_and_nothing_trained_twice(
    start_system: Callable[..., RunningSystem], victim: str, chaos: Chaos
) -> None:
    system = start_system(batch_size=4, max_batch_age_seconds=5.0, own_broker=victim == "broker")
    under_way = threading.Semaphore(0)

    def converse(number: int) -> str:
        response = system.converse(number)
        under_way.release()
        return response

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(converse, number) for number in range(CONVERSATIONS)]
        for _ in range(CONVERSATIONS // 4):
            under_way.acquire()
        system.kill(victim)
        delivered = {answer.result() for answer in answers}
    assert len(delivered) == CONVERSATIONS

    turns = wait_for(
        lambda: (found := system.events("turns.v1")) and delivered <= {t["response_id"] for t in found} and found,
        "every delivered answer is on the log",
    )
    copies = Counter(turn["turn_id"] for turn in turns)
    assert set(copies.values()) == {1}
    judged = {turn["turn_id"] for turn in turns if turn["response_id"] in delivered}

    def trained() -> list[str]:
        return [sample["turn_id"] for step in system.events("train-steps.v1") for sample in step["samples"]]

    wait_for(lambda: judged <= set(trained()), "every judged answer is trained")
    assert max(Counter(trained()).values()) == 1
    versions = [step["weight_version"] for step in system.events("train-steps.v1") if step["weight_version"]]
    assert versions == sorted(set(versions)), "versions rise and none is used twice"
    wait_for(lambda: system.engine_version() == str(versions[-1]), "the newest version is in service")
    chaos.audited(system.layout.kafka, system.layout.namespace)
    chaos.counts.crashes_survived += 1
