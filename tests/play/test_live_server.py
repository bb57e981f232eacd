import http.client
import json
import socket

import pytest

from helpers.small_replays import player_of
from holdfast.errors import ConfigError
from holdfast.play.live import LivePlay
from holdfast.play.live_server import LONGEST_BODY, LiveServer
from holdfast.play.play_loop import PlayLoop

EVIL = '"><script>alert(1)</script>'


@pytest.fixture(scope="module")
def server():
    with PlayLoop(player_of(), 2, follow=2) as loop:
        server = LiveServer(LivePlay(loop, loop.header(EVIL, 0)))
        with server.serving():
            yield server


def request(server, path=None, method="GET", body=None, **headers):
    """Send a request as it is; return status, body and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    path = f"/{server.token}/" if path is None else path
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    headers = {"Host": f"127.0.0.1:{server.server_port}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    if body is not None:
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    for name, value in headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, response.headers


def command(server, **fields):
    return request(server, f"/{server.token}/command", "POST", json.dumps(fields).encode())


def test_the_page_with_its_token(server):
    status, text, headers = request(server)
    assert status == 200
    assert "hf-viewer" in text
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "Access-Control-Allow-Origin" not in headers
    # Names are text, whatever they are.
    assert EVIL not in text
    assert "<script>alert" not in text
    for host in ("127.0.0.1", "localhost"):
        assert request(server, Host=f"{host}:{server.server_port}")[0] == 200


@pytest.mark.parametrize("path", ["/", "", "/state", "/x/", "/x/state?since=0", "//", "/../", "/TOKEN", "state"])
def test_a_request_without_the_token_is_refused(server, path):
    if path == "/TOKEN":
        assert request(server, f"/{server.token[:-1]}/")[0] == request(server, f"/{server.token}x/")[0] == 403
        return
    status, text, _ = request(server, path)
    assert status in (400, 403)
    assert server.token not in text
    assert "hf-viewer" not in text


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:PORT",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1:PORT.evil.example",
        "rebound.localhost:PORT",
        "0.0.0.0:PORT",
        "[::1]:PORT",
        "",
        None,
    ],
)
def test_another_host_is_refused(server, host):
    host = None if host is None else host.replace("PORT", str(server.server_port))
    for path in (None, f"/{server.token}/state"):
        status, text, _ = request(server, path, Host=host)
        assert (status, text) == (421, "unknown host")
    status, *_ = request(server, f"/{server.token}/command", "POST", b'{"do": "step"}', Host=host)
    assert status == 421
    assert server.play.total == 0


@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1:PORT", "http://127.0.0.1:1", "null", ""])
def test_another_origin_is_refused(server, origin):
    origin = origin.replace("PORT", str(server.server_port))
    for method, path, body in (("GET", "state", None), ("POST", "command", b'{"do": "step"}')):
        assert request(server, f"/{server.token}/{path}", method, body, Origin=origin)[:2] == (403, "other origin")
    assert server.play.total == 0


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_is_refused(server, site):
    assert request(server, Sec_Fetch_Site=site)[0] == 403


def test_its_own_origin_is_served(server):
    own = f"http://127.0.0.1:{server.server_port}"
    assert request(server, f"/{server.token}/state", Origin=own, Sec_Fetch_Site="same-origin")[0] == 200
    # Of two names of this machine, the other one is another origin.
    assert request(server, Origin=f"http://localhost:{server.server_port}")[0] == 403


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{}", {}, 400),
        (b"{", {}, 400),
        (b"\xff", {}, 400),
        (b"[" * 5000, {}, 400),
        (b'{"do": "exec"}', {}, 400),
        (b'{"do": "clear", "agent": 99}', {}, 400),
        (b'{"do": "step", "count": 1e300}', {}, 400),
        (b'{"do": "step"}', {"Content_Type": "text/plain"}, 415),
        (b'{"do": "step"}', {"Content_Type": None}, 415),
        (b" " * (LONGEST_BODY + 1), {}, 413),
        (b"", {"Content_Length": "-1"}, 413),
        (b"", {"Content_Length": "9" * 30}, 413),
    ],
)
def test_wrong_commands_are_refused(server, body, headers, status):
    assert request(server, f"/{server.token}/command", "POST", body, **headers)[0] == status
    assert server.play.total == 0


@pytest.mark.parametrize("path", ["nothing", "state?since=-1", "state?since=9e9", "../", "command"])
def test_unknown_paths_are_refused(server, path):
    assert request(server, f"/{server.token}/{path}")[0] in (400, 404)


def test_an_address_without_its_last_slash_is_refused(server):
    assert request(server, f"/{server.token}")[:2] == (404, "the address ends in /")


@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "DELETE", "HEAD"])
def test_other_methods_are_refused(server, method):
    status, _, headers = request(server, method=method)
    assert status == 501
    assert "Access-Control-Allow-Origin" not in headers


def test_only_this_machine_can_connect(server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"--port \d+ cannot be used: Address already in use"):
        LiveServer(server.play, server.server_port)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=5):
        pass


def test_bytes_that_are_no_text_are_refused(server):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as connection:
        connection.sendall(b"GET /\xff\xfe/ HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.server_port)
        assert b" 403 " in connection.recv(100)


def test_two_servers_have_different_tokens(server):
    other = LiveServer(server.play)
    other.server_close()
    assert other.token != server.token
    assert len(other.token) >= 32


def test_commands_change_the_state_of_play(server):
    assert command(server, do="step", count=5)[:2] == (200, "{}")
    assert command(server, do="clear", agent=1)[0] == 200
    status, text, _ = request(server, f"/{server.token}/state?since=0")
    state = json.loads(text)
    assert (status, state["total"], state["rows"]["reward"]["shape"]) == (200, 5, [5, 2])
    assert state["marks"] == [{"t": 5, "agents": [1], "what": "cleared"}]
    assert set(state["before"]) == {"1"}
    status, text, _ = command(server, do="restore", agent=1)
    assert (status, json.loads(text)) == (400, {"error": "No state of agent 1 is remembered; remember one first."})
