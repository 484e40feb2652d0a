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
without the adapters, or with a copy of them (`adapters`). TRL pads there, so `liger` and `padded` run padded batches:
`liger` has SDPA if there is no FlashAttention, and Liger's kernels in the layers. `ours+shared` computes a prompt once.

In a mixture of experts, adapters go on the linear layers of a block, on the shared expert and on the experts. Unsloth adds
the last two together. With adapters, `liger` keeps Transformers' experts: Liger's would run without the adapters.

The run checks itself. It notes the shapes that the model got in the warm-up. With `sft`, after the last step it replaces the
first document of a batch, and notes how much the loss at the start of the second one changes (`isolation`). With `dpo`, it
notes the mean log-probabilities of both answers (`logps`), which must agree among tools. The first loss is log 2, and
more with the loss of routers.

    python benchmarks/peers/train.py --checkpoint /dev/shm/0.8B --make 0.8B
    python benchmarks/peers/train.py --checkpoint /dev/shm/35B-A3B-12L --make 35B-A3B --layers 12
    python benchmarks/peers/train.py --checkpoint /dev/shm/0.8B --tool ours --lora --output benchmarks/results/peers.json
    unsloth/bin/python benchmarks/peers/train.py --checkpoint /dev/shm/0.8B --tool unsloth --lora --output ...
"""

import argparse
import importlib.util
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


TOOLS = {
    "sft": ("ours", "ours+float8", "liger", "unsloth", "padded"),
    "dpo": ("ours", "ours+shared", "liger", "unsloth", "padded"),
}
# Tokens and documents of a step: 34 samples, or 16 pairs with prompts of 512 tokens and answers of 300 on average.
SIZES = {"sft": (16384, 34), "dpo": (25984, 32)}
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "flash-linear-attention",
            "flash-qla", "tilelang", "causal-conv1d", "flash-attn", "xformers", "liger-kernel", "unsloth",
            "unsloth-zoo", "bitsandbytes")  # fmt: skip
# Targets of the second document whose loss shows a leak from the first one.
NEAR = 16
sys.path.insert(0, str(Path(__file__).parents[1]))


class TimeIsUp(Exception):
    pass


def make_checkpoint(name: str, layers: int | None, folder: Path) -> None:
    """Save random weights of a shape, and a tokenizer that no sample needs."""
    import torch
    from pairs import make_tokenizer
    from shapes import MODELS, with_layers
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    config = AutoConfig.for_model(**with_layers(MODELS[name], layers))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # The special words alone.
    make_tokenizer(3).save_pretrained(folder)


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


def load(args):
    """Return the model of the tool, its tokenizer, and the adapters that the trainer has to add, if any."""
    from shapes import LORA_EXPERTS, LORA_LAYERS

    if args.tool == "unsloth":
        import torch
        from unsloth import FastLanguageModel

        # Both calls switch checkpointing on by default, and the first one's choice holds for full fine-tuning.
        checkpointing = {"use_gradient_checkpointing": "unsloth" if args.checkpointing else False}
        model, tokenizer = FastLanguageModel.from_pretrained(
            str(args.checkpoint),
            max_seq_length=args.tokens,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            full_finetuning=not args.lora,
            **checkpointing,
        )
        if args.lora:
            own = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
            layers = [name for name in LORA_LAYERS if name in own]
            # With the names of the layers of a shared expert, it adds adapters to all experts.
            model = FastLanguageModel.get_peft_model(
                model, r=16, target_modules=layers, lora_alpha=32, lora_dropout=0, random_state=0, **checkpointing
            )
        return model, tokenizer, None
    # Hides FLA from the stock classes on a machine without a GPU, so it comes before Transformers' models.
    from arms import prepare  # isort: skip
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    attention = None
    if args.tool == "liger":
        if not (installed("flash_attn") and installed("causal_conv1d")):
            prepare(args.device)
        # Torch's needs the boundaries of packed rows.
        instead = "varlen" if args.task == "sft" else "sdpa"
        attention = "flash_attention_2" if installed("flash_attn") else instead
    model = AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.bfloat16, attn_implementation=attention, device_map=args.device
    )
    adapters = None
    if args.lora:
        set_seed(0)
        experts = list(LORA_EXPERTS) if is_mixture(model.config) else None
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=list(LORA_LAYERS), target_parameters=experts)
        if args.task == "sft":
            model, adapters = get_peft_model(model, adapters), None
    return model, AutoTokenizer.from_pretrained(args.checkpoint), adapters


def is_mixture(config) -> bool:
    return getattr(config, "num_experts", None) is not None


def liger_settings(args, config) -> dict:
    if not is_mixture(config):
        return {"use_liger_kernel": True}
    from liger_kernel.transformers.model import output_classes

    # Liger 0.8.5 imports this name, which it defines only for other releases of Transformers.
    vars(output_classes).setdefault("LigerQwen3_5MoeCausalLMOutputWithPast", None)
    return {"use_liger_kernel": True, "liger_kernel_config": {"swiglu": not args.lora}}


def settings_of(args, model) -> dict:
    """The arguments that the configurations of both trainers share."""
    settings = {
        "output_dir": args.scratch,
        # Unsloth's default is 2.
        "gradient_accumulation_steps": 1,
        "max_steps": args.warmup + args.steps,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_length": None,
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
        per_device_train_batch_size=args.documents,
        packing=False,
        # Unsloth chooses by itself; with this package, `configure_packing` does.
        **({"padding_free": True} if args.tool == "liger" else {}),
    )
    dataset = Dataset.from_dict({"input_ids": samples})
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=dataset, processing_class=tokenizer, callbacks=[callback]
    )
    if args.tool.startswith("ours"):
        from transformers_packed import configure_packing

        configure_packing(trainer, float8="float8" in args.tool)
    return trainer


def make_clock(args):
    """A callback that notes the end of each step without waiting for the GPU, and the losses."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.started = time.perf_counter()
            self.first, self.ends, self.losses, self.logps, self.shapes = None, [], {}, {}, []
            self.hook, self.graphs = None, None

        def on_train_begin(self, settings, state, control, model=None, **kwargs):
            # With pairs, this package gets padded batches and packs them before it looks up their embeddings.
            module = model.get_input_embeddings() if args.task == "dpo" else model
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


