"""Steps of preference and reinforcement learning with TRL: the stock model on padded batches against this package.

`dpo` is a whole step of `DPOTrainer` without its data loader: the reference model (the adapter turned off), forward,
backward and optimizer, LoRA of rank 16 on all linear layers, gradient checkpointing. Prompts have 512 tokens, the answers
of `--pairs` pairs are lognormal with mean 300 and sigma 0.8, from 8 to 2,048 tokens.

`reward` is the same of `RewardTrainer` and a classifier with one label, whose answers follow their prompt.

`grpo` is the learning step of groups of 8 answers of 512 tokens on a prompt of 1,024: the log-probabilities through TRL's
own head, a clipped policy gradient, backward and optimizer. No batch of it has padding.

`distillation` is the learning step of TRL's `DistillationTrainer` after the student has answered: student and teacher on
`--prompts` prompts of 512 tokens with answers like those of `dpo`, up to 1,024 tokens, the reverse divergence, backward and
optimizer.

Arms: `trl` is the stock class, with flash-linear-attention and the convolution of arms.py; `ours` is the same trainer or
model after `configure_packing` or `patch_model`, and `ours+shared` shares prompts. `rows` is distillation in supervised
fine-tuning, of the same samples in one packed row, with the same divergence.

    python benchmarks/preference.py --task dpo --models 4B --output benchmarks/results/preference.json
    python benchmarks/preference.py --task reward --models 4B --pairs 32 --output benchmarks/results/reward.json
    python benchmarks/preference.py --task grpo --models 0.8B --groups 4 --output benchmarks/results/preference.json
    python benchmarks/preference.py --task grpo --models 4B --groups 1 --lora --output benchmarks/results/preference.json
    python benchmarks/preference.py --task distillation --models 4B --teacher 9B --lora --checkpointing \
        --output benchmarks/results/distillation.json
"""

import argparse
import gc
import json
import math
import random
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from arms import make_model, prepare
from shapes import GROUPS, LORA_LAYERS, MODELS
from step import earlier_report, machine_name, profile, seconds_of_steps
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast, set_seed

from transformers_packed import (
    DataCollatorWithFlattening,
    configure_packing,
    keep_layers_in_host_memory,
    patch_model,
)
from transformers_packed.models.losses import DivergenceLoss
from transformers_packed.ops import implementations_used


ARMS = ("trl", "ours", "ours+shared")
ALL_ARMS = (*ARMS, "rows")
_WARM_UP_STEPS = 2


def make_pairs(args, vocab_size: int) -> list[dict]:
    draw = random.Random(0)
    mean, sigma = args.answer or 300, 0.8

    def tokens(n):
        return [draw.randrange(1, vocab_size) for _ in range(n)]

    def answer():
        length = draw.lognormvariate(torch.tensor(mean).log().item() - sigma**2 / 2, sigma)
        return tokens(min(max(round(length), 8), 2048))

    return [
        {"prompt_ids": tokens(args.prompt or 512), "chosen_ids": answer(), "rejected_ids": answer()}
        for _ in range(args.pairs)
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def lora_config():
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=list(LORA_LAYERS))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)


def options_of(device: str) -> dict:
    return {"bf16": device == "cuda", "use_cpu": device != "cuda", "report_to": "none"}


