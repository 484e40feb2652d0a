"""A process that runs one command: no lines of other packages, and an end by Ctrl-C at any moment."""

import contextlib
import logging
import os
import signal
import sys
import warnings
from typing import Any

from . import INTERRUPTED, print_interrupted


# Someone who set one of these wants to see more.
_ASKED = ("TORCH_LOGS", "TRANSFORMERS_VERBOSITY")
_OURS = "transformers_packed"


def silence_other_packages() -> None:
    """Show the errors of other packages, but not their warnings, and our own messages.

    At import, other packages report what they lack and what is deprecated. No option of a command changes that. Call
    this function before they are imported. `PYTHONWARNINGS=default` in the environment shows everything.
    """
    if set(sys.warnoptions) - {"ignore"} or any(name in os.environ for name in _ASKED):
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.setLoggerClass(_Logger)


class _Logger(logging.Logger):
    """A logger that drops the warnings of other packages, whatever their levels and handlers are."""

    def filter(self, record: logging.LogRecord):
        ours = record.name.split(".")[0] == _OURS
        return (ours or record.levelno >= logging.ERROR) and super().filter(record)


def exit_on_interrupt(name: str) -> None:
    """End the process at once on Ctrl-C, with a line that starts with `name`.

    Imports take seconds. A `KeyboardInterrupt` is lost in a `__del__`, and aborts compiled modules that import others.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler or isinstance(handler, _Exit):
        signal.signal(signal.SIGINT, _Exit(name))


def raise_on_interrupt() -> None:
    """Raise `KeyboardInterrupt` on Ctrl-C again. Call this function before there is something to clean up."""
    if isinstance(signal.getsignal(signal.SIGINT), _Exit):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once(status: int) -> None:
    """End the process if threads compile kernels, for which Python would wait."""
    # No command imports torch only to end.
    kernels = sys.modules.get(f"{_OURS}.ops.backends.flash_qla_kernels")
    if kernels is not None:
        kernels.end_at_once(status)


def end_on_error(*error: Any) -> None:
    """Print an error that no command expects, and end the process."""
    sys.__excepthook__(*error)
    end_at_once(1)


class _Exit:
    def __init__(self, name: str):
        self.name = name

    def __call__(self, *signal_and_frame: object) -> None:
        # The signal may have interrupted a write to the stream.
        with contextlib.suppress(RuntimeError, OSError):
            sys.stdout.flush()
            print_interrupted(self.name)
            end_at_once(INTERRUPTED)
        os._exit(INTERRUPTED)
