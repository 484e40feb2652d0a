"""Train random set-ups twice, padded through the built-in class and packed through ours, and compare.

A set-up is drawn from its seed alone (`draw`): a family, an attention implementation, gradient checkpointing, a PEFT
method, changes to modules, a way to packed rows, a loop around the model and arguments of Trainer. The oracle is the
built-in class on padded batches of the same samples, with the same weights (`fuzz_arms.run`). Compared are losses, the
gradients and weights of every step, an evaluation, and what hooks saw, at real tokens (`errors`).

A set-up passes when ours equals the oracle, when it ends with an error of this package (`errors.input_error`), or when
automatic packing says in one line that it stays off, and training then equals the oracle. Everything else is printed,
with the seed that runs it again. A set-up that the oracle itself cannot run is counted as skipped.

Usage: python utils/fuzz.py [--seed N] [--seconds S] [--count N] [--only] [--shrink]
"""

import argparse
import contextlib
import faulthandler
import logging
import math
import os
import random
import re
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any


# DDP warns of every set-up in which all parameters are used.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Every set-up has other shapes, and what is kept of each adds up over an hour.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
import torch
import transformers
from fuzz_arms import CHANGES, CONFIGURED, FAMILIES, HOOKS, PEFT, STOCK, Result, Setup, build, run

import transformers_packed


# Relative to the norm of each gradient. Other orders of the same sums stay below a tenth of it in float32, and what
# leaves out a module or mixes documents is above it tenfold. Where rounding counts for more (experts that change hands,
# terms that cancel), the oracle shows it: then the bar is `_ROUNDING` times what weights off by half a unit in the last
# place, or by one or two, change in the oracle itself.
_BAR, _BF16_BAR, _ROUNDING = 1e-4, 5e-2, 10
# Gradients below this part of the gradient of all parameters are compared with that part.
_FLOOR = 1e-3
_HANGS = 180  # seconds
# The share of set-ups that have to be equal, and of how many that is asked.
_FEWEST_EQUAL, _ENOUGH = 0.5, 20
# Methods of PEFT that put tokens before the row.
PROMPTS = ("prompt", "p_tuning", "prefix")
# The modules that a change is made for, where that is not any.
_FITS = {
    "subclass": r".",  # Trainer looks at the name of the model's own class
    "identity": r"(q_norm|k_norm|layernorm|model\.norm|dropout|drop_path)$",
    "activation": r"act_fn$",
    "parametrized": r"(_proj|norm|conv1d|lm_head|embed_tokens|in_proj_\w+|gate|fc1|qkv)$",
    "weight_norm": r"(_proj|lm_head|in_proj_\w+)$",
    "spectral_norm": r"(_proj|lm_head|in_proj_\w+)$",
}


