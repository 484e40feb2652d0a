"""Forward and backward of the experts of one layer, from the router's logits to the sum of the experts' outputs.

`ours` is this package's op, and `grouped_mm` Transformers' default. Both get the same logits, in which some experts are
more likely than others, and compute all gradients. With `--lora`, the weights are frozen, adapters of rank 16 are trained, and
`nf4` and `float8` have quantized weights. `nf4+bitsandbytes` dequantizes them by bitsandbytes, and `float8+reference` by
PyTorch. `blocks` has weights in FP8 with a scale for each block of 128 x 128, which `blocks+products` multiplies in FP8. `--frozen`
is the same without adapters. The rate counts the useful products with the weights only, without padding of tiles and without anything computed
twice: three times those of the forward, or twice with frozen weights. On a GPU, each arm also runs as a CUDA graph, so that
the time of its kernels is known where the host is slower.

    python benchmarks/experts_layer.py --output benchmarks/results/experts.json
    python benchmarks/experts_layer.py --models 35B-A3B --tokens 2048 16384
    python benchmarks/experts_layer.py --lora --output benchmarks/results/experts_lora.json
    python benchmarks/experts_layer.py --frozen --models 35B-A3B --output benchmarks/results/experts_lora.json
"""

import argparse
import copy
import importlib.util
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from arms import fill_blocks, quantize, stock_module, store_in_float8
from shapes import MODELS
from step import earlier_report, machine_name, timed
from transformers import AutoConfig, set_seed
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.moe import grouped_mm_experts_forward

from transformers_packed.models.experts import weights_of
from transformers_packed.models.float8_marks import MARK
from transformers_packed.ops import choose_experts, experts
from transformers_packed.ops.float8_blocks import BLOCK
from transformers_packed.ops.terms import Adapter


MIXTURES = [name for name, config in MODELS.items() if "num_experts" in config]


def make_layer(config: dict, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """Transformers' module of experts, with random weights."""
    text = AutoConfig.for_model(**config, experts_implementation="grouped_mm")
    (cls,) = (cls for name, cls in vars(stock_module(config)).items() if name.endswith("Experts"))
    with torch.device(device):
        layer = cls(text).to(dtype)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return layer


def adapters_of(layer: torch.nn.Module, rank: int) -> list[Adapter]:
    """Adapters in float32, as PEFT has them."""
    found = []
    for weight in (layer.gate_up_proj, layer.down_proj):
        number, out, size = weight.shape
        shapes = (number, rank, size), (number, out, rank)
        down, up = (0.02 * torch.randn(shape, device=weight.device) for shape in shapes)
        found.append(Adapter(down.requires_grad_(), up.requires_grad_(), 2.0))
    return found


def quantized(layer: torch.nn.Module, kind: str) -> torch.nn.Module:
    layer = copy.deepcopy(layer)
    if kind == "nf4":
        quantize(layer)
    else:
        store_in_float8(layer)
    return layer


def in_blocks(layer: torch.nn.Module, config: dict) -> dict[str, torch.nn.Module]:
    """The same experts in FP8 with scales of blocks, dequantized and with products in FP8."""
    text = AutoConfig.for_model(**config)
    with torch.device("meta"):
        stored = FP8Experts(text, (BLOCK, BLOCK))
    fill_blocks(stored.to_empty(device=layer.down_proj.device), layer)
    marked = copy.copy(stored)
    vars(marked)[MARK] = 0.0
    return {"blocks": stored, "blocks+products": marked}


def ours(layer, hidden_states, logits, top_k, gate_up_adapter=None, down_adapter=None, dequantize="auto"):
    weights, index = choose_experts(logits, top_k)
    matrices = weights_of(layer, hidden_states)
    if dequantize != "auto":
        matrices = [x._replace(compute=partial(x.compute, impl=dequantize)) for x in matrices]
    adapters = {"gate_up_adapter": gate_up_adapter, "down_adapter": down_adapter}
    return experts(hidden_states, index, weights, *matrices, **adapters)


def grouped_mm(layer, hidden_states, logits, top_k):
    weights, index = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), top_k, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)
    return grouped_mm_experts_forward(layer, hidden_states, index, weights)


