"""Compare packed rows split over several GPUs with whole rows on each GPU, in tokens per second per GPU and memory.

    torchrun --nproc_per_node 4 benchmarks/sequence_parallel.py --output benchmarks/results/sequence_parallel.json
    torchrun --nproc_per_node 4 benchmarks/sequence_parallel.py --sizes 4 --one-document 524288
    torchrun --nproc_per_node 2 benchmarks/sequence_parallel.py --models 9B --lora --sizes 2 --one-document 131072 262144

A step is forward and backward of one row per group of processes, with random bfloat16 weights and gradient
checkpointing. Every process holds all weights and gradients, and no optimizer runs. With `--lora`, only adapters in
float32 are trained. Each step ends with an all-reduce
of the gradients over all processes, which is part of the time in every arm.

At size 1 each process computes its own row. At size P a group of P processes shares one row, so tokens per second per
GPU are `row / (time * P)`. All rows are the same, so the losses and gradient norms of all arms have to agree. The
slowest process determines the time of a step, and the median step counts for an arm.

The arm `state+heads` splits the gated delta rule by states and attention by heads. Size 1 has the arm `whole`. Each arm
runs in the chosen variants: as it is, without cuDNN's attention, with checkpoints in host memory, with Transformers' copies to
host memory, and with attention of long documents there too. `--segment-tokens` repeats the last one with layers that compute
segments. A row that does not fit is part of the results, and longer ones are left out.

    torchrun --nproc_per_node 1 benchmarks/sequence_parallel.py --models 4B --lora --sizes 1 --variants offload \
        --one-document 131072 262144 327680 393216 --warmup 1 --warmup-tokens 16384 --repeats 1
    torchrun --nproc_per_node 1 benchmarks/sequence_parallel.py --models 4B --lora --sizes 1 --one-document 65536 \
        --variants 'offload, attention kept' --segment-tokens 32768 16384 --warmup 1 --repeats 3
"""

import argparse
import gc
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import step as one_gpu
import torch
import torch.distributed as dist
from arms import make_model
from transformers import PreTrainedModel

from transformers_packed import DataCollatorWithFlattening
from transformers_packed.boundaries import Derived
from transformers_packed.models.registry import inner_model
from transformers_packed.ops import dispatch, implementations_used
from transformers_packed.ops.attention import IMPLEMENTATIONS as ATTENTION
from transformers_packed.parallel import SequenceParallel, shard_batch


KEPT = "offload, attention kept"
# With and without cuDNN, and whose copies of checkpoints to host memory run.
VARIANTS = {
    "as it is": (True, None),
    "varlen_attn": (False, None),
    "offload": (True, "ours"),
    "stock offload": (True, "stock"),
    KEPT: (True, "ours"),
}
SDPA = ATTENTION["sdpa"]
ARMS = [f"{rule}+{attention}" for rule in ("state", "heads") for attention in ("heads", "gather")]


