"""Attention of packed rows alone, forward and backward: long documents by cuDNN against `varlen_attn`.

Each row runs through this package's op with each implementation in turn. TFLOP/s count 3.5 times the operations of a
causal forward of each document. Errors are relative to the reference in float32, of the documents alone, on a row that
is short enough for it. The first call of a shape includes cuDNN's plan.

    python benchmarks/attention.py --output benchmarks/results/attention.json
"""

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from step import versions

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import attention
from transformers_packed.ops.dense_attention import group


HEADS = {"4B, 9B": (16, 4, 256), "0.8B": (8, 2, 256), "27B": (24, 4, 256), "heads of 128": (32, 8, 128)}
ROWS = {
    "1 x 65,536": [65536],
    "1 x 131,072": [131072],
    "1 x 100,001": [100001],
    "1 x 16,384": [16384],
    "2 x 8,192": [8192] * 2,
    "4 x 4,096": [4096] * 4,
    "8 x 2,048": [2048] * 8,
    "16 x 1,024": [1024] * 16,
    "mixed": [9000, 3000, 1500, 1200, 700, 500, 300, 184],
    "one long and many short": [49152, *[480] * 34],
    "many short, then long": [*[480] * 64, 20000, 9000],
}
IMPLEMENTATIONS = ("varlen_attn", "cudnn")


def layer(heads: tuple[int, int, int]) -> SimpleNamespace:
    config = SimpleNamespace(_attn_implementation="sdpa")
    return SimpleNamespace(config=config, num_key_value_groups=heads[0] // heads[1], training=True)


def make(lengths: list[int], heads: tuple[int, int, int], dtype=torch.bfloat16) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, laid out as a layer makes them."""
    generator = torch.Generator("cuda").manual_seed(0)
    numbers = heads[0], heads[1], heads[1], heads[0]
    made = [
        torch.randn(1, sum(lengths), h, heads[2], generator=generator, device="cuda").bfloat16().to(dtype)
        for h in numbers
    ]
    return [x.transpose(1, 2).requires_grad_() for x in made[:3]] + made[3:]


def step(tensors, lengths, heads, impl, boundaries) -> tuple[torch.Tensor, ...]:
    options = {"eager": None, "scaling": heads[2] ** -0.5, "boundaries": boundaries, "impl": impl}
    output = attention(layer(heads), *tensors[:3], None, **options)[0]
    return output.detach(), *torch.autograd.grad(output, tensors[:3], tensors[3])


def milliseconds(run, repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(events, events[1:], strict=False)]


def measure(name: str, heads: tuple[int, int, int], lengths: list[int]) -> dict:
    boundaries, tensors = SequenceBoundaries.from_lengths(lengths, device="cuda"), make(lengths, heads)
    flops = 3.5 * sum(2 * n * n * heads[0] * heads[2] for n in lengths)
    found = {"row": name, "heads": heads, "lengths": lengths, "dense": group(lengths, *heads)}
    for impl in IMPLEMENTATIONS:
        if impl == "cudnn" and not found["dense"]:
            continue
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(tensors, lengths, heads, impl, boundaries)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        repeats = 3 if sum(lengths) > 40000 else 20
        milliseconds(lambda impl=impl: step(tensors, lengths, heads, impl, boundaries), 2)
        times = sorted(milliseconds(lambda impl=impl: step(tensors, lengths, heads, impl, boundaries), repeats))
        median = times[len(times) // 2]
        found[impl] = {
            "ms": round(median, 3),
            "tflops": round(flops / median / 1e9, 1),
            "first_ms": round(1e3 * first),
        }
    return found


def errors(heads: tuple[int, int, int], lengths: list[int]) -> dict:
    """Relative errors of output and gradients, and whether two runs agree in all bits if torch asks for it."""
    boundaries = SequenceBoundaries.from_lengths(lengths, device="cuda")
    want = step(make(lengths, heads, torch.float32), lengths, heads, "per_document(sdpa)", boundaries)
    found: dict = {"heads": heads, "lengths": lengths}
    for impl in IMPLEMENTATIONS:
        got = step(make(lengths, heads), lengths, heads, impl, boundaries)
        found[impl] = [float((x.float() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True)]
    torch.use_deterministic_algorithms(True)
    for impl in IMPLEMENTATIONS:
        try:
            runs = [step(make(lengths, heads), lengths, heads, impl, boundaries) for _ in range(2)]
            found[f"{impl} deterministic"] = all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
        except (ValueError, RuntimeError) as error:
            found[f"{impl} deterministic"] = str(error)[:200]
    torch.use_deterministic_algorithms(False)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report = {"machine": torch.cuda.get_device_name(), "versions": versions() | {"system": platform.system()}}
    report |= {"cudnn": torch.backends.cudnn.version(), "command": shlex.join(["python", *sys.argv]), "runs": []}
    report["errors"] = [errors(HEADS[name], [300, 9000, 8800, 1, 2200]) for name in args.heads]
    for found in report["errors"]:
        print(found, flush=True)
    for name in args.heads:
        for row in args.rows:
            run = measure(row, HEADS[name], ROWS[row])
            report["runs"].append(run)
            times = [
                f"{impl} {run[impl]['ms']:.2f} ms, {run[impl]['tflops']:.0f}"
                for impl in IMPLEMENTATIONS
                if impl in run
            ]
            print(
                f"{name:<14}{row:<26}{'; '.join(times)}; dense {len(run['dense'])} batches, first {run.get('cudnn', {}).get('first_ms')}",
                flush=True,
            )
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
