"""The kinds of faults of benchmarks/chaos.py."""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos_disk import Disk
from chaos_job import ChaosJob

# Exit codes of a program that ends by itself: done, no checkpoint, another process was lost or is missing, wrong bits,
# a disk or a network failed, stopped. Nothing here is wrong input (2), and no run diverges (3).
CODED = frozenset((0, 4, 5, 9, 74, 75))
LOST = 5
SENDER = str(Path(__file__).with_name("chaos_ports.py"))
Inject = Callable[[ChaosJob, int, contextlib.ExitStack], set[int]]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        inject: (job, victim, scope) -> the processes that it ends itself. The scope ends when the run goes on.
        restarts: whether the job has to start again.
        may_follow: whether it can come while the job starts again. The recipe harms itself only once it is loaded, and
            damage to several checkpoints in a row could leave none. A limit on the size of files, which imitates a full
            disk, is an error that the start of a run rightly takes for wrong input.
        needs_network: the processes must be on hosts of their own.
        needs_disk: the run directory must be on a disk of its own. It stands alone: a supervisor that starts on a full
            disk ends, with 74, and this program starts only those again that it has killed.
        damages: it damages the newest checkpoint.
    """

    inject: Inject
    restarts: bool = True
    may_follow: bool = True
    needs_network: bool = False
    needs_disk: bool = False
    damages: bool = False

    @property
    def may_be_followed(self) -> bool:
        """Whether another fault can come while the job starts again after it."""
        return self.restarts and not self.needs_disk


def send(*signals: signal.Signals, pause: float = 0.5) -> Inject:
    def inject(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
        for number, signum in enumerate(signals):
            time.sleep(pause if number else 0)
            job.signal_program(victim, signum)
        return {victim}

    return inject


def harm(name: str) -> Inject:
    def inject(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
        (job.folder / f"harm.{victim}").write_text(name)
        job.signal_program(victim, signal.SIGUSR1)
        return {victim}

    return inject


def kill_all(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
    for index in range(job.count):
        job.signal_program(index, signal.SIGKILL)
    return set(range(job.count))


def kill_supervisor(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
    job.kill_supervisor(victim, away=1.0)
    return {victim}


def lose_host(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
    job.kill_supervisor(victim, away=10.0)
    return {victim}


def kill_service(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
    """Kill JAX's coordination service, without which JAX aborts all processes, as soon as it runs."""
    for child in job.services():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return set(range(job.count))


