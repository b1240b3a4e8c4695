"""``spot://host:port/run/…`` as an fsspec file system: ``Trainer.fit(ckpt_path="spot://…/last.ckpt")`` works."""

from __future__ import annotations

import io
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from lightning_spot.errors import SettingsError, SnapshotNotFound
from lightning_spot.memory.client import NodeClient, quoted
from lightning_spot.memory.paths import LAST
from lightning_spot.memory.wire import Address, parse_spot_url

_BLOCK_BYTES = 8 * 1024 * 1024


class SpotFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """The snapshots and files of a memory node.

    A run is a directory, a snapshot a directory in it with ``model.ckpt`` and ``manifest.json``. ``RUN/last.ckpt``
    reads as the newest snapshot. Files written here are held in the node's memory and flushed like snapshots.

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
    def _strip_protocol(cls, path: str) -> str:
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

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """List runs, snapshots of a run, or files of a snapshot."""
        path = self._strip_protocol(path)
        run, _, below = path.partition("/")
        if not run:
            status = self.client.call("GET", "/v1/status")
            names = sorted({*status["runs"], *(slot["run"] for slot in status["slots"] if slot["run"])})
            entries = [{"name": name, "size": 0, "type": "directory"} for name in names]
        else:
            entries = self._children(run, below)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Size, type and, for files, time of a path."""
        path = self._strip_protocol(path)
        run, _, below = path.partition("/")
        if not below:
            self.ls(run)  # raises if there is no such run
            return {"name": path, "size": 0, "type": "directory"}
        for entry in self._files(run):
            if entry["name"] == path:
                return entry
            if str(entry["name"]).startswith(path + "/"):
                return {"name": path, "size": 0, "type": "directory"}
        if below == LAST:
            headers = self.client.head(f"/v1/files/{quoted(run, below)}")
            size = int(headers["content-range"].rpartition("/")[2])
            created = parsedate_to_datetime(headers["last-modified"]).timestamp()
            return {"name": path, "size": size, "type": "file", "created": created}
        raise SnapshotNotFound(self.unstrip_protocol(path))

    def modified(self, path: str) -> datetime:
        """When a file was taken."""
        return datetime.fromtimestamp(float(self.info(path).get("created", 0.0)), tz=timezone.utc)

    created = modified

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing to do: directories are made by what is in them."""

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Nothing to do, see :meth:`makedirs`."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Read a file, or the bytes ``[start, end)`` of it."""
        path = self._strip_protocol(path)
        size = int(self.info(path)["size"])
        first = max(0, size + start if start is not None and start < 0 else start or 0)
        last = min(size, size if end is None else size + end if end < 0 else end)
        buffer = bytearray(max(0, last - first))
        self.client.receive(f"/v1/files/{quoted(path)}", first, memoryview(buffer))
        return bytes(buffer)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file whole."""
        self.client.send(f"/v1/files/{quoted(self._file_path(path))}", memoryview(value))

    def rm_file(self, path: str) -> None:
        """Remove a file or a snapshot, in memory and at the tiers below."""
        self.client.call("DELETE", f"/v1/files/{quoted(self._strip_protocol(path))}")

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, snapshots, or (recursively) all of a run."""
        for item in path if isinstance(path, list) else [path]:
            stripped = self._strip_protocol(item)
            if "/" in stripped:
                self.rm_file(stripped)
                continue
            if not recursive:
                raise IsADirectoryError(f"{stripped} is a run; pass recursive=True to remove all of it")
            for name in {str(entry["name"]).split("/")[1] for entry in self._files(stripped)}:
                self.rm_file(f"{stripped}/{name}")

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
            return _Reader(self, path, mode, block_size or _BLOCK_BYTES, cache_options=cache_options, **kwargs)
        if mode in ("wb", "xb"):
            return _Writer(self, self._file_path(path), autocommit)
        raise SettingsError(f"a spot:// file is opened for 'rb' or 'wb', not {mode!r}")

    def _file_path(self, path: str) -> str:
        path = self._strip_protocol(path)
        if path.count("/") != 1:
            raise SettingsError(f"spot://…/{path}: a file is written as spot://host:port/RUN/NAME, without folders")
        return path

    def _files(self, run: str) -> list[dict[str, Any]]:
        listed = self.client.call("GET", f"/v1/runs/{quoted(run)}/snapshots")["snapshots"]
        entries = []
        for item in listed:
            manifest = item["manifest"]
            file = manifest["file"]
            entries.append(
                {
                    "name": f"{run}/{manifest['name']}" + (f"/{file}" if file else ""),
                    "size": manifest["nbytes"],
                    "type": "file",
                    "created": manifest["created_unix_s"],
                    "step": manifest["step"],
                    "dirty": item["dirty"],
                    "safe": item["safe"],
                }
            )
        return entries

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
                directory = {"name": child, "size": 0, "type": "directory"}
                children[child] = entry if child == name else directory
        if not children:
            raise SnapshotNotFound(self.unstrip_protocol(path))
        return list(children.values())


class _Reader(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """Reads ranges of a file at a node; large reads go to the network once, without a second copy."""

    def readinto(self, target: Any) -> int:
        """Read straight into ``target``, past the cache where it is larger than a block."""
        view = memoryview(target).cast("B")
        if len(view) < self.blocksize:
            data = self.read(len(view))
            view[: len(data)] = data
            return len(data)
        count = max(0, min(len(view), int(self.size) - int(self.loc)))
        self.fs.client.receive(f"/v1/files/{quoted(self.path)}", self.loc, view[:count])
        self.loc += count
        return count

    def _fetch_range(self, start: int, end: int) -> bytes:
        buffer = bytearray(max(0, min(end, self.size) - start))
        self.fs.client.receive(f"/v1/files/{quoted(self.path)}", start, memoryview(buffer))
        return bytes(buffer)


class _Writer(io.BytesIO):
    """Collects a file and sends it when it is closed (or, in a transaction, when that commits): whole or not at all."""

    def __init__(self, fs: SpotFileSystem, path: str, autocommit: bool) -> None:
        super().__init__()
        self.fs = fs
        self.path = path
        self._autocommit = autocommit
        self._data: bytes | None = None

    def close(self) -> None:
        """Send the file, unless a transaction will."""
        if not self.closed:
            self._data = self.getvalue()
            super().close()
            if self._autocommit:
                self.commit()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            super().close()  # a failed write leaves nothing behind
        else:
            self.close()

    def commit(self) -> None:
        """Send what was written."""
        if self._data is not None:
            self.fs.pipe_file(self.path, self._data)
            self._data = None

    def discard(self) -> None:
        """Forget what was written."""
        self._data = None
