"""Directories, files and sockets of this user alone, on a host that others use, too.

A directory is opened once and checked by its descriptor. What lies in it is reached by that descriptor
(``/proc/self/fd/N``): nobody can put another directory, or a link, in its place between the check and the use.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from lightning_spot.errors import SettingsError

logger = logging.getLogger(__name__)

_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EACCES, errno.EPERM)
_WRITABLE_BY_OTHERS = 0o022
_CREDENTIALS = struct.Struct("3i")  # pid, user and group, see unix(7)
_ROOT = 0
"""Of root nothing can be kept anyway: its processes count as this user's."""


class OwnDirectory(contextlib.AbstractContextManager["OwnDirectory"]):
    """A directory of this user's to which no other may write, held open.

    Args:
        path: where it is; a link there is not followed.

    Raises:
        FileNotFoundError: if nothing is there.
        SettingsError: if something else is there.

    Attributes:
        path: its name, for messages.
        here: leads to this very directory as long as it is open, whatever others do with its name.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, *_NOT_A_FILE):
                raise
            raise SettingsError(f"{path} is no directory that this user can use") from error
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
            os.close(self._fd)
            if status.st_uid != os.geteuid():
                raise SettingsError(f"{path} belongs to another user ({status.st_uid})")
            raise SettingsError(f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o})")
        self.path = path
        through = Path(f"/proc/self/fd/{self._fd}")
        self.here = through if through.exists() else path

    def close(self) -> None:
        """Let go of it; ``here`` is its name from now on: the descriptor's number may be another one's soon."""
        self.here = self.path
        os.close(self._fd)

    def __exit__(self, *_: object) -> None:
        self.close()


def own_directories(path: Path) -> Iterator[OwnDirectory]:
    """Those of this user at ``path`` and beside it (``path-…``), each open: the caller's to close."""
    names = [name for name in _names_in(path.parent) if name == path.name or name.startswith(f"{path.name}-")]
    for name in sorted(names):
        try:
            directory = OwnDirectory(path.with_name(name))
        except (SettingsError, FileNotFoundError) as error:
            logger.debug("not used: %s", error)
            continue
        yield directory


def files_in(folder: Path, pattern: str) -> list[Path]:
    """What has such a name in a directory, in order; nothing if that is not there.

    To ``Path.glob``, since Python 3.13, what cannot be listed is empty, such as for want of descriptors.

    Raises:
        OSError: if it cannot be listed.
    """
    return [folder / name for name in sorted(_names_in(folder)) if fnmatch.fnmatchcase(name, pattern)]


def make_directory(path: Path) -> None:
    """Make a directory that is this user's alone, and those above it likewise; nothing is done if it is there."""
    missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process of ours was faster; what it is shows at its use
            os.mkdir(each, 0o700)


def open_file(path: Path, flags: int = os.O_RDONLY, *, linked: bool = False) -> int:
    """Open a regular file of this user's, or make it for this user alone; returns its descriptor.

    Args:
        path: in an :class:`OwnDirectory`; a link there is not followed, a pipe is not waited for.
        flags: as for ``os.open``.
        linked: whether it may have another name elsewhere; else that may be of a file that is none of our records.

    Raises:
        SettingsError: if something else is there.
        OSError: if it cannot be opened, such as ``FileNotFoundError``.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        raise _refusal(path) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or (status.st_nlink > 1 and not linked):
        os.close(fd)
        raise _refusal(path)
    if flags & os.O_CREAT and stat.S_IMODE(status.st_mode) != 0o600:  # by a strange umask, or an earlier version
        os.fchmod(fd, 0o600)
    return fd


def replace_file(path: Path, data: bytes) -> None:
    """Put a file of this user's in the place of what is there. A reader never sees half of it.

    Args:
        path: in an :class:`OwnDirectory`.
        data: what it holds then.

    Raises:
        OSError: if it cannot be written.
    """
    new = path.with_name(f"{path.name}-{os.getpid()}")
    new.unlink(missing_ok=True)  # of a killed process
    with open(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(data)
    os.replace(new, path)


def read_file(path: Path, most_bytes: int, *, linked: bool = False) -> bytes:
    """What is in a file of this user's, see :func:`open_file`.

    Raises:
        SettingsError: if there are more than ``most_bytes``.
    """
    with open(open_file(path, linked=linked), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise _refusal(path, f", or larger than {most_bytes} bytes")
    return data


def tail_of(path: Path, most_bytes: int) -> str:
    """The end of a file of this user's, as text; empty if it is gone."""
    with contextlib.suppress(FileNotFoundError), open(open_file(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes).decode(errors="replace")
    return ""


def remove_file(path: Path) -> None:
    """Remove what is at ``path``, if anything: a link itself, never what is behind it.

    Raises:
        SettingsError: if it is a directory.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError as error:
        raise _refusal(path) from error


def own_socket(path: Path) -> socket.socket:
    """A stream socket bound to ``path``; this user alone may connect from the start, whatever the umask."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(made.fileno(), 0o600)  # which bind takes over from the descriptor
        made.bind(str(path))
    except BaseException:
        made.close()
        raise
    return made


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is of this user, or root."""
    return peer_of(connection)[1] in (os.geteuid(), _ROOT)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket; the process is 0 where it is in another namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _group = _CREDENTIALS.unpack(credentials)
    return int(pid), int(user)


def _names_in(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def _refusal(path: Path, why: str = "") -> SettingsError:
    shown = os.path.join(os.path.realpath(path.parent), path.name)
    return SettingsError(f"{shown} is no private file of this user{why}. It is not used: remove it")
