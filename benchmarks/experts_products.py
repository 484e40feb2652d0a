"""The grouped products of one layer of experts, each alone: this package's kernels beside those of other libraries.

`ours` are the kernels of `ops/backends/triton/grouped_products.py`, `grouped_mm` is torch's, and `quack` are the products of
quack-kernels, the library below SonicMoE, if it is installed: each with the fastest of its tiles. Rows are sorted by
expert. A product that reads the rows of tokens includes their copy where a library has no such product. `gate_up`
includes the activation, but for `grouped_mm`. The rate counts the products of the chosen experts, without the padding
of tiles.

    python benchmarks/experts_products.py --output benchmarks/results/experts_products.json
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from experts_layer import measure_all
from shapes import MODELS
from step import timed
from transformers import set_seed

from transformers_packed.ops import choose_experts
from transformers_packed.ops.backends.triton.grouped_products import Plan


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
        _, index = choose_experts((torch.randn(tokens, number, device=device) + likely).bfloat16(), top_k)
        self.plan = Plan.of(index, number)
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


def milliseconds(product: Callable, args) -> float:
    def repeat():
        for _ in range(args.repeats):
            product()

    product()
    return 1000 * statistics.median(timed(repeat, args.device) / args.repeats for _ in range(args.rounds))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def measure(model: str, tokens: int, args) -> dict:
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
    parser.add_argument("--repeats", type=int, default=20, help="products of a timed round")
    return measure_all(measure, parser)


if __name__ == "__main__":
    sys.exit(main())
