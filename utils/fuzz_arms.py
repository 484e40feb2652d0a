"""The arms of `fuzz.py`: train a set-up padded through the stock class or packed through ours, and record results."""

import contextlib
import io
import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import peft
import torch
import torch.utils.checkpoint
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fuzz_changes import CHANGES, HOOKS, Recorder, tensors
from fuzz_data import Once, collate, collator, evaluation_set, lengths, real, samples
from fuzz_own import keep, make_trainer, metrics
from fuzz_setup import CONFIGURED, FAMILIES, PEFT, STOCK, Setup
from scripts.trainer_arms import OPTIONS
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import transformers_packed
from transformers_packed import PackedTrainer, PackedTrainingArguments


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


def _train(setup, ours, model, rows, directory, recorder, later, result) -> None:
    """Train with Trainer or PackedTrainer."""
    options = {
        **OPTIONS,
        "max_steps": setup.steps,
        "per_device_train_batch_size": setup.batch_size,
        # Trainer averages the loss over batches, so the oracle has one batch.
        "per_device_eval_batch_size": setup.eval_batch_size if ours else 8,
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
    given = Once(data) if setup.stream else data
    keywords = {"train_dataset": given, "eval_dataset": evaluation_set(setup, data, ours)}
    if setup.evaluation in ("predictions", "inputs"):
        keywords["compute_metrics"] = metrics
    configured = setup.way in CONFIGURED
    kind, arguments = Trainer, TrainingArguments
    packing = {"auto": {}, "padding_free": {"padding_free": True}, "pack": {"packing": True, "max_length": 128}}
    if ours and setup.way == "packed_trainer":
        kind, arguments = PackedTrainer, PackedTrainingArguments
        options |= packing[setup.mode]
    keywords["data_collator"] = collator(setup, ours, model)
    set_seed(setup.seed)
    trainer = make_trainer(setup.own, kind, model=model, args=arguments(directory, **options), **keywords)
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
        if trainer.train_dataset is not given:
            result.rows = trainer.train_dataset
    if rows is not None:
        trainer.train_dataset = rows
        trainer.args.train_sampling_strategy = "sequential"
    if setup.kept:
        keep(setup.kept, trainer, model.get_input_embeddings())
    later()
    step, clock = trainer.training_step, Steps()
    trainer.add_callback(clock)

    def training_step(model, inputs, *args, **kwargs):
        if not clock.running:
            return step(model, inputs, *args, **kwargs)
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
    trainer.own = []
    if setup.evaluation == "predict":
        result.figures |= metrics(trainer.predict(trainer.eval_dataset))
    elif setup.evaluation:
        figures = trainer.evaluate()
        names = [
            name for name in figures if name.startswith("eval_") and not re.search("runtime|per_second|epoch", name)
        ]
        result.figures |= {name: figures[name] for name in names}
        result.figures |= {"own figures": float(len(trainer.own)), "their sum": sum(trainer.own)}


class Steps(TrainerCallback):
    """Tells the micro-batches of steps from what runs before training."""

    running = False

    def on_step_begin(self, args, state, control, **kwargs):
        self.running = True

    def on_step_end(self, args, state, control, **kwargs):
        self.running = False


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
        data, collates = samples(setup), collator(setup, ours, model)
        batches = iter([data[i : i + setup.batch_size] for i in range(0, len(data), setup.batch_size)])
        for _ in range(setup.steps):
            group = [collates(next(batches)) for _ in range(setup.accumulation)]
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
        states = next(tensors([args, kwargs]))
        states = real(states.detach(), batch, False)
        ids = batch["input_ids"][batch["input_ids"] != 0]
        sizes = lengths(batch)
        noise = states - nn.functional.embedding(ids, embed.weight.detach())
        for part, token in zip(noise.split(sizes), ids.split(sizes), strict=True):
            if len(part) >= 8 and int(token.max()) < 90:  # no images
                result.noise.append(float(part.std() * (3 * part.numel()) ** 0.5 / 5.0))

    next(m for n, m in base.named_modules() if n.endswith("layers.0") and "visual" not in n).register_forward_pre_hook(
        listen, with_kwargs=True
    )
