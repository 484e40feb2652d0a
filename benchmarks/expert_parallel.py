"""Forward and backward of a mixture with its experts spread over the GPUs (EP), and with FSDP2 alone: ours and stock.

Each process has a row of its own. All arms load the same checkpoint of random weights, and their losses are compared.
Stock classes get variable-length attention and a convolution for packed rows. Adapters of rank 16 are on the layers
outside the experts.

    torchrun --nproc_per_node 2 benchmarks/expert_parallel.py --layers 12 --output benchmarks/results/expert_parallel.json
"""

import argparse
import gc
import json
import sys
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from arms import ARMS, make_model
from data_parallel import add_options, make_row, milliseconds, start, step
from peft import LoraConfig, get_peft_model
from shapes import LORA_LAYERS, LORA_MLP, MODELS, sample_lengths, with_layers
from step import earlier_report
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from transformers_packed import registered
from transformers_packed.ops import dispatch, implementations_used


KINDS = {"ours": "ours", "stock": "packed+varlen"}


def save_checkpoint(config: dict, folder: str, device: str) -> None:
    """Write a model of random weights, by one process while the others wait."""
    if dist.get_rank() == 0:
        make_model(config, "packed", device).save_pretrained(folder)
        gc.collect()
    dist.barrier()


def load(folder: str, kind: str, plan: dict, lora: bool) -> torch.nn.Module:
    with registered() if ARMS[kind].model == "ours" else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            attn_implementation=ARMS[kind].attention,
            distributed_config=DistributedConfig(**plan),
        ).train()
    if lora:
        targets = [name for name in LORA_LAYERS if name not in LORA_MLP]
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    return model


def measure(arm: str, folder: str, config: dict, lengths: list[int], repeats: int, device: str) -> dict:
    """Time and peak memory of an arm such as `"ours, EP, LoRA"`."""
    words = arm.split(", ")
    size, cuda = dist.get_world_size(), device == "cuda"
    kind, plan = KINDS[words[0]], {"fsdp_size": size} | ({"ep_size": size} if words[1] == "EP" else {})
    dispatch._used.clear()
    model = load(folder, kind, plan, "LoRA" in words)
    row = make_row(dist.get_rank(), lengths, config["vocab_size"], device, stock=ARMS[kind].model == "builtin")
    with torch.autocast(device, torch.bfloat16, enabled="LoRA" in words):
        loss = step(model, row)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        entry = {"ms": milliseconds(model, row, repeats), "loss": loss.item()}
    if cuda:
        entry["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return entry | {"implementations": implementations_used()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=[name for name in MODELS if "num_experts" in MODELS[name]], default="35B-A3B"
    )
    arms = [f"{kind}, {plan}{end}" for end in ("", ", LoRA") for plan in ("EP", "FSDP2") for kind in KINDS]
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms)
    add_options(parser)
    args = parser.parse_args()
    machine, command = start(args.device)
    report = earlier_report(args.output, machine, parser)
    config, lengths = with_layers(MODELS[args.model], args.layers), sample_lengths("lognormal", args.tokens)
    run = {"command": command, "model": args.model, "layers": config["num_hidden_layers"], "tokens": args.tokens}
    run["arms"] = {}
    report["runs"].append(run)
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    save_checkpoint(config, shared[0], args.device)
    for arm in args.arms:
        run["arms"][arm] = measure(arm, shared[0], config, lengths, args.repeats, args.device)
        # A patched model holds itself in cycles.
        gc.collect()
        if dist.get_rank() == 0:
            print(f"{arm}: {run['arms'][arm]}", flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