def draw(seed: int) -> Setup:
    """The set-up of a seed."""
    rng = random.Random(seed)

    def rarely(value: Any, otherwise: Any = None, share: float = 0.1) -> Any:
        return value if rng.random() < share else otherwise

    family = rng.choice([*FAMILIES, "qwen3_next", "qwen3_5"])
    # Stock models need neither of the first two; on the others a collator alone is refused.
    weights = (1, 1, 3, 2, 4) if family in STOCK else (3, 3, 3, 2, 0.2)
    (way,) = rng.choices(("register", "patch", "configure", "packed_trainer", "stock"), weights)
    configured = way in CONFIGURED
    mode = rng.choice(["auto", "auto", "padding_free", "pack"]) if configured else rarely("padded", "rows")
    loop = (
        "trainer" if configured or way == "stock" else rng.choice(["trainer", "trainer", "plain", "ddp", "accelerate"])
    )
    collator = {name: True for name in ("cu_seqlens", "seq_idx", "flash_attn_kwargs") if rng.random() < 0.4}
    collator = {f"return_{name}": True for name in collator}
    if rng.random() < 0.2:
        collator |= {"pad_to_multiple_of": rng.choice([8, 64]), "pad_token_id": 0}
    changes = tuple(_draw_change(rng, family) for _ in range(rng.choice([0, 0, 1, 2, 3])))
    arguments = {
        "use_cache": rarely(True),
        "label_smoothing_factor": rarely(0.1),
        "neftune_noise_alpha": rarely(5.0, share=0.06),
        "max_grad_norm": rarely(0.5, share=0.2),
        "train_sampling_strategy": rarely(rng.choice(["group_by_length", "sequential"]), share=0.2),
        "dataloader_num_workers": rarely(1, share=0.03),
        "dataloader_drop_last": rarely(True),
        "auto_find_batch_size": rarely(True),
        "average_tokens_across_devices": rarely(False),
        "remove_unused_columns": rarely(False),
        "include_num_input_tokens_seen": rarely("all", share=0.05),
        "torch_empty_cache_steps": rarely(1, share=0.05),
        "weight_decay": rarely(0.1),
        "optim": rarely("adamw_torch", share=0.05),
    }
    arguments = {name: value for name, value in arguments.items() if value is not None} if loop == "trainer" else {}
    config = {"tie_word_embeddings": rarely(True), "hidden_act": rarely("gelu"), "attention_bias": rarely(True)}
    if "moe" in family or family == "qwen3_next":
        config["output_router_logits"] = rarely(True, share=0.3)
    adapter = rarely(rng.choice(list(PEFT)), "", share=0.35)
    if "neftune_noise_alpha" in arguments:
        # The noise is what the embeddings themselves are not.
        changes, adapter = (), ""
    if loop != "trainer" and adapter in PROMPTS:
        # PEFT takes position_ids away there, with a warning of its own, before any of this package's code.
        adapter = ""
    bf16 = rng.random() < 0.15
    evaluation = rarely("loss", share=0.3)
    if way in CONFIGURED:
        evaluation = rarely(rng.choice(["predictions", "inputs"]), evaluation, share=0.3)
    return Setup(
        seed,
        family=family,
        way=way,
        mode=mode,
        collator=collator if not configured and mode == "rows" else {},
        loop=loop,
        attention=rng.choice(["sdpa", "sdpa", "eager"]),
        checkpointing=rarely(rng.choice(["reentrant", "non_reentrant"]), "", share=0.3),
        peft=adapter,
        changes=changes,
        late=rng.random() < 0.5,
        config={name: value for name, value in config.items() if value is not None},
        batch_size=rng.choice([1, 2, 2, 3, 4]),
        accumulation=rng.choice([1, 1, 2, 3]),
        # In bfloat16 a step makes other experts of a tie, and the arms part.
        steps=1 if bf16 else rng.choice([1, 2, 2]),
        bf16=bf16,
        evaluation=(evaluation or "") if loop == "trainer" else "",
        arguments=arguments,
    )


@cache
def module_names(family: str) -> dict[str, list[str]]:
    """The names of a family's modules, by name without numbers, so that rare ones are drawn as often as others."""
    groups: dict[str, list[str]] = {}
    for name, _ in build(Setup(0, family=family), ours=False).named_modules():
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return groups


def _draw_change(rng: random.Random, family: str) -> tuple[str, str]:
    # Hooks that only look are as frequent as all else together, nearly: they are the most frequent in life.
    kind = rng.choice([*HOOKS, *HOOKS, *CHANGES])
    groups = module_names(family)
    likely = [key for key in groups if re.search(_FITS.get(kind, ""), key)]
    return kind, rng.choice(groups[rng.choice(likely)])


def errors(actual: Result, expected: Result) -> dict[str, float]:
    """By what is compared, the relative error; infinite where there is nothing to compare."""
    found = {}
    for number, (got, want) in enumerate(_pairs(found, "losses", actual.losses, expected.losses)):
        found[f"loss {number}"] = abs(got - want) / max(abs(want), 1e-3)
    for number, (got, want) in enumerate(_pairs(found, "gradients", actual.gradients, expected.gradients)):
        # All of them may be zero but for rounding, as those of queries are in documents of one token.
        floor = _FLOOR * max(_norm(want.values()), 1.0)
        for name in got.keys() | want.keys():
            pair = [x.get(name, torch.zeros(())) for x in (got, want)]
            found[f"gradient {number} of {name}"] = _error(*pair, floor)
    changes = {name: value - expected.before[name] for name, value in expected.after.items()}
    floor = _FLOOR * _norm(changes.values())
    for name, change in changes.items():
        if name not in actual.after or not torch.equal(actual.before[name], expected.before[name]):
            found[f"initial weight {name}"] = float("inf")
        else:
            # A weight itself is rounded to seven digits.
            rounding = 2e-3 * expected.after[name].norm().item()
            found[f"weight {name}"] = _error(actual.after[name], expected.after[name], floor + rounding, change)
    for (kind, name), calls in expected.seen.items():
        what = f"calls of the {kind} hook of {name or 'all modules'}"
        got = actual.seen.get((kind, name), [])
        if kind == "global":
            more, fewer = Counter(got) - Counter(calls), Counter(calls) - Counter(got)
            if more or fewer:
                found[f"{what}: {dict(more)} more, {dict(fewer)} fewer"] = float("inf")
            continue
        largest = max((x.float().norm().item() for x in calls if x is not None), default=0.0)
        for number, (x, y) in enumerate(_pairs(found, what, got, calls)):
            if x is not None and y is not None:
                found[f"{what}, {number}"] = _error(x.float(), y.float(), 1e-2 * largest)
            elif x is not y:
                found[f"{what}, {number}"] = float("inf")
    for name, value in expected.figures.items():
        got = actual.figures.get(name, float("inf"))
        found[name] = abs(got - value) / max(abs(value), 1e-3)
    return found


