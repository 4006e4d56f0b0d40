"""Addresses of this machine: whether a host is this machine alone (`is_loopback`), for the servers of `jaxtune serve`
and `jaxtune watch` and for runs of several processes, and whether a request comes from a page of another site
(`refusal`), for the servers.

A page in the browser can send requests to a server on the loopback address, and a host name of the page's site can be
made to resolve to that address. Such requests have the site's name in their Host or Origin header.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

HOST = "127.0.0.1"


def is_loopback(host: str | None) -> bool:
    """Whether a host, a name or an IP address without port and brackets, is that of this machine alone: the name
    localhost or a loopback address. False for any other name, for None and for "". On any other host `jaxtune serve`
    demands an API key; on a loopback one it checks each request by `refusal`. In a run of several processes `join` asks
    it about the first one's host: if that is this machine alone, the first one listens on no other address.

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
    """The reason why a server on a loopback address must not answer a request, in words for its sender; None if it may.
    `jaxtune serve` and `jaxtune watch` ask it for each request. Without this check a page of another site could read
    the server's answers through the user's browser.

    Args:
      host: the header Host; None or one that is not this machine's (`is_loopback`) is refused.
      origin: the header Origin. None, when a request has none, is accepted, as is a page of this machine at any port.
    """
    if not is_loopback(host_name(f"//{host or ''}")):
        return f"Host = {host!r}: this server is asked as localhost or {HOST} only"
    if origin is not None and not is_loopback(host_name(origin)):
        return f"Origin = {origin!r}: this server answers no page of another site"
    return None


def host_name(url: str) -> str | None:
    """The host name in `url`, such as "http://localhost:8000" or "//[::1]:8000", without port and brackets; None if it
    has none or is not a URL. `refusal` reads a request's headers with it, and `join` the first process's address."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
