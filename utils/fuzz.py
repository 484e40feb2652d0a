"""Train random set-ups twice, padded through the stock class and packed through ours, and compare the results.

The seed alone determines a set-up (`draw`): a family, an attention implementation, gradient checkpointing, a PEFT
method, changes to modules, a way to enable packing, a training loop and arguments of Trainer. Users bring samples with
padding or without tokens, collators with masks of any kind, methods and losses with noise of their own, samplers, streams
that can be read once, state that every call changes, and packed rows to evaluate. The oracle
is the stock class on padded batches of the same samples, with the same weights (`fuzz_arms.run`). The comparison covers
losses, gradients and weights of every step, an evaluation, and the tensors that hooks record at real tokens (`errors`).

A set-up passes in one of three cases: the results equal the oracle's; it ends with an error of this package
(`errors.input_error`); or automatic packing reports in one line that it stays off, and training equals the oracle. All
other set-ups are printed with the seed that reproduces them. Set-ups that the oracle cannot run count as skipped.

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


# DDP warns about every set-up that uses all parameters.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Every set-up has other shapes, so the cache would grow over an hour.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
sys.path.append(str(Path(__file__).parents[1] / "tests"))
import conftest  # noqa: F401  Hides GPU kernels from the stock classes.
import torch
import transformers
from fuzz_arms import Result, build, run
from fuzz_changes import CHANGES, HOOKS
from fuzz_data import BLOCKS, PADDED, ROWS
from fuzz_own import COUNTS, EVALUATED, KEPT, OWN, PER_SAMPLE, PER_TOKEN
from fuzz_setup import CONFIGURED, FAMILIES, GENERIC, PEFT, STOCK, Setup

import transformers_packed


# Tolerances relative to the norm of each gradient. In float32 a different order of the same sums stays below a tenth
# of the bar, and a skipped module or a leak between documents exceeds it tenfold. Some set-ups amplify rounding (tokens
# routed to other experts, terms that cancel), and then the oracle does too. Its sensitivity is measured with weights
# perturbed by half a unit in the last place, by one and by two. The bar is `_ROUNDING` times the resulting change.
_BAR, _BF16_BAR, _ROUNDING = 1e-4, 5e-2, 10
# Relative errors of gradients have this floor, as a share of the norm of the gradient of all parameters.
_FLOOR = 1e-3
_HANGS = 180  # seconds
# The share of set-ups that have to be equal, and the number of set-ups from which on this is checked.
_FEWEST_EQUAL, _ENOUGH = 0.5, 20
# PEFT methods that prepend tokens to the row.
PROMPTS = ("prompt", "p_tuning", "prefix")
# The modules that a change can apply to. Changes not listed apply to any module.
_FITS = {
    "subclass": r".",  # Trainer looks at the name of the model's own class
    "identity": r"(q_norm|k_norm|layernorm|model\.norm|dropout|drop_path)$",
    "activation": r"act_fn$",
    "parametrized": r"(_proj|norm|conv1d|lm_head|embed_tokens|in_proj_\w+|gate|fc1|qkv)$",
    "weight_norm": r"(_proj|lm_head|in_proj_\w+)$",
    "spectral_norm": r"(_proj|lm_head|in_proj_\w+)$",
}


def draw(seed: int) -> Setup:
    """Draw the set-up of a seed."""
    rng = random.Random(seed)

    def rarely(value: Any, otherwise: Any = None, share: float = 0.1) -> Any:
        return value if rng.random() < share else otherwise

    family = rng.choice([*FAMILIES, "qwen3_next", "qwen3_5"])
    # Stock families need neither of the first two. For the other families, a collator alone is refused.
    weights = (1, 1, 3, 2, 4) if family in STOCK else (3, 3, 3, 2, 0.2)
    (way,) = rng.choices(("register", "patch", "configure", "packed_trainer", "stock"), weights)
    configured = way in CONFIGURED
    mode = rng.choice(["auto", "auto", "padding_free", "pack"]) if configured else rarely("padded", "rows", share=0.2)
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
    # Only configured Trainers draw noise by document. Of a stock model with a cache, the collator can only warn.
    unfit = ("neftune_noise_alpha",) * (not configured) + ("use_cache",) * (way == "stock")
    # Trainer smooths the labels of vision-language models without a shift, where the first ones of documents count too.
    unfit += ("label_smoothing_factor",) * (family == "qwen3_5_vl" and not configured)
    arguments = {name: value for name, value in arguments.items() if name not in unfit}
    config = {"tie_word_embeddings": rarely(True), "hidden_act": rarely("gelu"), "attention_bias": rarely(True)}
    if "moe" in family or family == "qwen3_next":
        config["output_router_logits"] = rarely(True, share=0.3)
    adapter = rarely(rng.choice(list(PEFT)), "", share=0.35)
    if "neftune_noise_alpha" in arguments:
        # The noise is measured as the difference from the embeddings, so nothing else may change them.
        changes, adapter = (), ""
    unread = loop != "trainer" or (mode == "rows" and not collator)
    if adapter in PROMPTS and not configured and unread:
        # Here PEFT drops position_ids with a warning, before any code of this package runs. Other boundaries are refused.
        adapter = ""
    bf16 = rng.random() < 0.15
    evaluation = rarely("loss", share=0.3)
    if way in CONFIGURED:
        evaluation = rarely(rng.choice(["predictions", "inputs", "predict"]), evaluation, share=0.3)
    setup = Setup(
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
        # After a step in bfloat16, routers break ties differently and the arms diverge.
        steps=1 if bf16 else rng.choice([1, 2, 2]),
        bf16=bf16,
        evaluation=(evaluation or "") if loop == "trainer" else "",
        arguments=arguments,
    )
    for draw_more in (_draw_mask, _draw_samples, _draw_own, _draw_evaluation, _draw_kept, _draw_stream):
        setup = draw_more(rng, setup)
    return setup


def _draw_mask(rng: random.Random, setup: Setup) -> Setup:
    """Sometimes the user's own collator, with another mask."""
    kind = rng.choice([*BLOCKS, *ROWS])
    options = {"rows": rng.choice([1, 1, 2]), "padding": rng.choice([0, 0, 5]), "restart": rng.random() < 0.5}
    if setup.mode == "padded":
        kind, options = rng.choice(PADDED), {}
    stock, configured = setup.family in STOCK, setup.way in CONFIGURED
    # Transformers' own classes take numbers for padding, and add masks to scores or cast them to the dtype of queries.
    unfit = stock and (kind == "numbered" or (kind == "boolean" and setup.attention == "eager") or setup.bf16)
    # Without code of this package there is nothing to test. Padding counts for routers, and NEFTune counts tokens.
    unfit |= setup.way == "stock" and not (stock and kind in BLOCKS)
    unfit |= setup.peft in PROMPTS or "neftune_noise_alpha" in setup.arguments
    unfit |= kind in ("ones", "none") and setup.config.get("output_router_logits", False)
    if unfit or rng.random() > (0.05 if configured else 0.5 if setup.mode == "padded" else 0.25):
        return setup
    return replace(setup, mask=kind, mask_options=options, collator={})


