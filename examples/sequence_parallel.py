"""Fine-tune a language model on rows that do not fit on one GPU: several GPUs compute each row.

torchrun --nproc_per_node 2 examples/sequence_parallel.py --sequence_parallel_size 2        # a tiny model, on a CPU
accelerate launch --config_file examples/fsdp2.yaml examples/sequence_parallel.py \\
    --model Qwen/Qwen3.5-4B --dataset trl-lib/Capybara --max-length 262144 --batch-size 1 \\
    --sequence_parallel_size 4                                                             # on 4 GPUs
"""

import common
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_packed import PackedTrainer, PackedTrainingArguments


def main(options):
    name = options.model or common.tiny_checkpoint()
    on_gpu = torch.cuda.is_available()
    # Before the model: this starts the process group. With FSDP, only one process then reads the weights.
    args = PackedTrainingArguments(
        options.output,
        packing=True,
        max_length=options.max_length,
        sequence_parallel_size=options.sequence_parallel_size,  # the only change
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        gradient_checkpointing=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=5,
        report_to="none",
    )
    dataset = load_dataset(options.dataset, split="train") if options.dataset else common.chats()
    tokenizer = AutoTokenizer.from_pretrained(name)

    def tokenize(sample):
        tokens = tokenizer.apply_chat_template(sample["messages"], return_dict=True)["input_ids"][: options.max_length]
        return {"input_ids": tokens, "labels": tokens}

    trainer = PackedTrainer(
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        args,
        train_dataset=dataset.map(tokenize, remove_columns=dataset.column_names),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    trainer.accelerator.end_training()  # destroys the process group


if __name__ == "__main__":
    size = {"type": int, "default": 1, "metavar": "P", "help": "processes per row (default: 1)"}
    common.run(main, __doc__, dataset="a column messages", sequence_parallel_size=size)
