"""The arms of `fuzz.py`: train a set-up padded through the stock class or packed through ours, and record results."""

import contextlib
import io
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any


sys.path.append(str(Path(__file__).parents[1] / "tests"))
import conftest  # noqa: F401  Hides GPU kernels from the stock classes.
import peft
import torch
import torch.utils.checkpoint
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from common.families import tiny_config
from mixins.vision import TEXT, VISION_INPUTS, document, vision_config
from scripts.trainer_arms import OPTIONS, collate_padded
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments, set_seed

import transformers_packed
from transformers_packed import DataCollatorWithFlattening, PackedTrainer, PackedTrainingArguments


_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_SHARED = {"shared_expert_intermediate_size": 16}
FAMILIES: dict[str, Callable] = {
    "qwen3_next": lambda: tiny_config("qwen3_next", **_LAYERS, **_SHARED, mlp_only_layers=[0]),
    "qwen3_5": lambda: tiny_config("qwen3_5_text", **_LAYERS),
    "qwen3_5_vl": lambda: transformers.Qwen3_5Config(**vision_config({**TEXT, "initializer_range": 0.15})),
    "qwen3_5_moe": lambda: tiny_config("qwen3_5_moe_text", **_LAYERS, **_SHARED),
    "llama": lambda: tiny_config("llama"),
    "qwen3": lambda: tiny_config("qwen3"),
}
STOCK = ("llama", "qwen3")  # families that keep documents apart by Transformers' masks
CONFIGURED = ("configure", "packed_trainer")  # ways that use `configure_packing`
_LORA = {"r": 2, "init_lora_weights": False}
PEFT: dict[str, Callable] = {
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "v_proj"], **_LORA),
    "lora_all": lambda: peft.LoraConfig(target_modules="all-linear", **_LORA),
    "lora_save": lambda: peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["lm_head", "q_norm"], **_LORA),
    "lora_embedding": lambda: peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], **_LORA),
    "lora_experts": lambda: peft.LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"], **_LORA),
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"], use_dora=True, **_LORA),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["q_norm", "k_norm"]),
    "norms_of_layers": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "linear_attn.norm"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj", "out_proj"], init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=["k_proj", "gate_proj"], init_weights=False),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, target_modules=["v_proj", "up_proj"], init_weights=False),
    "trainable_tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 5, 8], target_modules=["embed_tokens"]),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p_tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
_INPUTS = ("input_ids", "inputs_embeds", "hidden_states", "x")  # keywords of module inputs
HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre")


@dataclass(frozen=True)
class Setup:
    """One set-up. The defaults are the simplest one."""

    seed: int
    family: str = "qwen3_5"
    # How packing is enabled: `register`, `patch`, `configure`, `packed_trainer`, or `stock` (a collator only).
    way: str = "patch"
    # `auto`, `padding_free` or `pack` for ways that use `configure_packing`; `padded` batches or `rows` otherwise.
    mode: str = "rows"
    collator: dict = field(default_factory=dict)
    # `trainer`, or a custom training loop: `plain`, `ddp`, `accelerate`.
    loop: str = "trainer"
    attention: str = "sdpa"
    checkpointing: str = ""
    peft: str = ""
    changes: tuple[tuple[str, str], ...] = ()  # (kind, module)
    late: bool = False  # whether the changes follow the enabling of packing
    config: dict = field(default_factory=dict)
    batch_size: int = 3
    accumulation: int = 1
    steps: int = 2
    bf16: bool = False
    evaluation: str = ""  # `loss`, `predictions`, or `inputs`, which also go to the metrics
    arguments: dict = field(default_factory=dict)

    def __str__(self) -> str:
        plain = Setup(self.seed)
        drawn = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        }
        return " ".join(f"{name}={value!r}" for name, value in drawn.items())


# Changes to a module. Each one affects the result.


def _scaled(output: Any, factor: float = 1.1) -> Any:
    if isinstance(output, tuple):
        return (_scaled(output[0], factor), *output[1:])
    return output * factor if isinstance(output, torch.Tensor) and output.is_floating_point() else output


