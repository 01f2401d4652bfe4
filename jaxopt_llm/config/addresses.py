"""Addresses of programs, as host:port."""

import re


def is_address(text: str) -> bool:
    """Return whether a text is an address of the form host:port.

    A host with an empty label, or one of more than 63 characters, is none: look-ups of it raise UnicodeError.
    """
    port = re.fullmatch(r".+:([0-9]{1,5})", text)
    if port is None or not 0 < int(port[1]) < 2**16:
        return False
    try:
        parse_address(text)[0].encode("idna")
    except UnicodeError:
        return False
    return True


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of an address, without the brackets of an IPv6 host."""
    host, port = text.rsplit(":", 1)
    return host.strip("[]"), int(port)
