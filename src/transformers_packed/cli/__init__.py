"""The command line, `transformers-packed`.

Each command is a module whose docstring is its help, with two functions: `add_options` declares its options, and `run`
takes the parsed arguments and returns the exit status, or nothing on success. Torch and Transformers take seconds to
import, so only `run` does. This module imports next to nothing, so that Ctrl-C is handled from the first moment on.

Behind the commands, `finetune.py`, `demo_arms.py` and `bench_arm.py` train, with the models of `models.py`. `run_folder.py`
has the files of a run, and `folder_trainer.py` writes them. `process.py` keeps other packages silent and ends on Ctrl-C.
`diagnosis.py` has the problems and slow parts of a machine or a model.
"""

import os
import sys


# In the order of a first use.
COMMANDS = ("demo", "train", "bench", "warmup", "plan", "memory", "audit", "doctor", "mtp", "env")

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status.

    The status is 0 on success, 1 after a failure (`audit`: 0, 1 or 2), 130 after Ctrl-C, and 141 for a closed pipe.

    Args:
        argv (`list[str]`, *optional*):
            The arguments, by default those of the process, where other packages then only show errors. As in
            `argparse`, invalid arguments exit with status 2.
    """
    status = _run(argv)
    if argv is None:
        from .process import end_at_once

        end_at_once(status)
    return status


def _run(argv: list[str] | None) -> int:
    name, args = "transformers-packed", None
    try:
        from .process import end_on_error, exit_on_interrupt, silence_other_packages

        if argv is None:
            exit_on_interrupt(name)
            sys.excepthook = end_on_error
            silence_other_packages()
        from .options import parse

        args = parse(argv)
        name = f"{name} {args.command}"
        if argv is None:
            exit_on_interrupt(name)
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        print_interrupted(name, error)
        return INTERRUPTED
    except BrokenPipeError:
        # As in `transformers-packed env | head -3`. Python flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ImportError, MemoryError, OSError, ValueError) as error:
        # Python's own `MemoryError` has no message.
        message = str(error) or type(error).__name__
        print(f"{name}: {args.parser.with_options(message, args) if args else message}", file=sys.stderr)
        return args.failed if args else 1
    except RuntimeError as error:
        from ..errors import is_out_of_memory

        if args is None or not is_out_of_memory(error):
            raise
        print(f"{name}: {args.parser.out_of_memory(args, error)}", file=sys.stderr)
        return args.failed


def print_interrupted(name: str, where: object = "") -> None:
    """Print the line with which Ctrl-C ends the command `name`."""
    # A terminal shows ^C where the cursor is.
    newline = "\n" if sys.stderr.isatty() else ""
    print(f"{newline}{name}: interrupted {where}".rstrip(), file=sys.stderr)
