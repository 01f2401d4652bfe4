"""Servers of models in a thread of the test."""

import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from jaxopt_llm.inference.models import LoadedModel


@contextmanager
def running(
    loaded: Mapping[str, LoadedModel], token: bytes = b"", folders: Any = None, length: int = 512
) -> Iterator[tuple[str, Any]]:
    """Yield the address of a server, and the server. At the end it raises what it failed with."""
    from jaxopt_llm.inference import server  # an extra

    served = server.Server(loaded, rows=4, length=length, token=token, folders=folders)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(served.serve_on, listener)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", served
        finally:
            served.should_exit = True
            ended.result()
