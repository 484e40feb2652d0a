"""Whole training steps of `PackedTrainer` on one GPU or on several: tokens per second of each GPU, and memory.

A step is a packed row on each GPU: loading, forward, backward, clipping, AdamW. Weights are in `--weights`, and compute in
bfloat16. In NF4 or float8, those of linear layers and experts are frozen, and `--lora` trains. `--optim` is one of
`models/optimizers.py`, whose dtype the weights have by default, or a name of `TrainingArguments`. How it is launched decides
between one GPU, DDP and FSDP2, as accelerate does for any Trainer:

    python benchmarks/whole_steps.py --model 0.8B --output benchmarks/results/whole_steps.json
    torchrun --nproc_per_node 2 benchmarks/whole_steps.py --model 0.8B --output benchmarks/results/whole_steps.json
    accelerate launch --config_file examples/fsdp2.yaml --num_processes 2 benchmarks/whole_steps.py --model 4B --profile
    python benchmarks/whole_steps.py --model 9B --checkpointing --optim flash_adamw_release --output optimizers.json
    python benchmarks/whole_steps.py --model 27B --weights bfloat16 --lora --checkpointing --offload --tokens 65536
    python benchmarks/whole_steps.py --model 4B --weights bfloat16 --lora --checkpointing --tokens 65536 --one-document --segment-tokens 16384
    python benchmarks/whole_steps.py --model 35B-A3B --weights fp8 --lora --linear --checkpointing --graphs --float8
    python benchmarks/whole_steps.py --model 35B-A3B --weights nvfp4 --lora --checkpointing --experts-in-host-memory

`--torch-compile` sets `torch_compile=True`, counts what is compiled up to the end of `--warmup` and in the steps after it, and
compares the gradients of a row with those of the model that is not compiled:

    python benchmarks/whole_steps.py --model 4B --weights bfloat16 --lora --torch-compile --steps 50 --output compiled.json

The time of a step is the mean of `--steps` steps after `--warmup` others. The step needs `peak_GiB`, and beside it the
`graphs_GiB` of CUDA graphs, which the allocator does not count. `--profile` adds a step under torch's profiler:
the time of kernels, how much of the communication no computation covers, and how often the host waited for the GPU or copied
something to it. With FSDP2, it also counts at how many addresses the weights of a layer lay in the steps: a CUDA graph would
read those at one.
"""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import DDPCommunicationHookType
from arms import make_base, with_lora
from graph_memory import memory_of_graphs
from shapes import MODELS, model_flops, sample_lengths, with_layers
from step import versions
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, set_seed

from transformers_packed import (
    GradientReleaseCallback,
    PackedTrainer,
    PackedTrainingArguments,
    keep_experts_in_host_memory,
    keep_layers_in_host_memory,
)
from transformers_packed.models.checkpointing import bytes_on_host
from transformers_packed.models.host_experts import bytes_in_host_memory
from transformers_packed.models.memory import on_host_of
from transformers_packed.models.optimizers import DEFAULT, OPTIMIZERS
from transformers_packed.models.versions import checkpointing_argument
from transformers_packed.training.optimizers import arguments_for, class_and_kwargs
from transformers_packed.training.run_ahead import RunAheadCallback


# Dense bfloat16 products of an H100 or H200, without sparsity.
PEAK_FLOPS = 989.4e12
# Frozen weights that `make_base` makes.
STORED = ("float8", "nf4", "fp8", "nvfp4", "awq")
# What the weights of a router are multiplied by for an expert that gets 8 times the mean: a quarter of the tokens, with 8 of
# 256 experts. Scores are normal, and the 8 highest ones are 1.86 standard deviations above the mean.
SKEW = 2.76
# The options that a result repeats.
SETTINGS = "model weights tokens one_document optim checkpointing every_n_layers offload keep_attention segment_tokens lora linear skewed experts_in_host_memory layers_in_host_memory float8 graphs torch_compile waits ddp_find_unused_parameters comm_hook".split()


