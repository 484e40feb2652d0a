"""Train LoRA adapters on trees of turns: rollouts that branch, with each turn computed once.

The documents of a packed row are the turns, and `parent_of` says which turn each one continues. The script compares
a row of trees with a row of separate samples, one for each path from a question to a last answer, and trains on trees.

python examples/tree.py                                               # a tiny model, on a CPU
python examples/tree.py --model Qwen/Qwen3.5-0.8B --max-steps 20      # on a GPU
"""

import time
from itertools import accumulate
from statistics import mean, median

import common
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_packed import patch_model, per_document_logps
from transformers_packed.shared_prompts import to_level_order


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def forest_of(trees, tokenizer, max_length):
    """The turns of several trees with their tokens, labels and parents, and their paths with advantages."""
    turns, parent_of, paths = [], [], []
    for tree in trees:
        start = len(turns)
        for turn in tree:
            head, said = (
                tokenizer(text, add_special_tokens=False)["input_ids"][:max_length]
                for text in (f"<|im_start|>{turn['role']}\n", f"{turn['content']}<|im_end|>\n")
            )
            # What the assistant says is a target. The first token of a document never is.
            ignored = [-100] * len(said)
            turns.append((head + said, [-100] * len(head) + (said if turn["role"] == "assistant" else ignored)))
            parent_of.append(turn["parent"] + start if turn["parent"] >= 0 else -1)
        last = [number for number in range(start, len(turns)) if number not in parent_of]
        rewards = [tree[number - start]["reward"] for number in last]
        paths += [
            (path_to(number, parent_of), reward - mean(rewards)) for number, reward in zip(last, rewards, strict=True)
        ]
    return turns, parent_of, paths


def path_to(turn, parent_of):
    return [*path_to(parent_of[turn], parent_of), turn] if turn >= 0 else []


def pack(turns, documents, parent_of=None):
    """A packed row of documents, which are lists of turns with an advantage."""
    ids, labels = ([x for path, _ in documents for n in path for x in turns[n][column]] for column in (0, 1))
    ends = accumulate((sum(len(turns[n][0]) for n in path) for path, _ in documents), initial=0)
    row = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
    row["advantages"] = torch.tensor([advantage for _, advantage in documents])
    row = {name: x.to(DEVICE) for name, x in row.items()}
    # These stay on the host.
    row["where"] = {"cu_seqlens": torch.tensor([*ends], dtype=torch.int32)}
    if parent_of is not None:
        row["where"]["parent_of"] = torch.tensor(parent_of)
    return row


def pack_trees(turns, parent_of, paths):
    """A row with each turn once. A turn counts with the advantages of all paths through it."""
    # In this order, no layer has to move tokens.
    order, parents = to_level_order(parent_of)
    documents = [([turn], sum(advantage for path, advantage in paths if turn in path)) for turn in order]
    return pack(turns, documents, parents)


def backward(model, row, targets):
    """Return the loss of a policy gradient, a mean over the targets of all paths."""
    base = model.get_base_model()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        hidden = base.model(row["input_ids"], **row["where"], use_cache=False).last_hidden_state
        logps = per_document_logps(hidden, row["labels"], row["where"]["cu_seqlens"], head=base.lm_head)
    loss = -(logps.sums * row["advantages"]).sum() / targets
    loss.backward()
    return loss.item()


def compare(model, rows, targets):
    """Print the loss, the gradients and the time of a row of trees and of one of separate samples."""
    losses, gradients, seconds = [], [], []
    for row in rows:
        times = []
        for _ in range(4):
            model.zero_grad()
            start = time.perf_counter()
            loss = backward(model, row, targets)
            times.append(time.perf_counter() - start)
        losses.append(loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        seconds.append(median(times[1:]))
    model.zero_grad()
    trees, samples = (row["input_ids"].numel() for row in rows)
    error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    print(f"Tokens: {trees:,} as trees, {samples:,} as separate samples ({samples / trees:.1f} x)")
    print(f"Loss: {losses[0]:.6f} as trees, {losses[1]:.6f} as separate samples; gradients differ by {error:.0e}")
    print(
        f"Step: {seconds[0]:.2f} s as trees, {seconds[1]:.2f} s as separate samples ({seconds[1] / seconds[0]:.1f} x)"
    )


def main(options):
    name = options.model or common.tiny_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(name)
    dataset = load_dataset(options.dataset, split="train") if options.dataset else common.trees()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16 if torch.cuda.is_available() else None)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    model = get_peft_model(patch_model(model), adapters).to(DEVICE).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for step in range(options.max_steps):
        start = step * options.batch_size
        trees = [dataset[n % len(dataset)]["turns"] for n in range(start, start + options.batch_size)]
        turns, parent_of, paths = forest_of(trees, tokenizer, options.max_length)
        row, samples = pack_trees(turns, parent_of, paths), pack(turns, paths)
        targets = (samples["labels"] != -100).sum()
        if step == 0:
            compare(model, (row, samples), targets)
        loss = backward(model, row, targets)
        optimizer.step()
        optimizer.zero_grad()
        print(f"Step {step}: loss {loss:.6f}")
    model.save_pretrained(options.output)


if __name__ == "__main__":
    common.run(
        main, __doc__, dataset="a column turns: messages, each with its parent, and the last ones with a reward"
    )
