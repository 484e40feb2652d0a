"""Train a mixture of experts, and count with the stock model which experts its tokens choose.

Also a script, `expert_load_run.py OUTPUT`, to run in several processes as with torchrun.
"""

import sys

import torch
from accelerate.utils import gather_object
from scripts.trainer_arms import EXPERTS, OPTIONS, TINY, Samples, save_and_end
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Trainer, TrainingArguments, set_seed

from transformers_packed import DataCollatorWithFlattening, configure_packing


NUMBER = 8


def make_model() -> Qwen3_5MoeForCausalLM:
    set_seed(0)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**TINY, **EXPERTS | {"num_experts": NUMBER}))
    # Choices that do not depend on rounding. The last expert is hardly ever among the best two.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(std=1.0)
            layer.mlp.gate.weight[-1] = layer.mlp.gate.weight[:-1].mean(0)
    return model


def build(directory: str, model=None, **options) -> tuple[Trainer, list[torch.Tensor]]:
    """Return a Trainer whose weights stay as they are, and the list to which it adds the counts of its batches.

    Counts `[layers, experts]` are those of the stock router in a forward of each document.
    """
    model = make_model() if model is None else model
    stock = make_model().train()
    defaults = {"max_steps": 4, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    arguments = OPTIONS | defaults | {"learning_rate": 0.0, "logging_steps": 2} | options
    # Rows end with padding.
    collator = DataCollatorWithFlattening(
        pad_to_multiple_of=64, pad_token_id=0, return_flash_attn_kwargs=True, on_leak="ignore"
    )
    samples = {"train_dataset": Samples(24), "eval_dataset": Samples(8), "data_collator": collator}
    trainer = Trainer(model, TrainingArguments(directory, **arguments), **samples)
    configure_packing(trainer, "padding_free", verify=False)
    step, counted = trainer.training_step, []

    def training_step(model, inputs, *args, **kwargs):
        ends, padding = inputs["cu_seq_lens_q"].tolist(), inputs.get("padding_tokens") or 0
        documents = inputs["input_ids"][0].split(torch.tensor(ends).diff().tolist())
        counted.append(sum(stock_counts(stock, ids) for ids in documents[: -1 if padding else None]))
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = training_step
    return trainer, counted


@torch.no_grad()
def stock_counts(model: Qwen3_5MoeForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    found = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda module, args, output: found.append(output[2])) for gate in gates]
    model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.bincount(index.flatten(), minlength=NUMBER) for index in found])


if __name__ == "__main__":
    (output,) = sys.argv[1:]
    sys.modules["fla"] = None  # the stock class would run its CUDA kernels on CPU tensors
    trainer, counted = build(f"{output}.trainer")
    trainer.train()
    counts = gather_object([counted])
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    save_and_end(trainer, output, log=log, counts=counts)
