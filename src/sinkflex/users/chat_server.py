"""A client of one OpenAI-compatible server: a bounded wait, bounded retries, and a fault when the server fails.

A request ends after `timeout_seconds` whatever the server does: a server that sends a byte a second, never answers, or
answers without an end is cut off. No thread is started and no connection outlives its request.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sinkflex.envs.env import EnvironmentFault

MAX_BYTES = 4_000_000
MAX_WAIT_SECONDS = 30.0
_BUSY = (408, 409, 425, 429)

AnswerT = TypeVar("AnswerT")


class Unusable(ValueError):
    """An answer that is not what was asked for; worth another attempt."""


class _Refused(Exception):
    """An answer that another attempt would not change, such as "no such model"."""


@dataclass(frozen=True, slots=True)
class ChatServer:
    """Where a model is served, and how long to wait for it.

    Attributes:
        url: the server's base, usually ending in "/v1".
        model: the model's name on that server.
        api_key: sent as a bearer token; "" sends none. It appears in no message and no `repr`.
        timeout_seconds: for a whole request, from the connection to the last byte.
        attempts: requests made before the server counts as broken.
        backoff_seconds: wait before the second attempt; doubles from then on, up to `MAX_WAIT_SECONDS`.

    Raises:
        ValueError: one of these makes no sense.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    timeout_seconds: float = 60.0
    attempts: int = 4
    backoff_seconds: float = 1.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError(
                f"{self.url!r} is no address of a server; expected, for instance, http://localhost:8000/v1"
            )
        if not self.model:
            raise ValueError(f"no model given for {self.url}; its names are listed at {self.url}/models")
        if self.attempts < 1 or self.timeout_seconds <= 0 or self.backoff_seconds < 0:
            raise ValueError(
                f"attempts = {self.attempts}, timeout_seconds = {self.timeout_seconds}, backoff_seconds = "
                f"{self.backoff_seconds}: expected at least 1, more than 0, at least 0"
            )

    def complete(self, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], AnswerT]) -> AnswerT:
        """Return what `read` makes of the assistant message that the server answers with.

        Args:
            body: fields of a chat completion request beside the model.
            read: turns the message into an answer, or raises `Unusable` for another attempt.

        Raises:
            EnvironmentFault: the server is down, hangs, refuses, or answers with nothing usable, at every attempt.
        """
        request = json.dumps({"model": self.model, **body}).encode()
        wait, problem = self.backoff_seconds, ""
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(wait, MAX_WAIT_SECONDS))
                wait *= 2
            try:
                status, retry_after, data = self._post(request)
                _check_status(status, data)
                return read(_message(data))
            except _Busy as busy:
                problem, wait = str(busy), max(wait, _seconds(retry_after))
            except _Refused as refused:
                raise EnvironmentFault(f"the server {self.url} refuses model {self.model!r}: {refused}") from None
            except (OSError, http.client.HTTPException, Unusable) as error:
                problem = f"{type(error).__name__}: {error}".strip(": ")
        raise EnvironmentFault(
            f"the server {self.url} gave no usable answer in {self.attempts} attempts of {self.timeout_seconds:g} "
            f"seconds (the last: {problem}). Does it run? Type curl {self.url}/models, which should list its models"
        )

    def _post(self, request: bytes) -> tuple[int, str, bytes]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        deadline = time.monotonic() + self.timeout_seconds
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_seconds)
        try:
            connection.connect()
            connection.sock = _TimedSocket(connection.sock, deadline)  # type: ignore[assignment]
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if self.api_key:
                headers["Authorization"] = f"Bearer {self.api_key}"
            connection.request("POST", f"{parts.path.rstrip('/')}/chat/completions", request, headers)
            response = connection.getresponse()
            data = response.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise Unusable(f"more than {MAX_BYTES} bytes")
            return response.status, response.headers.get("Retry-After", ""), data
        finally:
            connection.close()


class _Busy(Exception):
    """The server asks to try again later."""


class _TimedSocket:
    """As much of a socket as `http.client` uses, with one deadline for everything."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))

    def close(self) -> None:
        self._sock.close()


class _TimedReader(io.RawIOBase):
    """The reading end: it keeps the socket open until it is closed itself, as the files of sockets do."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._file = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the answer took too long")
    return left


def _check_status(status: int, data: bytes) -> None:
    if status == 200:
        return
    words = re.sub(r"\s+", " ", data[:300].decode("utf-8", "replace")).strip()
    if status in _BUSY or status >= 500:
        raise _Busy(f"status {status} {words}".strip())
    raise _Refused(f"status {status} {words}".strip())


def _message(data: bytes) -> Mapping[str, Any]:
    try:
        message = json.loads(data)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Unusable(f"no chat completion ({type(error).__name__}) in {data[:80]!r}") from None
    if not isinstance(message, Mapping):
        raise Unusable(f"a message that is a {type(message).__name__}")
    return message


def _seconds(header: str) -> float:
    return float(header) if re.fullmatch(r"\d+(\.\d+)?", header) else 0.0
