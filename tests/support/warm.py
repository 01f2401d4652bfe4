"""Commands as forks of one process that has imported their modules, because imports take half of a small run's time.

Works only on Linux: the commands become children of the test process, like the processes that it starts itself.
"""

import ctypes
import functools
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import types
from typing import Any

COMMANDS = ("train", "generate", "evaluate", "plan", "prepare", "convert")
# Modules that the commands import only when they need them.
LIBRARIES = ("jax._src.interpreters.mlir", "jinja2.sandbox", "tensorboardX", "tokenizers", "tyro")
AVAILABLE = sys.platform == "linux"
_SET_CHILD_SUBREAPER = 36  # option of prctl(2): this process adopts orphans


class Forked(subprocess.Popen[str]):
    """Forked equivalent of `Popen([sys.executable, "-m", module, ...])`, or of `-c` and a program.

    stdout and stderr must be pipes.
    """

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:  # type: ignore[override]
        pipes = rest[3:9]  # (read, write) of stdin, stdout and stderr
        request = {"how": args[1], "what": args[2], "arguments": args[3:], "folder": str(cwd), "environment": env}
        connection, _ = _server()
        socket.send_fds(connection, [json.dumps(request).encode()], [pipes[3], pipes[5]])
        answer = connection.recv(8)
        if not answer:
            raise RuntimeError("the process that commands are forked from has died: import jaxopt_llm.train to see why")
        self.pid = int.from_bytes(answer, "little")
        self._child_created = True
        self._close_pipe_fds(*pipes)


def fits(environment: dict[str, str]) -> bool:
    """Return whether a forked command can use this environment as a newly started process would."""
    names = {*environment, *_environment()}
    changed = {name for name in names if environment.get(name) != _environment().get(name)}
    return AVAILABLE and not any(name.startswith(("JAX_", "XLA_", "PYTHON")) for name in changed)


@functools.cache
def _environment() -> dict[str, str]:
    """Return the environment of the server, which is that of the first command."""
    from commands import ENVIRONMENT

    return {**os.environ, **ENVIRONMENT}


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the server. Return our end of the socket, and the process, which keeps its pipes open."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())],
            env=_environment(),
            pass_fds=[its.fileno()],
            stdout=subprocess.PIPE,  # so that sys.stdout and sys.stderr are set up for pipes, which the forks have
            stderr=subprocess.PIPE,
        )
    process.returncode = 0  # it ends with this process, when our end of the socket closes
    return ours, process


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork a process per request. Returns the request in each command's process, and never in the server."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not message:
            os._exit(0)
        result, told = os.pipe()
        if not (between := os.fork()):
            if pid := os.fork():
                os.write(told, pid.to_bytes(8, "little"))
                os._exit(0)
            for descriptor, number in zip(descriptors, (1, 2), strict=True):
                os.dup2(descriptor, number)
            for descriptor in (*descriptors, result, told, connection.detach()):
                os.close(descriptor)
            return json.loads(message)
        os.waitpid(between, 0)  # only then is the command an orphan that the test process adopts; report it now
        connection.send(os.read(result, 8))
        for descriptor in (*descriptors, result, told):
            os.close(descriptor)


if __name__ == "__main__":
    import jax
    from jax._src.lru_cache import LRUCache
    from remembered import put_whole

    LRUCache.put = put_whole  # type: ignore[method-assign]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    for name in COMMANDS:
        runpy.run_module(f"jaxopt_llm.{name}", run_name="imported")
    for name in LIBRARIES:
        importlib.import_module(name)
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[1:], sys.path[0] = request["arguments"], request["folder"]
    if request["how"] == "-m":
        runpy.run_module(request["what"], run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(request["what"], "<string>", "exec"), main.__dict__)
