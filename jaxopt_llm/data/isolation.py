"""Isolation of a process that reads untrusted programs or files: no network, no files, no other processes.

A filter of system calls (seccomp, in Linux since 3.17) makes them fail in this process with EPERM. This file imports
nothing of this package, because such a process is a script.
"""

import ctypes
import os
import platform
import struct

# Numbers of the system calls that are refused, on x86-64 and on ARM64; None where there is no such call. Files that are
# open, memory, threads and the clock can be used.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    **{"open": (2, None), "creat": (85, None), "openat": (257, 56), "openat2": (437, 437), "truncate": (76, 45)},
    **{"unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None), "mkdir": (83, None), "mkdirat": (258, 34)},
    **{"rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37)},
    **{"symlink": (88, None), "symlinkat": (266, 36), "chmod": (90, None), "fchmodat": (268, 53), "chown": (92, None)},
    **{"lchown": (94, None), "fchownat": (260, 54), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51)},
    **{"socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)},
    **{"execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "kill": (62, 129), "tkill": (200, 130)},
    **{"tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setns": (308, 268)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_open": (434, 434), "bpf": (321, 280)},
    **{"pidfd_send_signal": (424, 424), "io_uring_setup": (425, 425), "perf_event_open": (298, 241)},
    **{"userfaultfd": (323, 282), "unshare": (272, 97), "add_key": (248, 217), "keyctl": (250, 219)},
    **{
        "mknod": (133, None),
        "mknodat": (259, 33),
        "fchmodat2": (452, 452),
        "utime": (132, None),
        "utimes": (235, None),
    },
    **{"futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6)},
    **{"fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15)},
    **{"fremovexattr": (199, 16), "removexattrat": (466, 466), "name_to_handle_at": (303, 264)},
    **{"open_by_handle_at": (304, 265), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"open_tree_attr": (467, 467), "pivot_root": (155, 41), "init_module": (175, 105), "finit_module": (313, 273)},
    **{"delete_module": (176, 106)},
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and AUDIT_ARCH_*
_EPERM = 1
_LOAD, _EQUALS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of the kernel's packet filter
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000  # its results
_X32 = 0x40000000  # numbers of a second interface on x86-64
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl


def isolate() -> None:
    """Take the network, the files and other processes away from this process, for good.

    Call it after the imports, because a module cannot be imported afterwards, and before threads start. It does nothing
    outside Linux and on other processors. If the kernel refuses, it says so on standard error.
    """
    if not hasattr(os, "uname") or os.uname().sysname != "Linux" or platform.machine() not in _MACHINES:
        return
    program = _make_filter(*_MACHINES[platform.machine()])
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    library = ctypes.CDLL(None, use_errno=True)
    if (
        library.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0
        or library.prctl(_SET_SECCOMP, _FILTER, ctypes.c_char_p(header), 0, 0) != 0
    ):
        reason = os.strerror(ctypes.get_errno())
        os.write(
            2,
            f"warning: the kernel has no filter of system calls ({reason}): chat templates and tokenizers "
            "run without isolation from files and network\n".encode(),
        )


def _make_filter(column: int, machine: int) -> bytes:
    """Return the filter: the number of the call lies at offset 0 of its input, the machine at offset 4."""
    numbers = [each[column] for each in _REFUSED.values() if each[column] is not None]
    fail = len(numbers) + 1  # instructions from the first comparison to the one that fails, which is the last
    lines = [
        (_LOAD, 0, 0, 4),
        (_EQUALS, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, fail, 0, _X32),
        *((_EQUALS, fail - 1 - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL),
    ]
    return b"".join(struct.pack("HBBI", code, if_true, if_false, value) for code, if_true, if_false, value in lines)