def _draw_samples(rng: random.Random, setup: Setup) -> Setup:
    """Sometimes padding inside the samples, and an empty sample."""
    padding, empty = rng.random() < 0.1, rng.random() < 0.08 and setup.batch_size > 1
    if setup.mask or setup.way == "stock":
        return setup
    # On the left, padding moves positions. Layers see their differences only, unless the rotation itself is changed.
    side = "right" if any("rotary" in name for _, name in setup.changes) else rng.choice(["left", "right"])
    return replace(setup, padding=side if padding else "", empty=empty)


def _draw_own(rng: random.Random, setup: Setup) -> Setup:
    """Sometimes a method of the user's own. Explicit modes trust what reads one sample a row, so they get none."""
    trusting = {"padding_free": (*PER_TOKEN, *PER_SAMPLE), "pack": PER_TOKEN, "rows": PER_TOKEN}
    own = rng.choice(trusting.get(setup.mode, tuple(OWN)))
    # A mean over samples counts an empty one, or does not, as the collator does.
    unfit = setup.mask or setup.way == "stock" or (setup.empty and own in PER_SAMPLE)
    if setup.loop != "trainer" or unfit or rng.random() > 0.2:
        return setup
    # Their loss has no part of routers.
    config = {name: value for name, value in setup.config.items() if name != "output_router_logits"}
    return replace(setup, own=own, config=config, evaluation="loss" if own in EVALUATED else setup.evaluation)


