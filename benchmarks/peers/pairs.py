"""Preference pairs for `train.py --task dpo`, and TRL's `DPOTrainer` on them.

Every tool gets the same texts, in which each word is one token, and the same tokenizer. A step has `--documents` sequences,
two for each pair: a prompt of `--prompt` tokens, and a chosen or a rejected answer. Answers have lognormal lengths, with
sigma 0.8. Prompts, counted twice, and answers add up to `--tokens` in each step.
"""

import torch


# As many as the samples of the other task draw from; the first three are the special ones.
WORDS = 2000
SIGMA = 0.8


def make_tokenizer(words: int = WORDS):
    """A tokenizer of so many words, the special ones included. `AutoTokenizer` would make one of the model's family."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(word(i) for i in range(3, words))]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def word(token: int) -> str:
    return f"t{token}"


def make_pairs(args) -> list[dict[str, str]]:
    """The pairs of all steps. TRL appends the last token of an answer, which ends it."""
    from shapes import split_tokens

    generator = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return " ".join(word(i) for i in torch.randint(3, WORDS, (count,), generator=generator).tolist())

    pairs, answers = [], args.tokens - args.documents * args.prompt
    for _ in range(args.warmup + args.steps):
        lengths = split_tokens(generator, args.documents, answers, SIGMA).tolist()
        for chosen, rejected in zip(lengths[::2], lengths[1::2], strict=True):
            # The space keeps the last word of the prompt apart from the first one of an answer.
            prompt = text(args.prompt) + " "
            pairs.append({"prompt": prompt, "chosen": text(chosen - 1), "rejected": text(rejected - 1)})
    return pairs


def check_lengths(args, rows) -> None:
    """Raise an error unless the first step has the tokens that the run counts."""
    first = rows.select(range(args.documents // 2))
    found = sum(2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in first)
    if found != args.tokens:
        raise RuntimeError(
            f"Expected {args.tokens} tokens in the first step, got {found}: the trainer split the words of the pairs "
            "otherwise. Look at what it does with its tokenizer and its dataset."
        )


def make_trainer(args, model, settings: dict, pairs, callback, adapters):
    """`adapters` is the configuration of those that the trainer adds, which make the model without them the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(**settings, max_length=None, per_device_train_batch_size=args.documents // 2),
        train_dataset=Dataset.from_list(pairs),
        processing_class=make_tokenizer(),
        callbacks=[callback],
        peft_config=adapters,
    )
    check_lengths(args, trainer.train_dataset)
    return trainer
