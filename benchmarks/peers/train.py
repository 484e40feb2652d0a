"""Whole training steps of a tool as its users run it: a trainer of TRL with this package, with Liger, and with Unsloth.

Every tool trains the same random checkpoint on the same samples in the same order, without padding: `--documents` samples
of lognormal lengths per step, which add up to `--tokens`. A step is loading, forward, backward, clipping, fused AdamW and
logging. Weights are in bfloat16 under autocast; adapters of rank 16 on all linear layers are in float32. The time of a
step is the median of `--steps` steps after `--warmup` others. The first step counts from `trainer.train()`, and the tool's
kernel caches are as `--caches` says. The allocator does not count the memory of CUDA graphs in `peak_GiB`, so `graphs_GiB`
states it.

Each tool is one process in an environment of its own, which `environments.sh` builds. The results of all of them go into
one JSON file. `liger` is Transformers' own class with Liger's kernels. On a machine without FlashAttention and
causal-conv1d, it gets torch's variable-length attention and flash-linear-attention's convolution in their place. `padded`
is the same class on TRL's padded batches, with SDPA and without Liger; it also runs on a CPU.

`--task sft` is `SFTTrainer`. `--task dpo` is `DPOTrainer` on the pairs of `pairs.py`. With LoRA, its reference is the model
without the adapters, or with a copy of them (`adapters`). `--task grpo` is the learning step of `GRPOTrainer` on the groups
of `groups.py`. TRL pads in both, so `liger` and `padded` run padded batches: `liger` has SDPA if there is no
FlashAttention, and Liger's kernels in the layers. `ours+shared` computes a prompt once.

With `--load-in-4bit`, the base is in NF4 with double quantization. `--make` then saves a checkpoint that is so already, with
the head and the gates of the delta rule in bfloat16 for every tool, and needs no memory for the rest in bfloat16. Experts
stay in bfloat16 there, because no stock class reads them in 4 bit, and each tool quantizes those. Of another checkpoint,
each tool quantizes the layers that it chooses. TRL casts the adapters to bfloat16.

In a mixture of experts, adapters go on the linear layers of a block, on the shared expert and on the experts. Unsloth adds
the last two together. With adapters, `liger` keeps Transformers' experts: Liger's would run without the adapters.

The run checks itself. It notes the shapes that the model got in the warm-up. With `sft`, after the last step it replaces the
first document of a batch, and notes how much the loss at the start of the second one changes (`isolation`). A single
document has no other one, so nothing is compared. With `dpo`, it notes the mean log-probabilities of both answers
(`logps`), which must agree among tools. The first loss is log 2, and more with the loss of routers. With `grpo`, the first
loss does not depend on the model. The norm of its gradient (`grad_norms`) does, and is the same for the same random
adapters. After the last step, the run notes the mean log-probability of each answer to the first prompt (`logps`),
replaces the first answer, and notes how much the log-probabilities of the others change (`isolation`).

A checkpoint of each shape, then a run of each tool in its environment. CELL is any of the lines below.

    python benchmarks/peers/train.py --checkpoint /dev/shm/4B --make 4B
    python benchmarks/peers/train.py --checkpoint /dev/shm/9B --make 9B
    python benchmarks/peers/train.py --checkpoint /dev/shm/27B --make 27B --load-in-4bit
    python benchmarks/peers/train.py --checkpoint /dev/shm/35B-A3B-12L --make 35B-A3B --layers 12
    python benchmarks/peers/train.py CELL --tool ours --output benchmarks/results/peers.json
    unsloth/bin/python benchmarks/peers/train.py CELL --tool unsloth --caches partly --output benchmarks/results/peers.json

    --checkpoint /dev/shm/4B [--lora]                           # tools: ours, ours+float8, liger, unsloth
    --checkpoint /dev/shm/9B --lora --checkpointing             # the same tools
    --checkpoint /dev/shm/27B --lora --load-in-4bit --checkpointing --tokens 8192 --documents 17
    --checkpoint /dev/shm/4B --lora --checkpointing --tokens 65536 --documents 1   # the same tools
    --checkpoint /dev/shm/4B --lora --checkpointing --task dpo  # ours, ours+shared, liger, unsloth
    --checkpoint /dev/shm/4B --lora --checkpointing --task grpo # the same tools
    --checkpoint /dev/shm/35B-A3B-12L --lora
"""

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

from tools import is_mixture, kernels_of, liger_settings, load, make_checkpoint, pack, train_again


