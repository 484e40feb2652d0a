"""Kernels that are compiled in the middle of training, with and without `warm_up`.

Each arm trains in a process of its own, because a process keeps its kernels. A step is forward, backward and AdamW on one
packed row. The steps have 1 to 200 documents in random order, and documents of all sizes in rows of up to `--tokens`
tokens. Every kernel that is compiled, loaded from a disk cache, or tuned is recorded with its step, and so is each
recording of a CUDA graph. With warm-up, steps should record nothing. Its own records and seconds count as step 0.

    python benchmarks/first_steps.py --models 0.8B --output benchmarks/results/first_steps.json
    python benchmarks/first_steps.py --models 0.8B --arms ours --no-warm-up --empty-caches
    python benchmarks/first_steps.py --models 4B --arms ours+lora --trees --empty-caches --steps 10

`--no-warm-up` is a loop of one's own, whose first step compiles the kernels of the delta rules in threads.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import torch
from arms import ARMS, make_model
from shapes import MODELS, with_layers
from step import earlier_report, machine_name

from transformers_packed import DataCollatorWithFlattening, use_cuda_graphs, warm_up
from transformers_packed.models.cuda_graphs import graph_length
from transformers_packed.models.recordings import RecordedLayers
from transformers_packed.ops import implementations_used
from transformers_packed.ops.compilations import Compilation, compilations


OURS = [name for name, kind in ARMS.items() if kind.model == "ours" and kind.packed]
# Environment variables of the disk caches.
CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def rows(steps: int, documents: int, tokens: int) -> list[list[int]]:
    """The lengths of the documents of each step: all numbers of documents in random order, and random cuts."""
    generator = torch.Generator().manual_seed(0)
    found = []
    while len(found) < steps:
        for number in (1 + torch.randperm(documents, generator=generator)).tolist():
            total = int(torch.randint(2 * number, max(tokens, 2 * number) + 1, (), generator=generator))
            cuts = torch.rand(number, generator=generator).square()
            extra = (cuts / cuts.sum() * (total - 2 * number)).long()
            extra[0] += total - 2 * number - extra.sum()
            found.append((2 + extra).tolist())
    return found[:steps]


def train(name: str, config: dict, args) -> dict:
    """The records of one arm, as JSON."""
    now, found = {"step": 0}, []

    def tell(compilation: Compilation) -> None:
        found.append(now | asdict(compilation))

    def record_graph(self, layers, parameters, row, *others):
        start = time.perf_counter()
        init(self, layers, parameters, row, *others)
        # Its last document is always empty, and padding is one.
        documents = len(row.cu_seqlens) - 3
        tell(Compilation("cuda graph", f"{documents} documents", "", time.perf_counter() - start, False))

    def loss(model, batch):
        with torch.autocast(args.device, torch.bfloat16, enabled="lora" in name):
            return model(**batch).loss

    init, model = RecordedLayers.__init__, make_model(config, name, args.device)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "+graphs" in name:
        use_cuda_graphs(model, graph_length(args.tokens))
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-6)
    collator = DataCollatorWithFlattening(
        return_cu_seqlens=True, on_leak="ignore", model=model if args.trees else None
    )
    generator, seconds, lengths = torch.Generator().manual_seed(1), [], rows(args.steps, args.documents, args.tokens)
    with compilations(tell), patch.object(RecordedLayers, "__init__", record_graph):
        start = time.perf_counter()
        if not args.no_warm_up:
            # Its own records come from the hooks above.
            warm_up(
                model, args.tokens, max_documents=args.documents, loss=loss, dtype=torch.bfloat16, trees=args.trees
            )
        synchronize(args.device)
        warming = time.perf_counter() - start
        for at, row in enumerate(lengths, 1):
            now["step"] = at
            ids = [torch.randint(1, config["vocab_size"], (n,), generator=generator).tolist() for n in row]
            samples = [{"input_ids": x, "labels": x} for x in ids]
            batch = collator([tree_of(samples)] if args.trees else samples)
            on_host = "cu_seqlens", "parent_of"
            batch = {k: x.to(args.device) if torch.is_tensor(x) and k not in on_host else x for k, x in batch.items()}
            synchronize(args.device)
            start = time.perf_counter()
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(args.device)
            seconds.append(time.perf_counter() - start)
    slowest = sorted(range(len(seconds)), key=seconds.__getitem__, reverse=True)[:5]
    return {
        "arm": name,
        "warm_up": not args.no_warm_up,
        "trees": args.trees,
        "warm_up_seconds": round(warming, 2),
        "steps": args.steps,
        "tokens": args.tokens,
        "documents": args.documents,
        "median_ms": round(1000 * statistics.median(seconds), 1),
        "first_step_ms": round(1000 * seconds[0], 1),
        "slowest": [
            {"step": i + 1, "ms": round(1000 * seconds[i], 1), "tokens": sum(lengths[i]), "documents": len(lengths[i])}
            for i in slowest
        ],
        "before_step_1": summary([event for event in found if event["step"] == 0]),
        "during_steps": summary([event for event in found if event["step"]]),
        "events": [event | {"seconds": round(event["seconds"], 3)} for event in found if event["step"]],
        "implementations": implementations_used(),
    }


def tree_of(samples: list[dict]) -> dict:
    """A tree of these samples: the first one has turns, and so has the first of these."""
    # A target of the first token would move the end of the sample before.
    first, *others = [sample | {"labels": [-100, *sample["labels"][1:]]} for sample in samples]
    half = len(others) // 2
    if half:
        others[0]["turns"] = others[1 : half + 1]
        others[1 : half + 1] = []
    return first | {"turns": others} if others else first


def summary(events: list[dict]) -> dict[str, dict]:
    """Number and seconds of the records, by package and whether they came from the disk."""
    found: dict[str, dict] = {}
    for event in events:
        entry = found.setdefault(event["package"] + " from disk" * event["from_disk"], {"number": 0, "seconds": 0.0})
        entry["number"] += 1
        entry["seconds"] = round(entry["seconds"] + event["seconds"], 3)
    return found


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def show(run: dict) -> None:
    print(
        f"\n{run['model']}, {run['arm']}: {'trees, ' * run['trees']}{'warm_up ' if run['warm_up'] else 'no warm-up '}{run['warm_up_seconds']} s "
        f"{run['before_step_1']}\n  {run['steps']} steps, median {run['median_ms']} ms, first {run['first_step_ms']} ms; "
        f"during them {run['during_steps'] or 'nothing was compiled'}"
    )
    for entry in run["slowest"]:
        print(
            f"  step {entry['step']:>4}: {entry['ms']:9.1f} ms, {entry['tokens']} tokens, {entry['documents']} documents"
        )
    for event in run["events"][:40]:
        how = "from disk" if event["from_disk"] else "built"
        print(
            f"  step {event['step']:>4}: {event['package']} {event['kernel']} {how}, {event['seconds']:.2f} s, "
            f"{event['key'][:400]}"
        )
    print(f"  {run['implementations']}", flush=True)


def alone(model: str, arm: str, args) -> dict:
    """Run one arm in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if args.empty_caches:
            environment |= {name: str(Path(folder) / name) for name in CACHES}
        target = Path(folder) / "run.json"
        given = {"tokens": args.tokens, "steps": args.steps, "documents": args.documents, "layers": args.layers}
        options = [f"--{name}={value}" for name, value in given.items() if value]
        options += ["--checkpointing"] * args.checkpointing + ["--no-warm-up"] * args.no_warm_up
        options += ["--trees"] * args.trees
        command = [sys.executable, __file__, "--models", model, "--arms", arm, f"--device={args.device}", *options]
        result = subprocess.run([*command, "--alone", str(target)], env=environment, capture_output=True, text=True)
        if result.returncode:
            return {"model": model, "arm": arm, "error": result.stderr[-2000:]}
        return {"model": model} | json.loads(target.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.8B"])
    parser.add_argument("--arms", nargs="+", choices=OURS, default=["ours", "ours+lora"])
    parser.add_argument("--layers", type=int, help="layers of each model, instead of its own number")
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a row")
    parser.add_argument("--documents", type=int, default=200, help="most documents of a row")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--trees", action="store_true", help="the samples of a row are a tree")
    parser.add_argument("--no-warm-up", action="store_true", help="start with the first step")
    parser.add_argument("--empty-caches", action="store_true", help="start without kernels on disk")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        run = train(args.arms[0], with_layers(MODELS[args.models[0]], args.layers), args)
        args.alone.write_text(json.dumps(run))
        return 0
    report, failed = earlier_report(args.output, machine_name(args.device), parser), False
    for model in args.models:
        for arm in args.arms:
            run = {"command": shlex.join(["python", *sys.argv])} | alone(model, arm, args)
            if "error" in run:
                failed = True
                print(f"\n{model}, {arm}: failed\n{run['error']}", flush=True)
            else:
                show(run)
            report["runs"].append(run)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
