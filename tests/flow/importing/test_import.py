"""`clawstream import` on a real Kafka with the real CPU engine: scored, whole, and never twice."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clawstream import topics
from clawstream.blobs import BlobStore
from clawstream.clock import SystemClock
from clawstream.engine.client import HttpEngineClient
from clawstream.engine.pool import EnginePool
from clawstream.errors import EngineUnavailable
from clawstream.forgetting.batches import BatchTreatment
from clawstream.forgetting.forget import Forgetting
from clawstream.forgetting.survey import Subject
from clawstream.importing.conversations import LoggedConversation, LoggedTurn
from clawstream.importing.importer import Importer
from clawstream.importing.openai_log import parse_openai_line
from clawstream.importing.scoring import ImportRules, ScoredTurn, TurnScorer
from clawstream.rendering.renderer import load_renderer
from schemas.events import NextStateEvent, TurnEvent
from schemas.events.forgotten import ForgottenKind
from schemas.events.next_state import NextStateKind
from schemas.events.turn import UntrainableReason
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import REPOSITORY
from tests.numerics.engine.conftest import running_engine
from tests.numerics.engine.reference import Reference

pytestmark = pytest.mark.kafka
COMMAND_SECONDS = 400


@pytest.fixture
def log(broker: str, namespace: str) -> JudgedLog:
    made = JudgedLog(kafka_bus(broker, "tests"), namespace)
    made.create_topics()
    return made


def line(*messages: tuple[str, str], **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": words} for role, words in messages], **fields}).encode()


def talk(number: int) -> bytes:
    return line(
        ("system", "Be kind."),
        ("user", f"Question {number}?"),
        ("assistant", f"Answer {number}."),
        ("user", "No, shorter."),
        ("assistant", f"{number}."),
        user="carol",
    )


async def test_chat_logs_become_scored_turns_once(
    log: JudgedLog, broker: str, namespace: str, tiny_model_directory: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    file = tmp_path / "log.jsonl"
    file.write_bytes(b"\n".join([talk(1), b"not json", talk(2), line(("user", "Anyone?"))]))
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "CLAWSTREAM_KAFKA__BOOTSTRAP_SERVERS": broker,
        "CLAWSTREAM_KAFKA__NAMESPACE": namespace,
    }

    def clawstream_import(url: str, *further: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "clawstream", "import", str(file), "--engine", url, "--json"]
        options = ["--model", str(tiny_model_directory), "--blobs", str(tmp_path / "blobs"), *further]
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, env=environment, timeout=COMMAND_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    async with running_engine(tiny_model_directory, weight_version="0") as running:
        url = str(running.client.base_url)
        first = await asyncio.to_thread(clawstream_import, url, "--trainable")
        again = await asyncio.to_thread(clawstream_import, url, "--trainable")

    assert {key: first[key] for key in ("conversations", "turns", "next_states", "already_imported")} == {
        "conversations": 2,
        "turns": 4,
        "next_states": 2,
        "already_imported": 0,
    }
    assert first["skipped"] == {"unreadable": 1, "no_answer": 1}
    assert first["untrainable_turns"] == {}
    assert (again["conversations"], again["already_imported"], again["turns"]) == (0, 2, 0)

    turns = log.events(topics.TURNS, TurnEvent)
    assert len(turns) == 4
    reference = Reference(tiny_model_directory)
    renderer = load_renderer(tiny_model_directory)
    for turn in turns:
        assert (turn.imported_from, turn.principal, turn.trainable) == ("openai", "carol", True)
        prompt, response = turn.prompt_ids.to_numpy().tolist(), turn.response_ids.to_numpy().tolist()
        assert prompt == renderer.render(turn.request_messages).token_ids
        assert renderer.decode(response).removesuffix("<|im_end|>") == turn.response_message["content"]
        assert response[-1] in renderer.stop_token_ids
        expected = np.array(reference.of_output(prompt, response, temperature=1.0))
        np.testing.assert_allclose(turn.response_logprobs.to_numpy(), expected, atol=1e-3)
    records = {(record.partition, record.offset): record for record in read_all(log.bus, log.topic(topics.TURNS))}
    next_states = log.events(topics.NEXT_STATES, NextStateEvent)
    assert sorted(each.kind.value for each in next_states) == ["reply", "reply", "session_end", "session_end"]
    for each in next_states:
        record = records[each.turn_ref.partition, each.turn_ref.offset]
        assert json.loads(record.value or b"")["turn_id"] == each.turn_id
        if each.kind is NextStateKind.REPLY:
            assert each.following_messages == [{"role": "user", "content": "No, shorter."}]


class BrokenAfter:
    """Scores so many conversations, then the engine is gone."""

    def __init__(self, scorer: TurnScorer, conversations: int) -> None:
        self._scorer = scorer
        self.left = conversations

    async def score(self, conversation: LoggedConversation, turns: Sequence[LoggedTurn]) -> list[ScoredTurn]:
        self.left -= 1
        if self.left < 0:
            raise EngineUnavailable("gone")
        return await self._scorer.score(conversation, turns)


async def test_an_interrupted_import_is_continued_and_a_forgotten_session_stays_away(
    log: JudgedLog, namespace: str, tiny_model_directory: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    conversations = [parse_openai_line(talk(number), f"log:{number}") for number in range(10)]
    clock = SystemClock()
    async with running_engine(tiny_model_directory, weight_version="0") as running:
        engines = EnginePool([HttpEngineClient("engine-0", str(running.client.base_url))])
        rules = ImportRules("default", "imported", trainable=False)
        scorer = TurnScorer(rules, load_renderer(tiny_model_directory), engines, BlobStore(str(tmp_path)), clock)

        def importer(conversations: int = 1000) -> Importer:
            broken = BrokenAfter(scorer, conversations)
            return Importer(log.bus, namespace, broken, principal="imported", concurrent=3, clock=clock)

        with pytest.raises(EngineUnavailable):
            await importer(7).run(conversations)
        written = len(log.events(topics.TURNS, TurnEvent))
        assert written == 12, "two whole chunks of three conversations with two turns each"
        report = await importer().run(conversations)
        assert (report.conversations, report.already, report.turns) == (4, 6, 8)
        turns = log.events(topics.TURNS, TurnEvent)
        assert len(turns) == len({turn.turn_id for turn in turns}) == 20
        assert {turn.untrainable_reason for turn in turns} == {UntrainableReason.IMPORTED}
        assert report.untrainable == {"imported": 8}

        grown = parse_openai_line(talk(3).replace(b"No, shorter.", b"Yes."), "log:3")
        new = parse_openai_line(talk(77), "log:77")
        Forgetting(log.bus, namespace, clock).run(
            Subject(ForgottenKind.SESSION, new.session_id("carol")), BatchTreatment.KEEP
        )
        last = await importer().run([new])
        assert last.skipped == {"forgotten": 1}
        assert (await importer().run([grown])).conversations == 1, (
            "another content without a name is another conversation"
        )
        await engines.close()