TOOLS = {
    "sft": ("ours", "ours+float8", "liger", "unsloth", "padded"),
    "dpo": ("ours", "ours+shared", "liger", "unsloth", "padded"),
    "grpo": ("ours", "ours+shared", "liger", "unsloth", "padded"),
}
# Tokens and documents of a step: 34 samples, 16 pairs, or 4 groups. With prompts of 512 tokens, answers of pairs have 300
# on average, and those of groups 512.
SIZES = {"sft": (16384, 34), "dpo": (25984, 32), "grpo": (32768, 32)}
# To a prompt.
ANSWERS = {"sft": 1, "dpo": 2, "grpo": 8}
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "flash-linear-attention",
            "flash-qla", "tilelang", "causal-conv1d", "flash-attn", "xformers", "liger-kernel", "unsloth",
            "unsloth-zoo", "bitsandbytes")  # fmt: skip
# Targets of the second document whose loss shows a leak from the first one.
NEAR = 16
sys.path.insert(0, str(Path(__file__).parents[1]))


class TimeIsUp(Exception):
    pass


def make_samples(args, vocab_size: int) -> list[list[int]]:
    """Random tokens. The samples of each step add up to `--tokens`."""
    import torch
    from pairs import WORDS
    from shapes import split_tokens

    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(args.warmup + args.steps):
        lengths = split_tokens(generator, args.documents, args.tokens)
        # The tokens of few words, so that there is something to learn.
        samples += [torch.randint(3, min(vocab_size, WORDS), (n,), generator=generator).tolist() for n in lengths]
    return samples


def settings_of(args, model) -> dict:
    """The arguments that the configurations of all trainers share."""
    settings = {
        "output_dir": args.scratch,
        # Unsloth's default is 2.
        "gradient_accumulation_steps": 1,
        "max_steps": args.warmup + args.steps,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "optim": "adamw_torch_fused",
        "logging_steps": 5,
        "logging_first_step": True,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": args.checkpointing,
        "use_cpu": args.device == "cpu",
    }
    return settings | (liger_settings(args, model.config) if args.tool == "liger" else {})


def make_trainer(args, model, tokenizer, samples, callback):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        **settings_of(args, model),
        max_length=None,
        per_device_train_batch_size=args.documents,
        packing=False,
        # Unsloth chooses by itself; with this package, `pack` does.
        **({"padding_free": True} if args.tool == "liger" else {}),
    )
    dataset = Dataset.from_dict({"input_ids": samples})
    return SFTTrainer(
        model=model, args=settings, train_dataset=dataset, processing_class=tokenizer, callbacks=[callback]
    )


def make_clock(args):
    """A callback that notes the end of each step without waiting for the GPU, and the losses."""
    import torch
    from graph_memory import memory_of_graphs
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.started = time.perf_counter()
            self.first, self.ends, self.shapes = None, [], []
            self.losses, self.gradients, self.logps = {}, {}, {}
            self.hook, self.graphs = None, None

        def on_train_begin(self, settings, state, control, model=None, **kwargs):
            # With answers, this package gets padded batches and packs them before it looks up their embeddings.
            module = model if args.task == "sft" else model.get_input_embeddings()
            self.hook = module.register_forward_pre_hook(self.note, with_kwargs=True)

        def note(self, module, inputs, named):
            # The reference of a pair has no gradients.
            if torch.is_grad_enabled():
                ids = named["input_ids"] if "input_ids" in named else inputs[0]
                self.shapes.append(list(ids.shape))

        def on_step_end(self, settings, state, control, model=None, **kwargs):
            if args.device == "cuda":
                self.ends.append(torch.cuda.Event(enable_timing=True))
                self.ends[-1].record()
            else:
                self.ends.append(time.perf_counter())
            if self.first is None:
                self.wait()
                self.first = time.perf_counter()
            if len(self.ends) >= args.warmup and self.hook:
                self.hook.remove()
                self.hook = None
                self.graphs = memory_of_graphs(model) if args.tool.startswith("ours") else None

        def on_log(self, settings, state, control, logs=None, **kwargs):
            if "loss" in (logs or {}):
                self.losses[state.global_step] = round(float(logs["loss"]), 5)
            if "grad_norm" in (logs or {}):
                self.gradients[state.global_step] = round(float(logs["grad_norm"]), 5)
            if "logps/chosen" in (logs or {}):
                self.logps[state.global_step] = [round(float(logs[f"logps/{x}"]), 3) for x in ("chosen", "rejected")]

        def wait(self):
            if args.device == "cuda":
                torch.cuda.synchronize()

        def milliseconds(self) -> list[float]:
            """Of each step after the warm-up."""
            self.wait()
            ends = self.ends[args.warmup - 1 :]
            between = (lambda a, b: a.elapsed_time(b)) if args.device == "cuda" else (lambda a, b: 1000 * (b - a))
            return [round(between(a, b), 2) for a, b in zip(ends, ends[1:], strict=False)]

    return Clock()


