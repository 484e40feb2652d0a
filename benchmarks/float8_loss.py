"""Loss of each step of training from random weights on real text, in bf16 and with FP8 products.

Each process trains one arm and writes its own JSON, and `--merge` puts these files into one. All arms start from the same
float32 weights and train under bf16 autocast. The arm `float8` computes the linear layers in FP8, except those of the
first and the last decoder layer, `in_proj_a`, `in_proj_b` and the head. A second bf16 run with another order of the
documents shows the spread of the loss without FP8. `benchmarks/float8_corpus.py` makes the corpus. Its last rows are kept
apart: the same rows in each order, for the held-out loss.

    python benchmarks/float8_corpus.py --output corpus.npz
    python benchmarks/float8_loss.py --corpus corpus.npz --arm bf16 --output bf16.json
    python benchmarks/float8_loss.py --corpus corpus.npz --arm bf16 --order 1 --output bf16_again.json
    python benchmarks/float8_loss.py --corpus corpus.npz --arm float8 --output float8.json
    python benchmarks/float8_loss.py --merge bf16.json bf16_again.json float8.json --output benchmarks/results/float8_loss.json
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from arms import CLASSES, family_of
from shapes import MODELS
from step import earlier_report, machine_name
from transformers import AutoConfig, set_seed

from transformers_packed import DataCollatorWithFlattening
from transformers_packed.ops import implementations_used


HELD_OUT_ROWS = 16
LAST_STEPS = 100
_READ_EVERY = 50


def load(corpus: Path) -> tuple[list[np.ndarray], int]:
    """The documents, and the size of their vocabulary."""
    arrays = np.load(corpus)
    return np.split(arrays["ids"], arrays["lengths"].cumsum()[:-1]), int(arrays["vocab_size"])


def pack(documents: list[np.ndarray], tokens: int) -> list[list[np.ndarray]]:
    """Rows of exactly `tokens` tokens. A document that does not fit continues as a new one in the next row."""
    rows, row, room = [], [], tokens
    for document in documents:
        while len(document):
            part, document = document[:room], document[room:]
            row.append(part)
            room -= len(part)
            if not room:
                rows.append(row)
                row, room = [], tokens
    return rows


def split(documents: list[np.ndarray], tokens: int, order: int) -> tuple[list, list]:
    """Rows to train on in the order of this seed, and the held-out rows, which do not depend on it."""
    first, wanted = len(documents), HELD_OUT_ROWS * tokens
    while first and wanted > 0:
        first -= 1
        wanted -= len(documents[first])
    shuffled = [documents[i] for i in np.random.default_rng(order).permutation(first)]
    return pack(shuffled, tokens), pack(documents[first:], tokens)[:HELD_OUT_ROWS]


def make_model(config: dict, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Our class, with the same weights in each process."""
    family = family_of(config)
    module = import_module(f"transformers_packed.models.{family}.modeling_{family}")
    set_seed(seed)
    with torch.device(device):
        text_config = AutoConfig.for_model(**config)
        cls = getattr(module, CLASSES[family])
        return cls._from_config(text_config, dtype=torch.float32, attn_implementation="sdpa").to(dtype).train()


def float8_filter(layers: int):
    """Whether a module computes in FP8, by its name `model.layers.<n>....`."""

    def takes(module: torch.nn.Module, name: str) -> bool:
        _, found, rest = name.partition("layers.")
        inner = found and 0 < int(rest.partition(".")[0]) < layers - 1
        return bool(inner) and isinstance(module, torch.nn.Linear) and not name.endswith(("in_proj_a", "in_proj_b"))

    return takes


def make_optimizer(model: torch.nn.Module, args) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW that decays matrices only; the learning rate warms up, and falls to a tenth along a cosine."""
    weights = list(model.parameters())
    groups = [
        {"params": [x for x in weights if x.ndim > 1], "weight_decay": 0.1},
        {"params": [x for x in weights if x.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")

    def factor(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def loss_of(model: torch.nn.Module, row: list[np.ndarray], collator, device: str) -> torch.Tensor:
    batch = collator([{"input_ids": document.tolist()} for document in row])
    inputs = {name: batch[name].to(device) for name in ("input_ids", "labels")}
    with torch.autocast(device, torch.bfloat16):
        return model(**inputs, cu_seqlens=batch["cu_seqlens"]).loss


def train(args, parser: argparse.ArgumentParser) -> dict:
    documents, vocab_size = load(args.corpus)
    rows, held_out = split(documents, args.tokens, args.order)
    if len(rows) < args.steps:
        parser.error(f"{args.corpus} has {len(rows)} rows of {args.tokens} tokens to train on, not {args.steps}")
    config = MODELS[args.models] | {"vocab_size": vocab_size}
    model, layers = make_model(config, args.device), 0
    if args.arm == "float8":
        from transformers_packed import use_float8

        takes = float8_filter(config["num_hidden_layers"])
        layers = sum(takes(module, name) for name, module in model.named_modules())
        use_float8(model, module_filter=takes)
    collator = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")
    optimizer, schedule = make_optimizer(model, args)
    # Tensors on the device, because a number would wait for the GPU in each step.
    losses, norms, start = [], [], time.perf_counter()
    for step, row in enumerate(rows[: args.steps], 1):
        loss = loss_of(model, row, collator, args.device)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step % _READ_EVERY == 0:
            print(f"{args.arm}, order {args.order}, step {step}: {float(losses[-1]):.4f}", flush=True)
    losses, norms = ([round(x, 5) for x in torch.stack(found).tolist()] for found in (losses, norms))
    seconds, used = time.perf_counter() - start, implementations_used()
    model.eval()
    with torch.no_grad():
        held_out_losses = [float(loss_of(model, row, collator, args.device)) for row in held_out]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "arm": args.arm,
        "order": args.order,
        "model": args.models,
        "vocab_size": vocab_size,
        "parameters": sum(x.numel() for x in model.parameters()),
        "float8_layers": layers,
        "steps": args.steps,
        "tokens": args.tokens,
        "lr": args.lr,
        "warmup": args.warmup,
        "seconds": round(seconds, 1),
        "mean_loss_of_last_steps": round(statistics.fmean(losses[-LAST_STEPS:]), 5),
        "held_out_rows": len(held_out),
        "held_out_loss": round(statistics.fmean(held_out_losses), 5),
        "loss": losses,
        "gradient_norm": norms,
        "implementations": used,
    }


def merge(sources: list[Path], parser: argparse.ArgumentParser) -> dict:
    reports = [json.loads(source.read_text()) for source in sources]
    for source, report in zip(sources, reports, strict=True):
        if any(report[key] != reports[0][key] for key in ("machine", "versions")):
            parser.error(f"{source} is of another machine or of other versions than {sources[0]}")
    return reports[0] | {"runs": [run for report in reports for run in report["runs"]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="the file of float8_corpus.py")
    parser.add_argument("--arm", choices=("bf16", "float8"), default="bf16")
    parser.add_argument("--order", type=int, default=0, help="seed of the order of the documents")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=100, help="steps until the full learning rate")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each row, which is a step")
    parser.add_argument("--models", choices=MODELS, default="0.8B", help="the shape, with the corpus' vocabulary")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="only merge the files of several arms")
    parser.add_argument("--output", type=Path, required=True, help="add the run to this JSON file")
    args = parser.parse_args()
    if args.merge:
        report = merge(args.merge, parser)
    elif args.corpus is None:
        parser.error("--corpus or --merge is required")
    else:
        report = earlier_report(args.output, machine_name(args.device), parser)
        report["runs"].append(train(args, parser))
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
