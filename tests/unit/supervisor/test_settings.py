"""The list of processes: order of start, and mistakes that are named at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import SettingsError
from clawstream.supervisor.settings import (
    ProcessSpecification,
    Service,
    dependencies,
    load_system_settings,
    start_order,
)

SERVICES = [Service.BROKER, Service.TOPICS, Service.ENGINE, Service.GATEWAY, Service.JUDGE, Service.TRAINER]


def load(tmp_path: Path, text: str):
    file = tmp_path / "clawstream.toml"
    file.write_text(text)
    return load_system_settings(file, {})


def test_usual_dependencies() -> None:
    processes = [ProcessSpecification(name=service.value, service=service) for service in SERVICES]
    needed = {process.name: dependencies(process, processes) for process in processes}
    assert needed == {
        "broker": frozenset(),
        "topics": {"broker"},
        "engine": frozenset(),
        "gateway": {"topics", "engine"},
        "judge": {"topics"},
        "trainer": {"topics"},
    }


def test_without_a_topics_process_the_broker_itself_is_needed() -> None:
    processes = [ProcessSpecification(name=s.value, service=s) for s in (Service.BROKER, Service.JUDGE)]
    assert dependencies(processes[1], processes) == {"broker"}


@given(st.permutations(SERVICES))
def test_start_order_never_starts_before_what_is_needed(services: list[Service]) -> None:
    processes = [ProcessSpecification(name=service.value, service=service) for service in services]
    order = start_order(processes)
    assert sorted(order) == sorted(process.name for process in processes)
    for process in processes:
        for needed in dependencies(process, processes):
            assert order.index(needed) < order.index(process.name)


def test_a_cycle_names_its_members(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="wait for each other: a, b"):
        load(
            tmp_path,
            """
            [[processes]]
            name = "a"
            service = "judge"
            depends_on = ["b"]
            [[processes]]
            name = "b"
            service = "teacher"
            depends_on = ["a"]
            """,
        )


def test_all_mistakes_of_the_list_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        load(
            tmp_path,
            """
            [[processes]]
            name = "a"
            service = "judge"
            depends_on = ["nobody"]
            [[processes]]
            name = "a"
            service = "teacher"
            """,
        )
    assert "'a' is used twice" in str(raised.value)
    assert "'nobody', which is not in [[processes]]" in str(raised.value)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('service = "wizard"', r"processes\.1\.service \(a\): Input should be"),
        ('service = "command"', r"processes\.1 \(a\): a command is needed"),
        ('service = "judge"\ncommand = ["x"]', "a command is needed"),
        ('service = "judge"\nranks = 2', "only a trainer has ranks"),
        ('service = "command"\ncommand = ["x"]\nready = { url = "u", file = "f" }', "exactly one of"),
        ('service = "judge"\ndepend_on = []', r"processes\.1\.depend_on \(a\): nothing reads it; is depends_on meant"),
        (
            'service = "judge"\nready = { urls = "u" }',
            r"processes\.1\.ready\.urls \(a\): nothing reads it; is url meant",
        ),
        ("", r"processes\.1\.service \(a\): Field required"),
    ],
)
def test_mistakes_of_an_entry(tmp_path: Path, entry: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load(tmp_path, f'[[processes]]\nname = "z"\nservice = "judge"\n[[processes]]\nname = "a"\n{entry}\n')


def test_of_an_entry_without_a_name_the_place_alone_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        load(tmp_path, '[[processes]]\nservice = "judge"\n')
    assert "processes.0.name: Field required" in str(raised.value)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    settings = load(tmp_path, 'data_directory = "data"\n')
    assert settings.supervisor_directory == tmp_path / "data" / "supervisor"