def memory_of_graphs(model) -> float | None:
    """The GiB that the CUDA graphs of a model reserve, or `None` without graphs."""
    import torch

    from transformers_packed.models.cuda_graphs import find_text_models, records_graphs

    if not any(records_graphs(text) for text in find_text_models(model)):
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return round((torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / 2**30, 2)


def isolation(trainer, documents: list[list[int]]) -> dict[str, float]:
    """How much the loss at the start of the second document changes with the first one, and in a repetition."""
    import torch

    trainer.model.train()
    if hasattr(trainer.model, "for_training"):
        # Unsloth leaves the model ready for generation.
        checkpointing = getattr(trainer.model, "_unsloth_gradient_checkpointing", False)
        trainer.model.for_training(use_gradient_checkpointing=checkpointing)
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


def kernels_of(args, trainer) -> dict:
    """What the tool itself says about its kernels."""
    found = {"attention": trainer.model.config._attn_implementation, "collator": type(trainer.data_collator).__name__}
    if args.tool == "unsloth":
        from unsloth.utils.hf_packed_attention import HF_PACKED_ATTENTION_STATS
        from unsloth.utils.packing import HYBRID_PACKING_STATS
        from unsloth_zoo.temporary_patches.gdn_causal_conv1d import GDN_CAUSAL_CONV1D_STATS

        # Unsloth raises an error in the first packed forward if a layer did not hand boundaries to its kernels.
        done = getattr(trainer.model, "_unsloth_varlen_handshake_done", False)
        return found | {
            "padding_free": getattr(trainer.args, "padding_free", None),
            "boundaries_reached_kernels": done,
            "hybrid_packing": dict(HYBRID_PACKING_STATS),
            "packed_attention": dict(HF_PACKED_ATTENTION_STATS),
            "convolution": dict(GDN_CAUSAL_CONV1D_STATS),
            # Its own copy of FLA is older than 0.6.
            "fla": getattr(sys.modules.get("fla"), "__version__", None),
        }
    if args.tool.startswith("ours"):
        from transformers_packed.ops import implementations_used

        return found | {"implementations": implementations_used()}
    return found


def measure(args, entry: dict) -> None:
    """Train, and add what was found to the entry as soon as it is known."""
    if args.tool == "unsloth":
        import unsloth  # noqa: F401 (before all that it patches)
    import torch
    from transformers import AutoConfig, set_seed

    entry["machine"] = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    set_seed(0)
    begin = time.perf_counter()
    config = AutoConfig.from_pretrained(args.checkpoint)
    entry |= {"experts": config.num_experts} if is_mixture(config) else {}
    clock = make_clock(args)
    if args.task == "dpo":
        import pairs

        model, _, adapters = load(args)
        trainer = pairs.make_trainer(args, model, settings_of(args, model), pairs.make_pairs(args), clock, adapters)
    else:
        samples = make_samples(args, config.vocab_size)
        model, tokenizer, _ = load(args)
        trainer = make_trainer(args, model, tokenizer, samples, clock)
    trained = [x for x in trainer.model.parameters() if x.requires_grad]
    entry["trained_parameters"] = sum(x.numel() for x in trained)
    entry["trained_dtypes"] = sorted({str(x.dtype).removeprefix("torch.") for x in trained})
    if args.lora and args.task == "dpo":
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
        if "stopped" not in entry and args.task == "sft":
            entry["isolation"] = isolation(trainer, samples[: args.documents])
    except Exception as error:
        # The times are good without the check.
        entry["check_failed"] = f"{type(error).__name__}: {error}"[:300]


def add_times(args, entry: dict, clock) -> None:
    import torch

    times = clock.milliseconds()
    entry |= {"losses": clock.losses, "shapes": [list(x) for x in sorted({tuple(x) for x in clock.shapes})]}
    entry["forwards_per_step"] = len(clock.shapes) / min(max(len(clock.ends), 1), args.warmup)
    if clock.logps:
        entry["logps"] = clock.logps
    if clock.graphs is not None:
        entry["graphs_GiB"] = clock.graphs
    # One row of exactly the step's tokens in each step, without the prompts that two answers share.
    row = args.tokens - (args.documents // 2 * args.prompt if args.tool == "ours+shared" else 0)
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


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def stop(*_):
    raise TimeIsUp


def write(output: Path, entry: dict) -> None:
    """Add the entry to the file, in place of an earlier one of the same cell and tool."""
    report = json.loads(output.read_text()) if output.exists() else {"runs": []}
    key = ("tool", "task", "model", "lora", "checkpointing", "tokens", "documents", "prompt", "caches", "machine")
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
    parser.add_argument("--task", choices=TOOLS, default="sft")
    parser.add_argument("--tool", choices=sorted({tool for tools in TOOLS.values() for tool in tools}), default="ours")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, as the tool does it")
    parser.add_argument("--tokens", type=int, help="of a step: 16384, with pairs 25984")
    parser.add_argument("--documents", type=int, help="of a step: 34, with pairs 32, which are 16 pairs")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt of a pair")
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
        make_checkpoint(args.make, args.layers, args.checkpoint)
        return 0
    tokens, documents = SIZES[args.task]
    args.tokens, args.documents = args.tokens or tokens, args.documents or documents
    if args.tool not in TOOLS[args.task]:
        parser.error(f"--task {args.task} expects one of {', '.join(TOOLS[args.task])}, got {args.tool}.")
    if args.device == "cpu" and args.tool not in ("ours", "ours+shared", "padded"):
        parser.error(f"{args.tool} needs a GPU: without its kernels, the stock class refuses packed rows.")
    if args.warmup < 1 or args.documents < 2 or args.tokens < 4 * args.documents:
        parser.error("A run needs a warm-up step, two documents, and at least four tokens for each.")
    if args.task == "dpo" and (args.documents % 2 or args.tokens < args.documents * (args.prompt + 4)):
        parser.error("Pairs need an even number of documents, and --prompt and at least four tokens for each.")
    entry = {"command": shlex.join(["python", "benchmarks/peers/train.py", *sys.argv[1:]]), "tool": args.tool}
    entry |= {key: getattr(args, key) for key in ("lora", "checkpointing", "tokens", "documents", "warmup", "steps")}
    entry |= {"task": "dpo", "prompt": args.prompt} if args.task == "dpo" else {}
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
