"""Training steps of a mixture on several GPUs, with its experts spread over them (EP) or not: ours and stock.

Each process has a row of its own, or with SP a part of one row. All arms have the same random weights, and their losses are
compared. No checkpoint is read: each process makes the modules one after another, and keeps its parts. Stock classes get
variable-length attention and a convolution for packed rows. What an arm has, by the words of its name:

- FSDP2: each process gathers the weights of a layer. EP: the same, but tokens travel to the experts. DDP: all have all weights.
- LoRA: adapters of rank 16 on the layers outside of experts and MLPs. "LoRA of experts": on all linear layers and experts.
- NF4: weights in 4 bit below the adapters. SP: all processes share one row.

A step is forward and backward, the mean of the adapters' gradients, and AdamW of `--optim` if given. Gradients are not clipped.

    torchrun --nproc_per_node 2 benchmarks/expert_parallel.py --layers 12 --output benchmarks/results/expert_parallel.json
    torchrun --nproc_per_node 4 benchmarks/expert_parallel.py --optim flash_adamw --checkpointing --profile --arms 'ours, EP'
    torchrun --nproc_per_node 4 benchmarks/expert_parallel.py --optim adamw_torch_fused --checkpointing \
        --arms 'ours, EP, LoRA' 'ours, DDP, LoRA of experts, NF4'
    torchrun --nproc_per_node 4 benchmarks/expert_parallel.py --checkpointing --offload --tokens 262144 --one-document \
        --warmup 1 --repeats 1 --arms 'ours, EP, LoRA, SP'

An arm that needs more memory than there is, or more than `--limit` seconds, ends all processes, and stays in the report as
an error. Run arms that may fail in calls of their own. The losses of earlier calls in `--output` are compared too.
"""

import argparse
import faulthandler
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain

import torch
import torch.distributed as dist
from arms import ARMS, make_base, with_lora
from data_parallel import add_options, make_row, start
from peft import LoraConfig, get_peft_model
from sequence_parallel import fresh, largest, make_batch
from shapes import LORA_LAYERS, LORA_MLP, MODELS, sample_lengths, with_layers
from step import earlier_report, timed
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig
from whole_steps import summary

from transformers_packed import registered
from transformers_packed.errors import input_error
from transformers_packed.models.optimizers import OPTIMIZERS
from transformers_packed.models.quantization import initialized_modules
from transformers_packed.models.registry import inner_model
from transformers_packed.models.shards import split_adapters
from transformers_packed.ops import dispatch, implementations_used
from transformers_packed.parallel import SequenceParallel
from transformers_packed.training.optimizers import arguments_for, class_and_kwargs


# On a CPU, which has no variable-length attention, stock classes isolate documents in attention alone.
KINDS = {"ours": "ours", "stock": "packed+varlen" if torch.cuda.is_available() else "packed"}
DEFAULT_ARMS = [f"{kind}, {plan}{end}" for end in ("", ", LoRA") for plan in ("EP", "FSDP2") for kind in KINDS]
EXPERTS, NF4 = "LoRA of experts", "NF4"
OTHER_ARMS = [f"ours, {plan}, {EXPERTS}" for plan in ("EP", "FSDP2", "DDP")]
OTHER_ARMS += [f"ours, DDP, {adapters}, {NF4}" for adapters in ("LoRA", EXPERTS)]
OTHER_ARMS += [f"ours, {plan}{adapters}, SP" for adapters in (", LoRA", "") for plan in ("EP", "FSDP2")]
SETTINGS = ("tokens", "one_document", "optim", "checkpointing", "offload", "warmup", "repeats")
# Runs whose losses can be compared.
SAME_ROWS = ("model", "layers", "gpus", "tokens", "one_document")
NOT_ENDED = "did not end: out of memory, or longer than --limit"


def split(config: dict, kind: str, experts: bool, device: str) -> torch.nn.Module:
    """A model of random weights, of which each process has a part. They are the same for any number of processes.

    Transformers 5.24 gives no weights to a model that it has split, so a whole one is made beside it, module by module.
    """

    def on_meta() -> torch.nn.Module:
        with registered() if ARMS[kind].model == "ours" else nullcontext(), torch.device("meta"):
            options = {"dtype": torch.bfloat16, "attn_implementation": ARMS[kind].attention}
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), **options)

    size = dist.get_world_size()
    whole, model = on_meta(), on_meta()
    plan, _, mesh = model.prepare_distribute_model(
        DistributedConfig(fsdp_size=size, ep_size=size if experts else None)
    )
    model = model.maybe_distribute_model(model, plan, mesh).to_empty(device=device)
    for name, module in initialized_modules(whole, device):
        # Not the module itself, because a mixture gives its router weights.
        for child, made in module.named_children():
            keep_part(made, model.get_submodule(f"{name}.{child}".removeprefix(".")))
    model.tie_weights()
    return model


