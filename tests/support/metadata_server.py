"""A fake metadata server over real HTTP, with the characters of four clouds. One public fake for all their sources."""

from __future__ import annotations

import datetime
import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from tests.support.answering import Answering


def in_seconds(seconds: float) -> str:
    when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


class MetadataServer(Answering):
    """Answers as told by its attributes.

    Attributes:
        hang: whether it takes connections and never answers.
        slow_first_s: what its first answer takes (Azure switches its events on).
        ahead_s: so much its clock is ahead of this machine's.
        garbage: whether it answers with a web page.
        stop_s: seconds until the end, counted anew at each question (some emulators slide); ``None``: no notice.
        rebalance: whether AWS recommends to rebalance.
        maintenance: whether GCP announces maintenance.
        vm: this VM's name (Azure).
        concerned: whose event it is (Azure).
        tokens: how many tokens were given out (AWS); each is good for ``token_uses`` questions.
    """

    def __init__(self) -> None:
        self.hang = self.garbage = self.rebalance = self.maintenance = False
        self.slow_first_s = self.ahead_s = 0.0
        self.stop_s: float | None = None
        self.vm = self.concerned = "vm-1"
        self.tokens = 0
        self.token_uses = 10**9
        self.uses = 0
        self.asked = 0
        self.changed = threading.Condition()
        super().__init__()

    def announce(self, seconds: float | None) -> None:
        with self.changed:
            self.stop_s = seconds
            self.changed.notify_all()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        if self.hang:
            time.sleep(30)
            return
        if self.asked == 1:
            time.sleep(self.slow_first_s)
        status, text, headers = self._cloud(request)
        if self.garbage:
            status, text, headers = 200, "<html>log in to the hotel's network</html>", {}
        request.send_response_only(status)
        request.send_header("Date", request.date_time_string(time.time() + self.ahead_s))
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(text.encode())

    def _cloud(self, request: BaseHTTPRequestHandler) -> tuple[int, str, dict[str, str]]:
        path = urlsplit(request.path).path
        if path.startswith("/latest/meta-data/instance"):
            return self._alibaba(path)
        if path.startswith("/latest"):
            return self._aws(request, path)
        if path.startswith("/computeMetadata"):
            return self._gcp(request, path)
        return self._azure(request, path)

    def _aws(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str, dict[str, str]]:
        if path == "/latest/api/token":
            self.tokens, self.uses = self.tokens + 1, 0
            return (200, f"token-{self.tokens}", {}) if request.command == "PUT" else (405, "", {})
        self.uses += 1
        if request.headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}" or self.uses > self.token_uses:
            self.tokens += 1  # what was given out is not good any more
            return 401, "", {}
        if path.endswith("/spot/instance-action") and self.stop_s is not None:
            return 200, json.dumps({"action": "terminate", "time": in_seconds(self.stop_s + self.ahead_s)}), {}
        if path.endswith("/rebalance") and self.rebalance:
            return 200, json.dumps({"noticeTime": in_seconds(0)}), {}
        return 404, "<h1>404 - Not Found</h1>", {}

    def _gcp(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str, dict[str, str]]:
        if request.headers.get("Metadata-Flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header.", {}
        flavor = {"Metadata-Flavor": "Google"}
        if path.endswith("/maintenance-event"):
            return 200, "TERMINATE_ON_HOST_MAINTENANCE" if self.maintenance else "NONE", flavor
        query = parse_qs(urlsplit(request.path).query)
        if "wait_for_change" in query and self.stop_s is None:
            with self.changed:
                self.changed.wait_for(lambda: self.stop_s is not None, float(query["timeout_sec"][0]))
        taken = self.stop_s is not None
        return 200, "TRUE" if taken else "FALSE", {**flavor, "ETag": f"etag-{taken}"}

    def _azure(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str, dict[str, str]]:
        if request.headers.get("Metadata") != "true":
            return 400, "", {}
        if path == "/metadata/instance/compute/name":
            return 200, self.vm, {}
        event = {
            "EventId": "e-1",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [self.concerned],
            "EventStatus": "Scheduled",
            "NotBefore": "",
        }
        if self.stop_s is not None:
            when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.stop_s + self.ahead_s)
            event["NotBefore"] = when.strftime("%a, %d %b %Y %H:%M:%S GMT")
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": [event] if self.stop_s is not None else []}), {}

    def _alibaba(self, path: str) -> tuple[int, str, dict[str, str]]:
        if path.endswith("/spot/termination-time") and self.stop_s is not None:
            return 200, in_seconds(self.stop_s + self.ahead_s), {}
        return 404, "", {}
