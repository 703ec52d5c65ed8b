"""A reverse proxy that serves a service under a prefix, and strips it, as nginx does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2

OF_ONE_HOP = {"connection", "transfer-encoding", "content-length", "host"}


@contextmanager
def proxied(client: httpx2.Client, prefix: str) -> Iterator[httpx2.Client]:
    """A client of the proxy's host; requests outside of the prefix are 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def log_message(self, *words: object) -> None:
            """Nothing."""

        def _forward(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            kept = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in OF_ONE_HOP
            }
            headers = kept | {
                "Host": "inside.example",
                "X-Forwarded-Host": self.headers["Host"],
            }
            answer = client.request(
                self.command,
                self.path.removeprefix(prefix),
                content=body,
                headers=headers,
            )
            self.send_response(answer.status_code)
            for name, value in answer.headers.multi_items():
                # The client has decompressed the content.
                if name not in OF_ONE_HOP and name != "content-encoding":
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with httpx2.Client(
                base_url=f"http://127.0.0.1:{server.server_port}", timeout=60
            ) as outside:
                yield outside
        finally:
            server.shutdown()
            thread.join()
