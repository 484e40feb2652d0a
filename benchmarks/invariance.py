"""Whether a document has the same bits in every row and batch, with `batch_invariant` and without, and in two runs.

`--task places` computes the log-probabilities of `--documents` documents, each alone in a row, and again in these places:

* `rows`: eight times in rows of other documents, in another order and in rows of other lengths each time;
* `padded 1`, `padded 4`, `padded 8`: in eight padded batches, and `full 1` without padding and without a mask;
* `checkpointing`: in rows under gradient checkpointing, with gradients;
* `graphs`: in rows with CUDA graphs, where the model has them;
* `shared prompts`: as answers to one prompt that is computed once. Another order of sums is expected here.

It states the largest difference of a log-probability, the share of documents that differ, and the implementations that ran.
Lengths are lognormal with a mean of 480, and four documents are longer than 1,500 tokens.

`--task grpo` trains with TRL's `GRPOTrainer` and a learning rate of 0. The policy computes the log-probabilities of its
own answers in batches of `--old-batch` answers before a step, and in batches of `--batch` in the step. It states how many
of their ratios are exactly 1. With `--new-adapters`, which add zero, also the largest difference from the reference model,
which is the policy without adapters. Otherwise the adapters are random.

`--task twice` trains 20 steps under `torch.use_deterministic_algorithms(True)` twice, and once more in two halves with saved
weights and states of the optimizer between them. It compares checksums of all trained weights.

`--task distance` compares log-probabilities in bfloat16 with those of the same weights in float32: of this package, of the
stock class on each document alone, and of this package with one op at a time computed by its PyTorch reference.

    python benchmarks/invariance.py --task places --models 0.8B 4B 35B-A3B olmo_hybrid kimi_linear \
        --output benchmarks/results/invariance.json
    python benchmarks/invariance.py --task grpo --models 0.8B [--new-adapters] --output benchmarks/results/invariance.json
    python benchmarks/invariance.py --task twice --models 0.8B 4B 35B-A3B --output benchmarks/results/invariance.json
    python benchmarks/invariance.py --task distance --models 0.8B --output benchmarks/results/invariance.json
"""

import os


# cuBLAS reads it when its first handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import gc
import hashlib
import io
import json
import random
import shlex
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from arms import make_model, prepare
from families import FAMILIES
from preference import lora_config, make_tokenizer
from shapes import MODELS, sample_lengths, split_tokens, with_layers
from step import earlier_report, machine_name
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from transformers_packed import (
    DataCollatorWithFlattening,
    batch_invariant,
    configure_packing,
    patch_model,
    use_cuda_graphs,
)
from transformers_packed.models.cuda_graphs import remove_graphs
from transformers_packed.models.registry import inner_model
from transformers_packed.ops import dispatch, implementations_used, linear_logps


OTHERS = ("olmo_hybrid", "kimi_linear", "tiny")
# Mixtures are measured with a few layers.
LAYERS = {"35B-A3B": 8}
LONG = (1600, 2100, 3000, 5000)


def model_of(name: str, device: str, layers: int | None = None) -> torch.nn.Module:
    """A model of random weights in bfloat16, with LoRA if it is one of Qwen's shapes."""
    if name in FAMILIES:
        set_seed(0)
        with torch.device(device):
            config = AutoConfig.for_model(**FAMILIES[name])
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        return patch_model(model)
    config = with_layers(MODELS[name], layers or LAYERS.get(name))
    return make_model(config, "ours+lora" if name != "tiny" else "ours", device)


def make_documents(count: int, vocab: int) -> list[list[int]]:
    draw = random.Random(0)
    lengths = sample_lengths("lognormal", 10**6)[: count - len(LONG)] + list(LONG)
    return [[draw.randrange(1, vocab) for _ in range(max(length, 16))] for length in lengths]