def whole_step(trainer, batch: dict):
    """Return a function that runs a step of a trainer on a batch, and the numbers of real and padded tokens."""
    batch = {name: x.to(trainer.args.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    # `train` would do both.
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.accelerator.prepare_model(trainer.model)
    optimizer = optimizer_of(model)
    model.train()

    def run():
        loss = trainer.training_step(model, dict(batch), None)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run, int(batch["attention_mask"].sum()), batch["input_ids"].numel()


def dpo_step(arm: str, config: dict, args):
    """Return a function that runs a step and returns the loss, and the numbers of real and padded tokens."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    # TRL tokenizes the dataset of a trainer when it is built. The batch comes from TRL's collator.
    texts = Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "a"}] * 2)
    options = options_of(args.device)
    trainer = DPOTrainer(
        make_model(config, "padded", args.device),
        args=DPOConfig(tempfile.mkdtemp(), gradient_checkpointing=True, max_length=None, **options),
        train_dataset=texts,
        processing_class=make_tokenizer(),
        peft_config=lora_config(),
    )
    if arm != "trl":
        configure_packing(trainer, "padding_free", share_prompts=arm == "ours+shared")
    return whole_step(trainer, trainer.data_collator(make_pairs(args, config["vocab_size"])))


def reward_step(arm: str, config: dict, args):
    """Return a function that runs a step and returns the loss, and the numbers of real and padded tokens."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import RewardConfig, RewardTrainer

    set_seed(0)
    with torch.device(args.device):
        text_config = AutoConfig.for_model(**config, num_labels=1)
        options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        model = AutoModelForSequenceClassification.from_config(text_config, **options)
    texts = Dataset.from_list([{"chosen": "a", "rejected": "a"}] * 2)
    options = options_of(args.device)
    trainer = RewardTrainer(
        model,
        args=RewardConfig(tempfile.mkdtemp(), gradient_checkpointing=True, max_length=None, **options),
        train_dataset=texts,
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules=list(LORA_LAYERS)),
    )
    if arm != "trl":
        configure_packing(trainer, "padding_free", share_prompts=arm == "ours+shared")
    pairs = make_pairs(args, config["vocab_size"])
    names = "chosen_ids", "rejected_ids"
    batch = trainer.data_collator([{name: pair["prompt_ids"] + pair[name] for name in names} for pair in pairs])
    return whole_step(trainer, batch)


def grpo_step(arm: str, config: dict, args):
    """Return a function that runs a step and returns the loss, and the numbers of real and padded tokens."""
    from contextlib import nullcontext

    from peft import get_peft_model
    from trl.trainer.utils import add_fused_lm_head

    model = make_model(config, "padded", args.device)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if arm != "trl":
        patch_model(model).share_prompts = arm == "ours+shared"
    autocast = nullcontext
    if args.lora:
        model = get_peft_model(model, lora_config())
        autocast = lambda: torch.autocast(args.device, torch.bfloat16)  # noqa: E731
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    generator = torch.Generator().manual_seed(0)
    prompt, answer, vocab = args.prompt or 1024, args.answer or 512, config["vocab_size"]
    rows = []
    for _ in range(args.groups):
        first = torch.randint(1, vocab, (1, prompt), generator=generator)
        rows.append(torch.cat([first.expand(8, -1), torch.randint(1, vocab, (8, answer), generator=generator)], dim=1))
    ids = torch.cat(rows).to(args.device)
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, :prompt] = -100
    advantages = torch.randn(len(ids), 1, generator=generator).to(args.device)
    optimizer = optimizer_of(model)
    model.train()

    def run():
        with autocast():
            logps = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -answer:]
        ratio = (logps - logps.detach()).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return logps.detach().mean()

    return run, ids.numel(), ids.numel()


