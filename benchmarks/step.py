"""Forward and backward of one training step on a GPU: what users have today against this package.

Every arm gets the same samples and the same random weights, in bfloat16: padded batches of `--batch` for the padded arms,
one packed row for the others. The arms take turns, so that a change of the machine's speed meets all of them, and
each counts with the median of its steps after a warm-up. The steps of an arm follow one another as in training: nobody waits
for the GPU between them, and events on it take the times. The built-in classes need `causal_conv1d` for packed rows; they
get flash-linear-attention's convolution in its place, and `varlen` is torch's variable-length attention, which
Transformers does not offer by itself.

The share of the machine is the model's FLOPs (three times the forward's, attention inside documents only, the head for
every token) over the time, against the best matrix product that the machine itself manages: once by itself, and once
repeated for seconds, as in a step, when the GPU's power limit lowers its clock.

The peak above weights and gradients is the peak of allocated memory minus the parameters and the gradients that a step
leaves. Without the head, each step starts its backward at a fixed random gradient of the last hidden state. In models
with experts, the arms of the built-in classes compute them with `grouped_mm`, also with Liger's other kernels. The suffix
`-experts` adds Liger's kernels for experts, `ours+stock-experts` is this package with `grouped_mm`.

    python benchmarks/step.py --models 0.8B 4B --tokens 16384 --output benchmarks/results/step.json
    python benchmarks/step.py --models 0.8B --tokens 16384 --arms ours --profile
    python benchmarks/step.py --models 4B --arms ours ours+lora packed+varlen+liger+lora --output benchmarks/results/lora.json
    python benchmarks/step.py --models 35B-A3B --layers 8 --no-head --arms packed+varlen+liger ours ours+stock-experts
    python benchmarks/step.py --models 0.8B 4B 9B --labelled 0.33 --arms ours ours+mtp ours+mtp-only
    python benchmarks/step.py --models 0.8B 4B --arms ours ours+invariant --output benchmarks/results/invariant_step.json
    python benchmarks/step.py --plot benchmarks/results/step.json step.png
"""

import argparse
import gc
import json
import platform
import shlex
import statistics
import sys
import time
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import torch
from arms import ARMS, Arm, default_arms, prepare
from graph_memory import free_in_pools
from shapes import GROUPS, MODELS, group_of, model_flops, sample_lengths, with_layers

from transformers_packed import batch_invariant
from transformers_packed.ops import implementations_used


PACKAGES = (
    "flash-linear-attention",
    "peft",
    "bitsandbytes",
    "torchao",
    "flashoptim",
    "flash-qla",
    "tilelang",
    "causal-conv1d",
    "liger-kernel",
    "triton",
)
# Of an arm at least: caches of the host and the GPU's clock settle.
_WARM_UP_SECONDS = 2.0
_SUSTAINED_SECONDS = 1.0


def gemm_rates(device: str) -> dict[str, float]:
    """FLOP/s of the best of a few large bfloat16 products, each by itself, and repeated for seconds."""
    shapes = ((8192, 8192, 8192), (16384, 4096, 4096), (16384, 8192, 4096)) if device == "cuda" else ((512,) * 3,)
    rates = {"gemm_flops_per_second": 0.0, "sustained_gemm_flops_per_second": 0.0}
    for m, n, k in shapes:
        a, b = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        for _ in range(3):
            a @ b
        seconds = min(timed(lambda a=a, b=b: a @ b, device) for _ in range(10))
        rates["gemm_flops_per_second"] = max(rates["gemm_flops_per_second"], 2 * m * n * k / seconds)
    m, n, k = shapes[0]
    a, b = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    product = a @ b
    repeats = max(1, int(_SUSTAINED_SECONDS * rates["gemm_flops_per_second"] / (2 * m * n * k)))

    def again():
        for _ in range(repeats):
            torch.mm(a, b, out=product)

    # The second one finds the GPU as warm as a step does.
    seconds = [timed(again, device) for _ in range(2)][1]
    rates["sustained_gemm_flops_per_second"] = 2 * m * n * k * repeats / seconds
    return rates


def seconds_of_steps(arm: Arm, repeats: int, device: str) -> list[float]:
    if device != "cuda":
        return [timed(arm.run, device) for _ in range(repeats)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        arm.run()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in zip(events, events[1:], strict=False)]