ARMS = {"ours": ours, "grouped_mm": grouped_mm}


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of the step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(model: str, tokens: int, args) -> dict:
    config, dtype = MODELS[model], torch.bfloat16
    set_seed(0)
    layer = make_layer(config, args.device, dtype)
    number, top_k, hidden = config["num_experts"], config["num_experts_per_tok"], config["hidden_size"]
    likely = torch.randn(number, device=args.device) / 2
    logits = (torch.randn(tokens, number, device=args.device) + likely).to(dtype).requires_grad_()
    x, upstream = (torch.randn(tokens, hidden, device=args.device).to(dtype) for _ in range(2))
    leaves, adapters, arms = [x.requires_grad_(), logits], [], {name: (arm, layer) for name, arm in ARMS.items()}
    if args.lora or args.frozen:
        layer.requires_grad_(False)
        adapters = adapters_of(layer, 16) if args.lora else []
        leaves += [factor for adapter in adapters for factor in adapter[:2]]
        arms = {"ours": (ours, layer)}
        for kind, other, package in (("nf4", "bitsandbytes", "bitsandbytes"), ("float8", "reference", "torchao")):
            if not importlib.util.find_spec(package):
                continue
            stored = quantized(layer, kind)
            arms |= {kind: (ours, stored), f"{kind}+{other}": (partial(ours, dequantize=other), stored)}
        if not (hidden % BLOCK or config["moe_intermediate_size"] % BLOCK):
            arms |= {name: (ours, stored) for name, stored in in_blocks(layer, config).items()}
    else:
        leaves += layer.parameters()
    flops = (2 if args.lora or args.frozen else 3) * 2 * tokens * top_k * 3 * hidden * config["moe_intermediate_size"]
    found = {}
    for name, (arm, module) in arms.items():

        def step(arm=arm, module=module):
            for _ in range(args.repeats):
                torch.autograd.grad(arm(module, x, logits, top_k, *adapters), leaves, upstream)

        step()
        seconds = statistics.median(timed(step, args.device) / args.repeats for _ in range(args.rounds))
        found[name] = {"median_ms": round(1000 * seconds, 3), "tflops": round(flops / seconds / 1e12, 1)}
        if args.device == "cuda":
            replay = captured(step)
            seconds = statistics.median(timed(replay, args.device) / args.repeats for _ in range(args.rounds))
            found[name] |= {"graph_ms": round(1000 * seconds, 3), "graph_tflops": round(flops / seconds / 1e12, 1)}
        print(f"{model}, {tokens:,} tokens  {name:<17} {found[name]}", flush=True)
    return {"model": model, "tokens": tokens, "lora": args.lora, "frozen": args.frozen, "flops": flops, "arms": found}


def measure_all(measure: Callable[..., dict], parser: argparse.ArgumentParser) -> int:
    """Add the options of all measurements of layers, and call `measure` for each model and number of tokens."""
    parser.add_argument("--models", nargs="+", choices=MIXTURES, default=["35B-A3B", "Next-80B"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    report = earlier_report(args.output, machine_name(args.device), parser)
    for model in args.models:
        for tokens in args.tokens:
            report["runs"].append({"command": shlex.join(["python", *sys.argv])} | measure(model, tokens, args))
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384])
    parser.add_argument("--lora", action="store_true", help="frozen weights and adapters of rank 16")
    parser.add_argument("--frozen", action="store_true", help="frozen weights alone")
    parser.add_argument("--repeats", type=int, default=10, help="steps of a timed round")
    return measure_all(measure, parser)


if __name__ == "__main__":
    sys.exit(main())