def make_batch(lengths: list[int], vocab_size: int, parallel: SequenceParallel, device: str) -> dict:
    """Return this process's shard of the row, or the whole row at size 1."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    row = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")(
        [{"input_ids": ids} for ids in documents]
    )
    if parallel.size > 1:
        row = shard_batch(row, parallel.rank, parallel.size, parallel=parallel, minimum=3)
    # The model copies boundaries from the host to the device itself.
    keep_on_host = ("cu_seqlens", "boundaries")
    return {
        name: x.to(device) if isinstance(x, torch.Tensor) and name not in keep_on_host else x
        for name, x in row.items()
    }


def fresh(batch: dict) -> dict:
    """The same shard without the index tensors that its boundaries keep. In training every row computes its own."""
    row = replace(batch["boundaries"].row, shared=Derived())
    return batch | {"boundaries": replace(batch["boundaries"], row=row, shared=Derived())}


def sum_gradients(model: torch.nn.Module) -> None:
    if dist.get_world_size() > 1:
        waiting = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters() if p.grad is not None]
        for work in waiting:
            work.wait()


def largest(value: float, device: str) -> float:
    """Return the maximum over all processes."""
    value = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def set_variant(model, name: str, segment: int | None) -> None:
    """Choose the implementation of attention, and checkpoint all layers, which compute segments of so many tokens."""
    with_cudnn, offload = VARIANTS[name]
    kernels = dict(SDPA)
    if not with_cudnn:
        del kernels["cudnn"]
    ATTENTION["sdpa"] = kernels
    inner = inner_model(model)
    enable = inner.activation_checkpointing_enable
    if offload == "stock":
        enable = partial(PreTrainedModel.activation_checkpointing_enable, inner)
    options = {"use_reentrant": False} | ({"keep_attention": "auto"} if name == KEPT else {})
    enable(options | ({"segment_tokens": segment} if segment else {}), offload=offload is not None)


def measure(model, lengths: list[int], size: int, arm: str, variant: str, segment: int | None, args) -> dict:
    device, cuda = args.device, args.device == "cuda"
    set_variant(model, variant, segment)
    methods = {}
    if size > 1:
        methods = dict(zip(("gated_delta_rule", "attention"), arm.split("+"), strict=True))
    parallel = SequenceParallel(size, **methods)
    batch = make_batch(lengths, model.config.vocab_size, parallel, device)
    # The targets of all groups, because gradients are summed over all of them.
    targets = (sum(lengths) - len(lengths)) * parallel.data_parallel_size
    losses = []

    def step(batch=batch):
        model.zero_grad(set_to_none=True)
        inputs = fresh(batch) if size > 1 else batch
        with torch.autocast(device, torch.bfloat16, enabled=args.lora):
            loss = model(**inputs, num_items_in_batch=targets).loss
        loss.backward()
        sum_gradients(model)
        losses.append(loss.detach())

    dispatch._used.clear()
    short = [args.warmup_tokens] if args.warmup_tokens else lengths
    warm_up_batch = make_batch(short, model.config.vocab_size, parallel, device)
    for _ in range(args.warmup):
        step(warm_up_batch)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.repeats):
        dist.barrier()
        seconds.append(round(largest(one_gpu.timed(step, device), device), 5))
    dist.all_reduce(losses[-1])
    median = statistics.median(seconds)
    norms = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None])
    result = {
        "size": size,
        "arm": arm,
        "variant": variant,
        **({"segment_tokens": segment} if segment else {}),
        "seconds": seconds,
        "median_ms": round(1000 * median, 2),
        "tokens_per_second_per_gpu": round(sum(lengths) / median / size),
        "loss": round(losses[-1].item(), 5),
        "gradient_norm": round(norms.norm().item(), 5),
        "implementations": implementations_used(isolating=True),
    }
    if cuda:
        result["peak_GiB"] = round(largest(torch.cuda.max_memory_allocated() / 2**30, device), 2)
    model.zero_grad(set_to_none=True)
    return result


def print_arm(arm: dict, baseline: dict) -> None:
    ratio = ""
    name = arm["variant"] + (f", segments of {arm['segment_tokens']:,}" if "segment_tokens" in arm else "")
    if "error" in arm:
        print(f"  P = {arm['size']} {arm['arm']:<13} {name:<13} {arm['error']}", flush=True)
        return
    if baseline["size"] == 1:
        ratio = f"x {arm['tokens_per_second_per_gpu'] / baseline['tokens_per_second_per_gpu']:4.2f}"
    print(
        f"  P = {arm['size']} {arm['arm']:<13} {name:<13} {arm['median_ms']:10.1f} ms"
        f"  {arm['tokens_per_second_per_gpu']:>8,} tokens/s/GPU  {ratio}  {arm.get('peak_GiB', 0):6.1f} GiB"
        f"  loss {arm['loss']:.4f}  |gradient| {arm['gradient_norm']:.4f}",
        flush=True,
    )


def measure_row(model, name: str, lengths: list[int], args, report: dict) -> bool:
    """Measure all arms on a row of these documents, and write the report after each arm. Return whether all fit."""
    world, first = dist.get_world_size(), dist.get_rank() == 0
    run = {
        "command": f"torchrun --nproc_per_node {world} {shlex.join(sys.argv)}",
        "model": name,
        "gpus": world,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "lora": args.lora,
        "qlora": args.qlora,
        "flops": one_gpu.model_flops(one_gpu.MODELS[name], lengths, frozen=args.lora),
        "arms": [],
    }
    report["runs"].append(run)
    arms = [(size, arm) for size in args.sizes if world % size == 0 for arm in (args.arms if size > 1 else ["whole"])]
    cases = [*((variant, None) for variant in args.variants), *((KEPT, n) for n in args.segment_tokens)]
    for (size, arm), (variant, segment) in itertools.product(arms, cases):
        gc.collect()
        if args.device == "cuda":
            # Blocks of other lengths would take memory.
            torch.cuda.empty_cache()
        try:
            run["arms"].append(measure(model, lengths, size, arm, variant, segment, args))
        except torch.OutOfMemoryError:
            # Other processes may wait for this one.
            if world > 1:
                raise
            run["arms"].append({"size": size, "arm": arm, "variant": variant, "error": "out of memory"})
            model.zero_grad(set_to_none=True)
        if first:
            print_arm(run["arms"][-1], run["arms"][0])
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    if first:
        documents = "one document" if len(lengths) == 1 else f"{len(lengths)} documents"
        print(f"\n{name}, a row of {sum(lengths):,} tokens in {documents}, {world} processes")
        for arm in run["arms"]:
            print_arm(arm, run["arms"][0])
    return not any("error" in arm for arm in run["arms"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=one_gpu.MODELS, default=["4B"])
    parser.add_argument("--tokens", type=int, default=65536, help="length of the row in tokens")
    parser.add_argument(
        "--one-document",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help="measure rows of one document of these lengths instead",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=[1, 2, 4],
        help="sizes that do not divide the process count are skipped",
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="arms for sizes above 1")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=["as it is"])
    cut = f"also '{KEPT}' with layers that compute segments of N tokens"
    parser.add_argument("--segment-tokens", nargs="+", type=int, default=[], metavar="N", help=cut)
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers, under autocast")
    parser.add_argument("--qlora", action="store_true", help="with frozen weights in 4 bits")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--warmup-tokens", type=int, help="warm up with one document of this length instead of the row"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    args.lora |= args.qlora
    cuda = args.device == "cuda"
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc_per_node N")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    first = dist.get_rank() == 0
    report = one_gpu.earlier_report(args.output, one_gpu.machine_name(args.device), parser)
    for name in args.models:
        config = one_gpu.MODELS[name]
        start = time.perf_counter()
        model = make_model(config, "ours+qlora" if args.qlora else "ours+lora" if args.lora else "ours", args.device)
        if first:
            print(
                f"{one_gpu.machine_name(args.device)}, {name} made in {time.perf_counter() - start:.0f} s",
                one_gpu.versions(),
                flush=True,
            )
        rows = [[n] for n in args.one_document or ()] or [one_gpu.sample_lengths("lognormal", args.tokens)]
        for lengths in rows:
            if not measure_row(model, name, lengths, args, report):
                break
        del model
        gc.collect()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
