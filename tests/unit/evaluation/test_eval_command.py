"""`clawstream eval` against scripted engines and endpoints, and what it asks, measures and writes."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from clawstream.chat_client import ChatClient
from clawstream.cli import app, evaluate
from clawstream.errors import EngineProtocolError, EngineRejected, EngineUnavailable, SettingsError
from clawstream.evaluation.preferences import NO_BULLETS, TERSE, load_preference
from clawstream.evaluation.questions import Question, load_questions
from clawstream.evaluation.targets import Target, TargetKind, check_names, parse_target
from clawstream.rendering.renderer import PackageRenderer
from tests.fixtures.gateway_app import GatewayUnderTest
from tests.fixtures.stub_engine import StubAnswer, StubEngine

QUESTIONS = """
[[held_out]]
question = "What is the capital of France?"
facts = ["paris"]

[[held_out]]
question = "What is the capital of Italy?"
facts = ["rome"]
"""


class EngineInThread:
    """A stub engine that lives beside a command which runs its own event loop."""

    def __init__(self, renderer: PackageRenderer, text: str) -> None:
        ids = [*renderer.encode(text), renderer.stop_token_ids[0]]

        def says(request: Mapping[str, Any]) -> StubAnswer:
            return StubAnswer(token_ids=ids, finish={"type": "stop", "matched": ids[-1]})

        self.engine = StubEngine(default_answer=says)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> StubEngine:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.engine.start(), self._loop).result(30)
        return self.engine

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.engine.close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()


@pytest.fixture
def taught(tiny_renderer: PackageRenderer) -> Iterator[StubEngine]:
    with EngineInThread(tiny_renderer, "Paris or Rome.") as engine:
        yield engine


@pytest.fixture
def frozen(tiny_renderer: PackageRenderer) -> Iterator[StubEngine]:
    with EngineInThread(tiny_renderer, "Well. That is a long story. It may be Paris.") as engine:
        yield engine


def test_two_engines_are_asked_the_same_and_compared(
    taught: StubEngine, frozen: StubEngine, tiny_model_directory: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.toml"
    questions.write_text(QUESTIONS)
    command = ["eval", "-q", str(questions), "--control", frozen.base_url, "--version", f"v7={taught.base_url}"]
    command += ["--tokenizer", str(tiny_model_directory), "--seeds", "2", "--samples", "2", "-d", str(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output

    (folder,) = tmp_path.glob("eval-*")
    document = orjson.loads((folder / "eval.json").read_bytes())
    control, version = document["comparison"]["versions"]
    assert (control["name"], version["name"]) == ("control", "v7")
    assert version["estimates"]["satisfied"]["mean"] == 1.0
    assert control["estimates"]["satisfied"]["mean"] == 0.0
    assert control["estimates"]["correct"]["mean"] == 0.5
    assert version["differences"]["correct"]["mean"] == 0.5
    assert set(version["by_seed"]) == {"1", "2"}
    assert len(document["answers"]["v7"]) == 2 * 2 * 2
    assert document["comparison"]["method"] == "percentile bootstrap over questions"
    assert (folder / "eval.png").stat().st_size > 10_000
    assert "preference satisfied higher" in result.output
    asked = [
        [(one["input_ids"], one["sampling_params"]["sampling_seed"]) for one in engine.requests]
        for engine in (taught, frozen)
    ]
    assert sorted(asked[0]) == sorted(asked[1])
    assert len({seed for _, seed in asked[0]}) == 4


@pytest.mark.parametrize("left", [(), ("engine-control.log",)])
def test_what_is_cut_off_leaves_no_empty_folder_and_says_what_is_in_another(
    left: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "q.toml").write_text(QUESTIONS)

    def cut_off(*_: object, **__: object) -> None:
        (folder,) = tmp_path.glob("eval-*")
        for name in left:
            (folder / name).write_text("an engine's words")
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "_ask_targets", cut_off)
    command = ["eval", "-q", str(tmp_path / "q.toml"), "--control", "http://h/v1", "--version", "a=http://i/v1"]
    result = CliRunner().invoke(app, [*command, "-d", str(tmp_path)])
    assert result.exit_code != 0
    assert "cut off: there is no report" in result.output
    folders = list(tmp_path.glob("eval-*"))
    assert [[file.name for file in folder.iterdir()] for folder in folders] == ([list(left)] if left else [])
    assert all(f"{folders[0]} holds what engines logged: {name}" in result.output for name in left)


def test_engines_need_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "q.toml").write_text(QUESTIONS)
    command = ["eval", "-q", str(tmp_path / "q.toml"), "--control", "http://127.0.0.1:9", "--version", "a=http://h/v1"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, SettingsError)
    assert "--tokenizer" in str(result.exception)


async def test_a_gateway_is_asked_by_side_turns(gateway: GatewayUnderTest) -> None:
    from clawstream.evaluation.respondents import ChatRespondent, Sampling

    ids = [*gateway.renderer.encode("Paris."), gateway.renderer.stop_token_ids[0]]
    gateway.engine.enqueue(StubAnswer(token_ids=ids, finish={"type": "stop", "matched": ids[-1]}))
    async with ChatClient(f"{gateway.base_url}/v1", api_key="k", model="policy", patience_seconds=0) as client:
        response = await ChatRespondent(client).answer("Capital?", Sampling(0.7, 16), 5)
    assert (response.text, response.finished, response.entropy_nats) == ("Paris.", True, None)
    assert response.tokens == len(ids)
    assert [request.turn_type_header for request in gateway.conversations.placed] == ["side"]
    assert gateway.engine.requests[0]["sampling_params"]["sampling_seed"] == 5


async def test_the_client_is_patient_with_what_may_change_and_not_with_what_may_not(gateway: GatewayUnderTest) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        gateway.router.closed = len(pauses) < 3

    gateway.router.closed = True
    url = f"{gateway.base_url}/v1"
    hello = [{"role": "user", "content": "hello"}]
    async with ChatClient(url, api_key="k", model="policy", patience_seconds=60, sleep=pause) as client:
        assert (await client.chat(hello)).finish_reason == "stop"
        assert pauses == [pytest.approx(5.0, abs=0.9)] * 3, "the gateway's Retry-After"
        with pytest.raises(EngineRejected, match="temperature"):
            await client.chat(hello, temperature=-1)
        with pytest.raises(EngineProtocolError, match="no chat completion"):
            await client.chat(hello, stream=True)
    async with ChatClient("http://127.0.0.1:9/v1", api_key="k", model=None, patience_seconds=0) as client:
        with pytest.raises(EngineUnavailable, match="ConnectError"):
            await client.chat(hello)


def test_targets(tmp_path: Path) -> None:
    (tmp_path / "00000007").mkdir()
    (tmp_path / "00000007" / "config.json").write_text("{}")
    assert parse_target(str(tmp_path / "00000007")).name == "00000007"
    assert parse_target(f"seven={tmp_path / '00000007'}").kind is TargetKind.DIRECTORY
    assert parse_target("http://h:1/v1/") == Target("http://h:1/v1", TargetKind.ENDPOINT, "http://h:1/v1")
    assert parse_target("x=http://h:1?a=b").place == "http://h:1?a=b"
    assert parse_target("http://h:1?a=b").kind is TargetKind.ENGINE
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    for place, reason in (
        (tmp_path, r"no config\.json"),
        (tmp_path / "00000001", r"does not exist, but beside it 00000007; .*weights_keep"),
        (tmp_path / "no" / "model", "it does not exist$"),
        (tmp_path / "adapters", "holds adapters"),
    ):
        with pytest.raises(SettingsError, match=f"neither an address nor a model directory: .*{reason}"):
            parse_target(str(place))
    with pytest.raises(SettingsError, match="two targets are called a"):
        check_names([parse_target("a=http://h"), parse_target("a=http://i")])


def test_preferences_are_found_by_name_or_path() -> None:
    assert load_preference("terse") is TERSE
    assert load_preference("clawstream.evaluation.preferences:NO_BULLETS") is NO_BULLETS
    for wrong in ("nice", "no.such:thing", "clawstream.errors:SettingsError"):
        with pytest.raises(SettingsError, match="preference"):
            load_preference(wrong)
    question = Question("q", ("a",))
    assert not TERSE.is_satisfied(question, "Short", False)
    assert not NO_BULLETS.is_satisfied(question, " ", True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("held_out = ", "not a question file"),
        ("[[training]]\nquestion='a'\nfacts=['b']", "no \\[\\[held_out\\]\\]"),
        ("[[held_out]]\nquestion='a'", "facts"),
        ("[[held_out]]\nquestion='a'\nfacts=['(']", "not a question file"),
        ("[[held_out]]\nquestion='a'\nfacts=['b']\n[[training]]\nquestion='a'\nfacts=['b']", "asked in training"),
    ],
)
def test_wrong_question_files_say_why(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "q.toml").write_text(content)
    with pytest.raises(SettingsError, match=message):
        load_questions(tmp_path / "q.toml")
