"""Requests to S3 for which its library has no word, or needs more of them: to list, to remove many, to create."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_spot.errors import SettingsError
from lightning_spot.threads import all_at_once

logger = logging.getLogger(__name__)

S3 = frozenset({"s3", "s3a"})
CREATE = frozenset({"gs", "gcs", "az", "abfs", "abfss"})
"""Object stores whose libraries create an object exclusively."""

_MOST_REMOVED = 1000  # in one request


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
    """Create an object unless there is one.

    Raises:
        NotImplementedError: if this store cannot do that in one request.
        SettingsError: if the library installed here would leave the condition out of the request, without a word.
    """
    bucket, key, _ = files.split_path(path)
    if "IfNoneMatch" not in files.s3.meta.service_model.operation_model("PutObject").input_shape.members:
        raise SettingsError(
            "the botocore installed here knows no If-None-Match: two trainers could claim one attempt at"
            f" s3://{bucket}. Install aiobotocore 2.15 or later"
        )
    try:
        files.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
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
