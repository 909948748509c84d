"""Judge and teacher as processes on a real Kafka: nothing lost, nothing twice, nothing paid for twice."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from clawstream import topics
from clawstream.codec import header
from schemas.events import LlmCallEvent
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
PATIENCE_SECONDS = 120.0
KEY = "sk-flow-test"
HINT = "Keep to one short sentence."
HINT_ANSWER = f"[HINT_START]{HINT}[HINT_END]\\boxed{{1}}"


def wait_for(condition: Callable[[], Any], what: str, *processes: ServiceProcess) -> None:
    """Waits for other processes; fails early when one of them ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        for each in processes:
            assert each.process.poll() is None, f"a process ended:\n{each.text()}"
        assert time.monotonic() < deadline, f"in vain: {what}\n" + "\n".join(each.text() for each in processes)
        time.sleep(0.05)


@pytest.fixture
def log(broker: str, namespace: str) -> JudgedLog:
    made = JudgedLog(kafka_bus(broker, "tests"), namespace)
    made.create_topics()
    return made


@pytest.fixture
def rules(broker: str, namespace: str) -> str:
    return f"""\
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"

[judge]
spec = {{ backend = "rules", rules = [["thanks", 1], ["no", -1]] }}
"""


def replies(start: int, count: int) -> dict[int, str]:
    return {number: "thanks" if number % 2 else "no, too long" for number in range(start, start + count)}


def check_exactly_one_each(log: JudgedLog, numbers: range) -> None:
    turns = {f"turn-{number}": 1 for number in numbers}
    assert Counter(score.turn_id for score in log.scores()) == turns
    samples = log.samples()
    assert Counter(sample.turn_id for sample in samples) == turns
    for sample in samples:
        assert sample.reward == (1.0 if int(sample.turn_id.removeprefix("turn-")) % 2 else -1.0)
    for topic in (topics.JUDGE_DLQ, topics.TEACHER_DLQ):
        assert read_all(log.bus, log.topic(topic)) == []


def test_replies_become_samples_and_both_processes_stop_in_good_order(
    log: JudgedLog, rules: str, start_service: Callable[..., ServiceProcess]
) -> None:
    judge, teacher = start_service("judge", rules), start_service("teacher", rules)
    log.converse(replies(0, 40))
    wait_for(lambda: len(log.samples()) == 40, "40 samples", judge, teacher)
    check_exactly_one_each(log, range(40))
    for record in read_all(log.bus, log.topic(topics.SAMPLES)):
        assert (header(record.headers, "traceparent") or "").startswith("00-")
    assert judge.stop() == 0, judge.text()
    assert teacher.stop() == 0, teacher.text()


@pytest.mark.parametrize("victim", ["judge", "teacher"])
def test_killing_a_process_midway_loses_nothing_and_doubles_nothing(
    log: JudgedLog, rules: str, start_service: Callable[..., ServiceProcess], victim: str
) -> None:
    processes = {name: start_service(name, rules) for name in ("judge", "teacher")}
    done = log.scores if victim == "judge" else log.samples
    for round_number in range(3):
        before = len(done())
        log.converse(replies(100 * round_number, 100))
        wait_for(lambda before=before: len(done()) > before, f"some of round {round_number}", *processes.values())
        processes[victim].kill()
        processes[victim] = start_service(victim, rules)
    wait_for(lambda: len(log.samples()) >= 300, "300 samples", *processes.values())
    check_exactly_one_each(log, range(300))


