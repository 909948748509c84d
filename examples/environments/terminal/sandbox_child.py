"""The inside of the sandbox: builds a small file system, takes the limits on, gives up privileges, runs the command.

A program of its own that needs only the standard library: `python -I -S sandbox_child.py CONFIGURATION`, where
CONFIGURATION is a JSON object. With `isolated` it must be the first process of fresh mount, pid and network namespaces.
It writes one byte to the descriptor `ready_fd` when nothing but running the command is left to do.
"""

import ctypes
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
AT_FDCWD: Final = -100
AT_RECURSIVE: Final = 0x8000
MOUNT_ATTR_RDONLY: Final = 1
PR_CAPBSET_DROP: Final = 24
PR_SET_NO_NEW_PRIVS: Final = 38
SYSCALL_MOUNT_SETATTR: Final = 442
SYSCALL_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}

SYSTEM_FOLDERS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc/alternatives")
SYSTEM_FILES: Final = ("etc/ld.so.cache",)
DEVICES: Final = ("null", "zero", "full", "random", "urandom")
WORK: Final = "/work"


class MountAttributes(ctypes.Structure):
    """`struct mount_attr` of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


LIBC = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    """Raises OSError when a call into libc failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str | Path, target: Path | str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = (str(source).encode(), str(target).encode(), kind.encode() if kind else None)
    checked(LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None), f"mount {source} on {target}")


def make_read_only(target: Path, *, recursive: bool) -> None:
    """What is mounted at `target`, and with `recursive` below it too (mount_setattr(2), Linux 5.12)."""
    attributes = MountAttributes(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    flags = AT_RECURSIVE if recursive else 0
    arguments = (SYSCALL_MOUNT_SETATTR, AT_FDCWD, str(target).encode(), flags, ctypes.byref(attributes), size)
    checked(LIBC.syscall(*arguments), f"make {target} read-only")


def bind(source: Path, target: Path, *, read_only: bool) -> None:
    """Shows `source` at `target`."""
    mount(source, target, None, MS_BIND | MS_REC)
    if read_only:
        make_read_only(target, recursive=True)


def build_root(root: Path, folder: Path, temporary_bytes: int) -> None:
    """A file system with the programs of this machine, an empty `/tmp` and the folder as `/work`; nothing else."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for name in ("etc", "dev", "proc", "tmp", "work"):
        (root / name).mkdir()
    for name in SYSTEM_FOLDERS:
        source, target = Path("/") / name, root / name
        if source.is_symlink() and "/" not in name:
            target.symlink_to(source.readlink())
        elif source.is_dir():
            target.mkdir()
            bind(source, target, read_only=True)
    for name in SYSTEM_FILES:
        if (Path("/") / name).is_file():
            (root / name).touch()
            bind(Path("/") / name, root / name, read_only=True)
    (root / "etc/passwd").write_text(f"agent:x:{os.getuid()}:{os.getgid()}::{WORK}:/bin/sh\n")
    for name in DEVICES:
        (root / "dev" / name).touch()
        bind(Path("/dev") / name, root / "dev" / name, read_only=False)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd{target}")
    mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    bind(folder, root / "work", read_only=False)
    mount("tmpfs", root / "tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={temporary_bytes},nr_inodes=4096,mode=1777")
    # The root itself last; what is mounted on it keeps its own state.
    make_read_only(root, recursive=False)


def enter_root(root: Path) -> None:
    """Leaves the machine's own file system behind."""
    number = SYSCALL_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(0, f"pivot_root is not known on {platform.machine()}")
    os.chdir(root)
    checked(LIBC.syscall(number, b".", b"."), "pivot_root")
    checked(LIBC.umount2(b".", MNT_DETACH), "unmount the old root")


def set_limits(limits: Mapping[str, Any]) -> None:
    """Takes the limits on, hard ones, for this process and all that come from it."""
    numbers = {
        resource.RLIMIT_CPU: int(limits["cpu_seconds"]),
        resource.RLIMIT_AS: int(limits["memory_bytes"]),
        resource.RLIMIT_NPROC: int(limits["processes"]),
        resource.RLIMIT_FSIZE: int(limits["file_bytes"]),
        resource.RLIMIT_NOFILE: int(limits["open_files"]),
        resource.RLIMIT_CORE: 0,
    }
    for kind, number in numbers.items():
        highest = resource.getrlimit(kind)[1]
        allowed = number if highest == resource.RLIM_INFINITY else min(number, highest)
        resource.setrlimit(kind, (allowed, allowed))


def drop_privileges(user_id: int | None) -> None:
    """No capabilities, and none to be gained. With `user_id` (as root) also another user."""
    if os.geteuid() == 0:
        capability = 0
        while LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
            capability += 1
    if user_id is not None:
        os.setgroups([])
        os.setgid(user_id)
        os.setuid(user_id)
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new privileges")


def run(configuration: Mapping[str, Any]) -> None:
    """Becomes the command. Never returns."""
    os.umask(0o022)
    set_limits(configuration["limits"])
    drop_privileges(configuration["user_id"])
    os.set_inheritable(configuration["ready_fd"], False)
    os.write(configuration["ready_fd"], b"1")
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    os.execve(shell, [shell, "-c", configuration["command"]], configuration["environment"])


def main() -> int:
    """The command's exit code; 128 + the number of the signal that ended it."""
    configuration = json.loads(sys.argv[1])
    folder = Path(configuration["folder"])
    if not configuration["isolated"]:
        os.chdir(folder)
        run(configuration)
    root = Path(configuration["root"])
    build_root(root, folder, int(configuration["limits"]["temporary_bytes"]))
    enter_root(root)
    os.chdir(WORK)
    child = os.fork()
    if child == 0:
        run(configuration)
    os.close(configuration["ready_fd"])
    # This is process 1 of its namespace: orphans come to it, and when it ends the kernel kills all that is left.
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
