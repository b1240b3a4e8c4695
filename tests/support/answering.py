"""A server that is none of ours, over real HTTP: a webhook, a cloud's metadata, whoever is at a port."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answering:
    """Answers each request as :meth:`answer` does.

    Attributes:
        url: where it is.
    """

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            do_POST = do_PUT = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one of them, on a thread of its own; by default with nothing."""
        request.send_response(200)
        request.end_headers()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
