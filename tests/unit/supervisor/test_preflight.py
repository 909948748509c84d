"""Every mistake of a file is found before anything is started, each with its field."""

import json
import socket
import struct
from pathlib import Path

import pytest

from clawstream.errors import WrongValues
from clawstream.memory_need import model_size
from clawstream.process_identity import free_port
from clawstream.supervisor.preflight import Preflight, refuse_wrong_settings

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
NUMBERS = 100 * 8 + 8


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose headers say what a model's do; its tensors are absent."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tensors = {"embedding": [100, 8], "norm": [8]}
    header = json.dumps(
        {"__metadata__": {"format": "pt"}} | {name: {"dtype": "F32", "shape": shape} for name, shape in tensors.items()}
    ).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return directory


def processes(*names: str) -> str:
    """Entries whose service is the name up to the first hyphen."""
    return "\n".join(f'[[processes]]\nname = "{name}"\nservice = "{name.partition("-")[0]}"' for name in names)


def problems(tmp_path: Path, text: str, *names: str, **environment: str) -> list[str]:
    file = tmp_path / "clawstream.toml"
    file.write_text(f"{text}\n{processes(*names)}\n")
    return Preflight(file, environment).problems


def test_mistakes_of_all_sections_are_named_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        """
        polcy = "typo"
        [kafka]
        namespace = "No Spaces"
        [engine]
        model_path = "absent"
        [gateway]
        port = 99999
        no_such_setting = 1
        [judge]
        spec = { backend = "openai", model = "m" }
        model = { api_key_environment = "NO_SUCH_KEY" }
        [trainer]
        batch_size = 0
        learning_rate = { peek = 1.0 }
        [teachr]
        mode = "opd"
        """,
        *("engine-a", "engine-b", "gateway", "judge", "teacher", "trainer"),
    )
    fields = [problem.partition(":")[0] for problem in found]
    assert fields == [
        "kafka.namespace",
        "engine.model_path",
        *("gateway.port", "gateway.model_path", "gateway.engines", "gateway.no_such_setting"),
        *("trainer.model", "trainer.batch_size", "trainer.learning_rate.peek"),
        *("polcy", "teachr"),
    ]
    assert "(engine-a, engine-b)" in found[1]
    assert "is teacher meant?" in found[-1]
    assert "trainer.learning_rate.peek: nothing reads it; is peak meant? (trainer)" in found
    assert "gateway.no_such_setting: nothing reads it (gateway)" in found


def test_a_judge_lacks_its_key_its_address_and_its_prompt(tmp_path: Path) -> None:
    judge = """
    [judge]
    spec = { backend = "openai", model = "m", prompt = "no-such-prompt" }
    model = { api_key_environment = "THE_KEY" }
    """
    without = problems(tmp_path, judge, "judge")
    assert [each.partition(":")[0] for each in without] == [
        "judge.model.api_key_environment",
        "judge.spec",
        "judge.model.urls",
    ]
    assert len(problems(tmp_path, judge, "judge", THE_KEY="secret")) == 2


