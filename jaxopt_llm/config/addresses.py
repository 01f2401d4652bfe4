"""Addresses of programs, as host:port."""

import re


def is_address(text: str) -> bool:
    """Return whether a text is an address of the form host:port."""
    port = re.fullmatch(r".+:([0-9]{1,5})", text)
    return port is not None and 0 < int(port[1]) < 2**16


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of an address, without the brackets of an IPv6 host."""
    host, port = text.rsplit(":", 1)
    return host.strip("[]"), int(port)
