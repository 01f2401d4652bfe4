"""Token that the groups and the outer servers share."""

import os

from jaxopt_llm.distributed.handshake import read_token_file

TOKEN_VARIABLE = "JAXOPT_LLM_GROUPS_TOKEN"


def read_token(file: str, name: str = "groups.token_file") -> bytes:
    """Return the token: that of a file or of the environment; empty without either.

    name: of the setting, for messages.

    Raises:
        InputError: the file cannot be read or is empty.
    """
    if not file:
        return os.environ.get(TOKEN_VARIABLE, "").strip().encode()
    return read_token_file(file, f"{name}={file}")