def fill_disk(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
    """Let a process write no file beyond a few bytes for some seconds: its saves fail."""
    program = job.program(victim)
    limits = resource.prlimit(program, resource.RLIMIT_FSIZE)
    resource.prlimit(program, resource.RLIMIT_FSIZE, (100, limits[1]))
    time.sleep(3)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(program, resource.RLIMIT_FSIZE, limits)
    return set()


def spoil_at_a_save(spoil: Callable[[Disk], None]) -> Fault:
    """Return a fault that makes the disk useless until a save has failed. The run then saves again."""

    def inject(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
        assert job.disk is not None
        failed = job.count_failed_saves()
        spoil(job.disk)
        try:
            job.wait_for("save that failed", lambda: job.count_failed_saves() > failed)
        finally:
            job.disk.heal()
        newest = job.newest_checkpoint()
        job.wait_for("save after that", lambda: job.newest_checkpoint() > newest)
        return set()

    return Fault(inject, restarts=False, may_follow=False, needs_disk=True)


def spoil_and_kill(spoil: Callable[[Disk], None], seconds: float) -> Fault:
    """Return a fault that kills a program while the disk is useless, for some seconds: the job starts again on it."""

    def inject(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
        assert job.disk is not None
        spoil(job.disk)
        scope.callback(job.disk.heal_after(seconds).join)
        job.signal_program(victim, signal.SIGKILL)
        return {victim}

    return Fault(inject, may_follow=False, needs_disk=True)


def with_damage(damage: Callable[[Path], None]) -> Inject:
    """Damage the newest checkpoint, and kill all processes."""

    def inject(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
        for index in range(job.count):
            job.signal_program(index, signal.SIGSTOP)
        damage(job.directory / "checkpoints" / str(job.newest_checkpoint()))
        return kill_all(job, victim, scope)

    return inject


def _largest_file(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def tear(checkpoint: Path) -> None:
    file = _largest_file(checkpoint)
    os.truncate(file, file.stat().st_size // 2)


def flip_on_disk(checkpoint: Path) -> None:
    file = _largest_file(checkpoint)
    data = bytearray(file.read_bytes())
    data[random.Random(len(data)).randrange(len(data))] ^= 16
    file.write_bytes(data)


def cut_records(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
    """Cut the last line of the records, as the death of a machine does, and kill the process that writes them."""
    job.signal_program(0, signal.SIGKILL)
    time.sleep(0.1)
    for name in ("metrics.jsonl", "events.jsonl"):
        path = job.directory / name
        os.truncate(path, path.stat().st_size - 7)
    return {0}


def send_garbage(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
    """Send garbage to the port of process 0 for as long as the job starts again."""
    _start_sender(job, victim, job.address, f":{job.port}", scope)
    job.signal_program(victim, signal.SIGKILL)
    return {victim}


def send_garbage_to_all(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
    """Send garbage to all ports of host 0 and of the victim, while the job trains and as long as it starts again."""
    before = job.garbage_log.stat().st_size if job.garbage_log.exists() else 0
    for host in {0, victim}:
        address = job.network.find_address(host) if job.network else job.address
        _start_sender(job, host, address, str(job.supervisors[host].pid), scope)
    job.wait_for("garbage on a port", lambda: b"garbage" in job.garbage_log.read_bytes()[before:])
    job.signal_program(victim, signal.SIGKILL)
    return {victim}


def _start_sender(job: ChaosJob, host: int, address: str, target: str, scope: contextlib.ExitStack) -> None:
    """Send garbage from a host to an address until the scope ends. target: see chaos_ports.py."""
    with job.garbage_log.open("ab") as log:
        sender = subprocess.Popen([*job.prefix_command(host), sys.executable, SENDER, address, target], stdout=log)
    scope.callback(sender.wait)
    scope.callback(sender.kill)


def cut_off(seconds: float) -> Inject:
    """Return a fault that cuts a host off from the others for some time."""

    def inject(job: ChaosJob, victim: int, scope: contextlib.ExitStack) -> set[int]:
        assert job.network is not None
        scope.callback(job.network.cut(victim, seconds).join)
        return set()

    return inject


KINDS: dict[str, Fault] = {
    "process killed": Fault(send(signal.SIGKILL)),
    "process segfaults": Fault(send(signal.SIGSEGV)),
    "process stopped (SIGTERM)": Fault(send(signal.SIGTERM)),
    "process stopped (SIGHUP)": Fault(send(signal.SIGHUP)),
    "process stopped twice": Fault(send(signal.SIGTERM, signal.SIGTERM)),
    "all processes killed": Fault(kill_all),
    "supervisor killed": Fault(kill_supervisor),
    "host away for 10 s": Fault(lose_host),
    "process frozen (SIGSTOP)": Fault(send(signal.SIGSTOP)),
    "process paused for 2 s": Fault(send(signal.SIGSTOP, signal.SIGCONT, pause=2.0), restarts=False),
    "main thread stuck": Fault(harm("stuck"), may_follow=False),
    "exception in a process": Fault(harm("exception"), may_follow=False),
    "bit flip in memory": Fault(harm("flip"), may_follow=False),
    "clock jumps by an hour": Fault(harm("clock"), restarts=False, may_follow=False),
    "disk full for 3 s": Fault(fill_disk, restarts=False, may_follow=False),
    "disk slow for 5 s": Fault(harm("slow disk"), restarts=False, may_follow=False),
    "newest checkpoint torn": Fault(with_damage(tear), may_follow=False, damages=True),
    "bit flip on disk": Fault(with_damage(flip_on_disk), may_follow=False, damages=True),
    "newest checkpoint deleted": Fault(with_damage(shutil.rmtree), may_follow=False, damages=True),
    "records cut": Fault(cut_records),
    "garbage on the port": Fault(send_garbage),
    "garbage on all ports": Fault(send_garbage_to_all),
    "JAX's service killed": Fault(kill_service),
    "host cut off for 3 s": Fault(cut_off(3.0), restarts=False, needs_network=True),
    "host cut off for 40 s": Fault(cut_off(40.0), needs_network=True),
    "file system full at a save": spoil_at_a_save(Disk.fill),
    "file system read-only at a save": spoil_at_a_save(Disk.make_read_only),
    "killed, full file system": spoil_and_kill(Disk.fill, 40),
    "killed, read-only file system": spoil_and_kill(Disk.make_read_only, 40),
}