def lengths_of(args, seed: int = 0) -> list[int]:
    """The lengths of the documents of a full row."""
    return [args.tokens] if args.one_document else sample_lengths("lognormal", args.tokens, seed)


def samples_of(config: dict, args, rows: int) -> list[dict]:
    """Random documents for so many full rows."""
    found = []
    for seed in range(rows):
        generator = torch.Generator().manual_seed(seed)
        for n in lengths_of(args, seed):
            ids = torch.randint(1, config["vocab_size"], (n,), generator=generator).tolist()
            found.append({"input_ids": ids, "labels": ids})
    return found


def skew(model: torch.nn.Module) -> None:
    """Let one expert of each layer get about 8 times as many tokens as the mean, as real routers may."""
    for module in model.modules():
        if hasattr(module, "top_k") and isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            with torch.no_grad():
                module.weight[0] *= SKEW


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock(TrainerCallback):
    """Times steps, and profiles the last one."""

    def __init__(self, args):
        self.first, self.last, self.profiled = args.warmup, args.warmup + args.steps, args.profile
        self.times, self.losses, self.tokens, self.trace, self.peak = {}, [], [], None, 0
        self.loads = []
        self.graphs = None
        self.addresses, self.frames = {}, {}

    def on_train_begin(self, *_, **__):
        # Without the rows that compiled kernels.
        self.tokens.clear()
        self._note(0)

    def counted(self, collator):
        """The same collator, with the tokens of each row kept."""

        def collate(features):
            batch = collator(features)
            self.tokens.append(batch["input_ids"].numel())
            return batch

        return collate

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.last and self.profiled:
            wait()
            self.trace = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.trace.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (1, self.first, self.last):
            self._note(state.global_step)
        if state.global_step == self.last and torch.cuda.is_available():
            self.peak, self.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            # Trainer ends graphs that it has chosen itself.
            self.graphs = memory_of_graphs(kwargs["model"])
        if self.trace is not None:
            wait()
            self.trace.__exit__(None, None, None)

    def _note(self, step: int) -> None:
        wait()
        self.times[step] = time.perf_counter()
        self.frames[step] = torch._dynamo.utils.counters["frames"]["total"]
        if step == self.first and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def note_addresses(self, layer: torch.nn.Module, inputs: tuple) -> None:
        """A hook of a layer, which FSDP2 has gathered then."""
        for name, weight in layer.named_parameters():
            self.addresses.setdefault(name, set()).add(weight.data_ptr())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))
        if "expert_load_max" in logs:
            self.loads.append(float(logs["expert_load_max"]))


def compiled_and_not(trainer: PackedTrainer, clock: Clock) -> dict:
    """What was compiled, and how the loss and the gradients of a row differ from those of the model itself.

    `gradient_noise` is how those of the model differ in two runs, because some kernels add in any order.
    """
    row = next(iter(trainer.get_train_dataloader()))
    trained = [x for x in trainer.model.parameters() if x.requires_grad]
    found = []
    for model in (trainer.model, trainer.model, trainer.model_wrapped):
        set_seed(0)
        model.zero_grad()
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, trainer._prepare_inputs(dict(row)))
        loss.backward()
        found.append((loss.item(), [x.grad.clone() for x in trained if x.grad is not None]))
    (expected, gradients), (_, again), (loss, others) = found

    def difference(others: list[torch.Tensor]) -> float:
        wrong = sum(float((x.float() - y.float()).square().sum()) for x, y in zip(others, gradients, strict=True))
        return (wrong / sum(float(x.float().square().sum()) for x in gradients)) ** 0.5

    return {
        "compiled_before": clock.frames[clock.first],
        "compiled_in_steps": clock.frames[clock.last] - clock.frames[clock.first],
        "loss_difference": abs(loss - expected),
        "gradient_difference": difference(others),
        "gradient_noise": difference(again),
    }


