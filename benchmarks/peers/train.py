"""Whole training steps of a tool as its users run it: TRL's `SFTTrainer` with this package, with Liger, and with Unsloth.

Every tool trains the same random checkpoint on the same samples in the same order, without padding: `--documents` samples
of lognormal lengths per step, which add up to `--tokens`. A step is loading, forward, backward, clipping, fused AdamW and
logging. Weights are in bfloat16 under autocast; adapters of rank 16 on all linear layers are in float32. The time of a
step is the mean of `--steps` steps after `--warmup` others. The first step counts from `trainer.train()`, and the tool's
kernel caches are as `--caches` says.

Each tool is one process in an environment of its own, which `environments.sh` builds. The results of all of them go into
one JSON file. `liger` is Transformers' own class with all of Liger's kernels. On a machine without FlashAttention and
causal-conv1d, it gets torch's variable-length attention and flash-linear-attention's convolution in their place.

    python benchmarks/peers/train.py --checkpoint /dev/shm/0.8B --make 0.8B
    python benchmarks/peers/train.py --checkpoint /dev/shm/0.8B --tool ours --lora --output benchmarks/results/peers.json
    PYTHONPATH=unsloth's python benchmarks/peers/train.py --checkpoint /dev/shm/0.8B --tool unsloth --lora --output ...
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path


TOOLS = ("ours", "ours+float8", "ours+graphs", "liger", "unsloth")
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "flash-linear-attention", "flash-qla",
            "tilelang", "causal-conv1d", "flash-attn", "liger-kernel", "unsloth", "unsloth-zoo")  # fmt: skip
sys.path.insert(0, str(Path(__file__).parents[1]))


def make_checkpoint(name: str, folder: Path) -> None:
    """Save random weights of a shape, and a tokenizer that no sample needs."""
    import torch
    from shapes import MODELS
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def make_samples(args, vocab_size: int) -> list[list[int]]:
    """Random tokens. The samples of each step add up to `--tokens`."""
    import torch

    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(args.warmup + args.steps):
        shares = torch.randn(args.documents, generator=generator).exp()
        lengths = 2 + (shares / shares.sum() * (args.tokens - 2 * args.documents)).long()
        lengths[0] += args.tokens - lengths.sum()
        # The tokens of few words, so that there is something to learn.
        samples += [torch.randint(2, min(vocab_size, 2000), (n,), generator=generator).tolist() for n in lengths]
    return samples


def load(args):
    """Return the model of the tool, with adapters if asked for."""
    if args.tool == "unsloth":
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            str(args.checkpoint), args.tokens, load_in_4bit=False, full_finetuning=not args.lora
        )
        if args.lora:
            from shapes import LORA_LAYERS

            own = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
            model = FastLanguageModel.get_peft_model(
                model, 16, [x for x in LORA_LAYERS if x in own], 32, use_gradient_checkpointing=False
            )
        return model
    import torch
    from arms import prepare
    from peft import LoraConfig, get_peft_model
    from shapes import LORA_LAYERS
    from transformers import AutoModelForCausalLM

    if args.tool == "liger":
        if torch.cuda.is_available() and not (_installed("flash_attn") and _installed("causal_conv1d")):
            prepare("cuda")
        attention = "flash_attention_2" if _installed("flash_attn") else "varlen"
    else:
        attention = None
    model = AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.bfloat16, attn_implementation=attention, device_map=args.device
    )
    if args.lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=list(LORA_LAYERS)))
    return model


def make_trainer(args, model, samples, callback):
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        args.scratch,
        per_device_train_batch_size=args.documents,
        max_steps=args.warmup + args.steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_length=None,
        packing=False,
        bf16=True,
        optim="adamw_torch_fused",
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        use_cpu=args.device == "cpu",
        # Unsloth chooses by itself; with this package, `configure_packing` does.
        **({"padding_free": True, "use_liger_kernel": True} if args.tool == "liger" else {}),
    )
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=Dataset.from_dict({"input_ids": samples}),
        processing_class=AutoTokenizer.from_pretrained(args.checkpoint),
        callbacks=[callback],
    )
    trainer._get_train_sampler = lambda *_, **__: SequentialSampler(trainer.train_dataset)
    if args.tool.startswith("ours"):
        from transformers_packed import configure_packing, use_cuda_graphs

        configure_packing(trainer, float8="float8" in args.tool)
        if "graphs" in args.tool:
            use_cuda_graphs(trainer.model, args.tokens)
    return trainer


def measure(args) -> dict:
    if args.tool == "unsloth":
        import unsloth  # noqa: F401 (before all that it patches)
    import torch
    from transformers import AutoConfig, TrainerCallback, set_seed

    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    class Clock(TrainerCallback):
        times, losses = {}, []

        def on_step_end(self, settings, state, control, **kwargs):
            if state.global_step in (1, args.warmup, args.warmup + args.steps):
                wait()
                self.times[state.global_step] = time.perf_counter()

        def on_log(self, settings, state, control, logs=None, **kwargs):
            if "loss" in logs:
                self.losses.append(float(logs["loss"]))

    set_seed(0)
    clock = Clock()
    samples = make_samples(args, AutoConfig.from_pretrained(args.checkpoint).vocab_size)
    start = time.perf_counter()
    trainer = make_trainer(args, load(args), samples, clock)
    loaded = time.perf_counter()
    trainer.train()
    seconds = (clock.times[args.warmup + args.steps] - clock.times[args.warmup]) / args.steps
    found = {
        "step_ms": round(1000 * seconds, 2),
        "tokens_per_second": round(args.tokens / seconds),
        "first_step_seconds": round(clock.times[1] - loaded, 2),
        "load_seconds": round(loaded - start, 2),
        "losses": clock.losses,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    }
    if args.device == "cuda":
        found["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if any(True for _ in metadata.distributions(name=package)):
            found[package] = metadata.version(package)
    return found


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument(
        "--make", metavar="MODEL", help="save random weights of this shape as the checkpoint, and stop"
    )
    parser.add_argument("--tool", choices=TOOLS, default="ours")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--documents", type=int, default=34, help="of a step")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--caches", choices=("empty", "filled"), default="filled", help="kernel caches at the start")
    parser.add_argument("--scratch", default="/tmp/peers", help="folder of the trainer's files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.make:
        make_checkpoint(args.make, args.checkpoint)
        return 0
    entry = {"command": shlex.join(["python", "benchmarks/peers/train.py", *sys.argv[1:]]), "tool": args.tool}
    entry |= {key: getattr(args, key) for key in ("lora", "tokens", "documents", "warmup", "steps", "caches")}
    entry |= {"model": args.checkpoint.name, "versions": versions()}
    try:
        entry |= measure(args)
    except Exception as error:
        entry["error"] = f"{type(error).__name__}: {error}"[:300]
        raise
    finally:
        print(json.dumps({key: value for key, value in entry.items() if key not in ("command", "versions")}))
        if args.output:
            report = json.loads(args.output.read_text()) if args.output.exists() else {"runs": []}
            report["runs"].append(entry)
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    sys.exit(main())
