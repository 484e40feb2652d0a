"""`transformers-packed warmup`: compile the kernels of a model before it is trained."""

import argparse
from typing import Any

from .options import Parser


def add_parser(subparsers) -> Parser:
    """Declare the command and its options."""
    parser = subparsers.add_parser(
        "warmup",
        help="compile the kernels of a model before it is trained",
        description="Compile every kernel that training of --model on this GPU needs, and keep them in the caches on "
        "disk, from where training loads them in milliseconds. Only the configuration of the model is read: a few of its "
        "layers run with random weights. Options that select kernels must be those of the training.",
    )
    add, count, shared = parser.add_argument, parser.add_count, parser.add_shared
    add("--model", required=True, metavar="PATH|NAME", help="checkpoint: a directory or a name on the Hub")
    add("--max-length", type=positive_row, required=True, metavar="N", help="maximum number of tokens per row")
    count("--max-documents", "maximum number of documents per row (default: 128)")
    parser.add_lora()
    add("--float8", action="store_true", help="train linear layers with products in float8")
    add("--graphs", action="store_true", help="run the layers as CUDA graphs")
    shared("--attn")
    dtype = "compute dtype (auto: bfloat16 if the GPU supports it, else float32)"
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help=dtype)
    weights = "dtype of trained weights; frozen weights have the compute dtype"
    add("--weights", choices=("float32", "bfloat16"), default="float32", help=weights)
    add("--gradient-checkpointing", action="store_true", help="recompute activations in the backward")
    return parser


def positive_row(text: str) -> int:
    """The `type` of a number of tokens that can hold a target."""
    number = int(text) if text.isdecimal() else 0
    if number < 2:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 2, got {text!r}")
    return number


def run(args: argparse.Namespace) -> int:
    """Compile the kernels, and print them and where they are."""
    import torch

    from ..errors import input_error
    from ..models.cuda_graphs import graph_length, use_cuda_graphs
    from ..models.float8 import use_float8
    from ..models.releases import checkpointing_argument
    from ..ops.compilations import caches
    from ..training.warm_up import compiles_kernels, warm_up
    from .finetune import check_float8, check_peft, computes_in_bfloat16

    check_peft(args.lora)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not compiles_kernels(device):
        fix = "Run the command where training will run. A CPU needs no kernels."
        raise input_error("a CUDA device, for which kernels are compiled", device.type, fix)
    bfloat16 = computes_in_bfloat16(args.dtype)
    if args.float8:
        check_float8(bfloat16)
    model = make_model(args, bfloat16, device)
    if args.float8:
        use_float8(model)
    if args.gradient_checkpointing:
        getattr(model, f"{checkpointing_argument()}_enable")({"use_reentrant": False})
    if args.graphs:
        use_cuda_graphs(model, graph_length(args.max_length))

    def loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            return model(**batch).loss

    found = warm_up(model, args.max_length, max_documents=args.max_documents, loss=loss)
    for package in dict.fromkeys(one.package for one in found):
        built, loaded = ([x for x in found if x.package == package and x.from_disk == disk] for disk in (False, True))
        seconds = sum(one.seconds for one in built)
        print(f"{package}: {len(built)} compiled in {seconds:.1f} s, {len(loaded)} loaded from disk")
        for name in sorted({one.kernel for one in built}):
            print(f"  {name}: {sum(one.kernel == name for one in built)}")
    print("The kernels are in these directories. Copy them to machines with the same GPUs and the same packages:")
    for folder, variable in caches().values():
        print(f"  {folder} ({variable})")
    return 0


def make_model(args: argparse.Namespace, bfloat16: bool, device: Any) -> Any:
    """Our model with few layers: kernels depend on the kinds of layers, not on their number."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..models.registry import registered
    from .finetune import supported_config, with_adapters

    config = supported_config(args.model).get_text_config()
    kinds = list(dict.fromkeys(config.layer_types))
    # The first layer may have no gradient of its input. In float8, the first and the last layer keep their dtype.
    config.layer_types = [*kinds, *kinds, kinds[0]] if args.float8 else [*kinds, kinds[0]]
    config.num_hidden_layers = len(config.layer_types)
    frozen = torch.bfloat16 if bfloat16 else torch.float32
    dtype = frozen if args.lora else getattr(torch, args.weights)
    with registered(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=args.attn)
        return with_adapters(model, args.lora_rank) if args.lora else model
