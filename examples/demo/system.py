"""The demo's system: one TOML file for eight processes, started and stopped by clawstream's own supervisor."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clawstream.bus.interface import Bus
from clawstream.clock import SystemClock
from clawstream.encryption.bus import open_bus
from clawstream.process_identity import ProcessIdentity, free_ports
from clawstream.settings import KafkaSettings
from clawstream.supervisor import control
from clawstream.supervisor.report import SupervisorReport
from clawstream.supervisor.settings import SystemSettings, load_system_settings
from examples.demo.modes import MODES, TEACHER_CONTEXT_TOKENS, LearningMode

POLICY = "demo"
FROZEN = "smollm2-frozen"
JUDGE_PROMPT = "likelihood-1"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What one seed runs with."""

    directory: Path
    """Everything of this seed: configuration, broker data, logs, weights."""
    model_directory: Path
    """The model that is taught; a frozen copy of it judges and is the control."""
    seed: int
    batch_size: int
    """Judged answers per training step."""
    learning_rate: float
    temperature: float
    """Of the policy's answers."""
    mode: LearningMode = MODES["binary-baseline"]
    """What is learned from."""


@dataclass(frozen=True, slots=True)
class DemoSystem:
    """Addresses of a system that runs."""

    settings: SystemSettings
    supervisor: ProcessIdentity
    gateway_url: str
    policy_engine_url: str
    frozen_engine_url: str

    @property
    def namespace(self) -> str:
        """First part of all topic names."""
        return self.settings.kafka.namespace

    def bus(self) -> Bus:
        """The log."""
        return open_bus(self.settings.kafka, client_id="demo")

    def stop(self) -> None:
        """Ends all processes, gracefully."""
        control.stop(self.settings, SystemClock(), at_once=False, timeout_seconds=120)


def start(plan: DemoPlan, *, progress: Callable[[SupervisorReport], None]) -> DemoSystem:
    """Writes the configuration and starts everything. Raises SupervisorError naming what did not become ready."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    kafka, gateway, policy_engine, frozen_engine = free_ports(4)
    ports = (kafka, gateway, policy_engine, frozen_engine)
    file = plan.directory / "clawstream.toml"
    file.write_text(configuration(plan, ports), encoding="utf-8")
    settings = load_system_settings(file, os.environ)
    supervisor = control.start_detached(settings, file, os.environ)
    control.wait_until_ready(settings, supervisor, timeout_seconds=300, progress=progress)
    return DemoSystem(
        settings=settings,
        supervisor=supervisor,
        gateway_url=f"http://127.0.0.1:{gateway}/v1",
        policy_engine_url=f"http://127.0.0.1:{policy_engine}",
        frozen_engine_url=f"http://127.0.0.1:{frozen_engine}",
    )


def configuration(plan: DemoPlan, ports: tuple[int, int, int, int]) -> str:
    """The TOML file. `ports` are those of broker, gateway, policy engine and frozen engine.

    Every arithmetic process gets one thread: on two cores more threads only wait for each other.
    """
    kafka, gateway, policy_engine, frozen_engine = ports
    model = json.dumps(str(plan.model_directory))
    return f"""\
policy = "{POLICY}"
data_directory = "data"

[kafka]
bootstrap_servers = "127.0.0.1:{kafka}"
namespace = "{KafkaSettings().namespace}"

[engine]
model_path = {model}
threads = 1
seed = {plan.seed}
max_context_tokens = {TEACHER_CONTEXT_TOKENS}
weight_version = "0"
incremental_streaming_output = true

[gateway]
port = {gateway}
model_path = {model}
default_temperature = {plan.temperature}
engines = [{{ name = "engine-policy", url = "http://127.0.0.1:{policy_engine}", loads_beside = true }}]

[judge]
model = {{ urls = ["http://127.0.0.1:{frozen_engine}"], directory = {model} }}

[judge.spec]
backend = "likelihood"
model = "{FROZEN}"
prompt = "{JUDGE_PROMPT}"
votes = 1
hints = "{plan.mode.hints}"

[teacher]
mode = "{plan.mode.teacher.value}"
model_path = {model}

[teacher.model]
urls = ["http://127.0.0.1:{frozen_engine}"]
name = "{FROZEN}"
context_tokens = {TEACHER_CONTEXT_TOKENS}
support_k = {plan.mode.support_k}
student_urls = ["http://127.0.0.1:{policy_engine}"]

[trainer]
model = {model}
seed = {plan.seed}
threads = 1
batch_size = {plan.batch_size}
max_batch_age_seconds = 120.0
learning_rate = {{ peak = {plan.learning_rate} }}
algorithm = {{ factory = "{plan.mode.algorithm}" }}
advantage = {{ mode = "{plan.mode.advantage.value}" }}
tokens_per_micro_batch = 1024
max_sample_tokens = 1024
progress_seconds = 5.0

[[processes]]
name = "broker"
service = "broker"

[[processes]]
name = "topics"
service = "topics"

[[processes]]
name = "engine-policy"
service = "engine"
overrides = {{ port = {policy_engine} }}

[[processes]]
name = "engine-frozen"
service = "engine"
overrides = {{ port = {frozen_engine} }}

[[processes]]
name = "gateway"
service = "gateway"

[[processes]]
name = "judge"
service = "judge"

[[processes]]
name = "teacher"
service = "teacher"

[[processes]]
name = "trainer"
service = "trainer"
"""
