"""Run the command line, and scripts of this repository, in this process, where conftest.py hides packages for a GPU."""

import contextlib
import io
import sys
from unittest import mock

from transformers_packed import cli


def run_command(*arguments) -> tuple[int, str, str]:
    """Return the exit status, and the output to stdout and stderr."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = exit.code
    return status, stdout.getvalue(), stderr.getvalue()


def succeeds(*arguments) -> str:
    """Return what a command that succeeds prints, without a word to stderr."""
    status, out, err = run_command(*arguments)
    assert (status, err) == (0, ""), err
    return out


def fails(*arguments, status=1) -> str:
    """Return the error of a command that fails."""
    found, _, err = run_command(*arguments)
    assert found == status, err
    return err


def run_main(script, *arguments) -> str:
    """Call `main` of a module with these arguments of the process. Return the output."""
    command = [script.__file__, *map(str, arguments)]
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(io.StringIO()) as stdout:
        script.main()
    return stdout.getvalue()
