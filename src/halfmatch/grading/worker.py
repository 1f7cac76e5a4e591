"""A grading process: checks itself, then answers one task after another until its parent is gone.

Started by `process.GradingProcess` with a connection's file descriptor as its argument.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from halfmatch.errors import UserError

MEMORY_LIMIT_BYTES = 4 << 30
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # sched.h; os.unshare is of Python 3.12


def serve(connection: Connection) -> None:
    """Send None, or why this process cannot grade; then receive (task, arguments, seconds) and send the result.

    A task that takes more than its seconds of processor time ends the process, from the kernel: no Python code runs
    while a C function hangs, and no alarm would reach it.
    """
    leave_the_network()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # an ignored signal is inherited
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    memory = MEMORY_LIMIT_BYTES if hard_limit == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (memory, hard_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        from halfmatch.grading import equivalence

        equivalence.self_check()
    except UserError as error:
        connection.send(str(error))
        return
    except Exception as error:
        connection.send(f"the grader does not start: {type(error).__name__}: {error}")
        return
    connection.send(None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the LaTeX parser reports every syntax error there
    tasks: dict[str, Callable[..., str | bool]] = {"judge": equivalence.judge, "parses": equivalence.parses}
    while True:
        try:
            task, arguments, seconds = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        result = tasks[task](*arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(result)


def leave_the_network() -> bool:
    """Move this process to a network that has no interface up; whether the system lets it.

    Nothing here asks for a network, and what models write should not be able to. Linux allows it to root, and to others
    where user namespaces are allowed; elsewhere the process goes on as it is.
    """
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    return unshare is not None and any(unshare(flags) == 0 for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET))


def main() -> None:
    serve(Connection(int(sys.argv[1])))
