"""The least of S3 that s3fs needs, in memory: ``python -m benchmarks.s3_server``. Prints the port it listens on.

It checks no signature and computes no checksum, so that a speed measured against it is that of the client. For what
a store does right or wrong the tests use moto.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from benchmarks.beside import Beside

READ_BYTES = 256 * 1024
NUMBERS = itertools.count(1)
OBJECTS: dict[str, list[bytes]] = {}
UPLOADS: dict[str, dict[int, bytes]] = {}
ASKED: Counter[str] = Counter()
"""Requests by what they ask for, since somebody has asked for them at :data:`ASKED_PATH`."""
ASKED_PATH = "-asked-"
LOCK = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        return

    def _split(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        path = unquote(parts.path).strip("/")
        if path != ASKED_PATH:
            with LOCK:
                ASKED[_asks_for(self.command, path, query)] += 1
        return path, query

    def _body(self) -> bytes:
        left = int(self.headers.get("Content-Length") or 0)
        buffer = bytearray(left)
        view, place = memoryview(buffer), 0
        while place < left:
            count = self.rfile.readinto(view[place : place + READ_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError("the client went away")
            place += count
        return bytes(buffer) if left < READ_BYTES else buffer  # type: ignore[return-value] # not copied again

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _xml(self, text: str) -> None:
        self._answer(200, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), Content_Type="application/xml")

    def do_PUT(self) -> None:
        path, query = self._split()
        body = self._body()
        etag = f'"{next(NUMBERS):032x}"'
        with LOCK:
            if "uploadId" in query:
                UPLOADS[query["uploadId"]][int(query["partNumber"])] = body
            elif "If-None-Match" in self.headers and path in OBJECTS:
                self._error(412, "PreconditionFailed")
                return
            elif "/" in path:
                OBJECTS[path] = [body]
        self._answer(200, ETag=etag)

    def do_POST(self) -> None:
        path, query = self._split()
        body = self._body()
        with LOCK:
            if "delete" in query:
                for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                    OBJECTS.pop(f"{path}/{unescape(key)}", None)
                self._xml("<DeleteResult></DeleteResult>")
                return
            if "uploads" in query:
                upload = str(next(NUMBERS))
                UPLOADS[upload] = {}
                self._xml(
                    f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                )
                return
            parts = UPLOADS.pop(query["uploadId"])
            OBJECTS[path] = [parts[number] for number in sorted(parts)]
        self._xml('<CompleteMultipartUploadResult><ETag>"whole"</ETag></CompleteMultipartUploadResult>')

    def do_DELETE(self) -> None:
        path, query = self._split()
        with LOCK:
            UPLOADS.pop(query.get("uploadId", ""), None) if "uploadId" in query else OBJECTS.pop(path, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        path, _ = self._split()
        data = OBJECTS.get(path)
        if data is None:
            self._answer(200 if "/" not in path else 404)
            return
        self._answer(200, Content_Length=str(sum(map(len, data))), ETag='"whole"', Last_Modified=_DATE)

    def do_GET(self) -> None:
        path, query = self._split()
        if path == ASKED_PATH:
            with LOCK:
                asked = json.dumps(ASKED)
                ASKED.clear()
            self._answer(200, asked.encode())
            return
        if "/" not in path:
            self._xml(_listing(path, query))
            return
        data = OBJECTS.get(path)
        if data is None:
            self._error(404, "NoSuchKey")
            return
        nbytes = sum(map(len, data))
        start, stop = 0, nbytes
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(nbytes, int(last) + 1) if last else nbytes
        self.send_response(206 if wanted else 200)
        for name, value in (("Content-Length", stop - start), ("ETag", '"whole"'), ("Last-Modified", _DATE)):
            self.send_header(name, str(value))
        self.end_headers()
        place = 0
        for part in data:
            low, high = max(start - place, 0), min(stop - place, len(part))
            for at in range(low, high, READ_BYTES):
                self.wfile.write(memoryview(part)[at : min(at + READ_BYTES, high)])
            place += len(part)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())


def _asks_for(method: str, path: str, query: dict[str, str]) -> str:
    """What a request asks for, in one word."""
    if method == "POST":
        return "remove" if "delete" in query else "begin" if "uploads" in query else "complete"
    if method == "PUT":
        return "part" if "uploadId" in query else "put"
    if method == "GET":
        return "get" if "/" in path else "uploads" if "uploads" in query else "list"
    return {"HEAD": "look", "DELETE": "remove"}.get(method, method)


_DATE = "Sat, 01 Jan 2000 00:00:00 GMT"


def _listing(bucket: str, query: dict[str, str]) -> str:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    folders, contents = set(), ""
    with LOCK:
        for path, data in sorted(OBJECTS.items()):
            key = path.removeprefix(f"{bucket}/")
            if not key.startswith(prefix):
                continue
            below = key[len(prefix) :]
            if delimiter and delimiter in below:
                folders.add(prefix + below.split(delimiter)[0] + delimiter)
            else:
                size = sum(map(len, data))
                contents += f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size>"
                contents += "<LastModified>2000-01-01T00:00:00Z</LastModified></Contents>"
    shared = "".join(f"<CommonPrefixes><Prefix>{escape(item)}</Prefix></CommonPrefixes>" for item in sorted(folders))
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{shared}</ListBucketResult>"


class S3Server(Beside):
    """The server as a process of its own."""

    def __init__(self) -> None:
        super().__init__("benchmarks.s3_server")

    def asked(self) -> Counter[str]:
        """What clients have asked for since this was called before."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{ASKED_PATH}") as answer:
            return Counter(json.loads(answer.read()))


@contextlib.contextmanager
def s3_behind(proxy: Callable[[int], Beside]) -> Iterator[S3Server]:
    """A server that is reached through a proxy: credentials and endpoint in the environment, for as long as it lasts.

    Args:
        proxy: makes one before a port.
    """
    import s3fs

    before = dict(os.environ)
    with S3Server() as server, proxy(server.port) as way:
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{way.port}",
            AWS_ACCESS_KEY_ID="benchmark",
            AWS_SECRET_ACCESS_KEY="benchmark",
            AWS_DEFAULT_REGION="us-east-1",
        )
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield server
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            os.environ.clear()
            os.environ.update(before)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket.listen(128)
    print(server.server_port, flush=True)
    server.serve_forever()