class StubJudge:
    """An OpenAI-compatible endpoint that counts the calls for every prompt and can keep some of them waiting."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.answers_per_prompt: int | None = None
        self.knows_n = False
        """Whether a call may bring several answers; else it brings one, whatever it asks for."""
        self.keys: set[str] = set()
        self._changed = threading.Condition()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                prompt = str(body["messages"][0]["content"])
                wanted = body.get("n", 1) if stub.knows_n else 1
                answers = stub.admit(prompt, self.headers.get("authorization", ""), wanted)
                if not answers:
                    return
                text = HINT_ANSWER if "HINT_START" in prompt else r"\boxed{1}"
                choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
                answer = json.dumps({"choices": [choice] * answers}).encode()
                try:
                    self.send_response(200)
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                except ConnectionError:
                    return

            def log_message(self, format: str, *args: Any) -> None:
                """Not worth a line."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def admit(self, prompt: str, authorization: str, wanted: int) -> int:
        """How many answers this call is to get; 0 when it was kept until `stop_holding` and its client is gone."""
        with self._changed:
            self.keys.add(authorization)
            self.asked[prompt] += 1
            if self.answers_per_prompt is not None and self.answered[prompt] >= self.answers_per_prompt:
                self._changed.wait_for(lambda: self.answers_per_prompt is None)
                return 0
            most = self.answers_per_prompt
            answers = wanted if most is None else min(wanted, most - self.answered[prompt])
            self.answered[prompt] += answers
            return answers

    def stop_holding(self) -> None:
        with self._changed:
            self.answers_per_prompt = None
            self._changed.notify_all()


@pytest.fixture
def stub() -> Iterator[StubJudge]:
    made = StubJudge()
    yield made
    made.stop_holding()
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize(("hints", "knows_n"), [("none", False), ("judge", False), ("judge", True)])
def test_a_killed_judge_does_not_pay_twice(
    log: JudgedLog,
    broker: str,
    namespace: str,
    stub: StubJudge,
    start_service: Callable[..., ServiceProcess],
    hints: str,
    knows_n: bool,
) -> None:
    toml = f"""\
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"

[judge]
spec = {{ backend = "openai", model = "stub", votes = 3, hints = "{hints}", hint_votes = 3 }}
model = {{ urls = ["{stub.url}"], api_key_environment = "FLOW_KEY" }}
"""
    environment = {"FLOW_KEY": KEY}
    turns = 8
    prompts = turns * (2 if hints == "judge" else 1)  # A verdict prompt and a hint prompt for every turn.
    stub.answers_per_prompt, stub.knows_n = 2, knows_n
    calls = 2 if knows_n else 3  # For the three votes of a prompt: two come together, or each by itself.
    judge = start_service("judge", toml, environment)
    log.converse(dict.fromkeys(range(turns), "thanks"))

    def ledger() -> list[LlmCallEvent]:
        return log.events(topics.LLM_CALLS, LlmCallEvent)

    wait_for(lambda: len(ledger()) == 2 * prompts, "two of three votes of each input are in the ledger", judge)
    wait_for(lambda: stub.asked.total() == calls * prompts, "the third votes are being asked for", judge)
    assert log.scores() == []
    judge.kill()
    stub.stop_holding()

    judge = start_service("judge", toml, environment)
    wait_for(lambda: len(log.scores()) == turns, "every input has a score", judge)
    assert judge.stop() == 0, judge.text()

    # What was answered before the crash was not asked for again; only the third vote, which never was, is.
    assert set(stub.answered.values()) == {3}
    assert len(stub.answered) == prompts
    assert stub.asked.total() == (calls + 1) * prompts
    assert Counter(score.turn_id for score in log.scores()) == {f"turn-{number}": 1 for number in range(turns)}
    for score in log.scores():
        assert [vote.verdict for vote in score.votes] == [1, 1, 1]
        assert [vote.useful for vote in score.hint_votes] == ([True] * 3 if hints == "judge" else [])
        assert [hint.text for hint in score.hints] == ([HINT] if hints == "judge" else [])
        called = {vote.call_id for vote in [*score.votes, *score.hint_votes]}
        assert called <= {entry.call_id for entry in ledger()}
    assert stub.keys == {f"Bearer {KEY}"}
    assert KEY not in judge.text()


def test_a_wrong_setting_is_named_and_ends_the_process(
    log: JudgedLog, rules: str, start_service: Callable[..., ServiceProcess]
) -> None:
    judge = start_service("judge", rules + "votez = 3\n")
    assert judge.process.wait(PATIENCE_SECONDS) == 2
    assert "judge.votez" in judge.text()
    missing = start_service("judge", rules.replace('backend = "rules"', 'backend = "likelihood", model = "m"'))
    assert missing.process.wait(PATIENCE_SECONDS) == 2
    assert "judge.model.urls" in missing.text()
