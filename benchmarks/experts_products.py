"""The grouped products of one layer of experts, each alone: this package's kernels beside those of other libraries.

`ours` are the kernels of `ops/backends/triton/grouped_products.py`, `grouped_mm` is torch's, and `quack` are the products of
quack-kernels, the library below SonicMoE, if it is installed: each with the fastest of its tiles. Rows are sorted by
expert. A product that reads the rows of tokens includes their copy where a library has no such product. `gate_up`
includes the activation, but for `grouped_mm`. The rate counts the products of the chosen experts, without the padding
of tiles.

`--fp8` compares three ways to use weights in FP8 with a scale for each block of 128 x 128: `ours` multiplies them in bfloat16,
`dequantized` computes these weights first, and `fp8` multiplies the bytes, including the casts of rows. `--ranks` are those of
adapters. Errors are those to products of the dequantized weights: a cast of rows rounds by some percent. `cast`, `transposed` and
`gates` are parts of `fp8`, without a rate.

    python benchmarks/experts_products.py --output benchmarks/results/experts_products.json
    python benchmarks/experts_products.py --fp8 --models 35B-A3B --output benchmarks/results/experts_float8.json
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from arms import quantized_in_blocks
from experts_layer import measure_all
from shapes import MODELS
from step import timed
from transformers import set_seed
from transposed_bytes import variants

from transformers_packed.ops import choose_experts
from transformers_packed.ops.backends.triton.float8_blocks import Float8Plan, cast_in_blocks, transposed
from transformers_packed.ops.backends.triton.grouped_products import Factors, Plan
from transformers_packed.ops.dequantization import dequantize_blocks
from transformers_packed.ops.terms import DequantizedExperts, Float8Experts


# Rows and columns of a tile, whether two groups of warps take turns ("ping-pong"), and processors of a cluster.
QUACK_TILES = [
    (128, 128, True, 1),
    (128, 192, True, 2),
    (128, 256, False, 1),
    (128, 256, False, 2),
    (256, 128, False, 2),
]


class Layer:
    """The weights and the rows of a layer whose router prefers some experts."""

    def __init__(self, model: str, tokens: int, device: str):
        config = MODELS[model]
        number, top_k = config["num_experts"], config["num_experts_per_tok"]
        self.hidden, self.width = config["hidden_size"], config["moe_intermediate_size"]
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        likely = torch.randn(number, device=device) / 2
        logits = (torch.randn(tokens, number, device=device) + likely).bfloat16()
        self.weights, self.index = choose_experts(logits, top_k)
        self.plan = Plan.of(self.index, number)
        self.token_of_row = (self.plan.order // top_k).int()
        self.starts = F.pad(self.plan.ends, (1, 0))
        rows = len(self.token_of_row)
        self.gate_up = random(number, 2 * self.width, self.hidden) * self.hidden**-0.5
        self.down = random(number, self.hidden, self.width) * self.width**-0.5
        self.x, self.dy = random(tokens, self.hidden), random(tokens, self.hidden)
        self.h, self.d_both = random(rows, self.width), random(rows, 2 * self.width)
        # One of the smaller products; those of gate and up have twice as many operations.
        self.flops = 2 * rows * self.hidden * self.width


def ours(layer: Layer) -> dict[str, Callable[[], torch.Tensor]]:
    plan, times = layer.plan, layer.plan.rows_times_experts
    return {
        "gate_up": lambda: plan.gate_up(layer.x, layer.gate_up, None, True)[1],
        "down": lambda: times(layer.h, layer.down, transposed=True)[0],
        "d_h": lambda: times(layer.dy, layer.down, transposed=False, of_tokens=True)[0],
        "d_x": lambda: times(layer.d_both, layer.gate_up, transposed=False)[0],
        "d_gate_up": lambda: plan.weight_gradient(layer.d_both, plan.gathered(layer.x), torch.bfloat16),
        "d_down": lambda: plan.weight_gradient(plan.gathered(layer.dy), layer.h, torch.bfloat16),
    }


def grouped_mm(layer: Layer) -> dict[str, Callable[[], torch.Tensor]]:
    product, gathered = partial(F.grouped_mm, offs=layer.plan.ends), layer.plan.gathered
    return {
        "gate_up": lambda: product(gathered(layer.x), layer.gate_up.mT),
        "down": lambda: product(layer.h, layer.down.mT),
        "d_h": lambda: product(gathered(layer.dy), layer.down),
        "d_x": lambda: product(layer.d_both, layer.gate_up),
        "d_gate_up": lambda: product(layer.d_both.t(), gathered(layer.x)),
        "d_down": lambda: product(gathered(layer.dy).t(), layer.h),
    }


def quack(layer: Layer, tile: tuple[int, int, bool, int]) -> dict[str, Callable[[], torch.Tensor]]:
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_act, gemm_tuned

    rows, columns, pingpong, cluster = tile
    config = GemmConfig(rows, columns, pingpong=pingpong, cluster_m=cluster, is_dynamic_persistent=False)
    number, tokens, starts = len(layer.gate_up), layer.token_of_row, layer.starts

    def product(a, b, n, gather=False):
        out = a.new_empty(len(tokens), n)
        gemm_tuned.fn(a, b, out, cu_seqlens_m=starts, A_idx=tokens if gather else None, config=config)
        return out

    def gradient(tokens_of_rows, values):
        """The sum of outer products of rows of tokens and of values, `[E, hidden, N]`."""
        out = values.new_empty(number, tokens_of_rows.shape[1], values.shape[1])
        gemm_tuned.fn(tokens_of_rows.t(), values, out, cu_seqlens_k=starts, A_idx=tokens, config=config)
        return out

    return {
        # The columns of gate and up take turns here.
        "gate_up": lambda: gemm_act(
            layer.x, layer.gate_up.mT, activation="swiglu", cu_seqlens_m=starts, A_idx=tokens, config=config
        )[0],
        "down": lambda: product(layer.h, layer.down.mT, layer.hidden),
        "d_h": lambda: product(layer.dy, layer.down, layer.width, gather=True),
        "d_x": lambda: product(layer.d_both, layer.gate_up, layer.hidden),
        "d_gate_up": lambda: gradient(layer.x, layer.d_both).mT,
        "d_down": lambda: gradient(layer.dy, layer.h),
    }


class StoredLayer(Layer):
    """A [`Layer`] whose weights are in FP8. `gate_up` and `down` are what they stand for."""

    def __init__(self, model: str, tokens: int, device: str, rank: int):
        super().__init__(model, tokens, device)
        self.stored, self.lazy, self.factors = {}, {}, {"gate_up": None, "down": None}
        for name in self.factors:
            weight = getattr(self, name)
            values, scale = quantized_in_blocks(weight)
            compute = partial(self.dequantized, values, scale)
            self.stored[name] = Float8Experts(weight.shape, weight.dtype, partial(self.both, values, scale))
            self.lazy[name] = DequantizedExperts(weight.shape, weight.dtype, compute)
            setattr(self, name, compute(0, len(weight)))
            if rank:
                number, out, size = weight.shape
                factors = (torch.randn(number, *shape, device=device) / 50 for shape in ((rank, size), (out, rank)))
                self.factors[name] = Factors(*factors, 2.0, torch.bfloat16)

    @staticmethod
    def both(*stored):
        return stored

    @staticmethod
    def dequantized(values, scale, first: int, last: int) -> torch.Tensor:
        return dequantize_blocks(values[first:last], scale[first:last], (128, 128), torch.bfloat16)


def products_of(layer: StoredLayer, plan: Plan, weights: dict) -> dict[str, Callable[[], torch.Tensor]]:
    """The products of a forward, and those of a backward with frozen weights, each with its adapter if there is one."""
    first, second = layer.factors["gate_up"], layer.factors["down"]
    h, d_both = layer.h, layer.d_both
    if isinstance(plan, Float8Plan):
        # The kernels of the gates cast these.
        h, d_both = cast_in_blocks(h), cast_in_blocks(d_both)
    times, adapted = plan.rows_times_experts, second is not None
    return {
        "gate_up": lambda: plan.gate_up(layer.x, weights["gate_up"], first, True, adapted)[1],
        "down": lambda: times(h, weights["down"], second, transposed=True)[0],
        "d_h": lambda: times(layer.dy, weights["down"], second, transposed=False, of_tokens=True)[0],
        "d_x": lambda: times(d_both, weights["gate_up"], first, transposed=False)[0],
    }


def ways_of_fp8(layer: StoredLayer) -> dict[str, dict[str, Callable[[], torch.Tensor]]]:
    """The products of each arm, by its name."""
    plan = Float8Plan.of(layer.index, len(layer.gate_up))
    plain = {"gate_up": layer.gate_up, "down": layer.down}
    ways = {
        "ours": products_of(layer, layer.plan, plain),
        "dequantized": products_of(layer, layer.plan, layer.lazy),
        "fp8": products_of(layer, plan, layer.stored),
    }
    values = layer.stored["gate_up"].stored()[0]
    ours = plan.gate_up(layer.x, layer.stored["gate_up"], None, True, False)[1]
    ways["parts"] = {
        "cast x": lambda: cast_in_blocks(layer.x),
        "transposed gate_up": lambda: transposed(values),
        **{f"transposed gate_up: {name}": run for name, run in variants(values).items()},
        "gates forward": lambda: plan.gated(ours, False),
        "gates backward": lambda: plan.gate_backward(ours, layer.h, layer.weights, (False, False)),
    }
    return ways


def measure_fp8(model: str, tokens: int, args) -> dict:
    found = {}
    for rank in args.ranks:
        set_seed(0)
        layer = StoredLayer(model, tokens, args.device, rank)
        ways = ways_of_fp8(layer)
        expected = {name: product() for name, product in ways["ours"].items()}
        for arm, products in ways.items():
            for name, product in products.items():
                try:
                    result = product()
                    time = milliseconds(product, args)
                except Exception as failure:  # A form that does not compile.
                    print(
                        f"{model} rank {rank} {name} {arm}: {type(failure).__name__}: {str(failure)[:300]}", flush=True
                    )
                    continue
                entry = {"median_ms": round(time, 4)}
                if arm != "parts":
                    flops = layer.flops * (2 if name in ("gate_up", "d_x") else 1)
                    entry |= {"tflops": round(flops / time / 1e9, 1), "error": relative_error(result, expected[name])}
                del result
                found.setdefault(f"rank {rank}", {}).setdefault(name, {})[arm] = entry
                print(f"{model}, {tokens:,} tokens, rank {rank}  {name:<18} {arm:<15} {entry}", flush=True)
        del layer, ways, expected, products, product
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return {"model": model, "tokens": tokens, "ranks": found}


def milliseconds(product: Callable, args) -> float:
    def repeat():
        for _ in range(args.repeats):
            product()

    product()
    return 1000 * statistics.median(timed(repeat, args.device) / args.repeats for _ in range(args.rounds))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def measure(model: str, tokens: int, args) -> dict:
    if args.fp8:
        return measure_fp8(model, tokens, args)
    set_seed(0)
    layer = Layer(model, tokens, args.device)
    expected = {name: product() for name, product in grouped_mm(layer).items()}
    arms = {"ours": [ours(layer)], "grouped_mm": [grouped_mm(layer)]}
    if importlib.util.find_spec("quack"):
        arms["quack"] = [quack(layer, tile) for tile in QUACK_TILES]
    found = {}
    for name in expected:
        flops = layer.flops * (2 if name in ("gate_up", "d_x", "d_gate_up") else 1)
        for arm, choices in arms.items():
            best = None
            for number, products in enumerate(choices):
                try:
                    result = products[name]()
                    error = relative_error(result, expected[name])
                    del result
                    time = milliseconds(products[name], args)
                except Exception as failure:  # A tile that a library does not have.
                    print(f"{model} {name} {arm} {number}: {type(failure).__name__}: {str(failure)[:200]}")
                    continue
                if best is None or time < best["median_ms"]:
                    best = {"median_ms": round(time, 4), "tflops": round(flops / time / 1e9, 1), "error": error}
                    if arm == "quack":
                        best["tile"] = QUACK_TILES[number]
            if best is not None:
                found.setdefault(name, {})[arm] = best
                print(f"{model}, {tokens:,} tokens  {name:<10} {arm:<11} {best}", flush=True)
    return {"model": model, "tokens": tokens, "products": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 2048])
    parser.add_argument("--fp8", action="store_true", help="weights in FP8 with a scale for each block")
    parser.add_argument("--ranks", nargs="+", type=int, default=[0, 16], help="of adapters, with --fp8")
    parser.add_argument("--repeats", type=int, default=20, help="products of a timed round")
    return measure_all(measure, parser)


if __name__ == "__main__":
    sys.exit(main())
