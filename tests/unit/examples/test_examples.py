"""Every example configuration loads into the settings of every process that it names."""

from pathlib import Path
from random import Random

import pytest

from clawstream.evaluation.preferences import has_list, is_one_short_sentence
from clawstream.evaluation.questions import load_questions
from clawstream.settings import load_settings
from clawstream.supervisor.settings import Service, load_system_settings
from examples.demo.modes import MODES, LearningMode
from examples.demo.personas import personas
from examples.demo.system import DemoPlan, configuration
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.judge.settings import JudgeSettings
from services.teacher.settings import Mode, TeacherSettings
from services.trainer.settings import TrainerSettings

EXAMPLES = Path(__file__).parents[3] / "examples"
MODELS = {
    Service.ENGINE: EngineSettings,
    Service.GATEWAY: GatewaySettings,
    Service.JUDGE: JudgeSettings,
    Service.TEACHER: TeacherSettings,
    Service.TRAINER: TrainerSettings,
}


def every_process_loads(file: Path) -> set[Service]:
    found: set[Service] = set()
    for process in load_system_settings(file, {}).processes:
        found.add(process.service)
        if process.service in MODELS:
            model = MODELS[process.service]
            load_settings(model, section=process.service.value, file=file, process=process.name, environment={})
    return found


def test_no_field_of_a_service_has_the_name_of_a_section() -> None:
    """It would be filled from another service's section: what stands at the top of a file is shared."""
    sections = {service.value for service in Service}
    assert {model.__name__: sections & model.model_fields.keys() for model in MODELS.values()} == {
        model.__name__: set[str]() for model in MODELS.values()
    }


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_example_files_load(file: Path) -> None:
    engines = {Service.ENGINE, Service.COMMAND}  # on a GPU it is SGLang, which is a command
    found = every_process_loads(file)
    assert found >= MODELS.keys() - engines
    assert found & engines


def test_sglang_on_one_gpu_leaves_the_trainer_room() -> None:
    """Each engine's address is where its command listens, and their shares of the memory leave more than half."""
    file = EXAMPLES / "one_gpu.toml"
    commands = {p.name: p for p in load_system_settings(file, {}).processes if p.service is Service.COMMAND}
    shares, ports = [], {}
    for name, process in commands.items():
        options = dict(zip(process.command, process.command[1:], strict=False))
        shares.append(float(options["--mem-fraction-static"]))
        ports[name] = f"http://127.0.0.1:{options['--port']}"
        assert process.ready is not None
        assert process.ready.url == f"{ports[name]}/health"
    assert sum(shares) < 0.5
    gateway = load_settings(GatewaySettings, section="gateway", file=file, process="gateway", environment={})
    judge = load_settings(JudgeSettings, section="judge", file=file, process="judge", environment={})
    assert [engine.url for engine in gateway.engines] == [ports["engine-policy"]]
    assert list(judge.model.urls) == [ports["engine-judge"]]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_demo_s_file_loads(tmp_path: Path, mode: LearningMode) -> None:
    plan = DemoPlan(
        tmp_path, tmp_path / "a model", seed=1, batch_size=16, learning_rate=1e-5, temperature=0.7, mode=mode
    )
    file = tmp_path / "clawstream.toml"
    file.write_text(configuration(plan, (1001, 1002, 1003, 1004)))
    assert every_process_loads(file) >= MODELS.keys()
    trainer = load_settings(TrainerSettings, section="trainer", file=file, process="trainer", environment={})
    assert trainer.learning_rate.peak == 1e-5
    assert trainer.algorithm.factory == mode.algorithm
    teacher = load_settings(TeacherSettings, section="teacher", file=file, process="teacher", environment={})
    judge = load_settings(JudgeSettings, section="judge", file=file, process="judge", environment={})
    assert (teacher.mode is Mode.BINARY) == (not judge.spec.user_gives_hints)


def test_question_files_keep_training_and_held_out_apart() -> None:
    for persona in personas().values():
        questions = load_questions(EXAMPLES / "demo" / persona.questions_file)
        assert len(questions.training) > len(questions.held_out) > 5


@pytest.mark.parametrize(
    ("answer", "finished", "satisfied"),
    [
        ("The capital of France is Paris.", True, True),
        ("Paris", True, True),
        ("The capital of France is Paris. It lies on the Seine.", True, False),
        ("The capital of France is Paris", False, False),
        ("It is Rome.", True, False),
        ("", True, False),
        ("Paris " * 21, True, False),
    ],
)
def test_the_terse_user(answer: str, finished: bool, satisfied: bool) -> None:
    terse = personas()["terse"]
    question = next(q for q in load_questions(EXAMPLES / "demo" / terse.questions_file).training if "France" in q.text)
    assert terse.react(question, answer, finished, Random(0)).satisfied is satisfied


def test_an_empty_answer_is_no_sentence() -> None:
    assert not is_one_short_sentence("  ")


@pytest.mark.parametrize(
    ("answer", "is_list"),
    [("1. Boil water\n2. Add tea", True), ("- milk\n- tea", True), ("First boil water, then add tea. Wait.", False)],
)
def test_lists_are_seen(answer: str, is_list: bool) -> None:
    assert has_list(answer) is is_list
