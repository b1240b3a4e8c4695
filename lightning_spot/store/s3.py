"""Requests to S3 for which its library has no word, or needs more of them: lists, conditions, uploads in parts.

A multipart upload is sent in parallel, and completed whole or aborted; those of dead attempts are found. The library's
own would not do: its files send one part after the other, and of what it sends in parallel it has a copy in memory, and
has it appear without asking whether the attempt still holds the run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lightning_spot.snapshot.files import is_data_file
from lightning_spot.snapshot.manifest import Manifest, snapshot_order
from lightning_spot.store import store
from lightning_spot.store.fsspec_client import Job, move
from lightning_spot.threads import all_at_once

logger = logging.getLogger(__name__)

_MOST_REMOVED = 1000  # in one request

BLOCK_BYTES = 8 * 1024 * 1024
_MOST_BLOCKS = 10_000
_MOST_PAGES = 20


def list_folder(files: Any, path: str) -> list[dict[str, Any]]:
    """What lies in a folder, each with its path as ``name``; of objects also ``size``. One request for each thousand.

    The library asks a second time, for the folder above, where there is nothing.

    Raises:
        FileNotFoundError: if there is no such bucket.
    """
    bucket, key, _ = files.split_path(path)
    found: list[dict[str, Any]] = []
    more: dict[str, str] = dict(getattr(files, "req_kw", {}))
    while True:
        prefix = f"{key.rstrip('/')}/" if key else ""
        page = files.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more)
        folders = [str(item["Prefix"]).rstrip("/") for item in page.get("CommonPrefixes") or []]
        found += ({"name": f"{bucket}/{name}", "size": 0, "type": "directory"} for name in folders)
        for item in page.get("Contents") or []:
            if item["Key"] != prefix:  # some tools make an object of that name, and call it a folder
                found.append({"name": f"{bucket}/{item['Key']}", "size": int(item["Size"]), "type": "file"})
        if not page.get("IsTruncated"):
            return found
        more["ContinuationToken"] = page["NextContinuationToken"]


def remove_objects(files: Any, paths: Sequence[str]) -> None:
    """Remove objects of one bucket, many by one request; nothing happens to those that are gone.

    Raises:
        Exception: if one could not be removed; the others may be.
    """
    for start in range(0, len(paths), _MOST_REMOVED):
        some = paths[start : start + _MOST_REMOVED]
        if len(some) == 1 or not _removed_at_once(files, some):
            remove_each(files.rm_file, some)


def remove_each(remove: Callable[[str], None], paths: Iterable[str]) -> None:
    """Remove objects side by side, each by a request of its own.

    Raises:
        Exception: if one could not be removed; the others are.
    """

    def one(path: str) -> Exception | None:
        try:
            remove(path)
        except FileNotFoundError:
            logger.debug("%s is gone", path)
        except Exception as error:
            return error
        return None

    failed = all_at_once([lambda path=path: one(path) for path in paths], "spot-remove")  # type: ignore[misc]
    if error := next(filter(None, failed), None):
        raise error


def _removed_at_once(files: Any, paths: Sequence[str]) -> bool:
    """Whether that request has removed all of them; stores that speak S3 do not all know it, or refuse its checksum."""
    bucket, keys = files.split_path(paths[0])[0], [files.split_path(path)[1] for path in paths]
    try:
        answer = files.call_s3(
            "delete_objects", Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
        )
    except Exception as error:  # botocore's errors are made at run time
        logger.debug("objects of %s are removed one by one: %s", bucket, error)
        return False
    if failed := answer.get("Errors"):
        logger.debug("%d of %d objects of %s were not removed: %s", len(failed), len(keys), bucket, failed[0])
    return not failed


def aborts_unfinished(files: Any, path: str) -> bool:
    """Whether the bucket has a lifecycle rule by which unfinished uploads below a path are aborted.

    Raises:
        Exception: if that cannot be read.
    """
    bucket, key, _ = files.split_path(path)
    try:
        found = files.call_s3("get_bucket_lifecycle_configuration", Bucket=bucket)
    except Exception as error:  # botocore's errors are made at run time, and s3fs translates some
        if _error_code(error) == "NoSuchLifecycleConfiguration":
            return False
        raise

    def is_one(rule: dict[str, Any]) -> bool:
        prefix = rule.get("Filter", rule).get("Prefix", "")
        return rule.get("Status") == "Enabled" and "AbortIncompleteMultipartUpload" in rule and key.startswith(prefix)

    return any(map(is_one, found.get("Rules") or []))


def create_object(files: Any, path: str, data: bytes) -> None:
    """Create an object of a bucket unless there is one, as all libraries of object stores can.

    Raises:
        NotImplementedError: if this store cannot do that in one request.
    """
    try:
        files.pipe_file(path, data, mode="create")
    except FileExistsError:
        return
    except Exception as error:  # botocore's errors are made at run time, and s3fs translates some
        code = _error_code(error)
        if code in ("NotImplemented", "501"):
            raise NotImplementedError from error
        if code not in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
            raise


def _error_code(error: BaseException) -> str:
    for one in (error, error.__cause__, error.__context__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return next((code for code in ("PreconditionFailed", "NotImplemented") if code in str(error)), "")


def block_bytes(nbytes: int) -> int:
    """Bytes of one block of an upload: 8 MiB (S3 wants at least 5), more where there would be over 10,000 of them."""
    return max(BLOCK_BYTES, -(-nbytes // _MOST_BLOCKS))


def regrouped(parts: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """The same bytes in blocks of ``size``, the last one shorter; copied, so that a part may go when the next comes."""
    waiting = bytearray()
    for part in parts:
        for start in range(0, len(part), size):
            waiting += part[start : start + size]
            while len(waiting) >= size:
                yield memoryview(bytes(memoryview(waiting)[:size]))
                del waiting[:size]
    if waiting:
        yield memoryview(bytes(waiting))


class _Block(io.RawIOBase):
    """A view of memory as a file, so that the library sends it piece by piece and never copies it as a whole.

    Each request begins by asking for the place. s3fs repeats a request without seeking: a place that is asked for
    after a read is therefore the beginning again.
    """

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._place = 0
        self._was_read = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._view)}[whence]
        self._was_read = False
        return self._place

    def tell(self) -> int:
        if self._was_read:
            self.seek(0)
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._view) if size is None or size < 0 else min(self._place + size, len(self._view))
        data = bytes(self._view[self._place : stop])
        self._place, self._was_read = max(stop, self._place), True
        return data


class MultipartUpload:
    """One multipart upload: begun, sent block by block in any order, and completed or aborted. Thread-safe.

    Each request is retried by the library; S3 checks the CRC32 of each block.

    Args:
        files: an s3fs file system.
        path: bucket and key of the object.
    """

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        bucket, key, _ = files.split_path(path)
        self._named = {"Bucket": bucket, "Key": key}
        self._named["UploadId"] = files.call_s3("create_multipart_upload", **self._named)["UploadId"]
        self._tags: dict[int, str] = {}

    def send(self, number: int, block: memoryview) -> None:
        """Send a block, numbered from 1; it is not copied."""
        answer = self._files.call_s3(
            "upload_part",
            **self._named,
            PartNumber=number,
            Body=_Block(block),
            ContentLength=len(block),  # never less, whatever happens on the way
        )
        self._tags[number] = answer["ETag"]

    def complete(self) -> None:
        """Have the object become visible, of all blocks that were sent."""
        parts = [{"PartNumber": number, "ETag": self._tags[number]} for number in sorted(self._tags)]
        self._files.call_s3("complete_multipart_upload", **self._named, MultipartUpload={"Parts": parts})
        self._files.invalidate_cache(self._path)

    def abort(self) -> None:
        """Give it up; no block may be under way."""
        self._files.call_s3("abort_multipart_upload", **self._named)


def upload(files: Any, path: str, blocks: Iterable[memoryview], size: int, *, ready: Callable[[], None]) -> None:
    """Upload an object in blocks, in parallel.

    Args:
        files: an s3fs file system.
        path: bucket and key.
        blocks: of ``size`` bytes each, but the last; not copied, and no more are asked for than are under way.
        size: of a block.
        ready: called when all blocks are there, before the object becomes visible.

    Raises:
        Exception: whatever failed; the upload is aborted, what was there before is there still.
    """
    begun = MultipartUpload(files, path)

    def jobs() -> Iterator[Job]:
        for number, block in enumerate(blocks, 1):
            yield len(block), functools.partial(begun.send, number, block)

    try:
        move(jobs(), size)
        ready()
        begun.complete()
    except BaseException:
        # No block is under way any more. What cannot be aborted now, the next attempt's sweep aborts, or the bucket.
        with contextlib.suppress(Exception):
            begun.abort()
        raise


def abort_dead_uploads(files: Any, root: str, current: Manifest) -> None:
    """Abort unfinished uploads of snapshots of earlier attempts, and old ones of the current attempt.

    Only uploads to places that have the name of a snapshot's file are ours to judge.
    """
    bucket, prefix, _ = files.split_path(f"{root}/")
    marker: dict[str, str] = {}
    for _page in range(_MOST_PAGES):
        try:
            page = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
        except Exception as error:  # may not be allowed, or not known to this store
            logger.debug("unfinished uploads below %s cannot be listed: %s", root, error)
            return
        for item in page.get("Uploads") or []:
            if _is_dead(str(item["Key"]).removeprefix(prefix), item, current):
                with contextlib.suppress(FileNotFoundError):
                    files.call_s3("abort_multipart_upload", Bucket=bucket, Key=item["Key"], UploadId=item["UploadId"])
        if not page.get("IsTruncated"):
            return
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}


def _is_dead(below: str, item: dict[str, Any], current: Manifest) -> bool:
    name, _, file = below.partition("/")
    order = snapshot_order(name)
    if order is None or not is_data_file(file) or order[0] > current.attempt:
        return False
    begun = item.get("Initiated")
    return order[0] < current.attempt or (begun is not None and time.time() - begun.timestamp() >= store.SETTLED_S)
