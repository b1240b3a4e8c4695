"""``spot://host:port/run/…`` as an fsspec file system: ``Trainer.fit(ckpt_path="spot://…/last.ckpt")`` works."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

import xxhash
from fsspec.spec import AbstractFileSystem

from lightning_spot.client.node_client import NodeClient, quoted
from lightning_spot.client.spot_files import BLOCK_BYTES, SpotReader, SpotWriter
from lightning_spot.errors import CorruptSnapshot, NodeRefused, SettingsError, SnapshotNotFound
from lightning_spot.image.parts import checksum
from lightning_spot.memory.paths import LAST
from lightning_spot.protocol.wire import DIGEST_HEADER, Address, answered, file_path, parse_spot_url
from lightning_spot.untrusted import file_name

_NO_FOLDERS = "a run at a node holds files without folders; write spot://host:port/RUN/NAME"


class SpotFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """The snapshots and files of the runs at a memory node, in memory and at the tier below it.

    A run is a directory, a snapshot a directory in it with ``model.ckpt`` (or the files of a sharded checkpoint) and
    ``manifest.json``. ``RUN/last.ckpt`` reads as the newest snapshot, if that is one file, unless a file of that name
    was written. Files written here are held in the node's
    memory and flushed like snapshots; once safe below they may leave memory, and are read from there.

    What a node cannot do raises an ``OSError`` that says so: folders within a run (``NotADirectoryError``), removing
    through the alias (``PermissionError``), ``mode="create"`` where a file is (``FileExistsError``).

    Args:
        host: host name or address of the node.
        port: its TCP port.
        **storage_options: passed to fsspec.
    """

    protocol = "spot"
    root_marker = ""
    cachable = True

    def __init__(self, host: str = "", port: int = 0, **storage_options: Any) -> None:
        super().__init__(host=host, port=port, use_listings_cache=False, **storage_options)
        if not host:
            raise SettingsError("a spot:// URL names its node: spot://host:port/run/last.ckpt")
        self.client = NodeClient(Address(host=host, port=port))

    @classmethod
    def _strip_protocol(cls, path: str | list[str]) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        path = str(path)
        return parse_spot_url(path)[1] if path.startswith("spot:") else path.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        address = parse_spot_url(str(path))[0]
        return {"host": address.host, "port": address.port}

    def unstrip_protocol(self, name: str) -> str:
        """The full URL of a path."""
        address = self.client.address
        return f"spot://{address.host}:{address.port}/{self._strip_protocol(name)}"

    # -- looking --------------------------------------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """List runs, files and snapshots of a run, or files of a snapshot."""
        path = self._strip_protocol(path)
        run, _, below = path.partition("/")
        if not run:
            answer = self.client.call("GET", "/v1/runs")
            with answered(str(self.client.address)):
                runs = [(file_path(item["name"]), file_name(item, "id")) for item in answer["runs"]]
            names = [name for name, _ in runs]
            texts = [f"{name}@{identity}" if identity and names.count(name) > 1 else name for name, identity in runs]
            entries = [_directory(text) for text in sorted(set(texts))]
        else:
            entries = self._children(run, below)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Size, type and, for files, time and version (``etag``) of a path."""
        path = self._strip_protocol(path)
        run, _, below = path.partition("/")
        if not run:
            return _directory("")
        if not below:
            self._files(run)  # raises if there is no such run
            return _directory(path)
        try:
            headers = self.client.head(f"/v1/files/{quoted(path)}")
        except SnapshotNotFound:
            headers = {}
        real = unquote(headers.get("spot-path", ""))
        if real and (real == below or ("/" not in below and unquote(headers["spot-snapshot"]) != below)):
            with answered(str(self.client.address)):
                return {
                    "name": path,
                    "size": int(headers["content-length"]),
                    "type": "file",
                    "created": float(headers["spot-created"]),
                    "etag": headers["etag"],
                    "path": f"{run}/{file_path(real)}",
                }
        listing = self._listing(run)
        if real or any(str(item["path"]).startswith(f"{below}/") for item in listing["files"]):
            return _directory(path)
        url = self.unstrip_protocol(path)
        if below == LAST and listing["last"]:
            raise SnapshotNotFound(
                f"{url} names one file, and the newest snapshot is several: {self.unstrip_protocol(run)}/"
                f"{listing['last']}. Give its directory, or make one file of it with lightning-spot pull"
            )
        raise SnapshotNotFound(url)

    def modified(self, path: str) -> datetime:
        """When a file was taken."""
        return datetime.fromtimestamp(float(self.info(path).get("created", 0.0)), tz=timezone.utc)

    created = modified

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing to do for a run: it is made by what is in it.

        Raises:
            NotADirectoryError: for a folder within a run.
        """
        path = self._strip_protocol(path)
        if "/" in path and not self.isdir(path):
            raise _not_a_directory(self.unstrip_protocol(path))

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """See :meth:`makedirs`."""
        self.makedirs(path, exist_ok=True)

    def rmdir(self, path: str) -> None:
        """Nothing to do: a directory goes with what is in it."""

    # -- reading and writing --------------------------------------------------------------------------------------

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Read a file, or the bytes ``[start, end)`` of it."""
        info = self._file_info(path)
        size = int(info["size"])
        first = max(0, size + start if start is not None and start < 0 else start or 0)
        last = min(size, size if end is None else size + end if end < 0 else end)
        buffer = bytearray(max(0, last - first))
        self.fill(info, first, memoryview(buffer))
        return bytes(buffer)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file whole; with ``mode="create"`` only where there is none.

        Raises:
            FileExistsError: if there is one.
        """
        view = memoryview(value).cast("B")
        self.store(path, lambda: [view], len(view), exclusive=mode == "create", digest=checksum(view))

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Write an empty file; with ``truncate=False`` leave one that is there as it is."""
        if truncate or not self.exists(path):
            self.pipe_file(path, b"")

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file, a block at a time.

        Raises:
            shutil.SameFileError: if both paths lead to one file. Moving it would copy it onto itself, and remove it.
        """
        info = self._file_info(path1)
        with contextlib.suppress(FileNotFoundError):
            if self.info(path2).get("etag") == info["etag"]:
                raise shutil.SameFileError(f"{path1} and {path2} are the same file at {self.client.address}")
        size, digest = int(info["size"]), xxhash.xxh3_128()

        def blocks() -> Iterator[memoryview]:
            buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
            for start in range(0, size, BLOCK_BYTES):
                piece = buffer[: min(BLOCK_BYTES, size - start)]
                self.fill(info, start, piece)
                digest.update(piece)
                yield piece

        if self.store(path2, blocks, size) != digest.hexdigest():
            self.rm_file(path2)
            raise CorruptSnapshot(f"the copy of {path1} was damaged on its way", where=self.unstrip_protocol(path2))

    def rm_file(self, path: str) -> None:
        """Remove a file or a snapshot, in memory and at the tiers below.

        Raises:
            PermissionError: if ``last.ckpt`` is only another name of a snapshot.
        """
        stripped = self._strip_protocol(path)
        try:
            self.client.call("DELETE", f"/v1/files/{quoted(stripped)}")
        except NodeRefused as error:
            if error.status == 409:
                raise PermissionError(errno.EPERM, str(error), self.unstrip_protocol(stripped)) from error
            raise

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, snapshots, what a pattern matches, or (recursively) all of a run."""
        for item in path if isinstance(path, list) else [path]:
            stripped = self._strip_protocol(item)
            if any(character in stripped for character in "*?["):
                found = self.glob(stripped)
                if not found:
                    raise SnapshotNotFound(self.unstrip_protocol(stripped))
            elif "/" in stripped:
                found = [stripped]
            elif recursive:
                found = sorted({"/".join(str(entry["name"]).split("/")[:2]) for entry in self._files(stripped)})
            else:
                raise IsADirectoryError(
                    errno.EISDIR, "this is a run; pass recursive=True to remove all of it", self.unstrip_protocol(item)
                )
            for name in found:
                self.rm_file(name)

    def fill(self, info: dict[str, Any], start: int, into: memoryview) -> None:
        """Read bytes of the very file that :meth:`info` told of; an error if it was replaced meanwhile."""
        self.client.receive(f"/v1/files/{quoted(info['path'])}", start, into, info["etag"])

    def store(
        self,
        path: str,
        pieces: Callable[[], Iterable[memoryview]],
        nbytes: int,
        *,
        exclusive: bool = False,
        digest: str | None = None,
    ) -> str:
        """Write a file whole from pieces.

        Args:
            path: of the file.
            pieces: called for an iterable of ``memoryview``.
            nbytes: their sum.
            exclusive: whether to write only where there is none.
            digest: xxh3-128 of the file, if it is known: what arrives must have it.

        Returns:
            xxh3-128 of what arrived.

        Raises:
            FileExistsError: if there is one, with ``exclusive``.
            NotADirectoryError: if the path has folders.
        """
        path = self.check_file_path(path)
        try:
            headers = {**({"If-None-Match": "*"} if exclusive else {}), **({DIGEST_HEADER: digest} if digest else {})}
            return str(self.client.send(f"/v1/files/{quoted(path)}", pieces, nbytes, headers)["xxh3_128"])
        except NodeRefused as error:
            if error.status == 412:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.unstrip_protocol(path)) from error
            raise

    def check_file_path(self, path: str) -> str:
        """The path of a file that may be written, without its protocol.

        Raises:
            NotADirectoryError: if it has folders within its run.
            IsADirectoryError: if it is a run.
        """
        path = self._strip_protocol(path)
        if path.count("/") > 1:
            raise _not_a_directory(self.unstrip_protocol(path))
        if "/" not in path:
            raise IsADirectoryError(errno.EISDIR, f"this is a run; {_NO_FOLDERS}", self.unstrip_protocol(path))
        return path

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return SpotReader(self, self._file_info(path), block_size or BLOCK_BYTES, cache_options, **kwargs)
        if mode not in ("wb", "xb"):
            raise NotImplementedError(f"a spot:// file is opened for 'rb', 'wb' or 'xb', not {mode!r}")
        path = self.check_file_path(path)
        if mode == "xb" and self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.unstrip_protocol(path))
        return SpotWriter(self, path, autocommit=autocommit, exclusive=mode == "xb")

    # -- inside ---------------------------------------------------------------------------------------------------

    def _file_info(self, path: str) -> dict[str, Any]:
        info = self.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.unstrip_protocol(path))
        return info

    def _listing(self, run: str) -> dict[str, Any]:
        listing = self.client.call("GET", f"/v1/runs/{quoted(run)}/files")
        with answered(str(self.client.address)):
            for item in listing["files"]:
                file_path(item["path"])
        return listing

    def _files(self, run: str) -> list[dict[str, Any]]:
        return [
            {
                "name": f"{run}/{item['path']}",
                "size": item["nbytes"],
                "type": "file",
                "created": item["created_unix_s"],
                "dirty": item["dirty"],
                "safe": item["safe"],
                **({"step": item["step"]} if "step" in item else {}),
            }
            for item in self._listing(run)["files"]
        ]

    def _children(self, run: str, below: str) -> list[dict[str, Any]]:
        files = self._files(run)
        path = f"{run}/{below}".rstrip("/")
        exact = [entry for entry in files if entry["name"] == path]
        if exact:
            return exact
        children: dict[str, dict[str, Any]] = {}
        for entry in files:
            name = str(entry["name"])
            if name.startswith(path + "/"):
                child = f"{path}/{name[len(path) + 1 :].split('/')[0]}"
                children[child] = entry if child == name else _directory(child)
        if not children and below:
            return [self._file_info(path)]  # the alias, or nothing
        return [children[name] for name in sorted(children)]


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _not_a_directory(url: str) -> NotADirectoryError:
    return NotADirectoryError(errno.ENOTDIR, _NO_FOLDERS, url)
