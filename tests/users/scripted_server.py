"""A real HTTP server on this machine that speaks the chat completion protocol and can be told to misbehave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Respond = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def send(handler: BaseHTTPRequestHandler, data: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


def completion(message: dict[str, Any]) -> bytes:
    return json.dumps({"object": "chat.completion", "choices": [{"index": 0, "message": message}]}).encode()


def says(content: Any, **fields: Any) -> Respond:
    return lambda handler, body: send(handler, completion({"role": "assistant", "content": content, **fields}))


def calls(*pairs: tuple[str, Any], content: str | None = None, ids: bool = True) -> Respond:
    made = [
        {"type": "function", "function": {"name": name, "arguments": arguments}} | ({"id": f"c{i}"} if ids else {})
        for i, (name, arguments) in enumerate(pairs)
    ]
    return says(content, tool_calls=made)


def raw(data: bytes, status: int = 200, **headers: str) -> Respond:
    return lambda handler, body: send(handler, data, status, **headers)


def hangs(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.server.released.wait(20)  # type: ignore[attr-defined]


def trickles(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Send headers, then one byte of a good answer every 50 ms: each read succeeds, the whole never ends."""
    data = completion({"role": "assistant", "content": "x" * 10_000})
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    for i in range(len(data)):
        if handler.server.released.wait(0.05):  # type: ignore[attr-defined]
            return
        handler.wfile.write(data[i : i + 1])
        handler.wfile.flush()


def hangs_up(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.close_connection = True
    handler.connection.close()


def cut_off(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


class Served:
    """A running server.

    Attributes:
        script: how to answer the next requests, in order; the last one stays.
        requests: (path, headers, body) of each request.
    """

    def __init__(self, script: list[Respond], port: int = 0) -> None:
        self.script, self.requests = list(script), []
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                served.requests.append((self.path, dict(self.headers), body))
                respond = served.script.pop(0) if len(served.script) > 1 else served.script[0]
                try:
                    respond(self, body)
                except OSError:
                    self.close_connection = True  # the client gave up

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.released = threading.Event()  # type: ignore[attr-defined]
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        self._server.released.set()  # type: ignore[attr-defined]
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(*script: Respond, port: int = 0) -> Iterator[Served]:
    """Run a server that answers request after request as told; the last way of answering stays."""
    served = Served(list(script), port)
    try:
        yield served
    finally:
        served.stop()


def elapsed(action: Callable[[], Any]) -> float:
    """Return how many seconds something takes, whether it raises or not."""
    begin = time.monotonic()
    with suppress(Exception):
        action()
    return time.monotonic() - begin