def distillation_step(arm: str, config: dict, args):
    """Return a function that runs a step and returns the loss, and the numbers of real and padded tokens."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    kind = "ours" if arm == "rows" else "padded"
    models = [make_model(x, kind, args.device) for x in (config, MODELS[args.teacher])]
    if args.teacher_in_host_memory and arm != "trl":
        teacher = patch_model(models[1].bfloat16().cpu()).requires_grad_(False)
        models[1] = keep_layers_in_host_memory(teacher).to(args.device)
    draw, vocab, prompt = random.Random(0), config["vocab_size"], args.prompt or 512
    mean, sigma = args.answer or 300, 0.8
    lengths = [round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)) for _ in range(args.prompts)]
    lengths = torch.tensor([min(max(length, 8), 1024) for length in lengths], device=args.device)
    mask = (torch.arange(int(lengths.max()), device=args.device) < lengths[:, None]).long()
    generator = torch.Generator(args.device).manual_seed(0)
    ids = torch.randint(1, vocab, (args.prompts, prompt + mask.shape[1]), generator=generator, device=args.device)
    if arm == "rows":
        return row_step(
            models, [row[: prompt + n].tolist() for row, n in zip(ids, lengths, strict=True)], prompt, args
        )
    options = options_of(args.device)
    trainer = DistillationTrainer(
        models[0],
        models[1].bfloat16(),
        args=DistillationConfig(tempfile.mkdtemp(), gradient_checkpointing=args.checkpointing, **options),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 16),
        processing_class=make_tokenizer(),
        peft_config=lora_config() if args.lora else None,
    )
    if arm != "trl":
        configure_packing(trainer, "padding_free", share_prompts=arm == "ours+shared")
    batch = {"prompt_ids": ids[:, :prompt], "prompt_mask": torch.ones_like(ids[:, :prompt])}
    batch |= {"completion_ids": ids[:, prompt:] * mask, "completion_mask": mask}
    batch["num_items_in_batch"] = mask.sum()
    if args.checkpointing:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    model = trainer.accelerator.prepare_model(trainer.model)
    optimizer = optimizer_of(model)
    model.train()

    def run():
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, dict(batch))
        trainer.accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run, int(mask.sum()) + args.prompts * prompt, ids.numel()


def row_step(models: list, samples: list[list[int]], prompt: int, args):
    """The step on one packed row of the samples, as a Trainer with a `teacher` runs it."""
    model, teacher = models
    model.losses = (DivergenceLoss(teacher.eval().requires_grad_(False), beta=1.0),)
    rows = [{"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]} for ids in samples]
    batch = DataCollatorWithFlattening(model=model, return_boundaries=True)(rows)
    batch = {name: x.to(args.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = optimizer_of(model)

    def run():
        with torch.autocast(args.device, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run, sum(map(len, samples)), sum(map(len, samples))


STEPS = {"dpo": dpo_step, "reward": reward_step, "grpo": grpo_step, "distillation": distillation_step}


def run_arm(arm: str, config: dict, args) -> dict:
    start = time.perf_counter()
    run, real, padded = STEPS[args.task](arm, config, args)
    first = float(run())
    if args.device == "cuda":
        torch.cuda.synchronize()
    entry = {"tokens": real, "padded_tokens": padded, "first": first}
    entry["until_first_step_s"] = round(time.perf_counter() - start, 1)
    for _ in range(_WARM_UP_STEPS - 1):
        run()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    entry["seconds"] = [round(x, 5) for x in seconds_of_steps(SimpleNamespace(run=run), args.repeats, args.device)]
    entry["median_ms"] = round(1000 * statistics.median(entry["seconds"]), 2)
    if args.device == "cuda":
        entry["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if args.profile:
        entry["profile_ms"] = profile(SimpleNamespace(run=run))
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=STEPS, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.8B"])
    parser.add_argument("--arms", nargs="+", choices=ALL_ARMS, default=list(ARMS))
    parser.add_argument("--pairs", type=int, default=16, help="pairs of a step of DPO or rewards")
    parser.add_argument("--groups", type=int, default=4, help="groups of a GRPO step")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step of distillation")
    parser.add_argument("--teacher", choices=MODELS, default="9B", help="teacher of the distillation")
    host = "keep the large weights of the teacher in host memory, except in the arm of TRL"
    parser.add_argument("--teacher-in-host-memory", action="store_true", help=host)
    parser.add_argument("--prompt", type=int, help="tokens of a prompt, instead of 512 or 1,024")
    parser.add_argument("--answer", type=int, help="mean tokens of an answer, instead of 300 or 512")
    parser.add_argument("--lora", action="store_true", help="LoRA in the other steps too")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in the other steps too")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of an arm")
    parser.add_argument("--profile", action="store_true", help=f"kernel time by group ({', '.join(GROUPS)})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    prepare(args.device)
    report = earlier_report(args.output, machine_name(args.device), parser)
    for model in args.models:
        sizes = {
            "dpo": {"pairs": args.pairs},
            "reward": {"pairs": args.pairs},
            "grpo": {"groups": args.groups},
            "distillation": {
                "prompts": args.prompts,
                "teacher": args.teacher,
                "teacher_in_host_memory": args.teacher_in_host_memory,
            },
        }[args.task]
        run = {"command": shlex.join(["python", *sys.argv]), "task": args.task, "model": model, **sizes}
        always = args.task in ("dpo", "reward")
        run |= {"lora": args.lora or always, "checkpointing": args.checkpointing or always}
        run["arms"] = {}
        report["runs"].append(run)
        print(f"\n{args.task}, {model}, {sizes}")
        for arm in args.arms:
            try:
                run["arms"][arm] = run_arm(arm, MODELS[model], args)
            except torch.OutOfMemoryError:
                run["arms"][arm] = {"error": "out of memory"}
            # Adapters and hooks hold the model in reference cycles.
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            entry = run["arms"][arm]
            if "median_ms" in entry and "median_ms" in run["arms"].get("ours", {}):
                entry["over_ours"] = round(entry["median_ms"] / run["arms"]["ours"]["median_ms"], 3)
            print(f"  {arm:<12} " + ", ".join(f"{k} {v}" for k, v in entry.items() if k != "seconds"), flush=True)
            run["implementations"] = implementations_used()
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