def keep_part(made: torch.nn.Module, kept: torch.nn.Module) -> None:
    """Move the process's part of a module's own weights and buffers to the module that keeps it."""
    for name, whole in chain(made.named_parameters(recurse=False), made.named_buffers(recurse=False)):
        part, values = getattr(kept, name).detach(), whole.detach()
        if isinstance(part, DTensor):
            # Each process has all values.
            values = distribute_tensor(values, part.device_mesh, part.placements, src_data_rank=None)
        part.copy_(values)
    made.to_empty(device="meta", recurse=False)


def with_adapters(model: torch.nn.Module, experts: bool) -> torch.nn.Module:
    set_seed(0)
    if experts:
        model = with_lora(model, False)
    else:
        targets = [name for name in LORA_LAYERS if name not in LORA_MLP]
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    layer, mesh = next(split_adapters(model), (None, ""))
    if layer is not None:
        raise input_error("adapters on layers that fsdp_size alone shards", f"{layer}, split over {mesh}")
    return model


def make(words: set[str], config: dict, args) -> torch.nn.Module:
    """The model of an arm."""
    set_seed(0)
    if "DDP" in words:
        model = make_base(config, "nf4" if NF4 in words else "bfloat16", args.device)
    else:
        model = split(config, KINDS["ours" if "ours" in words else "stock"], "EP" in words, args.device)
    model.train()
    if adapters := {"LoRA", EXPERTS} & words:
        model = with_adapters(model, EXPERTS in adapters)
    if args.checkpointing:
        kept = {"keep_attention": "auto"} if args.offload and "ours" in words else {}
        inner_model(model).activation_checkpointing_enable({"use_reentrant": False} | kept, offload=args.offload)
    return DistributedDataParallel(model) if "DDP" in words else model


def make_optimizer(name: str, model: torch.nn.Module, device: str) -> torch.optim.Optimizer:
    """The optimizer that a Trainer makes, with a group of weights for each mesh as there."""
    settings = TrainingArguments(
        tempfile.gettempdir(), learning_rate=1e-5, use_cpu=device == "cpu", report_to="none", **arguments_for(name)
    )
    made = class_and_kwargs(name, settings) or Trainer.get_optimizer_cls_and_kwargs(settings, model)
    groups = {}
    for weight in model.parameters():
        if weight.requires_grad:
            groups.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    return made[0]([{"params": group} for group in groups.values()], **made[1])


def average_gradients(model: torch.nn.Module) -> None:
    """Average the gradients of adapters, which FSDP2 knows nothing of."""
    gradients = [x.grad for x in model.parameters() if x.grad is not None and not isinstance(x.grad, DTensor)]
    for work in [dist.all_reduce(x, async_op=True) for x in gradients]:
        work.wait()
    for gradient in gradients:
        gradient /= dist.get_world_size()


def stepper(words: set[str], config: dict, lengths: list[int], args) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A training step of an arm, and the list to which it adds the process's loss."""
    model, size = make(words, config, args), dist.get_world_size()
    lora = bool({"LoRA", EXPERTS} & words)
    optimizer, losses = make_optimizer(args.optim, model, args.device) if args.optim else None, []
    if "SP" in words:
        row = make_batch(lengths, config["vocab_size"], SequenceParallel(size), args.device)
        # The mean over the processes is the loss of the row.
        row["num_items_in_batch"] = (sum(lengths) - len(lengths)) / size
    else:
        row = make_row(dist.get_rank(), lengths, config["vocab_size"], args.device, stock="stock" in words)

    def step() -> None:
        model.zero_grad()
        with torch.autocast(args.device, torch.bfloat16, enabled=lora):
            loss = model(**(fresh(row) if "SP" in words else row)).loss
        loss.backward()
        losses.append(loss.detach())
        if "DDP" not in words:
            average_gradients(model)
        if optimizer is not None:
            optimizer.step()

    return step, losses


