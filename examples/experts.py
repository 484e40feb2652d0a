"""Train a mixture of experts on chats in packed rows, with its experts spread over all processes.

python examples/experts.py                                          # a tiny model in one process, on a CPU
torchrun --nproc_per_node 8 examples/experts.py --model Qwen/Qwen3.5-35B-A3B --dataset trl-lib/Capybara --batch-size 1
"""

import os

import common
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from transformers_packed import configure_packing, registered


def main(options):
    name = options.model or common.tiny_checkpoint(experts=True)
    dataset = load_dataset(options.dataset, split="train") if options.dataset else common.chats()
    tokenizer = AutoTokenizer.from_pretrained(name)

    def tokenize(sample):
        tokens = tokenizer.apply_chat_template(sample["messages"], return_dict=True)["input_ids"]
        return {"input_ids": tokens, "labels": tokens}

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # One process has all experts. FSDP2 shards the other weights.
    spread = {"distributed_config": DistributedConfig(fsdp_size=processes, ep_size=processes)} if processes > 1 else {}
    # A model that is sharded while it is loaded cannot be patched afterwards.
    with registered():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **spread)
    trainer = Trainer(
        model,
        TrainingArguments(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
            save_only_model=True,  # Transformers saves no optimizer of such models
        ),
        train_dataset=dataset.map(tokenize, remove_columns=dataset.column_names),
        processing_class=tokenizer,
    )
    configure_packing(trainer, True, max_length=options.max_length, overlong="truncate")
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    common.run(main, __doc__, dataset="a column messages")
