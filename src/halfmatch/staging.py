"""Where a file or folder is written before it takes its name: beside it, hidden, in the name of the machine and the
process."""

from __future__ import annotations

import glob
import os
import platform
import shutil
from pathlib import Path


def staging_path(path: Path) -> Path:
    """A path of this process's own beside `path`. What processes of this machine that were killed have left of writes
    to the same path is removed; of other machines, which may share the folder, nothing is known."""
    own = f".{path.name}.{platform.node().split('.')[0]}"
    for left in path.parent.glob(f"{glob.escape(own)}.*.part"):
        process = left.name.split(".")[-2]
        if not process.isdecimal() or _is_running(int(process)):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
    return path.with_name(f"{own}.{os.getpid()}.part")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True
