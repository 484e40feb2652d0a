"""The bandwidth of kernels that dequantize weights, beside a copy of as many bytes: reads and writes over time.

`blocks` are weights in FP8 with a scale in float32 for 128 x 128 of them, `powers` the same with powers of two in 8 bit, and
`rows` weights in FP8 with a scale for each row. `nvfp4` has groups of 16 columns, `int4` and `int8` groups of 128 with a zero
each as AWQ has them, and `order` is `int4` with columns of a group in any place, as GPTQ may have them. Results are in bfloat16. Each is compared with the reference, bit by bit. Times
are medians in CUDA graphs, so the host does not count.

    python benchmarks/dequantization.py --output benchmarks/results/dequantization.json
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
from step import earlier_report, machine_name

from transformers_packed.ops.dequantization import dequantize_blocks, dequantize_rows
from transformers_packed.ops.grouped_dequantization import Groups, dequantize_groups


# Weights of 27B and 0.8B, one of 35B-A3B, and 64 of its experts.
SHAPES = [(17408, 5120), (5120, 17408), (12288, 5120), (3584, 1024), (2048, 2048), (64, 1024, 2048), (64, 2048, 512)]
KINDS = {"blocks": torch.float32, "powers": torch.float8_e8m0fnu, "rows": None}
IN_GROUPS = ("nvfp4", "int4", "order", "int8")


def milliseconds(function) -> float:
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(function, rep=40, return_mode="median")


def in_groups(shape: tuple[int, ...], kind: str) -> Groups:
    """A random weight with a scale for each group of columns."""
    *others, rows, columns = shape
    number = columns // (16 if kind == "nvfp4" else 128)
    values = torch.randint(256, (*others, rows, columns // (1 if kind == "int8" else 2)), device="cuda").to(
        torch.uint8
    )
    scale = torch.rand(*others, rows, number, device="cuda") + 0.01
    if kind == "nvfp4":
        whole = torch.full((*others, 1), 0.5, device="cuda")
        return Groups(values, scale.to(torch.float8_e4m3fn), kind, torch.bfloat16, whole=whole, divided=True)
    zero = torch.randint(1, 16, (*others, rows, number), device="cuda").to(torch.uint8)
    order = torch.randint(number, (*others, 1, columns), device="cuda").int() if kind == "order" else None
    return Groups(values, scale.half(), "int8" if kind == "int8" else "int4", torch.float16, zero, order)


def measure(shape: tuple[int, ...], kind: str) -> dict:
    values = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    groups = in_groups(shape, kind) if kind in IN_GROUPS else None
    if kind == "rows":
        scale = torch.rand(*shape[:-1], 1, device="cuda")
    elif groups is None:
        number = [-(-n // 128) for n in shape[-2:]]
        scale = (torch.rand(*shape[:-2], *number, device="cuda") + 0.5).to(KINDS[kind])

    def run(impl: str = "auto") -> torch.Tensor:
        if groups is not None:
            return dequantize_groups(groups, torch.bfloat16, impl=impl)
        if kind == "rows":
            return dequantize_rows(values, scale, torch.bfloat16, impl=impl)
        return dequantize_blocks(values, scale, (128, 128), torch.bfloat16, impl=impl)

    if not torch.equal(run(), run("reference")):
        raise AssertionError(f"{kind} {shape}: other bits than the reference")
    read = (values,) if groups is None else (x for x in groups if isinstance(x, torch.Tensor))
    moved = sum(x.nbytes for x in read) + 2 * values.numel()
    source = torch.empty(moved // 16, device="cuda", dtype=torch.int64)
    target = torch.empty_like(source)
    kernel, copy = milliseconds(run), milliseconds(lambda: target.copy_(source))
    found = {
        "kind": kind,
        "shape": list(shape),
        "us": round(1000 * kernel, 1),
        "share_of_copy": round(copy / kernel, 2),
    }
    return found | {
        "TB_per_second": round(moved / kernel / 1e9, 2),
        "copy_TB_per_second": round(moved / copy / 1e9, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    report = earlier_report(args.output, machine_name("cuda"), parser)
    run = {"command": shlex.join(["python", *sys.argv]), "weights": []}
    for shape in SHAPES:
        for kind in (*KINDS, *IN_GROUPS):
            run["weights"].append(measure(shape, kind))
            print(json.dumps(run["weights"][-1]), flush=True)
    report["runs"].append(run)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
