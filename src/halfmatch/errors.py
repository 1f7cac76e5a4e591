"""The one error that a user can mend, and how its messages end."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

# What an operating system refuses that the user can mend, and how.
_REMEDIES = {
    errno.ENOSPC: "free some space there, or write elsewhere with `output` in the configuration",
    errno.EDQUOT: "free some of your quota, or write elsewhere with `output` in the configuration",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or write elsewhere with `output` in the configuration",
    errno.EROFS: "make it writable, or write elsewhere with `output` in the configuration",
    errno.EACCES: "give yourself the permission, or use another path",
    errno.EPERM: "give yourself the permission, or use another path",
    errno.ENOTDIR: "a file stands where a folder is needed; move it, or use another path",
    errno.EISDIR: "a folder stands where a file is needed; move it, or use another path",
    errno.EEXIST: "a file stands where a folder is needed; move it, or use another path",
    errno.ENAMETOOLONG: "shorten the names in the configuration, or its `output`",
}


class UserError(Exception):
    """Something the user gave is wrong; the message says what, where, and what to do.

    The command line prints the message alone and exits with 2; every other exception is ours and exits with 1.
    """


def refusal(error: OSError) -> UserError | None:
    """What an error of the operating system means for the user; None where it is no matter of theirs."""
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    return UserError(f"{error.filename or 'writing'}: {(error.strerror or str(error)).lower()}; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str:
    """How a message ends that names something unknown: the nearest known name, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'none'}"
