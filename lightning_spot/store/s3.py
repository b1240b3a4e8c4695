"""Requests to S3 for which its library has no word: rules of a bucket, and uploads in parts.

A multipart upload is sent in parallel, and completed whole or aborted. The library's own would not do: its files send
one part after the other, and of what it sends in parallel it has a copy in memory, and has it appear without asking
whether the attempt still holds the run. Those of killed processes the bucket's lifecycle rule aborts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_spot.store.fsspec_client import code_of, move

BLOCK_BYTES = 8 * 1024 * 1024
_MOST_BLOCKS = 10_000


def aborts_unfinished(files: Any, path: str) -> bool:
    """Whether the bucket has a lifecycle rule by which unfinished uploads below a path are aborted.

    Raises:
        Exception: if that cannot be read.
    """
    bucket, key, _ = files.split_path(path)
    try:
        found = files.call_s3("get_bucket_lifecycle_configuration", Bucket=bucket)
    except Exception as error:  # botocore's errors are made at run time, and s3fs translates some
        if code_of(error) == "NoSuchLifecycleConfiguration":
            return False
        raise

    def is_one(rule: dict[str, Any]) -> bool:
        prefix = rule.get("Filter", rule).get("Prefix", "")
        return rule.get("Status") == "Enabled" and "AbortIncompleteMultipartUpload" in rule and key.startswith(prefix)

    return any(map(is_one, found.get("Rules") or []))


def block_bytes(nbytes: int) -> int:
    """Bytes of one block of an upload: 8 MiB (S3 wants at least 5), more where there would be over 10,000 of them."""
    return max(BLOCK_BYTES, -(-nbytes // _MOST_BLOCKS))


def regrouped(parts: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """The same bytes in blocks of ``size``, the last one shorter; a part may go when the next comes."""
    waiting = bytearray()
    for part in parts:
        for start in range(0, len(part), size):
            waiting += part[start : start + size]
            while len(waiting) >= size:
                yield bytes(memoryview(waiting)[:size])
                del waiting[:size]
    if waiting:
        yield bytes(waiting)


def upload(files: Any, path: str, blocks: Iterable[bytes], size: int, *, ready: Callable[[], None]) -> None:
    """Upload an object in blocks, in parallel; each request is retried by the library.

    Args:
        files: an s3fs file system.
        path: bucket and key.
        blocks: of ``size`` bytes each, but the last; no more are asked for than are under way.
        size: of a block.
        ready: called when all blocks are there, before the object becomes visible.

    Raises:
        Exception: whatever failed; the upload is aborted, what was there before is there still.
    """
    bucket, key, _ = files.split_path(path)
    named = {"Bucket": bucket, "Key": key}
    named["UploadId"] = files.call_s3("create_multipart_upload", **named)["UploadId"]
    tags: dict[int, str] = {}

    def send(number: int, block: bytes) -> None:
        tags[number] = files.call_s3("upload_part", **named, PartNumber=number, Body=block)["ETag"]

    try:
        move((functools.partial(send, number, block) for number, block in enumerate(blocks, 1)), size)
        ready()
        parts = [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]
        files.call_s3("complete_multipart_upload", **named, MultipartUpload={"Parts": parts})
        files.invalidate_cache(path)
    except BaseException:
        # No block is under way any more. What cannot be aborted now, the bucket aborts.
        with contextlib.suppress(Exception):
            files.call_s3("abort_multipart_upload", **named)
        raise
