"""Settings of the teacher: section `[teacher]`."""

from pydantic import Field

from clawstream.settings import ServiceSettings
from clawstream.worker.settings import WorkerSettings


class TeacherSettings(ServiceSettings):
    """The teacher."""

    worker: WorkerSettings = WorkerSettings()
    """How many scores at once, and how long."""
    turn_cache_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Turns that were read ahead and may be asked for soon."""
    turn_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long reading a turn may take before its score is put off."""