def measure(arm: str, config: dict, lengths: list[int], args) -> dict:
    """Time, memory and losses of an arm such as `"ours, EP, LoRA"`."""
    words, size, cuda = {*arm.split(", ")}, dist.get_world_size(), args.device == "cuda"
    dispatch._used.clear()
    began = time.perf_counter()
    step, losses = stepper(words, config, lengths, args)
    made = time.perf_counter() - began
    for _ in range(args.warmup):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    seconds = largest(timed(lambda: [step() for _ in range(args.repeats)], args.device) / args.repeats, args.device)
    entry = {"ms": round(1000 * seconds, 2)}
    tokens = sum(lengths) / (size if "SP" in words else 1)
    entry |= {"tokens_per_second_per_gpu": round(tokens / seconds), "made_seconds": round(made, 1)}
    if cuda:
        entry["peak_gib"] = round(largest(torch.cuda.max_memory_allocated() / 2**30, args.device), 2)
        entry["reserved_gib"] = round(largest(torch.cuda.max_memory_reserved() / 2**30, args.device), 2)
    if args.profile:
        with profile() if dist.get_rank() == 0 else nullcontext() as trace:
            timed(step, args.device)
        entry["profile"] = None if trace is None else summary(trace)
    means = torch.stack(losses).float()
    dist.all_reduce(means)
    means = [round(x, 6) for x in (means / size).tolist()]
    return entry | {"loss": means[0], "losses": means, "implementations": implementations_used()}


def differences(runs: list[dict]) -> dict[str, float]:
    """The largest relative difference of the first loss between arms that compute the same, by what they have in common."""
    losses = {}
    for arm, entry in (item for run in runs for item in run["arms"].items()):
        words = arm.split(", ")
        # Adapters outside of experts begin with zeros. Rounded weights compute something else.
        if "loss" in entry and NF4 not in words:
            losses.setdefault(", ".join(word for word in (EXPERTS, "SP") if word in words) or "rows", []).append(
                entry["loss"]
            )
    return {common: max(found) / min(found) - 1 for common, found in losses.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=[name for name in MODELS if "num_experts" in MODELS[name]], default="35B-A3B"
    )
    parser.add_argument("--arms", nargs="+", choices=DEFAULT_ARMS + OTHER_ARMS, default=DEFAULT_ARMS)
    parser.add_argument("--one-document", action="store_true", help="in a row, instead of documents of 480 on average")
    optimizers = [name for name, found in OPTIMIZERS.items() if not found.releases and not found.orthogonalizes]
    parser.add_argument("--optim", choices=optimizers, help="default: weights are not updated")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--offload", action="store_true", help="with --checkpointing, inputs of layers in host memory")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--profile", action="store_true", help="profile another step in the first process")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end all processes if an arm takes longer")
    add_options(parser)
    args = parser.parse_args()
    if args.offload and not args.checkpointing:
        parser.error("--offload needs --checkpointing")
    machine, command = start(args.device)
    report = earlier_report(args.output, machine, parser)
    # The first process writes the file below, while another one may still read it.
    dist.barrier()
    config = with_layers(MODELS[args.model], args.layers)
    lengths = [args.tokens] if args.one_document else sample_lengths("lognormal", args.tokens)
    run = {"command": command, "model": args.model, "layers": config["num_hidden_layers"]}
    run |= {"gpus": dist.get_world_size(), **{name: getattr(args, name) for name in SETTINGS}, "arms": {}}
    report["runs"].append(run)

    def note(arm: str, entry: dict) -> None:
        run["arms"][arm] = entry
        same = [x for x in report["runs"] if all(x.get(name) == run[name] for name in SAME_ROWS)]
        run["loss_differences"] = differences(same)
        if dist.get_rank() == 0 and args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    for arm in args.arms:
        note(arm, {"error": NOT_ENDED})
        if args.limit:
            faulthandler.dump_traceback_later(args.limit, exit=True)
        try:
            entry = measure(arm, config, lengths, args)
        except ValueError as error:
            # Each process refuses it.
            entry = {"error": str(error)}
        faulthandler.cancel_dump_traceback_later()
        note(arm, entry)
        if dist.get_rank() == 0:
            print(f"{arm}: {entry}", flush=True)
        # A patched model holds itself in cycles.
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print(f"relative differences of losses: {run['loss_differences']}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
