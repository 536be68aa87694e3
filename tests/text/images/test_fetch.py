"""Fetching from the web, against a server on this machine that the guard is told to let through."""

import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address

import pytest

from perilune.errors import RequestError
from perilune.text.images import fetch as fetching
from perilune.text.images.fetch import fetch, is_public

FIELD = "messages[0].content[0].image_url.url"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append((self.path, self.headers["Host"]))
        status, headers, body = self.server.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing."""


@contextmanager
def web(answer):
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.answer, server.paths = answer, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(fetching, "is_public", lambda address: True)


def get(server, path="/cat.png", limit=1000, **options):
    return fetch(f"http://localhost:{server.server_port}{path}", FIELD, limit, **options)


def refusal(call, *arguments, **options):
    with pytest.raises(RequestError) as raised:
        call(*arguments, **options)
    assert raised.value.param == FIELD
    assert raised.value.status == 400
    return str(raised.value)


def answer(status=200, body=b"picture", **headers):
    return status, {"Content-Length": str(len(body)), **headers}, body


@pytest.mark.usefixtures("anywhere")
def test_a_body_is_fetched_from_the_address_that_was_checked():
    with web(answer()) as server:
        assert get(server, "/a/cat.png?size=2") == b"picture"
        assert server.paths == [("/a/cat.png?size=2", f"localhost:{server.server_port}")]


def test_this_machine_is_not_the_public_internet():
    with web(answer()) as server:
        for host in ("localhost", "127.0.0.1", "0.0.0.0", "2130706433", "0x7f.1"):
            assert "not on the public internet" in refusal(fetch, f"http://{host}:{server.server_port}/", FIELD, 100)
        assert server.paths == []


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
        *(
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::8.8.8.8",
            "2002:7f00:1::1",
            "2001:db8::1",
        ),
    ],
)
def test_addresses_of_private_networks_are_refused_however_they_are_written(address):
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(address):
    assert is_public(ip_address(address))


def test_a_name_that_leads_to_a_public_and_a_private_address_is_refused(monkeypatch):
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 80)) for host in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    assert "not on the public internet" in refusal(fetch, "http://example.org/", FIELD, 100)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(status):
    with web(answer(status, Location="http://127.0.0.1/")) as server:
        assert "redirects are not followed" in refusal(get, server)
        assert len(server.paths) == 1


@pytest.mark.usefixtures("anywhere")
def test_other_answers_are_refused_with_their_status():
    with web(answer(404)) as server:
        assert "status 404" in refusal(get, server)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("headers", [{}, {"Content-Length": "3"}])
def test_no_more_than_the_limit_is_read(headers):
    with web((200, headers, b"x" * 5000)) as server:
        if headers:
            assert get(server) == b"xxx"
        else:
            assert "more than 1000 bytes" in refusal(get, server)


@pytest.mark.usefixtures("anywhere")
def test_a_body_that_ends_early_is_refused():
    with web((200, {"Content-Length": "900"}, b"x" * 10)) as server:
        assert "cut off" in refusal(get, server)


@pytest.mark.usefixtures("anywhere")
def test_a_server_that_never_answers_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://localhost:{silent.getsockname()[1]}/"
        assert "cannot be fetched" in refusal(fetch, url, FIELD, 100, deadline_s=0.2)


@pytest.mark.usefixtures("anywhere")
def test_a_server_that_answers_drop_by_drop_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        is_over = threading.Event()

        def drip():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
                while not is_over.is_set():
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return
                    time.sleep(0.02)

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://localhost:{listening.getsockname()[1]}/"
        assert FIELD in refusal(fetch, url, FIELD, 20000, deadline_s=0.3)
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    "url",
    ["http://", "http://user:secret@example.org/", "http://example.org:99999/", "http://exa mple.org/", "http://[::1/"],
)
def test_what_is_no_plain_address_is_refused(url):
    assert FIELD in refusal(fetch, url, FIELD, 100)


def test_a_host_that_is_not_known_is_refused():
    assert "not known" in refusal(fetch, "http://nowhere.invalid/", FIELD, 100)