def test_folders_that_hold_no_model_that_fits(tmp_path: Path, model: Path) -> None:
    engine = f'[engine]\nport = {free_port()}\nmodel_path = "{model}"'
    assert problems(tmp_path, engine, "engine") == []
    (model / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    (problem,) = problems(tmp_path, engine, "engine")
    assert "model_type 'gpt2'" in problem
    (model / "config.json").write_text("[]")
    assert "no JSON object" in problems(tmp_path, engine, "engine")[0]
    (model / "config.json").unlink()
    assert "holds no config.json" in problems(tmp_path, engine, "engine")[0]
    gateway = f'[gateway]\nmodel_path = "{model}"\nengines = [{{ name = "e", url = "http://127.0.0.1:1" }}]\nport = 0'
    assert "gateway.model_path" in problems(tmp_path, gateway, "gateway")[0]
    teacher = f'[teacher]\nmodel = {{ directory = "{model}" }}'
    assert "teacher.model.directory" in problems(tmp_path, teacher, "teacher")[0]


def test_ports_taken_and_wanted_twice(tmp_path: Path, model: Path) -> None:
    engine = f'[engine]\nmodel_path = "{model}"\nport = '
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        taken, twice = problems(tmp_path, f"{engine}{port}", "engine-a", "engine-b")
    assert taken.startswith(f"engine.port: {port}, wanted by engine-a, is taken by pid ")
    assert twice.startswith(f"engine.port: {port} is wanted by engine-a and by engine-b")
    assert problems(tmp_path, f"{engine}{free_port()}", "engine-a") == []


def test_values_of_one_process_and_of_the_environment_count(tmp_path: Path) -> None:
    trainer = '[[processes]]\nname = "t"\nservice = "trainer"\noverrides = { seed = "x" }'
    found = problems(tmp_path, trainer, CLAWSTREAM_TRAINER__THREADS="-1")
    assert [each.partition(":")[0] for each in found] == ["trainer.model", "trainer.seed", "trainer.threads"]


def test_protected_properties_of_kafka_are_refused(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, '[kafka]\nclient_properties = { "acks" = "1" }', "broker")
    assert found.startswith("kafka.client_properties: acks")


def test_a_good_file_gives_the_system_and_a_bad_one_an_error(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "clawstream.toml"
    file.write_text(f'[trainer]\nmodel = "{model}"\n{processes("broker", "trainer")}\n')
    assert [process.name for process in refuse_wrong_settings(file, {}).processes] == ["broker", "trainer"]
    file.write_text(processes("trainer"))
    with pytest.raises(
        WrongValues, match=r"1 wrong value\(s\); nothing was started:\n  trainer\.model: Field required"
    ):
        refuse_wrong_settings(file, {})


def test_memory_follows_from_the_model_and_its_bounds(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "clawstream.toml"

    def needs(engine: str = "", trainer: str = ""):
        sections = f'[engine]\nmodel_path = "{model}"\nport = 0\n{engine}\n[trainer]\nmodel = "{model}"\n{trainer}\n'
        file.write_text(f"{sections}{processes('broker', 'engine', 'trainer')}")
        preflight = Preflight(file, {})
        assert preflight.problems == []
        return preflight.memory_needs()

    size = model_size(model)
    assert size is not None
    assert (size.parameters, size.key_value_width) == (NUMBERS, 4)
    usual = needs()
    assert set(usual) == {"broker", "engine", "trainer"}
    narrow = needs(engine='dtype = "bfloat16"', trainer='dtype = "bfloat16"')
    assert usual["engine"].fixed_bytes - narrow["engine"].fixed_bytes == 2 * NUMBERS
    assert narrow["trainer"].fixed_bytes - usual["trainer"].fixed_bytes == 2 * NUMBERS
    one_slot = needs(engine="max_slots = 1\nmax_context_tokens = 10")["engine"]
    assert one_slot.working_bytes == 4 * (NUMBERS + 10 * 2 * 2 * 4)
    half = needs(trainer="tokens_per_micro_batch = 4096\nmax_sample_tokens = 4096")["trainer"]
    assert half.working_bytes * 2 == usual["trainer"].working_bytes


def test_the_size_of_what_is_no_model_is_unknown(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 8)
    assert model_size(model) is None
    (model / "config.json").write_text("{}")
    assert model_size(model) is None


LOSSES = "services.trainer.algorithms"


@pytest.mark.parametrize(
    ("loss", "teacher", "own_teacher", "missing"),
    [
        ("binary:Binary", 'mode = "binary"', False, []),
        ("binary:Binary", 'mode = "opd"', False, ["no rewards"]),
        ("combine:Combine", 'mode = "binary"', False, []),  # rewards alone teach it too
        ("opd:Opd", 'mode = "binary"', False, ["nothing from a teacher"]),
        ("opd:Opd", 'mode = "combine"', False, []),
        ("topk:TopK", 'mode = "opd"', False, ["no likeliest ids of the teacher"]),
        ("topk:TopK", 'mode = "opd"\nmodel.top_k = 5', False, []),
        ("hybrid:Hybrid", 'mode = "combine"\nmodel.top_k = 5', False, ["no likeliest ids of the student"]),
        ("hybrid:Hybrid", 'mode = "combine"\nmodel.support_k = 4', False, []),
        ("hybrid:Hybrid", 'mode = "combine"\nmodel.computed_by = "trainer"', True, []),
        ("opd:Opd", 'mode = "opd"\nmodel.computed_by = "trainer"', False, ["no trainer here has a teacher"]),
        ("opd:Opd", 'mode = "opd"\nmodel.computed_by = "trainer"', True, []),
        ("binary:Binary", 'mode = "combine"\nmodel.computed_by = "trainer"', False, []),  # the rewards teach it
    ],
)
def test_processes_that_would_learn_nothing_from_one_another(
    tmp_path: Path, model: Path, loss: str, teacher: str, own_teacher: bool, missing: list[str]
) -> None:
    text = f"""
[teacher]
model_path = "{model}"
{"" if "computed_by" in teacher else 'model.urls = ["http://127.0.0.1:1"]'}
{teacher}
[trainer]
model = "{model}"
algorithm.factory = "{LOSSES}.{loss}"
{"own_teacher = {}" if own_teacher else ""}
"""
    found = problems(tmp_path, text, "teacher", "trainer")
    assert len(found) == len(missing), found
    for problem, words in zip(found, missing, strict=True):
        assert words in problem
    # What runs elsewhere, or is wrong itself, is not known: nothing is said of it.
    assert problems(tmp_path, text, "trainer") == []
    assert problems(tmp_path, text, "teacher") == []
