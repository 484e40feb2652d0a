"""The page of steps of preference and reinforcement learning."""

from card import HEAD, PREFERENCE, Card, gib, ms, on_gpu, table, times
from steps import SHAPE


NAMES = {"trl": "TRL alone", "ours": "ours", "ours+shared": "ours, shared prompts"}
HEAD_ARMS = {"cross_entropy": "Cross entropy", "logps": "Log-probabilities", "logps+entropy": "With entropies"}
# The sizes of the batches in benchmarks/preference.py.
ANSWERS, PROMPT, ANSWER, DPO_PROMPT = 8, 1024, 512, 512


def preference(results: dict) -> Card:
    runs = results["preference.json"]["runs"]
    dpo = next(run for run in runs if run["task"] == "dpo")
    one, four = sorted((run for run in runs if run["task"] == "grpo"), key=lambda run: run["groups"])
    rows = []
    for run in (dpo, four, one):
        first = next(iter(run["arms"].values()))["median_ms"]
        for name, arm in run["arms"].items():
            tokens = f"{computed(run, name, arm):,}"
            rows.append((shape(run), NAMES[name], tokens, ms(arm), times(arm["median_ms"] / first), gib(arm)))
    trl, ours, shared = (dpo["arms"][name] for name in NAMES)
    gain, group_gain = (
        times(a["median_ms"] / b["median_ms"])
        for a, b in ((trl, shared), map(four["arms"].get, ("ours", "ours+shared")))
    )
    heads = results["head.json"]["runs"]
    head_rows = [
        (run["model"], "trained" if run["trained"] else "frozen", *(ms(run["arms"][name]) for name in HEAD_ARMS))
        for run in heads
    ]
    return Card(
        "Preferences and shared prompts",
        f"A DPO step of the 4B shape with LoRA takes {ms(shared)} with shared prompts, {ms(ours)} without, and {ms(trl)} with "
        f"TRL alone. A GRPO step of the 0.8B shape is {group_gain} as fast with shared prompts as without.",
        [
            f"""{SHAPE} *TRL alone* is the stock class with flash-linear-attention on TRL's padded batch. *Ours* is the same
trainer or model after `configure_packing` or `patch_model`, which computes the real tokens of that batch. *Shared prompts*
computes a prompt once for all of its documents.""",
            table(("Step", "Variant", "Computed tokens", "Time", "Time over the first", "Peak memory"), rows),
            f"""The DPO step is `DPOTrainer.training_step` and the optimizer, with gradient checkpointing. The reference model is the
policy with its adapters turned off. The batch of {dpo["pairs"]} pairs has {trl["padded_tokens"]:,} padded and {trl["tokens"]:,} real
tokens. Prompts have {DPO_PROMPT} tokens. Answers are lognormal (many short, few long) with a mean of 300 tokens, from 8 to 2,048.""",
            f"""The GRPO step is the learning step without generation: log-probabilities through TRL's head, a clipped policy gradient, backward
and the optimizer, without gradient checkpointing. A group is {ANSWERS} answers of {ANSWER} tokens on a prompt of {PROMPT:,} tokens.
The batch has no padding: the whole gain comes from shared prompts.""",
            f"""The step of one group at 4B is bound by the host: {computed(one, "ours+shared", {}):,} computed tokens are too few to
keep the GPU busy.""",
            """LoRA has rank 16 on all linear layers. Steps follow one another as in training, and CUDA events take the times. Each
figure is the median after a warm-up.""",
            "## The head alone",
            """These trainers need the log-probability of each token, and log the entropy. Both come from the head without logits,
as the cross entropy does. The times are of forward and backward of the head on 16,384 tokens.""",
            table(("Shape", "Head", *HEAD_ARMS.values()), head_rows),
            """With a trained head, the gradients of its weight wait until the gradient of each log-probability is known. So the
backward computes the logits again.""",
        ],
        ["preference.json", "head.json"],
        **on_gpu(results, "preference.json"),
        commands=[run["command"] for run in (dpo, four, one, *heads)],
        committed=[PREFERENCE, HEAD],
        number=f"DPO at 4B {gain} as fast as TRL alone; shared prompts: GRPO at 0.8B {group_gain}",
    )


def shape(run: dict) -> str:
    adapters = ", LoRA" if run["lora"] else ""
    if run["task"] == "dpo":
        return f"DPO, {run['model']}{adapters}, {run['pairs']} pairs"
    return f"GRPO, {run['model']}{adapters}, {run['groups']} group{'s' if run['groups'] > 1 else ''} of {ANSWERS}"


def computed(run: dict, name: str, arm: dict) -> int:
    """The tokens that a forward computes. A shared prompt counts once."""
    if name == "trl":
        return arm["padded_tokens"]
    if name == "ours":
        return arm["tokens"]
    if run["task"] == "dpo":
        return arm["tokens"] - run["pairs"] * DPO_PROMPT
    return run["groups"] * (PROMPT + ANSWERS * ANSWER)