class Places:
    """Log-probabilities of documents in the places of the module's docstring."""

    def __init__(self, model: torch.nn.Module, documents: list[list[int]], device: str):
        self.model, self.documents, self.device = model, documents, device
        self.inner = inner_model(model)
        # The stock class gets no rows.
        self.collator = DataCollatorWithFlattening(model=model, return_boundaries=True, on_leak="ignore")

    def logps(self, hidden: torch.Tensor, ids: list[int]) -> torch.Tensor:
        targets = torch.tensor(ids[1:], device=self.device)
        return linear_logps(hidden[:-1], self.inner.lm_head.weight, targets).detach().cpu()

    def hidden(self, **batch) -> torch.Tensor:
        batch = {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        batch.pop("labels", None)
        with torch.autocast(self.device, torch.bfloat16):
            return self.inner.model(**batch, use_cache=False).last_hidden_state

    def row(self, numbers: list[int]) -> dict[int, torch.Tensor]:
        documents = [self.documents[number] for number in numbers]
        hidden = self.hidden(**self.collator([{"input_ids": ids, "labels": ids} for ids in documents]))[0]
        parts = hidden.split([len(ids) for ids in documents])
        return {n: self.logps(part, ids) for n, part, ids in zip(numbers, parts, documents, strict=True)}

    def batch(self, numbers: list[int], extra: int = 0, mask: bool = True) -> dict[int, torch.Tensor]:
        documents = [self.documents[number] for number in numbers]
        ids = torch.zeros(len(documents), max(map(len, documents)) + extra, dtype=torch.long)
        real = torch.zeros_like(ids)
        for row, document in enumerate(documents):
            ids[row, : len(document)], real[row, : len(document)] = torch.tensor(document), 1
        hidden = self.hidden(input_ids=ids, **({"attention_mask": real} if mask else {}))
        return {n: self.logps(hidden[i, : len(d)], d) for i, (n, d) in enumerate(zip(numbers, documents, strict=True))}

    def alone(self) -> dict[int, torch.Tensor]:
        return {number: self.row([number])[number] for number in range(len(self.documents))}

    def each_unpacked(self, dtype: torch.dtype = torch.bfloat16) -> dict[int, torch.Tensor]:
        found = {}
        for number, ids in enumerate(self.documents):
            with torch.autocast(self.device, dtype, enabled=dtype != torch.float32):
                hidden = self.inner.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False)
            found[number] = self.logps(hidden.last_hidden_state[0], ids)
        return found

    def in_rows(self, seed: int) -> dict[int, torch.Tensor]:
        draw, found = random.Random(seed), {}
        numbers = list(range(len(self.documents)))
        draw.shuffle(numbers)
        while numbers:
            row, most = [numbers.pop()], draw.randrange(2000, 16384)
            while numbers and sum(len(self.documents[n]) for n in [*row, numbers[-1]]) <= most:
                row.append(numbers.pop())
            found |= self.row(row)
        return found

    def in_batches(self, size: int) -> dict[int, torch.Tensor]:
        numbers, found = list(range(len(self.documents))), {}
        random.Random(size).shuffle(numbers)
        numbers = numbers[: 8 * size]
        for start in range(0, len(numbers), size):
            found |= self.batch(numbers[start : start + size], extra=9)
        return found

    def trained(self, seed: int) -> dict[int, torch.Tensor]:
        """Rows of a forward for a backward."""
        self.model.train()
        try:
            with torch.enable_grad():
                return self.in_rows(seed)
        finally:
            self.model.eval()

    def checkpointed(self) -> dict[int, torch.Tensor]:
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            return self.trained(99)
        finally:
            self.model.gradient_checkpointing_disable()

    def with_graphs(self) -> dict[int, torch.Tensor]:
        use_cuda_graphs(self.model, max_length=16384)
        try:
            return self.trained(100)
        finally:
            remove_graphs(self.model)

    def sharing_prompts(self) -> dict[int, torch.Tensor]:
        """Answers of 64 to 300 tokens to a prompt of 256. Only these count, against themselves alone."""
        draw, vocab = random.Random(5), self.inner.config.get_text_config().vocab_size
        prompt = [draw.randrange(1, vocab) for _ in range(256)]
        answers = [[draw.randrange(1, vocab) for _ in range(draw.randrange(64, 300))] for _ in range(8)]
        places = Places(self.model, [prompt + answer for answer in answers], self.device)
        switch = next(x for x in self.inner.modules() if hasattr(x, "share_prompts"))
        alone, switch.share_prompts = places.alone(), True
        try:
            shared = places.batch(list(range(8)))
        finally:
            switch.share_prompts = False
        return {number: (alone[number], shared[number]) for number in alone}


def compare(alone: dict, found: dict) -> dict:
    pairs = [x if isinstance(x, tuple) else (alone[number], x) for number, x in found.items()]
    differ = [not torch.equal(*pair) for pair in pairs]
    return {
        "largest": max(float((a.double() - b.double()).abs().max()) for a, b in pairs),
        "documents_that_differ": sum(differ),
        "documents": len(pairs),
    }