def covered(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join intervals that overlap."""
    joined = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in covered(intervals))


def longest_gaps(kernels: list[tuple[float, float, str]]) -> dict[str, float]:
    """The times in which the GPU had nothing to do, of the kernels before and after, the longest of them."""
    gaps: dict[str, float] = {}
    end, last = float("inf"), ""
    for start, stop, name in sorted(kernels):
        if start > end:
            pair = f"{last[:40]} | {name[:40]}"
            gaps[pair] = gaps.get(pair, 0) + start - end
        if not last or stop > end:
            end, last = stop, name
    return {pair: round(gap / 1000, 2) for pair, gap in sorted(gaps.items(), key=lambda x: -x[1])[:12]}


def summary(trace) -> dict:
    """Milliseconds of kernels, and counts of what makes the host wait."""
    computing, communicating, names, copies, times, kernels = [], [], {}, {}, {}, []
    waited = 0
    for event in trace.events():
        span = event.time_range.start, event.time_range.end
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if "Memcpy" in event.name:
                copies[event.name] = copies.get(event.name, 0) + 1
            # Annotations, such as `DistributedDataParallel.forward`, last from their first kernel to their last one.
            elif not event.is_user_annotation and not event.name.startswith("Memset"):
                (communicating if "nccl" in event.name.lower() else computing).append(span)
                times[event.name] = times.get(event.name, 0) + span[1] - span[0]
                kernels.append((*span, event.name))
        elif event.name.startswith(
            ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync", "aten::item")
        ):
            names[event.name] = names.get(event.name, 0) + 1
            waited += 0 if event.name == "aten::item" else span[1] - span[0]
    spans = computing + communicating
    both = length(spans)
    return {
        "longest_gaps_ms": longest_gaps(kernels),
        "idle_ms": round((max(x[1] for x in spans) - min(x[0] for x in spans) - both) / 1000, 2) if spans else 0,
        "host_waits_ms": round(waited / 1000, 2),
        "computation_ms": round(length(computing) / 1000, 2),
        "communication_ms": round(length(communicating) / 1000, 2),
        "uncovered_communication_ms": round((both - length(computing)) / 1000, 2),
        "kernels": len(computing),
        "longest_ms": {
            name[:160]: round(time / 1000, 2) for name, time in sorted(times.items(), key=lambda x: -x[1])[:40]
        },
        "waits": names,
        "copies": copies,
    }


def measure(args, config: dict) -> dict:
    set_seed(0)
    checkpointing, optimizer = checkpointing_argument(), OPTIMIZERS.get(args.optim)
    options = {checkpointing: args.checkpointing}
    given = {name: getattr(args, name) for name in ("every_n_layers", "offload", "keep_attention", "segment_tokens")}
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen:
        options[f"{checkpointing}_kwargs"] = {"use_reentrant": False} | chosen
    options |= {"optim": args.optim} if optimizer is None else arguments_for(args.optim)
    # FSDP2 would copy them to float32 for mixed precision.
    kept = optimizer is not None and args.weights == optimizer.weights == "bfloat16" and not args.lora
    settings = PackedTrainingArguments(
        args.scratch,
        packing=True,
        max_length=args.tokens,
        cuda_graphs=args.graphs,
        float8=args.float8,
        torch_compile=args.torch_compile,
        per_device_train_batch_size=1,
        max_steps=args.warmup + args.steps + args.profile,
        bf16=not kept,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=args.ddp_find_unused_parameters,
        **options,
    )
    on_host = on_host_of(args.experts_in_host_memory, args.layers_in_host_memory)
    if args.weights in STORED or on_host:
        model = make_base(config, args.weights, settings.device, on_host)
    else:
        with settings.device:
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), dtype=getattr(torch, args.weights)
            )
    if args.skewed:
        skew(model)
    if args.lora:
        model = with_lora(model, False, not args.linear)
    if args.experts_in_host_memory:
        keep_experts_in_host_memory(model)
    if args.layers_in_host_memory:
        # PEFT puts adapters beside the weights.
        keep_layers_in_host_memory(model).to(settings.device)
    # Weights in fewer bits were others before, whose memory would count as reserved.
    torch.cuda.empty_cache()
    clock = Clock(args)
    # Many more than are read, so that the extra rows of a plan take little from each row.
    rows = max(400 * 16384 // args.tokens, 2 * settings.world_size * settings.max_steps)
    given = None if optimizer is None else class_and_kwargs(args.optim, settings)
    trainer = PackedTrainer(
        model,
        settings,
        train_dataset=samples_of(config, args, rows),
        callbacks=[clock],
        optimizer_cls_and_kwargs=given,
    )
    if optimizer is not None and optimizer.releases:
        trainer.add_callback(GradientReleaseCallback(trainer))
    trainer.data_collator = clock.counted(trainer.data_collator)
    if args.comm_hook:
        trainer.accelerator.ddp_handler.comm_hook = DDPCommunicationHookType(args.comm_hook)
    if args.waits:
        trainer.remove_callback(RunAheadCallback)
        del trainer.training_step
        trainer.accelerator.dataloader_config.non_blocking = False
    if args.profile and trainer.is_fsdp_enabled:
        model.get_decoder().layers[-1].register_forward_pre_hook(clock.note_addresses)
    trainer.train()
    seconds = (clock.times[clock.last] - clock.times[clock.first]) / args.steps
    lengths = lengths_of(args)
    # Rows are not quite full.
    tokens = sum(clock.tokens[clock.first : clock.last]) / args.steps
    flops = model_flops(config, lengths, frozen=args.lora) * tokens / args.tokens
    kind = "fsdp2" if trainer.is_fsdp_enabled else "ddp" if settings.world_size > 1 else "one"
    found = {"kind": kind, "gpus": settings.world_size, "step_ms": round(1000 * seconds, 2)}
    if kind == "ddp":
        # What Trainer or `configure_packing` chose.
        found["ddp_find_unused_parameters"] = trainer.accelerator.ddp_handler.find_unused_parameters
    found |= {
        "tokens_per_row": round(tokens),
        "tokens_per_second_per_gpu": round(tokens / seconds),
        "model_flops_utilization": round(flops / seconds / PEAK_FLOPS, 4),
        "peak_GiB": round(clock.peak / 2**30, 2),
        # Beside the peak, which does not count it.
        **({"graphs_GiB": clock.graphs} if clock.graphs is not None else {}),
        **({f"{on_host}_on_host_GiB": round(bytes_in_host_memory(model) / 2**30, 2)} if on_host else {}),
        **({"reserved_GiB": round(clock.reserved / 2**30, 2)} if clock.peak else {}),
        "first_step_seconds": round(clock.times[1] - clock.times[0], 2),
        "losses": clock.losses,
        **({"expert_load_max": max(clock.loads)} if clock.loads else {}),
    }
    if args.checkpointing:
        host = bytes_on_host(model)
        found |= {"offload": host > 0, "host_GiB": round(host / 2**30, 2)}
    if args.torch_compile:
        found |= compiled_and_not(trainer, clock)
    if clock.trace is not None:
        found["profile"] = {"tokens": clock.tokens[clock.last], **summary(clock.trace)}
        if clock.addresses:
            found["profile"]["weight_addresses"] = [len(x) for x in clock.addresses.values()]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.8B")
    parser.add_argument("--layers", type=int, help="layers of the model, instead of its own number")
    weights = "float8: torchao's, nf4: bitsandbytes', the others as in released checkpoints. Default: those of --optim, or float32"
    parser.add_argument("--weights", choices=("float32", "bfloat16", *STORED), help=weights)
    parser.add_argument("--tokens", type=int, default=16384, help="of each GPU's row")
    optim = f"{', '.join(OPTIMIZERS)}, or another one of TrainingArguments"
    parser.add_argument(
        "--one-document", action="store_true", help="in each row, instead of documents of 480 on average"
    )
    parser.add_argument("--optim", default=DEFAULT, metavar="NAME", help=optim)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--every-n-layers", type=int, metavar="N", help="checkpoint every n-th layer (default: all)")
    offload = "keep the inputs of checkpointed layers in host memory (default: PackedTrainer decides)"
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, help=offload)
    kept = "do not recompute attention (default: PackedTrainer decides)"
    parser.add_argument("--keep-attention", action=argparse.BooleanOptionalAction, help=kept)
    parser.add_argument("--segment-tokens", type=int, metavar="N", help="let layers compute segments of N tokens")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers and experts")
    parser.add_argument("--linear", action="store_true", help="with --lora, none on experts")
    skewed = "let one expert of each layer get about 8 times as many tokens as the mean"
    parser.add_argument("--skewed", action="store_true", help=skewed)
    on_host = "with --lora, keep the experts in host memory, in --weights bfloat16 or fewer bits but those of torchao"
    parser.add_argument("--experts-in-host-memory", action="store_true", help=on_host)
    parser.add_argument("--layers-in-host-memory", action="store_true", help="the same for whole layers")
    in_float8 = "products in FP8 of large linear layers, and of the experts in --weights fp8"
    parser.add_argument("--float8", action="store_true", help=in_float8)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, help="default: PackedTrainer decides")
    parser.add_argument("--torch-compile", action="store_true", help="torch_compile=True, and what it compiled")
    parser.add_argument("--waits", action="store_true", help="let Trainer wait for the GPU in each step")
    parser.add_argument(
        "--ddp-find-unused-parameters", action=argparse.BooleanOptionalAction, help="as in TrainingArguments"
    )
    parser.add_argument("--comm-hook", choices=("bf16",), help="dtype in which DDP sums gradients")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--launched", default="python", help="the launcher, for the command in the report")
    parser.add_argument("--scratch", default="/tmp/whole_steps", help="folder of the trainer's files")
    parser.add_argument("--output", type=Path, help="add the result to this JSON file")
    args = parser.parse_args()
    of_checkpoints = args.every_n_layers, args.offload, args.keep_attention, args.segment_tokens
    if not args.checkpointing and any(value is not None for value in of_checkpoints):
        parser.error("--every-n-layers, --offload, --keep-attention and --segment-tokens need --checkpointing")
    on_host = on_host_of(args.experts_in_host_memory, args.layers_in_host_memory)
    if on_host and (not args.lora or args.weights not in ("bfloat16", *STORED[1:])):
        parser.error(f"--{on_host}-in-host-memory needs --lora and --weights of bfloat16, {', '.join(STORED[1:])}")
    args.weights = args.weights or (OPTIMIZERS[args.optim].weights if args.optim in OPTIMIZERS else "float32")
    first = int(os.environ.get("RANK", 0)) == 0
    config = with_layers(MODELS[args.model], args.layers)
    entry = {key: getattr(args, key) for key in SETTINGS}
    entry["layers"] = config["num_hidden_layers"]
    words = [word for word in sys.argv if word not in ("--launched", args.launched)]
    # The image of a container sets the version.
    several = [
        name for name in os.environ if name.startswith("NCCL_") and name != "NCCL_VERSION" and "RANK" in os.environ
    ]
    entry["command"] = " ".join(
        [*(f"{name}={os.environ[name]}" for name in several), args.launched, shlex.join(words)]
    )
    try:
        entry |= measure(args, config)
    except torch.OutOfMemoryError as error:
        entry["error"] = f"out of memory: {str(error).splitlines()[0][:200]}"
    entry |= {"machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "versions": versions()}
    if first:
        print(
            json.dumps({key: value for key, value in entry.items() if key not in ("versions", "command")}), flush=True
        )
        if args.output:
            report = json.loads(args.output.read_text()) if args.output.exists() else {"runs": []}
            report["runs"].append(entry)
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