def isolation(trainer, documents: list[list[int]]) -> dict[str, float]:
    """How much the loss at the start of the second document changes with the first one, and in a repetition."""
    import torch

    device = next(trainer.model.parameters()).device
    targets = min(NEAR, len(documents[1]) - 1)

    def loss(first: list[int]) -> float:
        batch = dict(trainer.data_collator([{"input_ids": x} for x in (first, *documents[1:])]))
        labels = torch.full_like(batch["labels"], -100)
        row, start = (0, len(first) + 1) if len(labels) == 1 else (1, 1)
        kept = slice(start, start + targets)
        labels[row, kept] = batch["labels"][row, kept]
        inputs = trainer._prepare_inputs(batch | {"labels": labels})
        with trainer.compute_loss_context_manager():
            # With gradients, as in training: a tool may take other kernels without.
            count = torch.tensor(targets, device=device)
            return float(trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count).detach())

    before, again, changed = (loss(first) for first in (documents[0], documents[0], documents[0][::-1]))
    return {"loss": before, "repeated": abs(again - before), "changed": abs(changed - before)}


def measure(args, entry: dict) -> None:
    """Train, and add what was found to the entry as soon as it is known."""
    if args.tool == "unsloth":
        import unsloth  # noqa: F401 (before all that it patches)
    import groups
    import pairs
    import torch
    from transformers import AutoConfig, set_seed

    entry["machine"] = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    set_seed(0)
    begin = time.perf_counter()
    config = AutoConfig.from_pretrained(args.checkpoint)
    entry |= {"experts": config.num_experts} if is_mixture(config) else {}
    clock = make_clock(args)
    model, tokenizer, adapters = load(args)
    if args.task == "sft":
        samples = make_samples(args, config.vocab_size)
        trainer = make_trainer(args, model, tokenizer, samples, clock)
    else:
        task, make = (pairs, pairs.make_pairs) if args.task == "dpo" else (groups, groups.make_groups)
        samples = make(args)
        trainer = task.make_trainer(args, model, settings_of(args, model), samples, clock, adapters)
    if args.tool.startswith("ours"):
        pack(args, trainer)
    trained = [x for x in trainer.model.parameters() if x.requires_grad]
    entry["trained_parameters"] = sum(x.numel() for x in trained)
    entry["trained_dtypes"] = sorted({str(x.dtype).removeprefix("torch.") for x in trained})
    if args.lora and args.task != "sft":
        # TRL adds a frozen copy, "ref", to a model that came with adapters, as Unsloth's does.
        entry["adapters"] = sorted(trainer.model.peft_config)
    clock.started = time.perf_counter()
    entry["load_seconds"] = round(clock.started - begin, 2)
    try:
        trainer.train()
    except TimeIsUp:
        entry["stopped"] = f"after {args.time_limit} seconds"
    finally:
        signal.alarm(0)
        add_times(args, entry, clock)
    try:
        entry["kernels"] = kernels_of(args, trainer)
        if args.checkpointing and args.tool.startswith("ours"):
            from transformers_packed.models.checkpointing import bytes_on_host

            entry["offload"] = bytes_on_host(trainer.model) > 0
        if "stopped" not in entry:
            train_again(trainer.model)
            entry |= check(args, trainer, samples)
    except Exception as error:
        # The times are good without the check.
        entry["check_failed"] = f"{type(error).__name__}: {error}"[:300]


def check(args, trainer, samples) -> dict:
    """What the checks of the task find after the last step."""
    if args.task == "grpo":
        from groups import check_answers

        return check_answers(args, trainer, samples)
    if args.task == "dpo" or args.documents == 1:
        return {}
    return {"isolation": isolation(trainer, samples[: args.documents])}