def _draw_evaluation(rng: random.Random, setup: Setup) -> Setup:
    """Sometimes rows to evaluate, and batches of which the last one is not full."""
    rows, size = rng.choice(["samples", "rows", "packed"]), rng.choice([8, 3])
    explicit = setup.mode in ("padding_free", "pack") and not setup.own and not setup.mask
    if rows == "packed" and (setup.family == "qwen3_5_vl" or not explicit):
        rows = "rows"
    if rows == "rows" and setup.arguments.get("train_sampling_strategy") == "group_by_length":
        rows = "samples"  # Trainer sorts the rows to evaluate as well, and reads no length of a list
    arguments = {name: value for name, value in setup.arguments.items() if name != "dataloader_drop_last"}
    if rows == "packed" and explicit:
        arguments["remove_unused_columns"] = False
    # Trainer averages the means of batches. PackedTrainer averages over targets, and predictions have no mean. Outputs
    # of batches without images lack tensors, and Trainer does not put them together with others.
    sized = (setup.way == "packed_trainer" and setup.evaluation) or setup.evaluation == "predict"
    changes = {"eval_batch_size": size} if sized and not setup.own and setup.family != "qwen3_5_vl" else {}
    if explicit and setup.evaluation:
        changes["eval_rows"] = rows
    # Trainer would drop batches of the evaluation that are not full.
    return replace(setup, **changes, arguments=arguments) if setup.evaluation else setup


def _draw_kept(rng: random.Random, setup: Setup) -> Setup:
    """Sometimes the user keeps something that changes in each forward, and the model with it."""
    kept, fits = rng.choice(list(KEPT)), setup.loop == "trainer" and setup.peft not in PROMPTS
    # NEFTune's noise is measured in the embeddings.
    fits &= "neftune_noise_alpha" not in setup.arguments
    return replace(setup, kept=kept) if fits and rng.random() < 0.2 else setup


def _draw_stream(rng: random.Random, setup: Setup) -> Setup:
    """Sometimes a stream that can be read once. Of the rows that are planned for one, the oracle would not know."""
    fits = setup.way in CONFIGURED and setup.mode != "pack" and setup.own != "sampler" and not setup.empty
    fits &= not setup.arguments.keys() & {"train_sampling_strategy", "auto_find_batch_size"}
    return replace(setup, stream=True) if fits and rng.random() < 0.15 else setup


@cache
def module_names(family: str) -> dict[str, list[str]]:
    """Group the module names of a family by name without numbers, so that each kind is drawn equally often."""
    groups: dict[str, list[str]] = {}
    for name, _ in build(Setup(0, family=family), ours=False).named_modules():
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return groups


def _draw_change(rng: random.Random, family: str) -> tuple[str, str]:
    # Hooks that only observe are the most common change in practice, so they get extra weight.
    kind = rng.choice([*HOOKS, *HOOKS, *CHANGES])
    groups, mixer = module_names(family), GENERIC.get(family)
    if mixer:
        # Modules of mixers are called several times, with parts of the row.
        groups = {key: names for key, names in groups.items() if f"{mixer}." not in key}
        kind = "forward" if kind == "global" else kind
    likely = [key for key in groups if re.search(_FITS.get(kind, ""), key)] or list(groups)
    return kind, rng.choice(groups[rng.choice(likely)])


