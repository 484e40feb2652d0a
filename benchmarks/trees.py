"""Learning steps on trees of turns: a tree as one row, against rows that share less of it.

A step is forward and backward of the log-probabilities of all targets, with LoRA of rank 16 on all linear layers, in
bfloat16. The arms of a scene have the same model and the same terms of the loss, so their gradients agree up to
rounding. The first token of a turn is no target. An arm with more tokens than the tree has several rows, none longer
than the tree's, and adds their gradients.

`branching` is four groups of 8 rollouts. A prompt of 1,024 tokens is followed by one turn, and each turn by two others:
1, 2, 4 and 8 turns of 256 tokens. All rollouts of a group have the same prompt and first turn.

`conversation` is 12 turns of a user or a tool of 600 tokens, each with a trained answer of 400. The history keeps the last
100 tokens of an answer, without its reasoning.

`chain` is 20 turns of 800 tokens, each the only one after the turn before: 20 documents, or one.

Arms: `separate` repeats what samples share. `prompt shared` and `first turn shared` have it once, in one level, up to
the prompt or the first turn. `tree` has each turn once. The arms take turns, and each counts with the median of its steps.

On a GPU, the bar of the tree's memory is that of as many tokens of `separate` and 15 % of it, and a state for each layer of
the delta rule and each turn with several others after it. The number of kernels is that of a step, and the error
of the gradient is relative to the first arm.

    python benchmarks/trees.py --output benchmarks/results/trees.json
    python benchmarks/trees.py --model tiny --shorter 16 --device cpu
"""

import argparse
import gc
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from arms import make_model, prepare
from shapes import MODELS
from step import earlier_report, machine_name, profile, seconds_of_steps

from transformers_packed import SequenceBoundaries, per_document_logps
from transformers_packed.ops import implementations_used
from transformers_packed.shared_prompts import to_level_order


# The turns that the samples of a group share before they part. `None` is the tree.
ARMS = {
    "branching": {"separate": 0, "prompt shared": 1, "first turn shared": 2, "tree": None},
    "conversation": {"separate": 0, "tree": None},
    "chain": {"separate": 0, "tree": None},
}
# Ratios of the times of two arms.
BARS = {
    "branching": [("prompt shared", "tree", "at_least", 1.6), ("separate", "tree", "at_least", 2.6)],
    "conversation": [("separate", "tree", "at_least", 3.0)],
    "chain": [("tree", "separate", "at_most", 1.02)],
}
_WARM_UP_SECONDS = 2.0
# Of the memory of a tree, over that of as many tokens of other rows.
_TOLERANCE = 1.15


class Scene(NamedTuple):
    """A tree of turns, and the samples: for each turn of a path in order, what each of its targets counts."""

    lengths: list[int]
    parent_of: list[int]
    samples: list[dict[int, float]]

    def add(self, length: int, parent: int) -> int:
        self.lengths.append(length)
        self.parent_of.append(parent)
        return len(self.lengths) - 1

    def path(self, turn: int) -> list[int]:
        parent = self.parent_of[turn]
        return [*(self.path(parent) if parent >= 0 else ()), turn]

    def targets(self) -> int:
        return sum(self.lengths[turn] - 1 for sample in self.samples for turn, weight in sample.items() if weight)

    def branches(self) -> int:
        """The turns that several others continue."""
        return len({parent for parent in self.parent_of if parent >= 0 and self.parent_of.count(parent) > 1})