def add_times(args, entry: dict, clock) -> None:
    import torch

    times = clock.milliseconds()
    entry |= {
        "losses": clock.losses,
        "grad_norms": clock.gradients,
        "shapes": [list(x) for x in sorted({tuple(x) for x in clock.shapes})],
    }
    entry["forwards_per_step"] = len(clock.shapes) / min(max(len(clock.ends), 1), args.warmup)
    if clock.logps:
        entry["logps"] = clock.logps
    if clock.graphs is not None:
        entry["graphs_GiB"] = clock.graphs
    # One row of exactly the step's tokens in each step, without the prompts that answers share.
    prompts = args.documents // args.answers
    row = args.tokens - ((args.documents - prompts) * args.prompt if args.tool == "ours+shared" else 0)
    one = all(x == [1, row] for x in clock.shapes) and entry["forwards_per_step"] == 1
    entry["padding_free"] = bool(clock.shapes) and one
    if clock.first:
        entry["first_step_seconds"] = round(clock.first - clock.started, 2)
    if times:
        step = statistics.median(times)
        entry |= {"step_ms": round(step, 2), "tokens_per_second": round(1000 * args.tokens / step), "steps_ms": times}
    if args.device == "cuda":
        entry["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if any(True for _ in metadata.distributions(name=package)):
            found[package] = metadata.version(package)
    return found


def stop(*_):
    raise TimeIsUp


def write(output: Path, entry: dict) -> None:
    """Add the entry to the file, in place of an earlier one of the same cell and tool."""
    report = json.loads(output.read_text()) if output.exists() else {"runs": []}
    key = ("tool", "task", "model", "lora", "load_in_4bit", "checkpointing", "tokens", "documents", "prompt", "caches",
           "machine")  # fmt: skip
    same = [run for run in report["runs"] if all(run.get(name) == entry.get(name) for name in key)]
    report["runs"] = [run for run in report["runs"] if run not in same] + [entry]
    output.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument(
        "--make", metavar="MODEL", help="save random weights of this shape as the checkpoint, and stop"
    )
    parser.add_argument("--layers", type=int, help="of the shape that --make saves, instead of its own")
    parser.add_argument(
        "--load-in-4bit", action="store_true", help="QLoRA: the base in NF4. --make saves the checkpoint so"
    )
    parser.add_argument("--task", choices=TOOLS, default="sft")
    parser.add_argument("--tool", choices=sorted({tool for tools in TOOLS.values() for tool in tools}), default="ours")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, as the tool does it")
    parser.add_argument("--tokens", type=int, help="of a step: 16384, with pairs 25984, with groups 32768")
    parser.add_argument(
        "--documents", type=int, help="of a step: 34, with pairs 32, which are 16 pairs, with groups 32 answers"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt of a pair or group")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--caches",
        choices=("empty", "partly", "filled"),
        default="filled",
        help="kernel caches at the start: partly is what another cell of the tool left",
    )
    parser.add_argument("--time-limit", type=int, metavar="SECONDS", help="stop then, and write what was measured")
    parser.add_argument("--scratch", default="/tmp/peers", help="folder of the trainer's files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    if args.make:
        make_checkpoint(args.make, args.layers, args.load_in_4bit, args.checkpoint)
        return 0
    tokens, documents = SIZES[args.task]
    args.tokens, args.documents = args.tokens or tokens, args.documents or documents
    args.answers = ANSWERS[args.task]
    if args.tool not in TOOLS[args.task]:
        parser.error(f"--task {args.task} expects one of {', '.join(TOOLS[args.task])}, got {args.tool}.")
    if args.device == "cpu" and args.tool not in ("ours", "ours+shared", "padded"):
        parser.error(f"{args.tool} needs a GPU: without its kernels, the stock class refuses packed rows.")
    if args.warmup < 1 or args.documents < 1 or args.tokens < 4 * args.documents:
        parser.error("A run needs a warm-up step, a document, and at least four tokens for each.")
    if args.answers > 1 and (args.documents % args.answers or args.tokens < args.documents * (args.prompt + 4)):
        parser.error(
            f"--task {args.task} needs {args.answers} documents for each prompt, and --prompt and at least four tokens for each."
        )
    if args.load_in_4bit and not args.lora:
        parser.error("--load-in-4bit needs --lora: weights in 4 bit do not train.")
    entry = {"command": shlex.join(["python", "benchmarks/peers/train.py", *sys.argv[1:]]), "tool": args.tool}
    entry |= {key: getattr(args, key) for key in ("lora", "checkpointing", "tokens", "documents", "warmup", "steps")}
    entry |= {"task": args.task, "prompt": args.prompt} if args.answers > 1 else {}
    entry |= {"load_in_4bit": True} if args.load_in_4bit else {}
    entry |= {"caches": args.caches, "model": args.checkpoint.name, "versions": versions()}
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(args.time_limit or 0)
    try:
        measure(args, entry)
    except (TimeIsUp, Exception) as error:
        entry["error"] = f"{type(error).__name__}: {error}"[:300]
        raise
    finally:
        signal.alarm(0)
        print(json.dumps({key: value for key, value in entry.items() if key not in ("command", "versions")}))
        if args.output:
            write(args.output, entry)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", "/tmp/peers_unsloth")
    sys.exit(main())
