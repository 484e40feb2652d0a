"""`transformers-packed warmup`: compile the kernels of a model before it is trained.

Compile the kernels that training of --model on this GPU needs, and keep them in the caches on disk. A few layers run
with random weights. Options that select kernels must be those of the training.

    transformers-packed warmup --model Qwen/Qwen3.5-0.8B --row-length 8192 --lora
    transformers-packed warmup --model Qwen/Qwen3.5-0.8B --export kernels.tar.gz
    transformers-packed warmup --import kernels.tar.gz
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import count
from .options import LONGEST_SAMPLE, SAMPLES, Parser, positive_int
from .process import raise_on_interrupt


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    shared = parser.add_shared
    shared("--model", required=False)
    written = "write all compiled kernels of this machine to FILE"
    parser.add_argument("--export", type=Path, metavar="FILE", help=written)
    taken = "first add the kernels of FILE, from --export on a machine like this one"
    parser.add_argument("--import", dest="archive", type=Path, metavar="FILE", help=taken)
    longest = "most tokens per row (default: %(default)s, as in train)"
    shared("--row-length", default=SAMPLES * LONGEST_SAMPLE, help=longest)
    parser.add_count("--max-documents", "most documents per row (default: 128)")
    parser.add_argument(
        "--trees", action="store_true", help="also for rows with trees of samples or groups of answers"
    )
    parser.add_lora()
    shared("--float8")
    shared("--cuda-graphs", action="store_true", help="run the layers as CUDA graphs")
    shared("--attn", "--dtype", "--weights", "--gradient-checkpointing")
    cut = "compute layers in segments of N tokens (default: whole rows)"
    parser.add_argument("--segment-tokens", type=partial(positive_int, lowest=64), metavar="N", help=cut)
    shared("--sequence-parallel-size", help="processes that will share a row (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Import kernels, compile what is missing and print it, and export all, as far as the options say."""
    if not (args.model or args.archive or args.export):
        args.parser.error("expected --model, --import or --export")
    if args.archive and not args.archive.is_file():
        raise FileNotFoundError(f"--import: {args.archive} does not exist")
    if args.export and (args.export.is_dir() or not os.access(args.export.absolute().parent, os.W_OK)):
        raise OSError(f"--export: expected a file in a directory that can be written, got {args.export}")
    from ..ops.kernel_archive import export_kernels, import_kernels

    if args.archive:
        added, known = import_kernels(args.archive)
        print(f"{count(added, 'kernel')} added to the caches, {known:,} were there")
    if args.model:
        compile_and_print(args)
    if args.export:
        print(f"{count(export_kernels(args.export), 'kernel')} in {args.export}")


def compile_and_print(args: argparse.Namespace) -> None:
    """Compile the kernels of a model, and print them and where they are."""
    import torch

    from ..errors import input_error
    from ..models.sizes import take_few_layers
    from ..training.kernels import Needs
    from ..training.warm_up import compile_kernels, compiles_kernels
    from .models import config_and_dtype, untrained_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not compiles_kernels(device):
        fix = "Run the command where training will run. A CPU needs no kernels."
        raise input_error("a CUDA device, for which kernels are compiled", device.type, fix)
    config, dtype = config_and_dtype(args)
    take_few_layers(config, args.float8)
    model = untrained_model(config, args, dtype, device, args.row_length)

    def loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            return model(**batch).loss

    raise_on_interrupt()
    processes = args.sequence_parallel_size
    needs = Needs(args.row_length, args.max_documents, trees=args.trees, processes=processes)
    print_kernels(compile_kernels(model, needs, loss=loss, dtype=dtype))


def print_kernels(found: list[Any]) -> None:
    """Print the compiled kernels of each package, and the directories with all of them."""
    from ..ops.backends.caches import caches

    for package in dict.fromkeys(one.package for one in found):
        built, loaded = ([x for x in found if x.package == package and x.from_disk == disk] for disk in (False, True))
        seconds = sum(one.seconds for one in built)
        print(f"{package}: {len(built)} compiled in {seconds:.1f} s, {len(loaded)} loaded from disk")
        for name in sorted({one.kernel for one in built}):
            print(f"  {name}: {sum(one.kernel == name for one in built)}")
    print("The kernels are in these directories. --export makes one file of them for machines like this one:")
    for folder, variable in caches().values():
        print(f"  {folder} ({variable})")
