"""Train LoRA adapters on chats with Hugging Face's Trainer, in packed rows of up to max-length tokens.

python examples/lora.py                                                                        # a tiny model, on a CPU
python examples/lora.py --model Qwen/Qwen3.5-0.8B --dataset trl-lib/Capybara --batch-size 1    # on a GPU
"""

import common
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from transformers_packed import configure_packing


def main(options):
    name = options.model or common.tiny_checkpoint()
    dataset = load_dataset(options.dataset, split="train") if options.dataset else common.chats()
    tokenizer = AutoTokenizer.from_pretrained(name)

    def tokenize(sample):
        tokens = tokenizer.apply_chat_template(sample["messages"], return_dict=True)["input_ids"]
        return {"input_ids": tokens, "labels": tokens}

    # The base model is frozen, so it needs no float32 weights if the GPU computes in bfloat16.
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16 if torch.cuda.is_available() else None)
    trainer = Trainer(
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")),
        TrainingArguments(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=2e-4,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=dataset.map(tokenize, remove_columns=dataset.column_names),
    )
    configure_packing(trainer, True, max_length=options.max_length, overlong="truncate")
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    common.run(main, __doc__, dataset="a column messages")
