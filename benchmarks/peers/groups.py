"""Groups of answers for `train.py --task grpo`, and the learning step of TRL's `GRPOTrainer` on them.

No tool generates: `rollout_func` returns the same prompts and answers to every tool, and the reward is a function of their
tokens. A step has `--documents` answers, 8 for each prompt of `--prompt` tokens. Answers have lognormal lengths,
with sigma 0.5, and an end. Prompts, counted once for each answer, and answers add up to `--tokens` in each step. The
settings are TRL's defaults: the loss of DAPO, no reference model, and one update with each batch.
"""

import torch


SIGMA = 0.5
# Of the tokenizer that `pairs.py` makes.
PAD, END = 0, 1


def make_groups(args) -> list[tuple[list[int], list[list[int]]]]:
    """The prompts of all steps, each with its answers."""
    from pairs import WORDS
    from shapes import split_tokens

    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, WORDS, (count,), generator=generator).tolist()

    groups = []
    for _ in range(args.warmup + args.steps):
        answers = args.tokens - args.documents * args.prompt
        lengths = split_tokens(generator, args.documents, answers, SIGMA).tolist()
        for start in range(0, args.documents, args.answers):
            prompt = tokens(args.prompt)
            groups.append((prompt, [[*tokens(n - 1), END] for n in lengths[start : start + args.answers]]))
    return groups


def make_trainer(args, model, settings: dict, groups, callback, adapters):
    """`adapters` is the configuration of those that the trainer adds."""
    from datasets import Dataset
    from pairs import make_tokenizer
    from trl import GRPOConfig, GRPOTrainer

    def rollouts(prompts: list[str], trainer) -> dict:
        rows = [(groups[int(name)][0], groups[int(name)][1][i % args.answers]) for i, name in enumerate(prompts)]
        found = sum(len(prompt) + len(answer) for prompt, answer in rows)
        if found != args.tokens:
            raise RuntimeError(
                f"Expected {args.tokens} tokens in a step, got {found}: the trainer asks for the answers of other prompts. "
                "Look at its sampler and its batch size."
            )
        return {"prompt_ids": [x for x, _ in rows], "completion_ids": [x for _, x in rows], "logprobs": None}

    config = GRPOConfig(
        **settings,
        per_device_train_batch_size=args.documents,
        num_generations=args.answers,
        max_completion_length=max(len(answer) for _, answers in groups for answer in answers),
        shuffle_dataset=False,
        # TRL's defaults, in place of Unsloth's.
        loss_type="dapo",
        beta=0.0,
        mask_truncated_completions=False,
    )
    return GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        # The number of each group stands for its prompt.
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(groups))]),
        processing_class=make_tokenizer(),
        callbacks=[callback],
        peft_config=adapters,
        rollout_func=rollouts,
    )


def reward(completion_ids, **kwargs) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def check_answers(args, trainer, groups) -> dict:
    """The mean log-probabilities of the answers to the first prompt, and what changes with the first answer in others."""
    first = groups[: args.documents // args.answers]
    rows = [(prompt, answer) for prompt, answers in first for answer in answers]
    (prompt, answer), *others = rows
    device = next(trainer.model.parameters()).device

    def logps(rows) -> tuple[torch.Tensor, torch.Tensor]:
        samples = [torch.tensor([*prompt, *answer], device=device) for prompt, answer in rows]
        ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD)
        mask = (ids != PAD).long()
        kept = ids.shape[1] - args.prompt
        # With gradients, as in training: a tool may take other kernels without.
        found, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, kept)
        return found.detach().float() * mask[:, -kept:], mask[:, -kept:].sum(dim=1)

    changed = [(prompt, [*answer[-2::-1], END]), *others]
    (before, lengths), (again, _), (after, _) = (logps(x) for x in (rows, rows, changed))
    means = before.sum(dim=1) / lengths
    return {
        "logps": {str(args.warmup + args.steps): [round(x, 4) for x in means[: args.answers].tolist()]},
        "isolation": {
            "loss": -float(means.mean()),
            "repeated": float((again - before)[1:].abs().max()),
            "changed": float((after - before)[1:].abs().max()),
        },
    }