def task_places(name: str, args) -> dict:
    model = model_of(name, args.device, args.layers).eval()
    config = inner_model(model).config.get_text_config()
    places = Places(model, make_documents(args.count, config.vocab_size), args.device)
    found = {"layers": config.num_hidden_layers, "modes": {}}
    for mode in ("off", "on"):
        entry = found["modes"].setdefault(mode, {})
        with batch_invariant() if mode == "on" else nullcontext(), torch.no_grad():
            alone = places.alone()
            runs = {f"rows {seed}": lambda seed=seed: places.in_rows(seed) for seed in range(8)}
            runs |= {f"padded {size}": lambda size=size: places.in_batches(size) for size in (1, 4, 8)}
            runs["full 1"] = lambda: {n: places.batch([n], mask=False)[n] for n in range(8)}
            runs |= {"checkpointing": places.checkpointed, "graphs": places.with_graphs}
            runs["shared prompts"] = places.sharing_prompts
            for place, run in runs.items():
                try:
                    entry[place] = compare(alone, run())
                except Exception as error:
                    entry[place] = {"not_measured": f"{type(error).__name__}: {error}"[:200]}
                    torch.cuda.empty_cache()
        print(f"  {mode}: " + json.dumps({k: x.get("largest", x) for k, x in entry.items()}), flush=True)
    return found | {"implementations": implementations_used()}


def task_grpo(name: str, args) -> dict:
    return {"modes": {mode: grpo(name, args, mode == "on") for mode in ("off", "on")}}


def grpo(name: str, args, invariant: bool) -> dict:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config, prompt, answers = with_layers(MODELS[name], args.layers), 200, 4
    vocab, generator = config["vocab_size"], torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocab, (count,), generator=generator).tolist()

    lengths = split_tokens(generator, 4 * args.batch * 3, 4 * args.batch * 3 * 300, 0.5).tolist()
    groups = {}
    for start in range(0, len(lengths), answers):
        groups[str(start)] = tokens(prompt), [[*tokens(n - 1), 1] for n in lengths[start : start + answers]]

    def rollouts(prompts: list[str], trainer) -> dict:
        rows = [(groups[name][0], groups[name][1][i % answers]) for i, name in enumerate(prompts)]
        return {"prompt_ids": [x for x, _ in rows], "completion_ids": [x for _, x in rows], "logprobs": None}

    adapters = lora_config()
    adapters.init_lora_weights = args.new_adapters
    options = {"bf16": args.device == "cuda", "use_cpu": args.device != "cuda", "report_to": "none"}
    trainer = GRPOTrainer(
        model=make_model(config, "padded", args.device),
        args=GRPOConfig(
            tempfile.mkdtemp(),
            per_device_train_batch_size=args.batch,
            num_generations=answers,
            steps_per_generation=4,
            gradient_accumulation_steps=1,
            max_steps=4,
            max_completion_length=max(lengths),
            learning_rate=0.0,
            beta=0.1,
            gradient_checkpointing=True,
            save_strategy="no",
            **options,
        ),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=Dataset.from_list([{"prompt": name} for name in groups]),
        processing_class=make_tokenizer(),
        peft_config=adapters,
        rollout_func=rollouts,
    )
    configure_packing(trainer, "padding_free", batch_invariant=invariant)
    ratios, kls = [], []
    score, compute = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
    now = {}

    def scored(model, *inputs, batch_size=None, **kwargs):
        # Another batch size than that of the step.
        batch_size = None if torch.is_grad_enabled() else args.old_batch
        found = score(model, *inputs, batch_size=batch_size, **kwargs)
        if torch.is_grad_enabled():
            now["logps"] = found[0].detach()
        return found

    def computed(model, inputs):
        loss = compute(model, inputs)
        mask = inputs["completion_mask"].bool()
        ratios.append((now["logps"] - inputs["old_per_token_logps"]).exp()[mask].cpu())
        kls.append((now["logps"] - inputs["ref_per_token_logps"])[mask].abs().cpu())
        return loss

    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = scored, computed
    trainer.train()
    configure_packing(trainer, False)
    ratio, kl = torch.cat(ratios), torch.cat(kls)
    entry = {"tokens": len(ratio), "ratios_of_exactly_1": int((ratio == 1).sum())}
    entry |= {"ratio": [float(ratio.min()), float(ratio.max())]}
    if args.new_adapters:
        entry["largest_difference_from_reference"] = float(kl.max())
    entry |= {"batch": args.batch, "old_batch": args.old_batch}
    print(f"  {'on' if invariant else 'off'}: {json.dumps(entry)}", flush=True)
    return entry


