"""The command line, `transformers-packed`.

Each command is a module with two functions: `add_parser` declares its options, and `run` takes the parsed arguments
and returns the exit status. Torch and Transformers take seconds to import, so only `run` does.
"""

import os
import sys

from . import audit, bench, demo, doctor, env, memory, plan, train, warmup
from .options import Parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status.

    The status is 0 on success, 1 after a failure (`audit`: 0, 1 or 2), 130 after Ctrl-C, and 141 for a closed pipe.

    Args:
        argv (`list[str]`, *optional*):
            The arguments, by default those of the process. As in `argparse`, invalid arguments exit with status 2.
    """
    parser = Parser(
        prog="transformers-packed",
        description="Packed (padding-free) training of hybrid linear-attention models in Transformers.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in (demo, train, bench, warmup, plan, memory, audit, doctor, env):
        command.add_parser(subparsers).set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        # A terminal shows ^C where the cursor is.
        newline = "\n" if sys.stderr.isatty() else ""
        print(f"{newline}transformers-packed {args.command}: interrupted {error}".rstrip(), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # As in `transformers-packed env | head -3`. Python flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ImportError, OSError, ValueError) as error:
        print(f"transformers-packed {args.command}: {error}", file=sys.stderr)
        return 1