def _pairs(found: dict, what: str, got: list, want: list) -> Iterator[tuple]:
    if len(got) != len(want):
        found[f"{what}: {len(got)} for {len(want)}"] = float("inf")
    return zip(got, want, strict=False)


def _norm(tensors) -> float:
    return sum(x.float().square().sum().item() for x in tensors) ** 0.5


def _error(got: torch.Tensor, want: torch.Tensor, floor: float, scale: torch.Tensor | None = None) -> float:
    if got.ndim and want.ndim and got.shape != want.shape:
        return float("inf")
    scale = max((want if scale is None else scale).norm().item(), floor, 1e-30)
    error = (got - want).norm().item() / scale
    return error if error == error else float("inf")


def difference(setup: Setup, actual: Result, expected: Result) -> str:
    """What differs by more than rounding, the worst first; nothing if all is equal."""
    bar = _BF16_BAR if setup.bf16 else _BAR
    found = errors(actual, expected)
    if max(found.values(), default=0.0) <= bar:
        return ""
    rounding: dict[str, float] = {}
    for size in (1, 2, 4):
        moved = run(setup, ours=False, rows=actual.rows, perturb=size * (2e-3 if setup.bf16 else 6e-8))
        moved.before = expected.before
        for name, error in errors(moved, expected).items():
            rounding[name] = max(error, rounding.get(name, 0.0))
    # A single number may stay where it is by chance.
    largest = max(e for name, e in rounding.items() if name.startswith("gradient"))
    over = {}
    for name, error in found.items():
        tensor = name.startswith(("gradient", "weight", "calls"))
        # Adam makes steps of one size from gradients of any: where one is all rounding, so is the weight.
        adaptive = name.startswith("weight") and "optim" in setup.arguments
        if not adaptive and not error <= max(bar, _ROUNDING * (rounding.get(name, 0.0) if tensor else largest)):
            over[name] = error
    worst = sorted(over, key=over.get, reverse=True)
    text = ", ".join(f"{name} ({over[name]:.1e})" if over[name] < float("inf") else name for name in worst[:3])
    return text + (f" and {len(worst) - 3} more" if len(worst) > 3 else "")


@dataclass(frozen=True)
class Outcome:
    kind: str  # `equal`, `refused`, `off`, `skipped`, `failed`
    why: str = ""


def check(setup: Setup) -> Outcome:
    """Run both arms of a set-up and judge."""
    ours, error = Result(), None
    try:
        run(setup, ours=True, result=ours)
    except Exception as caught:
        error = caught
    try:
        oracle = run(setup, ours=False, rows=ours.rows)
    except Exception as caught:
        return Outcome("skipped", f"the oracle: {_short(caught)}")
    if not all(map(math.isfinite, oracle.losses)):
        return Outcome("skipped", "the oracle: a loss that is not a number, as that of a batch without targets")
    if error is not None:
        if setup.mode != "auto" and _is_refusal(setup, error):
            return Outcome("refused", str(error))
        return Outcome("failed", f"{_short(error)}{' (automatic packing is on)' if ours.on else ''}")
    off = re.search("Packing off, training is unchanged: .+", ours.said)
    if setup.mode == "auto" and not ours.on and not off:
        return Outcome("failed", "automatic packing is neither on nor off")
    if "neftune_noise_alpha" in setup.arguments:
        # The padded built-in divides by the padded length, so the paper is the oracle.
        packed = not off and setup.mode != "padded"
        wrong = [f"{x:.2f}" for x in ours.noise if packed and not 0.8 < x < 1.25]
        if wrong:
            return Outcome("failed", f"noise of NEFTune in documents, over that of the paper: {', '.join(wrong)}")
        return Outcome("off" if off else "equal", off.group() if off else "")
    differs = difference(setup, ours, oracle)
    if differs:
        return Outcome("failed", differs)
    return Outcome("off" if off else "equal", off.group() if off else "")


