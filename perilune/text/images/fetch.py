"""Fetches a picture from a public web address, and from nothing that only this machine can reach."""

import socket
import ssl
import threading
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import SplitResult, urlsplit

from perilune.errors import RequestError
from perilune.text.images.picture import refused

DEADLINE_S = 5.0
# IPv6 addresses that lead to the IPv4 address in their last 32 bits, and those that a network may map as it likes
_NAT64, _LOCAL_NAT64 = IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48")
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "perilune", "Connection": "close"}


def fetch(url: str, field: str, max_bytes: int, *, deadline_s: float = DEADLINE_S) -> bytes:
    """The body behind an http or https URL, within `deadline_s` seconds once its host is resolved.

    The address that was checked is the one connected to. Redirects are not followed. RequestError names `field`.
    """
    parts, port = _read_url(url, field)
    assert parts.hostname is not None
    address = _public_address(parts.hostname, port, field)
    try:
        with closing(socket.create_connection((address, port), timeout=deadline_s)) as plain:
            timer = threading.Timer(deadline_s, _hang_up, (plain,))
            timer.daemon = True
            timer.start()
            try:
                return _get(plain, parts, port, field, max_bytes)
            finally:
                timer.cancel()
    except (OSError, HTTPException) as error:
        raise refused(field, f"cannot be fetched ({error or type(error).__name__}); send it as a data: URL") from error


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address belongs to a host on the open internet, whatever form it is written in."""
    if isinstance(address, IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            embedded = IPv4Address(int(address) & 0xFFFFFFFF)
        if address in _LOCAL_NAT64 or (embedded is not None and not is_public(embedded)):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _read_url(url: str, field: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise refused(field, f"is no address ({error})") from error
    if not parts.hostname or parts.username is not None or any(character <= " " for character in url):
        raise refused(field, "is no plain address; give one such as https://example.org/picture.png")
    return parts, port


def _public_address(host: str, port: int, field: str) -> str:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise refused(field, f"names a host that is not known ({error})") from error
    if not found or not all(is_public(ip_address(address.partition("%")[0])) for address in found):
        raise _not_public(field)
    return sorted(found, key=lambda address: ":" in address)[0]


def _not_public(field: str) -> RequestError:
    return refused(field, "names a host that is not on the public internet; send the picture as a data: URL")


def _get(plain: socket.socket, parts: SplitResult, port: int, field: str, max_bytes: int) -> bytes:
    host = parts.hostname or ""
    connection = HTTPConnection(host, port)
    connection.sock = plain
    if parts.scheme == "https":
        connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    with closing(connection):
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target.encode("utf-8").decode("latin-1"), headers=_HEADERS)
        return _read_body(connection.getresponse(), field, max_bytes)


def _read_body(response: HTTPResponse, field: str, max_bytes: int) -> bytes:
    if 300 <= response.status < 400:
        raise refused(field, "redirects to another address; redirects are not followed, give the last address")
    if response.status != 200:
        raise refused(field, f"is answered with status {response.status}; send the picture as a data: URL")
    body = response.read(max_bytes + 1)
    if len(body) > max_bytes:
        raise refused(field, f"is a picture of more than {max_bytes} bytes, which is the limit")
    if response.length:
        raise refused(field, "is cut off before its end, or did not arrive in time")
    return body


def _hang_up(connection: socket.socket) -> None:
    """Makes a read that waits in another thread fail."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