def task_twice(name: str, args) -> dict:
    layers = args.layers or {"35B-A3B": 4, "4B": 8}.get(name)
    torch.use_deterministic_algorithms(True)
    found = {"steps": args.steps}
    try:
        sums = [train(name, args, layers, (args.steps,)) for _ in range(2)]
        sums.append(train(name, args, layers, (args.steps // 2, args.steps - args.steps // 2)))
        found |= {"checksums": sums, "equal": len(set(sums)) == 1}
    finally:
        torch.use_deterministic_algorithms(False)
    print(f"  {json.dumps(found)}", flush=True)
    return found


def train(name: str, args, layers: int | None, parts: tuple[int, ...]) -> str:
    """Train, with a new model and optimizer for each part that continue from what the one before has saved."""
    saved, step = None, 0
    for part in parts:
        model = model_of(name, args.device, layers) if name != "0.8B" else full_model(name, args)
        model.train()
        trained = [x for x in model.parameters() if x.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=args.device == "cuda")
        if saved is not None:
            saved.seek(0)
            state = torch.load(saved, weights_only=False)
            for parameter, value in zip(trained, state["weights"], strict=True):
                parameter.data.copy_(value)
            optimizer.load_state_dict(state["optimizer"])
        collator = DataCollatorWithFlattening(model=model, return_boundaries=True)
        vocab = inner_model(model).config.get_text_config().vocab_size
        for _ in range(part):
            draw = random.Random(step)
            rows = [[draw.randrange(1, vocab) for _ in range(n)] for n in sample_lengths("lognormal", 8192, step)]
            batch = collator([{"input_ids": ids, "labels": ids} for ids in rows])
            batch = {key: x.to(args.device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
            with torch.autocast(args.device, torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        saved = io.BytesIO()
        torch.save({"weights": [x.data for x in trained], "optimizer": optimizer.state_dict()}, saved)
        total = hashlib.sha256()
        for parameter in trained:
            total.update(parameter.data.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        del model, optimizer, trained
        clear()
    return total.hexdigest()[:16]


def full_model(name: str, args) -> torch.nn.Module:
    return make_model(with_layers(MODELS[name], args.layers), "ours", args.device)


def task_distance(name: str, args) -> dict:
    config = with_layers(MODELS[name], args.layers)
    documents = make_documents(args.count, config["vocab_size"])[:16]
    ours = make_model(config, "ours", args.device).eval()
    places, found = Places(ours, documents, args.device), {}
    with torch.no_grad():
        bf16 = places.alone()
        used = implementations_used()
        arms = {"this package": bf16}
        for op in used:
            with one_reference(op):
                arms[f"{op} by PyTorch"] = places.alone()
        stock = make_model(config, "padded", args.device).eval()
        arms["the stock class"] = Places(stock, documents, args.device).each_unpacked()
        del stock
        # Its weights are those of the first one, which autocast would round again.
        exact = Places(ours.float(), documents, args.device).each_unpacked(torch.float32)
    for arm, logps in arms.items():
        difference = torch.cat([(logps[n].double() - exact[n].double()).abs() for n in exact])
        found[arm] = {"mean": float(difference.mean()), "largest": float(difference.max())}
        print(f"  {arm}: {json.dumps(found[arm])}", flush=True)
    return {"documents": len(documents), "arms": found, "implementations": used}


@contextmanager
def one_reference(op: str):
    """The reference of one op runs, or its last implementation."""
    choose = dispatch.choose

    def chosen(name, impl, table, *args, **kwargs):
        return choose(name, list(table)[-1] if name == op else impl, table, *args, **kwargs)

    with mock.patch.object(dispatch, "choose", chosen):
        yield


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


TASKS = {"places": task_places, "grpo": task_grpo, "twice": task_twice, "distance": task_distance}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--models", nargs="+", choices=(*MODELS, *OTHERS), default=["0.8B"])
    parser.add_argument("--layers", type=int, help="layers of each model, instead of its own number")
    parser.add_argument("--documents", dest="count", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="answers of a step of GRPO")
    parser.add_argument("--old-batch", type=int, default=3, help="answers of a batch before that step")
    parser.add_argument("--new-adapters", action="store_true", help="of GRPO: adapters that add zero")
    parser.add_argument("--steps", type=int, default=20, help="of each run that trains twice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    prepare(args.device)
    report = earlier_report(args.output, machine_name(args.device), parser)
    for name in args.models:
        print(f"{args.task}, {name}", flush=True)
        run = {"command": shlex.join(["python", *sys.argv]), "task": args.task, "model": name}
        start = time.perf_counter()
        run |= TASKS[args.task](name, args)
        run["seconds"] = round(time.perf_counter() - start, 1)
        report["runs"].append(run)
        clear()
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