def _is_refusal(setup: Setup, error: Exception) -> bool:
    """Whether a model, a Trainer or what configures them refuses, by `errors.input_error`, or the stock model does."""
    where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    package = Path(transformers_packed.__file__).parent
    if not isinstance(error, ValueError):
        return False
    if not where.is_relative_to(package):
        return setup.way == "stock" and "can't keep packed sequences apart" in str(error)
    # Errors of these speak to who calls an op, and who trains a model calls none.
    speaks = not where.is_relative_to(package / "ops") and where != package / "boundaries.py"
    return speaks and bool(re.match(r"expected .+, got .+", str(error), re.DOTALL))


def _short(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {' '.join(str(error).split())[:300]}"


def shrink(setup: Setup) -> Setup:
    """A set-up as plain as possible that still fails."""
    plain = Setup(setup.seed)
    for f in fields(setup):
        for value in _plainer(getattr(setup, f.name), getattr(plain, f.name)):
            # Modes belong to ways.
            other = {"mode": plain.mode} if f.name == "way" else {}
            smaller = replace(setup, **{f.name: value}, **other)
            valid = f.name != "mode" or setup.way not in CONFIGURED
            if valid and smaller != setup and check(smaller).kind == "failed":
                setup = smaller
    return setup


def _plainer(value: Any, plain: Any) -> Iterator[Any]:
    """`plain`, or else `value` with less in it."""
    yield plain
    if isinstance(value, dict):
        for name in value:
            yield {n: v for n, v in value.items() if n != name}
    elif isinstance(value, tuple):
        for number in range(len(value)):
            yield (*value[:number], *value[number + 1 :])


@contextlib.contextmanager
def _watched(seed: int) -> Iterator[None]:
    """End the process with all stacks if a set-up takes minutes: one that hangs would say nothing."""

    def end():
        print(f"seed {seed}: failed: it hangs", flush=True)
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(_HANGS, end)
    timer.daemon = True
    timer.start()
    # Where the interpreter itself is held, no thread of it can say anything.
    faulthandler.dump_traceback_later(_HANGS + 10, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first set-up; the others follow")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no set-up after this time")
    parser.add_argument("--count", type=int, help="stop after this many set-ups")
    parser.add_argument("--only", action="store_true", help="run this one set-up, whatever comes out")
    parser.add_argument("--shrink", action="store_true", help="make set-ups that fail as plain as possible")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers_packed").setLevel(logging.ERROR)
    count = 1 if options.only else options.count
    outcomes, start, seed = Counter(), time.monotonic(), options.seed
    reasons: Counter = Counter()
    try:
        while (count is None or seed - options.seed < count) and time.monotonic() - start < options.seconds:
            setup = draw(seed)
            with _watched(seed):
                outcome = check(setup)
            outcomes[outcome.kind] += 1
            if outcome.kind in ("refused", "off", "skipped"):
                reasons[f"{outcome.kind}: {outcome.why[:150]}"] += 1
            if outcome.kind == "failed" and options.shrink:
                setup = shrink(setup)
                outcome = check(setup)
            if outcome.kind == "failed" or options.only:
                print(f"seed {seed}: {outcome.kind}: {outcome.why} [{setup}]", flush=True)
            seed += 1
    except KeyboardInterrupt:
        print()
    for reason, times in reasons.most_common():
        print(f"{times:5} {reason}")
    kinds = ", ".join(f"{outcomes[kind]} {kind}" for kind in ("equal", "refused", "off", "skipped", "failed"))
    print(f"seeds {options.seed} to {seed - 1} in {time.monotonic() - start:.0f} s: {kinds}")
    # A package that refuses everything is never wrong.
    judged = outcomes.total() - outcomes["skipped"]
    refuses = judged >= _ENOUGH and outcomes["equal"] < _FEWEST_EQUAL * judged
    if refuses:
        print(f"fewer than {_FEWEST_EQUAL:.0%} of the set-ups that the oracle can run were equal")
    return 1 if refuses or outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
