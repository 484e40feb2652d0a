"""The bandwidth of kernels that dequantize weights, beside a copy of as many bytes: reads and writes over time.

`blocks` are weights in FP8 with a scale in float32 for 128 x 128 of them, `powers` the same with powers of two in 8 bit, and
`rows` weights in FP8 with a scale for each row. Results are in bfloat16. Each is compared with the reference, bit by bit. Times
are medians in CUDA graphs, so the host does not count.

    python benchmarks/dequantization.py --output benchmarks/results/dequantization.json
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
from step import earlier_report

from transformers_packed.ops.dequantization import dequantize_blocks, dequantize_rows


# Weights of 27B and 0.8B, one of 35B-A3B, and 64 of its experts.
SHAPES = [(17408, 5120), (5120, 17408), (12288, 5120), (3584, 1024), (2048, 2048), (64, 1024, 2048), (64, 2048, 512)]
KINDS = {"blocks": torch.float32, "powers": torch.float8_e8m0fnu, "rows": None}


def milliseconds(function) -> float:
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(function, rep=40, return_mode="median")


def measure(shape: tuple[int, ...], kind: str) -> dict:
    values = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    if kind == "rows":
        scale = torch.rand(*shape[:-1], 1, device="cuda")
    else:
        number = [-(-n // 128) for n in shape[-2:]]
        scale = (torch.rand(*shape[:-2], *number, device="cuda") + 0.5).to(KINDS[kind])

    def run(impl: str = "auto") -> torch.Tensor:
        if kind == "rows":
            return dequantize_rows(values, scale, torch.bfloat16, impl=impl)
        return dequantize_blocks(values, scale, (128, 128), torch.bfloat16, impl=impl)

    if not torch.equal(run(), run("reference")):
        raise AssertionError(f"{kind} {shape}: other bits than the reference")
    moved = 3 * values.numel()
    source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
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
    report = earlier_report(args.output, torch.cuda.get_device_name(), parser)
    run = {"command": shlex.join(["python", *sys.argv]), "weights": []}
    for shape in SHAPES:
        for kind in KINDS:
            run["weights"].append(measure(shape, kind))
            print(json.dumps(run["weights"][-1]), flush=True)
    report["runs"].append(run)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
