"""Compute one training step of ms-swift on a packed row, and compare it with the stock class on each document alone.

Usage: swift_step.py FOLDER [OPTION ...], with the options of `swift sft`. Prints the losses and the relative difference
of all gradients as the last line, in JSON. Without a plugin, ms-swift does not accept packed rows on a CPU, because it
requires a flash attention implementation. This script then turns packing on after that check.
"""

import json
import sys

import torch
import transformers
from swift.pipelines import SwiftSft
from swift.trainers import TrainerFactory


def main(folder: str, options: list[str]) -> None:
    sft = SwiftSft(["--model", folder, *options])
    sft.args.packing = True
    rows, _ = sft._prepare_dataset()
    model = sft.prepare_model(sft.args, sft.model, template=sft.template, train_dataset=rows)
    cls = TrainerFactory.get_trainer_cls(sft.args)
    trainer = cls(model=model, args=sft.args.training_args, template=sft.template, train_dataset=rows)
    documents = [{name: sample[name] for name in ("input_ids", "labels")} for sample in rows[0]]
    batch = trainer.data_collator([rows[0]])
    sft.template.register_post_encode_hook([model])
    loss = trainer.compute_loss(model.train(), trainer._prepare_inputs(batch))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    stock = getattr(transformers, type(model).__name__).from_pretrained(folder, dtype=torch.float32).train()
    targets, total = sum(label != -100 for document in documents for label in document["labels"][1:]), 0.0
    for document in documents:
        inputs = {name: torch.tensor([column]) for name, column in document.items()}
        part = stock(**inputs, num_items_in_batch=targets).loss
        part.backward()
        total += part.item()
    expected = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.grad is not None}
    difference = sum((gradients[name] - x).square().sum() for name, x in expected.items()).sqrt()
    size = sum(x.square().sum() for x in expected.values()).sqrt()
    result = {
        "documents": len(documents),
        "loss": loss.item(),
        "alone": total,
        "gradients": (difference / size).item(),
    }
    result["position_ids"] = list(batch["position_ids"].shape)
    result["lengths"] = [len(document["input_ids"]) for document in documents]
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