def branching(shorter: int) -> Scene:
    scene, draw = Scene([], [], []), random.Random(0)
    for _ in range(4):
        prompt = scene.add(1024 // shorter, -1)
        turns = [scene.add(256 // shorter, prompt)]
        while len(turns) < 8:
            turns = [scene.add(256 // shorter, turn) for turn in turns for _ in range(2)]
        for turn in turns:
            advantage = draw.gauss(0, 1)
            scene.samples.append({t: 0.0 if t == prompt else advantage for t in scene.path(turn)})
    return scene


def conversation(shorter: int) -> Scene:
    scene, history = Scene([], [], []), -1
    for number in range(12):
        user = scene.add(600 // shorter, history)
        answer = scene.add(400 // shorter, user)
        scene.samples.append({turn: float(turn == answer) for turn in scene.path(answer)})
        if number < 11:
            history = scene.add(100 // shorter, user)
    return scene


def chain(shorter: int) -> Scene:
    scene, turn = Scene([], [], []), -1
    for _ in range(20):
        turn = scene.add(800 // shorter, turn)
    scene.samples.append(dict.fromkeys(scene.path(turn), 1.0))
    return scene


SCENES = {"branching": branching, "conversation": conversation, "chain": chain}


class Row(NamedTuple):
    """The documents of a row as turns with their weights, and the parent of each."""

    documents: list[dict[int, float]]
    parent_of: list[int]

    def tokens(self, scene: Scene) -> int:
        return sum(scene.lengths[turn] for document in self.documents for turn in document)


def summed(samples: list[dict[int, float]]) -> dict[int, float]:
    """The turns of several samples, with the sum of their weights."""
    found: dict[int, float] = {}
    for sample in samples:
        for turn, weight in sample.items():
            found[turn] = found.get(turn, 0.0) + weight
    return found


def tree_of(scene: Scene) -> Row:
    weights, (order, parents) = summed(scene.samples), to_level_order(scene.parent_of)
    return Row([{turn: weights[turn]} for turn in order], parents)


def group_of(samples: list[dict[int, float]], shared: int) -> Row:
    """A row of samples that share their first turns, as one document before them."""
    prefix = summed([dict(list(sample.items())[:shared]) for sample in samples])
    rest = [dict(list(sample.items())[shared:]) for sample in samples]
    return Row([prefix, *rest], [-1] + [0] * len(rest)) if shared else Row(rest, [-1] * len(rest))


def joined(rows: list[Row]) -> Row:
    """One row of the documents of several, level by level."""
    documents: list[dict[int, float]] = []
    parent_of: list[int] = []
    for row in rows:
        start = len(documents)
        documents += row.documents
        parent_of += [parent if parent < 0 else start + parent for parent in row.parent_of]
    order, parents = to_level_order(parent_of)
    return Row([documents[n] for n in order], parents)


def rows_of(scene: Scene, shared: int | None) -> list[Row]:
    """The rows of an arm: first fit of groups, the longest first, into rows of at most the tokens of the tree."""
    tree = tree_of(scene)
    if shared is None:
        return [tree]
    groups: dict[tuple, list[dict[int, float]]] = {}
    for number, sample in enumerate(scene.samples):
        groups.setdefault(tuple(sample)[:shared] or (number,), []).append(sample)
    rows: list[list[Row]] = []
    for group in sorted((group_of(x, shared) for x in groups.values()), key=lambda row: -row.tokens(scene)):
        fits = tree.tokens(scene) - group.tokens(scene)
        row = next((row for row in rows if sum(x.tokens(scene) for x in row) <= fits), None)
        if row is None:
            rows.append([group])
        else:
            row.append(group)
    return [joined(row) for row in rows]


def batch_of(scene: Scene, row: Row, vocab_size: int, device: str) -> dict:
    """The tokens of a row, its labels, what each counts, and where documents are. A turn has the same tokens everywhere."""
    ids, weights = [], []
    for document in row.documents:
        for turn, weight in document.items():
            generator = torch.Generator().manual_seed(turn)
            ids.append(torch.randint(1, vocab_size, (scene.lengths[turn],), generator=generator))
            weights.append(torch.full((scene.lengths[turn],), weight).index_fill(0, torch.tensor([0]), 0.0))
    lengths = [sum(scene.lengths[turn] for turn in document) for document in row.documents]
    tokens, counts = torch.cat(ids)[None].to(device), torch.cat(weights)[None].to(device)
    # As from a collator, boundaries are on the host.
    where = {"cu_seqlens": SequenceBoundaries.from_lengths(lengths).cu_seqlens}
    if max(row.parent_of) >= 0:
        where["parent_of"] = torch.tensor(row.parent_of)
    return {"ids": tokens, "labels": tokens.masked_fill(counts == 0, -100), "weights": counts, "where": where}


def step(model: torch.nn.Module, batches: list[dict], targets: int) -> torch.Tensor:
    """Forward and backward of all rows. Return the loss."""
    model.zero_grad(set_to_none=True)
    base, total = model.get_base_model(), torch.zeros((), device=model.device)
    for batch in batches:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=base.dtype == torch.bfloat16):
            hidden = base.model(batch["ids"], **batch["where"], use_cache=False).last_hidden_state
            documents = batch["where"]["cu_seqlens"]
            logps = per_document_logps(hidden, batch["labels"], documents, head=base.lm_head).per_token
        loss = -(logps * batch["weights"]).sum() / targets
        loss.backward()
        total += loss.detach()
    return total


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """All gradients as one vector, on the host."""
    return torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])


def measure(model: torch.nn.Module, name: str, run: dict, args, write: Callable[[], None]) -> None:
    """Run the arms of a scene in turns, and put what they need into `run`."""
    cuda, config, scene = args.device == "cuda", MODELS[args.model], SCENES[name](args.shorter)
    first = None
    for number in range(args.rounds):
        for arm, shared in ARMS[name].items():
            rows = rows_of(scene, shared)
            batches = [batch_of(scene, row, config["vocab_size"], args.device) for row in rows]
            steps = SimpleNamespace(run=partial(step, model, batches, scene.targets()))
            lengths = [row.tokens(scene) for row in rows]
            entry = run["arms"].setdefault(arm, {"tokens": sum(lengths), "rows": lengths, "seconds": []})
            if "error" in entry:
                continue
            try:
                if number == 0:
                    entry["loss"] = warm_up(steps, cuda)
                    found = gradient_of(model)
                    first = found if first is None else first
                    entry["gradient_error"] = float((found - first).norm() / first.norm())
                    if cuda and name != "branching":
                        entry["profile_ms"] = profile(steps)
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                entry["seconds"] += [round(x, 5) for x in seconds_of_steps(steps, args.repeats, args.device)]
                entry["median_ms"] = round(1000 * statistics.median(entry["seconds"]), 2)
                if cuda:
                    entry["peak_above_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30 - held_GiB(model), 2)
            except torch.OutOfMemoryError:
                entry["error"] = "out of memory"
            model.zero_grad(set_to_none=True)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            run |= {"implementations": implementations_used(), "bars": bars(name, scene, run["arms"], config)}
            write()


def warm_up(steps: SimpleNamespace, cuda: bool) -> float:
    """Return the loss."""
    begin, loss = time.perf_counter(), float(steps.run())
    while cuda and time.perf_counter() - begin < _WARM_UP_SECONDS:
        loss = float(steps.run())
    return loss


def held_GiB(model: torch.nn.Module) -> float:
    """The weights, and the gradients after a step."""
    tensors = [x for weight in model.parameters() for x in (weight, weight.grad) if x is not None]
    return sum(x.numel() * x.element_size() for x in tensors) / 2**30


def bars(name: str, scene: Scene, arms: dict[str, dict], config: dict) -> list[dict]:
    """What is measured so far, and the bar for it."""
    found = []
    timed = {arm: entry["median_ms"] for arm, entry in arms.items() if "median_ms" in entry}
    for arm, other, side, bar in BARS[name]:
        if {arm, other} <= timed.keys():
            found.append({"what": f"time, {arm} over {other}", "is": round(timed[arm] / timed[other], 3), side: bar})
    tree, separate = (arms.get(arm, {}) for arm in ("tree", "separate"))
    if "peak_above_GiB" in tree and "peak_above_GiB" in separate:
        layers = config["num_hidden_layers"] - config["num_hidden_layers"] // 4
        state = config["linear_num_value_heads"] * config["linear_key_head_dim"] * config["linear_value_head_dim"] * 4
        allowed = _TOLERANCE * separate["peak_above_GiB"] * tree["tokens"] / max(separate["rows"])
        allowed += scene.branches() * layers * state / 2**30
        found.append({"what": "peak of the tree in GiB", "is": tree["peak_above_GiB"], "at_most": round(allowed, 2)})
    for bar in found:
        bar["met"] = bar["is"] >= bar["at_least"] if "at_least" in bar else bar["is"] <= bar["at_most"]
    return found


def print_table(runs: list[dict]) -> None:
    for run in runs:
        print(f"\n{run['scene']}, {run['model']}")
        for arm, entry in run["arms"].items():
            size = f"  {arm:<18} {entry['tokens']:>7,} tokens in {len(entry['rows'])} rows"
            if "error" in entry:
                print(f"{size}  {entry['error']}")
                continue
            memory = f"  {entry['peak_above_GiB']:6.1f} GiB above the weights" if "peak_above_GiB" in entry else ""
            launches = f"  {entry['profile_ms']['launches']:,} kernels" if "profile_ms" in entry else ""
            error = f"  gradient {entry['gradient_error']:.1e}, loss {entry['loss']:.5f}"
            print(f"{size}  {entry['median_ms']:9.1f} ms{memory}{launches}{error}")
        for bar in run["bars"]:
            limit = f"at least {bar['at_least']}" if "at_least" in bar else f"at most {bar['at_most']}"
            print(f"  {bar['what']}: {bar['is']}, {limit}: {'met' if bar['met'] else 'missed'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="4B")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--shorter", type=int, default=1, help="divide the lengths of turns by this number, for a CPU")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in every arm")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of an arm in each round")
    parser.add_argument("--rounds", type=int, default=2, help="how often the arms take turns")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    prepare(args.device)
    report = earlier_report(args.output, machine_name(args.device), parser)
    model, runs = make_model(MODELS[args.model], "ours+lora", args.device), []
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def write():
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    for scene in args.scenes:
        run = {"command": shlex.join(["python", *sys.argv]), "model": args.model, "scene": scene}
        run |= {"shorter": args.shorter, "checkpointing": args.checkpointing, "arms": {}}
        report["runs"].append(run)
        runs.append(run)
        measure(model, scene, run, args, write)
    print_table(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