class Scale(nn.Module):
    def forward(self, weight):
        return weight * 1.1


class Around(nn.Module):
    """A wrapper that replaces a module and calls it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return _scaled(self.inner(*args, **kwargs))


def _own_forward(model: nn.Module, name: str, module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: _scaled(forward(*args, **kwargs))


def _subclass(model: nn.Module, name: str, module: nn.Module) -> None:
    base = type(module)
    module.__class__ = type(
        f"Scaled{base.__name__}", (base,), {"forward": lambda self, *a, **k: _scaled(base.forward(self, *a, **k))}
    )


def _put(make: Callable) -> Callable:
    return lambda model, name, module: model.set_submodule(name, make(module))


CHANGES: dict[str, Callable[[nn.Module, str, nn.Module], Any]] = {
    "scaling_forward_hook": lambda _, __, module: module.register_forward_hook(lambda m, a, out: _scaled(out)),
    "scaling_forward_pre_hook": lambda _, __, module: module.register_forward_pre_hook(
        lambda m, a: _scaled(a) if a else a
    ),
    "scaling_backward_hook": lambda _, __, module: module.register_full_backward_hook(lambda m, into, out: _all(into)),
    "scaling_backward_pre_hook": lambda _, __, module: module.register_full_backward_pre_hook(
        lambda m, out: _all(out)
    ),
    "own_forward": _own_forward,
    "subclass": _subclass,
    "around": _put(Around),
    "identity": _put(lambda module: nn.Identity()),
    "activation": _put(lambda module: nn.Tanh()),
    "parametrized": lambda _, __, module: parametrize.register_parametrization(module, "weight", Scale()),
    "weight_norm": lambda _, __, module: nn.utils.parametrizations.weight_norm(module),
    "spectral_norm": lambda _, __, module: nn.utils.parametrizations.spectral_norm(module, n_power_iterations=1),
    "frozen": lambda _, __, module: module.requires_grad_(False),
    "global": lambda _, __, module: None,  # a hook on every module: see `Recorder`
}


def _all(gradients: tuple) -> tuple:
    return tuple(None if x is None else _scaled(x) for x in gradients)


class Recorder:
    """The tensors that hooks receive for each micro-batch, at its real tokens."""

    def __init__(self, setup: Setup):
        self.seen: dict[tuple[str, str], list] = {}
        self.setup = setup
        self.batch: dict | None = None  # the current micro-batch

    def hook(self, model: nn.Module, kind: str, name: str) -> Any:
        if kind == "global":
            seen, members = self.seen.setdefault((kind, ""), []), set()

            def count(module, *_):
                if self.batch is not None:
                    # Count only modules of the model: functions create temporary modules, such as activations.
                    members.update(members or map(id, model.modules()))
                    seen.extend([type(module).__name__] * (id(module) in members))

            return nn.modules.module.register_module_forward_hook(count)
        calls = self.seen.setdefault((kind, name), [])

        def record(module, *args):
            if self.batch is not None:
                # The gradients of outputs come last. Inputs may be keywords in any order.
                values = args[-1] if "backward" in kind else [args[0], [args[1].get(key) for key in _INPUTS]]
                # Expert inputs are ordered by expert and include padding, so only the calls are compared.
                tensor = None if ".experts" in name else next(_tensors(values), None)
                channels_first = isinstance(module, nn.Conv1d)
                if tensor is not None and ".visual." not in name:  # patches, not tokens
                    tensor = _real(tensor, self.batch, channels_first)
                calls.append(None if tensor is None else tensor.detach().clone())

        keywords = {"with_kwargs": True} if "forward" in kind else {}
        return getattr(model.get_submodule(name), f"register_{kind}_hook")(record, **keywords)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


def _real(x: torch.Tensor, batch: dict, channels_first: bool) -> torch.Tensor:
    """Return `[real tokens of the batch, ...]`, or `x` itself if it has no token dimension."""
    mask = batch.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(batch["input_ids"])
        if batch.get("padding_tokens"):
            mask[0, -batch["padding_tokens"] :] = 0
    mask, tokens = mask.bool(), int(mask.sum())
    if channels_first and x.ndim == 3:
        x = x.transpose(1, 2)
    for rows in (mask, mask.new_ones(1, tokens)):  # our model may pack a padded batch
        size = rows.numel()
        if x.shape[:2] == rows.shape:
            return x[rows]
        if x.ndim > 1 and x.shape[0] % size == 0 and x.shape[0]:
            return x.reshape(size, -1)[rows.flatten()]
    return x


def build(setup: Setup, ours: bool) -> nn.Module:
    """Build the model in train mode. Large weights and random norms make every layer affect the result."""
    torch.manual_seed(setup.seed)
    config = FAMILIES[setup.family]()
    for name, value in setup.config.items():
        for part in (config, config.get_text_config()):
            setattr(part, name, value)
    auto = transformers.AutoModelForImageTextToText if "_vl" in setup.family else transformers.AutoModelForCausalLM
    with transformers_packed.registered() if ours and setup.way == "register" else contextlib.nullcontext():
        model = auto.from_config(config, attn_implementation=setup.attention, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "dt_bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def samples(setup: Setup) -> list[dict]:
    """Draw samples of 1 to 70 tokens with a prompt without loss, some with images or videos."""
    rng = random.Random(setup.seed)
    made = []
    for number in range(setup.batch_size * setup.accumulation * setup.steps + rng.randrange(3)):
        # A batch needs at least one target.
        shortest = 1 if setup.batch_size > 1 else 2
        length = rng.choice(
            [shortest, 2, rng.randint(2, 12), *[rng.randint(2, 70) for _ in range(2)], rng.randint(63, 66)]
        )
        vision = {}
        if setup.family == "qwen3_5_vl" and rng.random() < 0.5:
            vision = rng.choice(
                [{"images": ((1, 4, 4),)}, {"images": ((1, 4, 4), (1, 8, 4))}, {"videos": ((2, 4, 4),)}]
            )
        feature = document(length, setup.seed + number, **vision)
        ids, types = feature["input_ids"], feature.pop("mm_token_type_ids")
        prompt = rng.randrange(max(1, len(ids) - 1))
        feature["labels"] = [
            -100 if i < prompt or kind else token for i, (token, kind) in enumerate(zip(ids, types, strict=True))
        ]
        if setup.family == "qwen3_5_vl":
            feature["mm_token_type_ids"] = types
        made.append(feature)
    return made


def collate(rows: list) -> dict:
    """Collate samples, or rows of samples, to a padded batch."""
    features = [sample for row in rows for sample in (row if isinstance(row, list) else [row])]
    batch = collate_padded(features)
    if "mm_token_type_ids" in features[0]:
        types = [torch.tensor(f["mm_token_type_ids"]) for f in features]
        batch["mm_token_type_ids"] = pad_sequence(types, batch_first=True)
    vision = {name: [f[name] for f in features if name in f] for name in VISION_INPUTS}
    return batch | {name: torch.cat(parts) for name, parts in vision.items() if parts}


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    seen: dict[tuple[str, str], list] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)
    said: str = ""
    rows: Any = None  # the packed dataset
    on: bool = False  # whether automatic packing is on


def run(setup: Setup, ours: bool, rows: Any = None, perturb: float = 0.0, result: Result | None = None) -> Result:
    """Train the oracle or our model, on planned `rows` if given. `perturb` is a relative change of all weights."""
    result = Result() if result is None else result
    recorder = Recorder(setup)
    model = build(setup, ours)
    base = model
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.utils.checkpoint.set_checkpoint_early_stop(False))
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        said = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))

        def change():
            for kind, name in setup.changes:
                if kind in CHANGES and kind != "global":
                    CHANGES[kind](base, name, base.get_submodule(name))
            for kind, name in setup.changes:
                if kind in HOOKS or kind == "global":
                    stack.callback(recorder.hook(base, kind, name).remove)

        if not setup.late or setup.way == "register":
            change()
        if setup.peft:
            torch.manual_seed(setup.seed + 1)
            model = peft.get_peft_model(model, PEFT[setup.peft]())
        if ours and setup.way == "patch":
            transformers_packed.patch_model(model)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(setup.seed)
            for parameter in model.parameters():
                parameter.mul_(1 + perturb * torch.randn(parameter.shape, generator=generator))
        if setup.arguments.get("neftune_noise_alpha"):
            _listen_to_noise(base, recorder, result)
        train = _train if setup.loop == "trainer" else _loop

        def later():
            if setup.late and setup.way != "register":
                change()
            result.before = {name: p.detach().clone() for name, p in model.named_parameters()}

        try:
            train(setup, ours, model, rows, directory, recorder, later, result)
        finally:
            result.said = said.getvalue()
        result.after = {name: p.detach().clone() for name, p in model.named_parameters()}
        result.seen = recorder.seen
    return result


def _collator(setup: Setup, ours: bool, model: nn.Module) -> Callable:
    if not ours or setup.mode == "padded":
        return collate
    return DataCollatorWithFlattening(**setup.collator, model=model if setup.family == "qwen3_5_vl" else None)


def _train(setup, ours, model, rows, directory, recorder, later, result) -> None:
    """Train with Trainer or PackedTrainer."""
    options = {
        **OPTIONS,
        "max_steps": setup.steps,
        "per_device_train_batch_size": setup.batch_size,
        # One batch, because Trainer averages the loss over batches.
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": setup.accumulation,
        "bf16": setup.bf16,
        "seed": setup.seed,
        **setup.arguments,
    }
    if setup.checkpointing:
        options["gradient_checkpointing"] = True
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": setup.checkpointing == "reentrant"}
    if setup.evaluation == "inputs":
        options["include_for_metrics"] = ["inputs"]
    data = samples(setup)
    keywords = {"train_dataset": data, "eval_dataset": [s for s in data if len(s["input_ids"]) > 1][:8]}
    if setup.evaluation in ("predictions", "inputs"):
        keywords["compute_metrics"] = _metrics
    configured = setup.way in CONFIGURED
    kind, arguments = Trainer, TrainingArguments
    packing = {"auto": {}, "padding_free": {"padding_free": True}, "pack": {"packing": True, "max_length": 128}}
    if ours and setup.way == "packed_trainer":
        kind, arguments = PackedTrainer, PackedTrainingArguments
        options |= packing[setup.mode]
    collator = None if ours and configured else _collator(setup, ours, model)
    set_seed(setup.seed)
    trainer = kind(model=model, args=arguments(directory, **options), data_collator=collator, **keywords)
    if setup.family == "qwen3_5_vl" and setup.way in ("register", "patch"):
        # Our model normalizes by the targets of a step, the stock model by micro-batch.
        trainer.model_accepts_loss_kwargs = True
    if ours and setup.way == "configure":
        length = {"max_length": 128} if setup.mode == "pack" else {}
        transformers_packed.configure_packing(trainer, setup.mode, **length)
    if ours and configured:
        result.on = setup.mode == "auto" and trainer.args.padding_free
        if not trainer.args.padding_free:
            trainer.data_collator = collate
        if trainer.train_dataset is not data:
            result.rows = trainer.train_dataset
    if rows is not None:
        trainer.train_dataset = rows
        trainer.args.train_sampling_strategy = "sequential"
    later()
    step = trainer.training_step

    def training_step(model, inputs, *args, **kwargs):
        recorder.batch = dict(inputs)
        try:
            loss = step(model, inputs, *args, **kwargs)
        finally:
            recorder.batch = None
        _note(result, loss, trainer.model)
        return loss

    trainer.training_step = training_step
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for number, log in enumerate(logs):
        result.figures |= {f"logged {name} {number}": log[name] for name in ("loss", "grad_norm") if name in log}
    if setup.evaluation:
        figures = trainer.evaluate()
        names = [
            name for name in figures if name.startswith("eval_") and not re.search("runtime|per_second|epoch", name)
        ]
        result.figures |= {name: figures[name] for name in names}


def _metrics(prediction) -> dict[str, float]:
    outputs = prediction.predictions if isinstance(prediction.predictions, tuple) else (prediction.predictions,)
    logits = next(x for x in outputs if x.ndim == 3)  # mixtures of experts have more outputs
    targets = prediction.label_ids[:, 1:] != -100
    figures = {"targets": float(targets.sum()), "logits": float(abs(logits[:, :-1][targets]).mean())}
    if prediction.inputs is not None:
        figures["inputs"] = float(prediction.inputs[:, 1:][targets].sum())
    return figures


def _note(result: Result, loss: torch.Tensor, model: nn.Module) -> None:
    result.losses.append(loss.item())
    named = model.named_parameters()
    result.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def _loop(setup, ours, model, rows, directory, recorder, later, result) -> None:
    """Train with a custom loop: plain, with DDP or with accelerate."""
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": setup.checkpointing == "reentrant"})
    if setup.family in STOCK:
        model.config.use_cache = False  # as Trainer does: with a cache, stock models create no mask for packed rows
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=OPTIONS["learning_rate"])
    wrapped = model
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=setup.bf16)
    with contextlib.ExitStack() as stack:
        backward = torch.Tensor.backward
        if setup.loop == "ddp":
            path = os.path.join(directory, "store")
            torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
            stack.callback(torch.distributed.destroy_process_group)
            # A thread of the group frees finished work and needs the GIL for this. Destroying the group meanwhile
            # waits for that thread and deadlocks.
            stack.callback(time.sleep, 0.1)
            wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        elif setup.loop == "accelerate":
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(cpu=True, mixed_precision="bf16" if setup.bf16 else "no")
            stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
            wrapped, optimizer = accelerator.prepare(model, optimizer)
            backward, autocast = accelerator.backward, contextlib.nullcontext
        later()
        data, collator = samples(setup), _collator(setup, ours, model)
        batches = iter([data[i : i + setup.batch_size] for i in range(0, len(data), setup.batch_size)])
        for _ in range(setup.steps):
            group = [collator(next(batches)) for _ in range(setup.accumulation)]
            items = sum((batch["labels"][:, 1:] != -100).sum() for batch in group)
            for recorder.batch in group:
                with autocast():
                    loss = wrapped(**recorder.batch, num_items_in_batch=items).loss
                backward(loss)
                _note(result, loss, model)
            recorder.batch = None
            optimizer.step()
            optimizer.zero_grad()


def _listen_to_noise(base: nn.Module, recorder: Recorder, result: Result) -> None:
    """Record the noise of NEFTune in the embeddings of each document, relative to the formula of the paper."""
    embed = base.get_input_embeddings()

    def listen(module, args, kwargs):
        batch = recorder.batch
        if batch is None or result.noise:
            return
        states = next(_tensors([args, kwargs]))
        states = _real(states.detach(), batch, False)
        ids = _real(batch["input_ids"], batch, False)
        noise = states - nn.functional.embedding(ids, embed.weight.detach())
        mask = batch.get("attention_mask")
        lengths = _lengths(batch) if mask is None else mask.sum(1).tolist()
        for part, token in zip(noise.split(lengths), ids.split(lengths), strict=True):
            if len(part) >= 8 and int(token.max()) < 90:  # no images
                result.noise.append(float(part.std() * (3 * part.numel()) ** 0.5 / 5.0))

    next(m for n, m in base.named_modules() if n.endswith("layers.0") and "visual" not in n).register_forward_pre_hook(
        listen, with_kwargs=True
    )


def _lengths(batch: dict) -> list[int]:
    """Return the document lengths of a packed row, without its padding."""
    row = batch["position_ids"].flatten(0, -2)[0].tolist()
    row = row[: len(row) - batch.get("padding_tokens", 0)]
    starts = [i for i, x in enumerate(row) if i == 0 or x != row[i - 1] + 1]
    return [end - start for start, end in zip(starts, [*starts[1:], len(row)], strict=True)]
