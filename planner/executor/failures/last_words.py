"""What a rank leaves for its launcher when it ends before its time, whatever ended it. Torch-free: it must stand before
torch is imported, for that import may be what fails.

    rank-3.json    its error (`planner.executor.failures.failure`)
    rank-3.doing   what it is doing, for a rank that has no time for an error: killed, or left by `os._exit`
    rank-3.crash   where its threads stood when its own fault ended it (`faulthandler`): segfault, abort, bus error
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.errors import PlannerError, RunError
from planner.executor.failures import doing
from planner.executor.failures.failure import (
    STOPPED,
    crash_path,
    doing_path,
    write_failure,
)

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for a rank's error, to show it in its summary."""


@contextmanager
def last_words(folder: Path | None, rank: int) -> Iterator[None]:
    """Within, every error and crash of this rank is left for whoever started it.

    Args:
        folder: that the launcher looks into; None: torchrun was started by the user, whose summary then tells it.
    """
    doing.note_in(None if folder is None else doing_path(folder, rank))
    if folder is not None:
        faulthandler.enable(
            os.open(crash_path(folder, rank), os.O_WRONLY | os.O_CREAT)
        )  # open until the very end
    try:
        yield
    except (Exception, SystemExit) as error:
        said = _error_of(error, rank)
        if said is not None and folder is not None:
            write_failure(folder, rank, said)
        elif said is not None and (path := os.environ.get(ERROR_FILE)) is not None:
            Path(path).write_text(
                json.dumps(_for_torchrun(rank, said)), encoding="utf-8"
            )
            sys.exit(1)  # without the traceback, which the summary shows
        raise
    finally:
        doing.forget()


def _error_of(error: BaseException, rank: int) -> Exception | None:
    """What to tell of an error; None: the rank left in good order, or was told to."""
    if isinstance(error, Exception):
        return error
    code = error.code if isinstance(error, SystemExit) else None
    if code in (None, 0, STOPPED):
        return None
    return RunError(
        f"rank {rank} called sys.exit({code!r}) {doing.current()}:\n"
        + "".join(traceback.format_tb(error.__traceback__)[-1:]).rstrip(),
        hint="let the code of the run raise an error that says why.",
    )


def _for_torchrun(rank: int, error: Exception) -> dict[str, object]:
    """An error in the form of torch.distributed.elastic's `ErrorHandler`."""
    text = (
        str(error)
        if isinstance(error, PlannerError)
        else "".join(traceback.format_exception(error))
    )
    told = {
        "py_callstack": f"rank {rank} failed {doing.current()}: {text}",
        "timestamp": str(int(time.time())),
    }
    return {
        "message": {"message": f"{type(error).__name__}: {error}", "extraInfo": told}
    }
