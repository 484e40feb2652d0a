"""The matrix products of linear layers in bf16 and in float8, one by one: their time, and what fast accumulation rounds.

A layer has three products: the output, the gradient of the input, and the gradient of the weight. For each size of the
model's layers, the float8 product runs with and without fast accumulation. Errors are those of the sum alone: the norm of
the difference from the float32 product of the same float8 numbers, over the norm of that product. Casts are not part of
these times.

`blocks` is a weight that is stored in float8 with a scale for each block of 128 x 128: the output and the gradient of the input
in float8, with the casts of rows and the transposed copy of the weight, and the time in which the weight is dequantized.

For mixtures, the grouped products of the experts' forward run in bf16 (`grouped_mm`) and in float8, with every expert
getting the same number of rows. Float8 also needs casts of the weights, for the forward and transposed for the gradient of
the input, and their times are given with those of the products that they serve.

    python benchmarks/float8_products.py --output benchmarks/results/float8_products.json
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
from shapes import MODELS
from step import earlier_report, machine_name

from transformers_packed.ops.backends.triton import float8_blocks
from transformers_packed.ops.dequantization import dequantize_blocks
from transformers_packed.ops.float8 import DTYPE, cast_rows
from transformers_packed.ops.float8 import transposed as transposed_cast


DENSE, MIXTURES = ["4B", "9B", "27B"], ["35B-A3B", "Next-80B"]


def milliseconds(function, repeats: int) -> float:
    """The mean time of a call, among calls that follow one another."""
    for _ in range(3):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / repeats, 4)


def layer_sizes(config: dict) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers that `use_float8` chooses, by name."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    heads = config["num_attention_heads"] * config["head_dim"]
    return {
        "in_proj_qkv": (2 * keys + values, hidden),
        "in_proj_z": (values, hidden),
        "out_proj": (hidden, values),
        "q_proj": (2 * heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (mlp, hidden),
        "down_proj": (hidden, mlp),
    }


def measure_layers(model: str, tokens: int, repeats: int) -> dict:
    layers = {}
    for name, (out, size) in layer_sizes(MODELS[model]).items():
        x, w, dy = (
            torch.randn(*shape, device="cuda").bfloat16() for shape in ((tokens, size), (out, size), (tokens, out))
        )
        products = {"output": (x, w), "input gradient": (dy, w.t()), "weight gradient": (dy.t(), x.t())}
        layers[name] = {kind: measure_product(*pair, repeats) for kind, pair in products.items()}
        layers[name]["blocks"] = measure_blocks(x, w, dy, repeats)
    return {"model": model, "tokens": tokens, "layers": layers}


def measure_product(left: torch.Tensor, right: torch.Tensor, repeats: int) -> dict:
    """`left @ right.T` in bf16 and in float8."""
    found = {"bf16_ms": milliseconds(lambda: left @ right.t(), repeats)}
    (a, a_scale), (b, b_scale) = cast_rows(left.contiguous()), cast_rows(right.contiguous())
    exact = (a.float() * a_scale[:, None]) @ (b.float() * b_scale[:, None]).t()
    for name, fast in (("fast", True), ("exact", False)):

        def product(fast=fast):
            scales = {"scale_a": a_scale[:, None], "scale_b": b_scale[None, :]}
            return torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

        error = (product().float() - exact).norm() / exact.norm()
        found |= {f"{name}_ms": milliseconds(product, repeats), f"{name}_error": error.item()}
    found["rounding_of_bf16"] = ((exact.bfloat16().float() - exact).norm() / exact.norm()).item()
    found["rounding_of_casts"] = ((left.float() @ right.float().t() - exact).norm() / exact.norm()).item()
    return found


def measure_blocks(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, repeats: int) -> dict:
    """The products of a layer whose weight is stored in blocks."""
    blocks = w.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).float()
    scale = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).view(w.shape).to(DTYPE)
    plain = dequantize_blocks(values, scale, (128, 128), torch.bfloat16)
    cast, times = float8_blocks.cast_in_blocks, float8_blocks.rows_times_weight
    calls = {
        "output": lambda: times(cast(x), values, scale),
        "input_gradient": lambda: times(cast(dy), values, scale, False),
        "cast": lambda: cast(x),
        "transposed": lambda: float8_blocks.transposed(values[None]),
        "dequantized": lambda: dequantize_blocks(values, scale, (128, 128), torch.bfloat16),
    }
    found = {f"{name}_ms": milliseconds(call, repeats) for name, call in calls.items()}
    for name, expected in (("output", x @ plain.t()), ("input_gradient", dy @ plain)):
        found[f"{name}_error"] = ((calls[name]() - expected).float().norm() / expected.float().norm()).item()
    return found


def measure_experts(model: str, tokens: int, repeats: int) -> dict:
    config = MODELS[model]
    hidden, size = config["hidden_size"], config["moe_intermediate_size"]
    rows = tokens * config["num_experts_per_tok"]
    sizes = {"gate_up_proj": (2 * size, hidden), "down_proj": (hidden, size)}
    found = {name: measure_grouped(rows, config["num_experts"], *pair, repeats) for name, pair in sizes.items()}
    return {"model": model, "tokens": tokens, "experts": found}


def measure_grouped(rows: int, number: int, out: int, size: int, repeats: int) -> dict:
    """The product of rows with the weights of their experts, and the casts that it needs in float8."""
    x = torch.randn(rows, size, device="cuda").bfloat16()
    weight = torch.randn(number, out, size, device="cuda").bfloat16()
    ends = torch.arange(1, number + 1, device="cuda", dtype=torch.int32) * (rows // number)
    flat, transposed = weight.flatten(0, 1), torch.empty(size, number * out, dtype=DTYPE, device="cuda")
    (cast, scale), (cast_weight, weight_scale) = cast_rows(x), cast_rows(flat)
    scales = (scale, weight_scale.view(number, out))
    cast_weight, options = cast_weight.view(weight.shape).transpose(1, 2), {"offs": ends, "out_dtype": torch.bfloat16}

    def in_bf16():
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)

    def in_float8():
        return torch._scaled_grouped_mm(cast, cast_weight, *scales, **options, use_fast_accum=True)

    return {
        "bf16_ms": milliseconds(in_bf16, repeats),
        "float8_ms": milliseconds(in_float8, repeats),
        "cast_of_rows_ms": milliseconds(lambda: cast_rows(x), repeats),
        "cast_of_weight_ms": milliseconds(lambda: cast_rows(flat), repeats),
        "transposed_cast_of_weight_ms": milliseconds(lambda: transposed_cast(flat, weight_scale, transposed), repeats),
        "error": ((in_float8() - in_bf16()).float().norm() / in_bf16().float().norm()).item(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=DENSE + MIXTURES, default=DENSE + MIXTURES)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    report = earlier_report(args.output, machine_name("cuda"), parser)
    for model in args.models:
        measure = measure_experts if model in MIXTURES else measure_layers
        run = {"command": shlex.join(["python", *sys.argv])} | measure(model, args.tokens, args.repeats)
        print_run(run)
        report["runs"].append(run)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def print_run(run: dict) -> None:
    print(f"\n{run['model']}, {run['tokens']:,} tokens")
    for name, kinds in run.get("layers", {}).items():
        for kind, entry in kinds.items():
            print(f"  {name:<12} {kind:<16} " + "  ".join(f"{key} {value:.3g}" for key, value in entry.items()))
    for name, entry in run.get("experts", {}).items():
        print(f"  {name:<12} " + "  ".join(f"{key} {value:.3g}" for key, value in entry.items()))


if __name__ == "__main__":
    sys.exit(main())
