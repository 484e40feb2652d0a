"""Fine-tune a vision-language model on images and chats with Hugging Face's Trainer, without padding.

python examples/vision_language.py                            # a tiny model, on a CPU
python examples/vision_language.py --model Qwen/Qwen3.5-0.8B \\
    --dataset HuggingFaceH4/llava-instruct-mix-vsft           # on a GPU; the processor needs torchvision
"""

import common
import torch
from datasets import load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

from transformers_packed import configure_packing


class Processed(torch.utils.data.Dataset):
    """Processes each sample on access. Image tokens have no loss."""

    def __init__(self, samples, processor):
        self.samples, self.processor = samples, processor

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        text = self.processor.apply_chat_template(sample["messages"])
        inputs = self.processor(text=[text], images=sample["images"] or None, return_tensors="pt")
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            inputs[name] = inputs[name][0]
        labels = inputs["input_ids"].masked_fill(inputs["mm_token_type_ids"] != 0, -100)
        return {**inputs, "labels": labels}


def main(options):
    if options.model:
        name, processor = options.model, AutoProcessor.from_pretrained(options.model)
    else:
        name, processor = common.tiny_vision_checkpoint()
    samples = load_dataset(options.dataset, split="train") if options.dataset else common.image_chats()
    trainer = Trainer(
        AutoModelForImageTextToText.from_pretrained(name, dtype=torch.float32),
        TrainingArguments(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=Processed(samples, processor),
        processing_class=processor.tokenizer,
    )
    configure_packing(trainer)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    common.run(main, __doc__, dataset="columns images and messages")
