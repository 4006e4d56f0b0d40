"""Addresses of this machine, and protection of local servers from pages of other sites.

A browser's page can send requests to a loopback address, also with its site's host name resolved there; their Host or
Origin names the site.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

HOST = "127.0.0.1"


def is_loopback(host: str | None) -> bool:
    """Whether a host, without port and brackets, is "localhost" or a loopback IP address; False for None and "".

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.com")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def refusal(host: str | None, origin: str | None) -> str | None:
    """Why a server on a loopback address must not answer a request, for its sender; None if it may.

    host: the header Host; None is refused.
    origin: the header Origin; None is accepted, as is this machine at any port.
    """
    if not is_loopback(host_name(f"//{host or ''}")):
        return f"Host = {host!r}: this server is asked as localhost or {HOST} only"
    if origin is not None and not is_loopback(host_name(origin)):
        return f"Origin = {origin!r}: this server answers no page of another site"
    return None


def host_name(url: str) -> str | None:
    """The host name in `url`, such as "http://localhost:8000" or "//[::1]:8000"; None if there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
