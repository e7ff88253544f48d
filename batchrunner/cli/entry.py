"""The beginning and the end of the command's process."""

import os
import signal
import sys
import threading
from typing import NoReturn

from typer import Typer

from batchrunner.cli.interrupts import Interrupts
from batchrunner.core.console import (
    lost_output,
    open_standard_streams,
    tell,
    tell_failure,
    unforeseen,
    wants_json,
)
from batchrunner.core.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_TERMINATED, EXIT_TIME_UP, interrupted
from batchrunner.core.processes import SignalWatch

_BY_SIGNAL = {EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TIME_UP}
"""Exit codes after which nothing is waited for."""


def start(app: Typer) -> NoReturn:
    """Run the command of `sys.argv` and end the process with its exit code, whatever happens."""
    open_standard_streams()
    interrupts = Interrupts()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, interrupts.handle)
    with SignalWatch(interrupts):
        code = _run(app)
        if signal.getsignal(signal.SIGINT) == interrupts.handle:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # from now on a Ctrl-C has nothing to interrupt
    if lost := lost_output():
        tell(f"batchrun: standard output: cannot be written: {lost}")
        code = code or EXIT_STOPPED
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    if code in _BY_SIGNAL or (code and any(not thread.daemon for thread in others)):
        os._exit(code)  # a thread that still works is not waited for, nor is Python's own end
    sys.exit(code)


def _run(app: Typer) -> int:
    """Run the command of `sys.argv`; return its exit code, whatever happens."""
    try:
        app()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # before a command began, or after it
        return tell_failure(interrupted(), as_json=wants_json(sys.argv[1:]))
    except Exception as failure:  # noqa: BLE001 - nobody foresaw it
        return tell_failure(unforeseen(failure), as_json=wants_json(sys.argv[1:]), of=failure)
    return 0
