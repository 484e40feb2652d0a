"""Fine-tune a language model on chats with Hugging Face's Trainer, without padding.

python examples/trainer.py                                                        # a tiny model, on a CPU
python examples/trainer.py --model Qwen/Qwen3.5-0.8B --dataset trl-lib/Capybara   # on a GPU
"""

import common
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from transformers_packed import configure_packing


def main(options):
    name = options.model or common.tiny_checkpoint()
    dataset = load_dataset(options.dataset, split="train") if options.dataset else common.chats()
    tokenizer = AutoTokenizer.from_pretrained(name)

    def tokenize(sample):
        tokens = tokenizer.apply_chat_template(sample["messages"], return_dict=True)["input_ids"][: options.max_length]
        return {"input_ids": tokens, "labels": tokens}

    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        TrainingArguments(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=dataset.map(tokenize, remove_columns=dataset.column_names),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    configure_packing(trainer)  # the only change
    trainer.train()
    trainer.save_model()
    print(f"Saved the model and the tokenizer in {options.output}")


if __name__ == "__main__":
    common.run(main, __doc__, dataset="a column messages")
