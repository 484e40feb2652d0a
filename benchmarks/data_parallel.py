"""Forward and backward with DDP and FSDP2 on several GPUs, against one GPU, in bf16 and in float8.

Each process has a row of its own. The gradients are compared with the mean of those that one GPU computes for the rows
one after another. FSDP2 shards each decoder layer and gathers it again in the backward. `--layers` keeps the weights
small: what one layer communicates does not depend on the number of layers.

    torchrun --nproc_per_node 2 benchmarks/data_parallel.py --models 4B --layers 6 --output benchmarks/results/data_parallel.json
"""

import argparse
import copy
import json
import os
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from arms import make_model, prepare
from shapes import MODELS, sample_lengths, with_layers
from step import earlier_report, timed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from transformers_packed import DataCollatorWithFlattening
from transformers_packed.ops import implementations_used


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that the benchmarks of several processes share."""
    parser.add_argument("--layers", type=int, help="layers of the model, instead of its own number")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of each row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")


def start(device: str) -> tuple[str, str]:
    """Form the group of processes. Returns the machine and the command."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    prepare(device)
    size = dist.get_world_size()
    machine = f"{size} x {torch.cuda.get_device_name()}" if device == "cuda" else f"{size} processes on a CPU"
    return machine, f"torchrun --nproc_per_node {size} {shlex.join(sys.argv)}"


def make_row(rank: int, lengths: list[int], vocab: int, device: str, stock: bool = False) -> dict:
    """Random documents in a row, with the boundaries that our classes or the stock ones read."""
    generator = torch.Generator().manual_seed(rank)
    collator = DataCollatorWithFlattening(
        return_cu_seqlens=not stock, return_seq_idx=stock, return_flash_attn_kwargs=stock, on_leak="ignore"
    )
    row = collator([{"input_ids": torch.randint(1, vocab, (n,), generator=generator)} for n in lengths])
    return {name: x.to(device) if torch.is_tensor(x) else x for name, x in row.items()}


def wrapped(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def step(model: torch.nn.Module, row: dict) -> torch.Tensor:
    model.zero_grad()
    loss = model(**row).loss
    loss.backward()
    return loss.detach()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = ((name.removeprefix("module."), p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return {name: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).float() for name, grad in found}


def relative_error(actual: dict, expected: dict) -> float:
    difference = sum((actual[name] - expected[name]).square().sum() for name in expected)
    return (difference / sum(grad.square().sum() for grad in expected.values())).sqrt().item()


def milliseconds(model: torch.nn.Module, row: dict, repeats: int) -> float:
    """The mean time of a step, from a barrier until all steps are done, after two others."""
    for _ in range(2):
        step(model, row)
    dist.barrier()
    seconds = timed(lambda: [step(model, row) for _ in range(repeats)], row["input_ids"].device.type)
    return round(1000 * seconds / repeats, 2)


def measure(arm: str, config: dict, lengths: list[int], repeats: int, device: str) -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [make_row(r, lengths, config["vocab_size"], device) for r in range(size)]
    model = make_model(config, arm, device)
    losses, expected = [], {}
    for row in rows:
        losses.append(step(model, row).item())
        for name, grad in gradients(model).items():
            expected[name] = grad / size + expected.get(name, 0)
    found = {"one": {"ms": milliseconds(model, rows[rank], repeats)}}
    model.zero_grad()
    for kind in ("ddp", "fsdp2"):
        parallel = wrapped(copy.deepcopy(model), kind)
        loss = step(parallel, rows[rank]).item()
        found[kind] = {"gradient_error": relative_error(gradients(parallel), expected), "loss": loss}
        found[kind] |= {"loss_of_one": losses[rank], "ms": milliseconds(parallel, rows[rank], repeats)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["4B"])
    parser.add_argument("--arms", nargs="+", default=["ours", "ours+float8"])
    add_options(parser)
    args = parser.parse_args()
    machine, command = start(args.device)
    report = earlier_report(args.output, machine, parser)
    for name in args.models:
        config, lengths = with_layers(MODELS[name], args.layers), sample_lengths("lognormal", args.tokens)
        run = {"command": command, "model": name, "layers": config["num_hidden_layers"], "tokens": args.tokens}
        run["arms"] = {arm: measure(arm, config, lengths, args.repeats, args.device) for arm in args.arms}
        report["runs"].append(run | {"implementations": implementations_used()})
        if dist.get_rank() == 0:
            for arm, kinds in run["arms"].items():
                for kind, entry in kinds.items():
                    print(f"{name} {arm} {kind}: {entry}", flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