def errors(actual: Result, expected: Result) -> dict[str, float]:
    """Return the relative error of each compared value, infinite if its counterpart is missing."""
    found = {}
    for number, (got, want) in enumerate(_pairs(found, "losses", actual.losses, expected.losses)):
        found[f"loss {number}"] = abs(got - want) / max(abs(want), 1e-3)
    for number, (got, want) in enumerate(_pairs(found, "gradients", actual.gradients, expected.gradients)):
        # All gradients may be zero except for rounding, as for the queries of one-token documents.
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
            # The weight itself is rounded to seven digits.
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
        if name.endswith(COUNTS) and got != value:
            found[f"{name}: {got:g} for {value:g}"] = float("inf")
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
    """Describe the differences beyond rounding, largest first. Empty if the results are equal."""
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
    # A single number may be unaffected by chance, so scalars use the largest change of a gradient.
    largest = max(e for name, e in rounding.items() if name.startswith("gradient"))
    over = {}
    for name, error in found.items():
        tensor = name.startswith(("gradient", "weight", "calls"))
        # Adam normalizes the gradient. If the gradient is only rounding, so is the step.
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
    """Run both arms of a set-up and return the outcome."""
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
        # The first batch of a stream is verified when training has begun, too late to turn packing off.
        if (setup.mode != "auto" or setup.stream) and _is_refusal(setup, error):
            return Outcome("refused", str(error))
        return Outcome("failed", f"{_short(error)}{' (automatic packing is on)' if ours.on else ''}")
    off = re.search("Packing off, training is unchanged: .+", ours.said)
    if setup.mode == "auto" and not ours.on and not off:
        return Outcome("failed", "automatic packing is neither on nor off")
    if "neftune_noise_alpha" in setup.arguments:
        # The stock model divides the noise by the padded length, so the formula of the paper is the oracle.
        packed = not off and setup.mode != "padded"
        wrong = [f"{x:.2f}" for x in ours.noise if packed and not 0.8 < x < 1.25]
        if wrong:
            return Outcome("failed", f"noise of NEFTune in documents, over that of the paper: {', '.join(wrong)}")
    elif differs := difference(setup, ours, oracle):
        return Outcome("failed", differs)
    return Outcome("off" if off else "equal", off.group() if off else "")


def _is_refusal(setup: Setup, error: Exception) -> bool:
    """Check whether an error is a refusal by `errors.input_error`, or a refusal by a stock model."""
    where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    package = Path(transformers_packed.__file__).parent
    # Logits that mixed precision lost. `configure_packing` knows the user's loss, `patch_model` cannot.
    lost = isinstance(error, AttributeError) and setup.own and setup.way not in CONFIGURED
    if not isinstance(error, ValueError) and not lost:
        return False
    if not where.is_relative_to(package):
        return setup.way == "stock" and "can't keep packed sequences apart" in str(error)
    # Errors of ops and boundaries address callers of ops. Training code calls no ops, so these are failures.
    boundaries = [package / name for name in ("boundaries.py", "boundary_checks.py")]
    speaks = not where.is_relative_to(package / "ops") and where not in boundaries
    # Tokens before the row are known by their number alone.
    speaks |= setup.peft in PROMPTS and "PEFT prompt learning" in str(error)
    return speaks and bool(re.match(r"expected .+, got .+", str(error), re.DOTALL))


def _short(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {' '.join(str(error).split())[:300]}"


def shrink(setup: Setup) -> Setup:
    """Simplify a failing set-up as far as it still fails."""
    plain = Setup(setup.seed)
    for f in fields(setup):
        for value in _plainer(getattr(setup, f.name), getattr(plain, f.name)):
            # The valid modes depend on the way.
            other = {"mode": plain.mode} if f.name == "way" else {}
            smaller = replace(setup, **{f.name: value}, **other)
            valid = f.name != "mode" or setup.way not in CONFIGURED
            if valid and smaller != setup and check(smaller).kind == "failed":
                setup = smaller
    return setup


def _plainer(value: Any, plain: Any) -> Iterator[Any]:
    """Yield `plain`, then `value` with one entry removed."""
    yield plain
    if isinstance(value, dict):
        for name in value:
            yield {n: v for n, v in value.items() if n != name}
    elif isinstance(value, tuple):
        for number in range(len(value)):
            yield (*value[:number], *value[number + 1 :])


@contextlib.contextmanager
def _watched(seed: int) -> Iterator[None]:
    """End the process and print all stacks if a set-up hangs."""

    def end():
        print(f"seed {seed}: failed: it hangs", flush=True)
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(_HANGS, end)
    timer.daemon = True
    timer.start()
    # If a thread holds the GIL, the timer above cannot run.
    faulthandler.dump_traceback_later(_HANGS + 10, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the first set-up; later set-ups count up from it")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no set-up after this time")
    parser.add_argument("--count", type=int, help="stop after this many set-ups")
    parser.add_argument("--only", action="store_true", help="run only this set-up and print its outcome")
    parser.add_argument("--shrink", action="store_true", help="simplify failing set-ups")
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
    # A package that refuses everything would pass, so require a share of equal set-ups.
    judged = outcomes.total() - outcomes["skipped"]
    refuses = judged >= _ENOUGH and outcomes["equal"] < _FEWEST_EQUAL * judged
    if refuses:
        print(f"fewer than {_FEWEST_EQUAL:.0%} of the set-ups that the oracle can run were equal")
    return 1 if refuses or outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
