"""Distill a larger model with the same vocabulary into a smaller one, on chats of your own.

python examples/distillation.py                                          # tiny models with random weights, on a CPU
python examples/distillation.py --model Qwen/Qwen3.5-0.8B --teacher Qwen/Qwen3.5-4B --dataset trl-lib/Capybara
"""

import common
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from transformers_packed import configure_packing


def main(options):
    name = options.model or common.tiny_checkpoint()
    dataset = load_dataset(options.dataset, split="train") if options.dataset else common.chats()
    tokenizer = AutoTokenizer.from_pretrained(name)
    on_gpu = torch.cuda.is_available()
    if options.teacher:
        # It is frozen, so it needs no more than 16 bits.
        dtype = torch.bfloat16 if on_gpu else torch.float32
        teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=dtype)
    else:
        teacher = common.tiny_teacher()

    def tokenize(sample):
        tokens = tokenizer.apply_chat_template(sample["messages"], return_dict=True)["input_ids"]
        return {"input_ids": tokens, "labels": tokens}

    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        TrainingArguments(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            bf16=on_gpu,
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=dataset.map(tokenize, remove_columns=dataset.column_names),
        processing_class=tokenizer,
    )
    # Half of the loss is that on the chats, half the divergence from the teacher.
    configure_packing(trainer, teacher=teacher, distill_weight=0.5)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    teacher = {"metavar": "NAME", "help": "larger checkpoint (default: a tiny one with random weights)"}
    common.run(main, __doc__, dataset="a column messages", teacher=teacher)
