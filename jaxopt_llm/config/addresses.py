"""Addresses of programs, as host:port."""

import re

_FORM = "must be host:port, with the name or IP address of a host"


def find_problem(text: str) -> str:
    """Return why a text is no address of the form host:port; "" if it is one.

    A name with an empty label, or with a label of more than 63 characters, is wrong: look-ups of it raise UnicodeError.
    """
    port = re.fullmatch(r".+:([0-9]{1,9})", text)
    if port is None:
        return _FORM
    if not 0 < int(port[1]) < 2**16:
        return "the port must be 1 to 65535"
    try:
        parse_address(text)[0].encode("idna")
    except UnicodeError:
        return _FORM
    return ""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of an address, without the brackets of an IPv6 host."""
    host, port = text.rsplit(":", 1)
    return host.strip("[]"), int(port)
