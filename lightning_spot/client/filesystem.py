"""``spot://host:port/run/…``, or ``spots://`` by TLS, as an fsspec file system.

``Trainer.fit(ckpt_path="spot://…/last.ckpt")`` works.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from lightning_spot.client.server_client import ServerClient, quoted
from lightning_spot.config import LARGEST, SERVER_SCHEMES, names_server
from lightning_spot.errors import ServerRefusedError, SettingsError, SnapshotNotFoundError
from lightning_spot.protocol.wire import Address, answered, etag_of, file_path, parse_spot_url
from lightning_spot.server.tier import Listed
from lightning_spot.snapshot.files import MODEL_FILE
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.store import newest_first, put_together
from lightning_spot.untrusted import file_name, integer

BLOCK_BYTES = 8 * 1024 * 1024
LAST = "last.ckpt"


class SpotFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """The snapshots and files of the runs that a snapshot server holds in its memory: to be read only.

    What has left that memory lies where the run is durable. A run is a directory, a snapshot a directory in it with
    ``model.ckpt`` (or the files of a sharded checkpoint) and ``manifest.json``. ``RUN/last.ckpt`` reads
    as the newest snapshot, if that is one file, unless the run has a file of that name. What would change something
    raises an ``OSError`` (``EROFS``).

    Args:
        host: host name or address of the server.
        port: its TCP port.
        tls: whether it speaks TLS.
        **storage_options: passed to fsspec.
    """

    protocol = SERVER_SCHEMES
    root_marker = ""
    cachable = True

    def __init__(self, host: str = "", port: int = 0, tls: bool = False, **storage_options: Any) -> None:
        super().__init__(host=host, port=port, tls=tls, use_listings_cache=False, **storage_options)
        if not host:
            raise SettingsError("a spot:// URL names its server: spot://host:port/run/last.ckpt")
        self.client = ServerClient(Address(host=host, port=port, tls=tls))

    @classmethod
    def _strip_protocol(cls, path: str | list[str]) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        path = str(path)
        return parse_spot_url(path)[1] if names_server(path) else path.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        address = parse_spot_url(str(path))[0]
        return {"host": address.host, "port": address.port, "tls": address.tls}

    def unstrip_protocol(self, name: str) -> str:
        """The full URL of a path."""
        return f"{self.client.address}/{self._strip_protocol(name)}"

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
            there = self._entries(run, self._listed(run))
            entries = [there[name] for name in sorted(there) if name.rpartition("/")[0] == path]
            if below and not entries:
                entries = [self._file_info(path)]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Size, type and, for files, time and version (``etag``) of a path."""
        path = self._strip_protocol(path)
        run, _, below = path.partition("/")
        if not run:
            return _directory("")
        listed = self._listed(run)  # raises if there is no such run
        entries = self._entries(run, listed)
        if (found := entries.get(path)) is not None:
            return found
        newest = next((each for each in listed if each.exact and not each.is_file), None)
        if below == LAST and newest is not None:
            first = newest.spans[0]
            if first.name == MODEL_FILE:
                return {**entries[f"{run}/{newest.path_of(first)}"], "name": path}
            raise SnapshotNotFoundError(
                f"{self.unstrip_protocol(path)} names one file, and the newest snapshot is several:"
                f" {self.unstrip_protocol(f'{run}/{newest.name}')}. Give its directory, or make one file of it with"
                " lightning-spot cp"
            )
        why = "it is no file"
        try:
            self.client.receive(f"/v1/files/{quoted(path)}", 0, memoryview(bytearray(1)), etag='""')
        except (SnapshotNotFoundError, ServerRefusedError) as error:  # the server says where it lies by now
            why = str(error)
        raise SnapshotNotFoundError(f"{self.unstrip_protocol(path)}: {why}")

    # -- reading --------------------------------------------------------------------------------------------------

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Read a file, or the bytes ``[start, end)`` of it."""
        data: bytes = super().cat_file(path, start, end, cache_type="none", **kwargs)
        return data

    def fill(self, info: dict[str, Any], start: int, into: memoryview) -> None:
        """Read bytes of the very file that :meth:`info` told of; an error if it was replaced meanwhile."""
        self.client.receive(f"/v1/files/{quoted(info['path'])}", start, into, info["etag"])

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        if mode != "rb":
            self._refuse(path)
        return SpotReader(self, self._file_info(path), block_size or BLOCK_BYTES, **kwargs)

    def _refuse(self, path: Any, *_arguments: Any, **_options: Any) -> Any:
        """Refuse whatever would change something.

        Raises:
            OSError: always.
        """
        raise OSError(errno.EROFS, "spot:// is read only: save to the run's directory or bucket", str(path))

    mkdir = makedirs = rmdir = pipe_file = touch = cp_file = rm_file = rm = _refuse

    # -- inside ---------------------------------------------------------------------------------------------------

    def _file_info(self, path: str) -> dict[str, Any]:
        info = self.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.unstrip_protocol(path))
        return info

    def _listed(self, run: str) -> list[Manifest]:
        """The snapshots and files of a run that are in the server's memory, the newest first."""
        answer = self.client.call("GET", f"/v1/runs/{quoted(run)}/snapshots")
        with answered(str(self.client.address)):
            listed = [item.manifest for item in Listed.all_of(answer)]
            if not listed and not integer(answer, "attempt", None, 0, LARGEST):
                raise SnapshotNotFoundError(f"this server has no run {run!r}")
            return newest_first([*(each for each in listed if each.shard is None), *put_together(listed)])

    def _entries(self, run: str, listed: Sequence[Manifest]) -> dict[str, dict[str, Any]]:
        """Every file of these, and the folders that they are in, by path."""
        entries = {run: _directory(run)}
        with answered(str(self.client.address)):
            for manifest in listed:
                for span in manifest.spans:
                    path = f"{run}/{file_path(manifest.path_of(span))}"
                    entries[path] = {
                        "name": path,
                        "path": path,
                        "size": span.nbytes,
                        "type": "file",
                        "created": manifest.created_unix_s,
                        "etag": etag_of(manifest),
                        "step": manifest.step,
                    }
                    while (path := path.rpartition("/")[0]) not in entries:
                        entries[path] = _directory(path)
        return entries


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


class SpotReader(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """Reads ranges of one version of a file; large reads go to the network once, without a second copy.

    Args:
        fs: where it is.
        info: what ``fs.info`` says of it. A file that is replaced while it is read is an error, never a mixture.
        block_size: bytes to ask for at least.
        **kwargs: passed to fsspec.
    """

    def __init__(self, fs: SpotFileSystem, info: dict[str, Any], block_size: int, **kwargs: Any) -> None:
        self._info = info
        super().__init__(fs, info["name"], "rb", block_size, size=info["size"], **kwargs)

    def readinto(self, target: Any) -> int:
        """Read straight into ``target``, past the cache where it is larger than a block."""
        view = memoryview(target).cast("B")
        if len(view) < self.blocksize:
            data = self.read(len(view))
            view[: len(data)] = data
            return len(data)
        count = max(0, min(len(view), int(self.size) - int(self.loc)))
        self.fs.fill(self._info, self.loc, view[:count])
        self.loc += count
        return count

    def _fetch_range(self, start: int, end: int) -> bytes:
        buffer = bytearray(max(0, min(end, self.size) - start))
        self.fs.fill(self._info, start, memoryview(buffer))
        return bytes(buffer)
