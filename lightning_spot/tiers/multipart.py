"""S3's multipart uploads through s3fs: parts in parallel, completed whole or aborted; those of dead attempts found."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_spot.image.files import is_data_file
from lightning_spot.image.manifest import Manifest, snapshot_order
from lightning_spot.tiers import store
from lightning_spot.tiers.transfers import Job, move

logger = logging.getLogger(__name__)

BLOCK_BYTES = 8 * 1024 * 1024
_MOST_BLOCKS = 10_000
_MOST_PAGES = 20


def block_bytes(nbytes: int) -> int:
    """Bytes of one block of an upload: 8 MiB (S3 wants at least 5), more where there would be over 10,000 of them."""
    return max(BLOCK_BYTES, -(-nbytes // _MOST_BLOCKS))


def slices_of(image: memoryview, size: int) -> Iterator[memoryview]:
    """Views of consecutive blocks."""
    return (image[start : start + size] for start in range(0, len(image), size))


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


class Upload:
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
    begun = Upload(files, path)

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