def timed(function, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(model: str, distribution: str, tokens: int, args, rates: dict[str, float]) -> dict:
    """All arms on one model and one set of samples; each arm's model lives only while it runs, to measure its memory."""
    config, lengths = with_layers(MODELS[model], args.layers), sample_lengths(distribution, tokens)
    results, head = {}, not args.no_head
    for round_number in range(args.rounds):
        for name in args.arms or default_arms(config):
            try:
                with batch_invariant() if "+invariant" in name else nullcontext():
                    found = run_arm(name, config, lengths, args, args.warmup if round_number == 0 else 2)
                seconds = results.get(name, {}).get("seconds", [])
                results[name] = found | {"seconds": seconds + found["seconds"]}
            except torch.OutOfMemoryError:
                results[name] = {"error": "out of memory"}
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            # An error's frames hold the model until its clause ends.
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    for name, entry in results.items():
        if "seconds" in entry:
            flops, median = model_flops(config, lengths, "lora" in name, head), statistics.median(entry["seconds"])
            entry |= {
                "median_ms": round(1000 * median, 2),
                "tokens_per_second": round(tokens / median),
                "share_of_gemm_rate": round(flops / median / rates["gemm_flops_per_second"], 4),
                "share_of_sustained_gemm_rate": round(flops / median / rates["sustained_gemm_flops_per_second"], 4),
            }
    ours = results.get("ours", {}).get("median_ms")
    for entry in results.values():
        if ours and "median_ms" in entry:
            entry["over_ours"] = round(entry["median_ms"] / ours, 3)
    print_table(f"{model}, {config['num_hidden_layers']} layers", distribution, tokens, lengths, results)
    return {
        "model": model,
        "lengths": distribution,
        "documents": len(lengths),
        "tokens": tokens,
        "checkpointing": args.checkpointing,
        "labelled": args.labelled,
        "layers": config["num_hidden_layers"],
        "head": head,
        "flops": model_flops(config, lengths, head=head),
        "arms": results,
    }


def run_arm(name: str, config: dict, lengths: list[int], args, warmup: int) -> dict:
    """Seconds of each step, the loss, and the memory."""
    cuda = args.device == "cuda"
    arm, begin = Arm(name, config, lengths, args), time.perf_counter()
    while warmup > 0 or (cuda and time.perf_counter() - begin < _WARM_UP_SECONDS):
        loss = float(arm.run())
        warmup -= 1
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    entry = {"seconds": [round(x, 5) for x in seconds_of_steps(arm, args.repeats, args.device)], "loss": loss}
    held = arm.bytes_of_weights_and_gradients()
    entry["weights_and_gradients_GiB"] = round(held / 2**30, 2)
    if cuda:
        peak = torch.cuda.max_memory_allocated()
        if "+graphs" in name:
            # What graphs keep for their activations does not count as allocated.
            peak += free_in_pools(torch.cuda.memory_snapshot())
        entry["peak_GiB"] = round(peak / 2**30, 2)
        entry["peak_above_GiB"] = round((peak - held) / 2**30, 2)
    if args.profile:
        entry["profile_ms"] = profile(arm)
    return entry


def profile(arm: Arm) -> dict[str, float]:
    """Milliseconds of kernels by group, of all kernels, and of the host until it has launched everything."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    arm.run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    arm.run()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        arm.run()
        torch.cuda.synchronize()
    groups, rest = dict.fromkeys([*GROUPS, "other", "all kernels"], 0.0), {}
    launches = 0
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        milliseconds = event.device_time / 1000
        launches += 1
        group = group_of(event.name)
        groups[group] += milliseconds
        groups["all kernels"] += milliseconds
        rest[event.name] = rest.get(event.name, 0.0) + milliseconds
    for name, milliseconds in sorted(rest.items(), key=lambda item: -item[1])[:40]:
        print(f"    {milliseconds:8.2f} ms  {name[:110]}")
    return {k: round(v, 2) for k, v in groups.items()} | {"host": round(1000 * host, 2), "launches": launches}


def print_table(model: str, distribution: str, tokens: int, lengths: list[int], results: dict) -> None:
    print(f"\n{model}, {tokens:,} tokens in {len(lengths)} documents ({distribution})")
    for name, entry in results.items():
        if "error" in entry:
            print(f"  {name:<30} {entry['error']}")
            continue
        print(
            f"  {name:<30} {entry['median_ms']:9.1f} ms  {entry['tokens_per_second']:>9,} tokens/s"
            f"  {100 * entry['share_of_gemm_rate']:5.1f} % ({100 * entry['share_of_sustained_gemm_rate']:.1f} %)"
            f"  {entry.get('peak_GiB', 0):6.1f} GiB, {entry.get('peak_above_GiB', 0):5.1f} above"
            f"  x {entry.get('over_ours', 0):5.2f}  loss {entry['loss']:.4f}"
        )
        if "profile_ms" in entry:
            print("    " + ", ".join(f"{k} {v}" for k, v in entry["profile_ms"].items()), flush=True)


def plot(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = json.loads(source.read_text())["runs"]
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 2.4 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    for axis, run in zip(axes.flat, runs, strict=False):
        arms = {name: entry["median_ms"] for name, entry in run["arms"].items() if "median_ms" in entry}
        colors = ["tab:green" if name.startswith("ours") else "tab:gray" for name in arms]
        bars = axis.barh(list(arms), list(arms.values()), color=colors, height=0.6)
        axis.bar_label(bars, fmt="{:,.0f}", padding=2)
        axis.margins(x=0.2)
        axis.set_ylim(len(arms) - 0.5, -0.5)
        checkpointing = ", checkpointing" if run["checkpointing"] else ""
        layers = f", {run['layers']} layers" if "layers" in run else ""
        axis.set_title(
            f"{run['model']}{layers}, {run['tokens']:,} tokens, {run['lengths']}{checkpointing}", fontsize=9
        )
        axis.set_xlabel("milliseconds, forward + backward", fontsize=8)
    figure.savefig(target, dpi=130)


def versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine_name(device: str) -> str:
    """The name of the GPU, or of the processor."""
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"


def earlier_report(output: Path | None, machine: str, parser: argparse.ArgumentParser) -> dict:
    """What the JSON file holds of this machine and these versions, to add runs to; a new report if there is no file."""
    report = {"machine": machine, "versions": versions(), "runs": []}
    if output and output.exists():
        earlier = json.loads(output.read_text())
        if any(earlier[key] != report[key] for key in ("machine", "versions")):
            parser.error(f"{output} holds runs of another machine or of other versions; name another file")
        report = earlier
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.8B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384], help="tokens of the row")
    parser.add_argument("--lengths", nargs="+", choices=("lognormal", "equal"), default=["lognormal"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all that fit the model, without LoRA")
    parser.add_argument("--layers", type=int, help="layers of each model, instead of its own number")
    parser.add_argument("--no-head", action="store_true", help="a fixed gradient of the last hidden state, no loss")
    share = "share of the tokens of a document that are targets, at its end, in packed rows"
    parser.add_argument("--labelled", type=float, default=1.0, help=share)
    parser.add_argument("--batch", type=int, default=8, help="rows of a padded batch")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of an arm in each round")
    parser.add_argument("--rounds", type=int, default=2, help="how often the arms take turns")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in every arm")
    parser.add_argument("--profile", action="store_true", help="kernel time by group, and the host's time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("JSON", "PNG"), help="only draw an earlier run")
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return 0
    prepare(args.device)
    rates = gemm_rates(args.device)
    once, sustained = (rate / 1e12 for rate in rates.values())
    print(
        f"{machine_name(args.device)}, best matrix product {once:.1f} TFLOP/s, for seconds {sustained:.1f} TFLOP/s",
        versions(),
    )
    report = earlier_report(args.output, machine_name(args.device), parser)
    for model in args.models:
        for tokens in args.tokens:
            for distribution in args.lengths:
                run = {"command": shlex.join(["python", *sys.argv])} | rates
                run |= measure(model, distribution, tokens, args, rates)
                report["runs"].append(run | {"implementations": implementations_used()})
                if args.output:
                    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(implementations_used())
    return 0


if __name__ == "__main__":
    sys.exit(main())
