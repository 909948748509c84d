"""Commands, environment and readiness of each service."""

from pathlib import Path
from typing import Any

from clawstream.supervisor.launch import Launch, plan_launch
from clawstream.supervisor.settings import ProcessSpecification, Service, SystemSettings

CONFIG = Path("system.toml")


def plan(process: ProcessSpecification, document: dict[str, Any] | None = None, **environment: str) -> Launch:
    return plan_launch(
        process,
        SystemSettings(),
        document or {},
        config_file=CONFIG,
        python="python",
        environment=environment,
        operations_port=4321,
    )


def test_a_worker_gets_its_name_and_an_operations_port() -> None:
    launch = plan(ProcessSpecification(name="judge-2", service=Service.JUDGE), PATH="bin")
    assert launch.command == ["python", "-m", "services.judge", "--config", "system.toml", "--process", "judge-2"]
    assert launch.environment == {"PATH": "bin", "CLAWSTREAM_JUDGE__OPERATIONS_PORT": "4321"}
    assert launch.ready_url == "http://127.0.0.1:4321/readyz"
    assert launch.metrics_url == "http://127.0.0.1:4321/metrics"


def test_a_chosen_operations_port_is_kept() -> None:
    process = ProcessSpecification(name="judge", service=Service.JUDGE, overrides={"operations_port": 99})
    assert plan(process, {"judge": {"operations_port": 5}}).ready_url == "http://127.0.0.1:99/readyz"


def test_engine_is_ready_by_its_own_port_and_waits_passively() -> None:
    process = ProcessSpecification(name="engine-2", service=Service.ENGINE, overrides={"port": 31000})
    launch = plan(process, {"engine": {"port": 30000, "host": "0.0.0.0"}})
    assert launch.ready_url == "http://127.0.0.1:31000/health"
    assert launch.environment["OMP_WAIT_POLICY"] == "passive"


def test_the_users_own_openmp_policy_wins() -> None:
    process = ProcessSpecification(name="trainer", service=Service.TRAINER, environment={"OMP_WAIT_POLICY": "active"})
    assert plan(process).environment["OMP_WAIT_POLICY"] == "active"


def test_several_ranks_have_a_launcher_that_waits_for_them_as_long_as_the_supervisor() -> None:
    launch = plan(ProcessSpecification(name="trainer", service=Service.TRAINER, ranks=2, stop_timeout_seconds=44.5))
    assert launch.command == [
        *("python", "-m", "services.trainer.launch_ranks", "--ranks=2", "--stop-timeout-seconds=44.5"),
        *("--config", "system.toml", "--process", "trainer"),
    ]


def test_gateway_tells_people_where_to_call() -> None:
    launch = plan(ProcessSpecification(name="gateway", service=Service.GATEWAY), {"gateway": {"port": 8000}})
    assert launch.addresses["openai"] == "http://127.0.0.1:8000/v1"
