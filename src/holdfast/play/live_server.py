"""The server of the live page: loopback only, a random token in the address, no other origin or host."""

import hmac
import json
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError

from holdfast.config.base import first_error_message
from holdfast.errors import ConfigError, HoldfastError, one_line
from holdfast.play.live import Command, LivePlay
from holdfast.play.live_page import live_page

LOOPBACK = "127.0.0.1"
LONGEST_BODY = 10_000
"""Bytes of a command."""
HEADERS = {
    "Cache-Control": "no-store",
    # The address has the token.
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
POLICY = (
    "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class RefusedError(Exception):
    """A request that is not answered."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class LiveServer(ThreadingHTTPServer):
    """Serves one LivePlay on the loopback device, at `url`."""

    daemon_threads = True

    def __init__(self, play: LivePlay, port: int = 0) -> None:
        try:
            super().__init__((LOOPBACK, port), LiveRequest)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--port {port} cannot be used: {reason}; leave it out for a free one.") from None
        self.play, self.token = play, secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}
        self.url = f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of ours; a browser that hangs up is none."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve from threads within this context; return the address."""
        stop = threading.Event()
        threads = [
            threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True),
            threading.Thread(target=self.play.play_until, args=(stop,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield self.url
        finally:
            stop.set()
            self.shutdown()
            self.server_close()
            for thread in threads:
                thread.join(timeout=5)


class LiveRequest(BaseHTTPRequestHandler):
    """Answers the page, its polls and its commands."""

    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "holdfast", ""
    timeout = 30

    def do_GET(self) -> None:
        """Return the page, or the state of play."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Run a command, and return the state of play."""
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses have the token."""

    def _answer(self, respond: Callable[[str], None]) -> None:
        try:
            respond(self._authorized_path())
        except RefusedError as refused:
            # The body of a refused request is not read, so the connection cannot be used again.
            self.close_connection = True
            self._send(refused.status, "text/plain", refused.reason.encode())
        except ConnectionError:
            self.close_connection = True

    def _authorized_path(self) -> str:
        """Return the path behind the token; refuse requests of other pages, by other names, or without the token."""
        host, origin = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(host) != 1 or host[0] not in self.server.hosts:
            # A name of another site that resolves to this machine (DNS rebinding) comes with its own Host.
            raise RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "unknown host")
        is_own = origin in ([], [f"http://{host[0]}"])
        if not is_own or self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            raise RefusedError(HTTPStatus.FORBIDDEN, "other origin")
        _, token, *rest = self.path.split("/", 2) if self.path.startswith("/") else ("", "")
        if not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            raise RefusedError(HTTPStatus.FORBIDDEN, "wrong token; open the address that holdfast play printed")
        if not rest:
            raise RefusedError(HTTPStatus.NOT_FOUND, "the address ends in /")
        return rest[0]

    def _get(self, path: str) -> None:
        parts = urlsplit(path)
        if parts.path == "":
            nonce = secrets.token_urlsafe(16)
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", live_page(self.server.play, nonce).encode(), nonce)
        elif parts.path == "state":
            since = parse_qs(parts.query).get("since", ["0"])[0]
            if not (since.isascii() and since.isdigit() and len(since) < 16):
                raise RefusedError(HTTPStatus.BAD_REQUEST, "since is a number of steps")
            self._send_state(int(since))
        else:
            raise RefusedError(HTTPStatus.NOT_FOUND, "not here")

    def _post(self, path: str) -> None:
        if path != "command":
            raise RefusedError(HTTPStatus.NOT_FOUND, "not here")
        length = self.headers.get("Content-Length", "")
        if self.headers.get("Content-Type") != "application/json" or "Transfer-Encoding" in self.headers:
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a command is application/json")
        if not (length.isascii() and length.isdigit() and len(length) < 16 and int(length) <= LONGEST_BODY):
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a command has at most {LONGEST_BODY} bytes")
        try:
            command = Command.model_validate_json(self.rfile.read(int(length)))
            self.server.play.run(command)
        except ValidationError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": first_error_message(error)})
        except HoldfastError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": one_line(error)})
        else:
            self._send_json(HTTPStatus.OK, {})

    def _send_state(self, since: int) -> None:
        try:
            self._send_json(HTTPStatus.OK, self.server.play.state(since))
        except HoldfastError as error:
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": one_line(error)})

    def _send_json(self, status: HTTPStatus, content: Any) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, nonce: str = "") -> None:
        self.send_response(status)
        policy = POLICY.format(nonce=nonce) if nonce else "default-src 'none'"
        headers = {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), "Content-Security-Policy": policy}
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
