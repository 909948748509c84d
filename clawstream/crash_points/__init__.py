"""Points at which a process kills itself, for tests that prove that nothing is lost then and nothing counted twice.

`CLAWSTREAM_CRASH_AT=NAME[:N]` chooses one; it is read once, in a process's wiring. Without it nothing here takes part:
what is wrapped below is then used as it is.
"""

from clawstream.crash_points.point import POINTS, CrashPoint, crash_point
from clawstream.crash_points.wrapping import with_blob_crash, with_bus_crash, with_handler_crash, with_sync_crash

__all__ = [
    "POINTS",
    "CrashPoint",
    "crash_point",
    "with_blob_crash",
    "with_bus_crash",
    "with_handler_crash",
    "with_sync_crash",
]
