"""Arms of the benchmark of one training step: the models and batches that `step.py` times."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch


if not torch.cuda.is_available():
    # Where these can be imported, the built-in classes would run them on the CPU, which fails.
    sys.modules |= dict.fromkeys(("fla", "causal_conv1d"))

from shapes import LORA_EXPERTS, LORA_LAYERS, LORA_MLP
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    set_seed,
)
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear

from transformers_packed import DataCollatorWithFlattening, registered, use_cuda_graphs, use_float8
from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.models.cuda_graphs import graph_length
from transformers_packed.models.host_parameters import loading_to_host, move_to_host
from transformers_packed.models.losses import OWN, MtpLoss
from transformers_packed.models.quantization import (
    SENSITIVE,
    in_4bit,
    initialize_in_4bit,
    initialized_modules,
    keeps_dtype,
    nf4,
)
from transformers_packed.models.quantized_weights import ExpertsIn4bit, set_weights
from transformers_packed.ops.grouped_dequantization import Groups
from transformers_packed.training.added_losses import train_losses


EXPERTS = ("gate_up_proj", "down_proj")
# Class by module; it has the same name in Transformers and in this package.
CLASSES = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


class Kind(NamedTuple):
    """What an arm is made of."""

    # "builtin" or "ours".
    model: str
    packed: bool = True
    attention: str = "sdpa"
    liger: bool = False
    flash_qla: bool = True
    # Of a mixture only, None for the default: an implementation that Transformers offers, or "liger" for Liger's kernels.
    experts: str | None = None


ARMS = {
    "padded": Kind("builtin", packed=False),
    "padded+liger": Kind("builtin", packed=False, liger=True),
    "packed": Kind("builtin"),
    "packed+varlen": Kind("builtin", attention="varlen"),
    "packed+varlen+liger": Kind("builtin", attention="varlen", liger=True),
    "packed+varlen+liger-flashqla": Kind("builtin", attention="varlen", liger=True, flash_qla=False),
    "packed+varlen+liger-experts": Kind("builtin", attention="varlen", liger=True, experts="liger"),
    "ours": Kind("ours"),
    "ours+graphs": Kind("ours"),
    "ours+stock-experts": Kind("ours", experts="grouped_mm"),
    "ours padded": Kind("ours", packed=False),
}
# LoRA as Trainer runs it: float32 adapters of rank 16 on all linear layers and all experts, bfloat16 weights, autocast.
ARMS |= {f"{name}+lora": ARMS[name] for name in ("packed+varlen+liger", "ours", "ours+graphs", "ours+stock-experts")}
# The same with weights in NF4, and after PEFT's `prepare_model_for_kbit_training`.
ARMS |= {f"{name}+qlora": ARMS[name] for name in ("packed+varlen+liger", "ours")}
ARMS["ours+qlora+prepared"] = ARMS["ours"]
ARMS |= {f"{name}+float8": ARMS["ours"] for name in ("ours", "ours+graphs", "ours+lora")}
# With the head of multi-token prediction, trained with the trunk or alone.
ARMS |= {f"ours+{name}": ARMS["ours"] for name in ("mtp", "mtp-only", "mtp+float8", "mtp+lora")}
# With the same bits for a document in every row.
ARMS |= {f"{name}+invariant": ARMS[name] for name in ("ours", "ours+lora", "ours+graphs", "ours+graphs+lora")}
# Frozen weights in float8 only, by torchao.
ARMS["ours+lora+float8base"] = ARMS["ours"]
# The same layers of the stock class in torchao's float8, with a scale for each row.
ARMS["packed+varlen+liger+torchao"] = ARMS["packed+varlen+liger"]
# The same with these layers compiled, one by one: kernels of the delta rule and attention would break a larger graph.
ARMS["packed+varlen+liger+torchao+compile"] = ARMS["packed+varlen+liger"]


def default_arms(config: dict) -> list[str]:
    """All arms of a full training step that fit the model: only a mixture can choose its experts."""
    names = [
        name
        for name in ARMS
        if name != "ours padded"
        and not {"lora", "qlora", "float8", "torchao", "mtp", "mtp-only", "invariant"} & {*name.split("+")}
    ]
    return [name for name in names if "num_experts" in config or not ARMS[name].experts]


def family_of(config: dict) -> str:
    return config["model_type"].removesuffix("_text")


def stock_module(config: dict) -> ModuleType:
    """Transformers' own module of the model."""
    return import_module(f"transformers.models.{family_of(config)}.modeling_{family_of(config)}")


def prepare(device: str) -> None:
    """Give the built-in classes variable-length attention, and on a GPU the convolution for packed rows."""
    AttentionInterface.register("varlen", varlen)
    AttentionMaskInterface.register("varlen", lambda *_, **__: None)
    if device == "cuda":
        for family in CLASSES:
            stock_module({"model_type": family}).causal_conv1d_fn = flas_convolution


def varlen(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    """Transformers' attention interface over `varlen_attn`."""
    from inspect import signature

    from torch.nn.attention.varlen import varlen_attn

    rows = (x.transpose(1, 2)[0] for x in (query, key, value))
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    ends = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(*rows, *ends, scale=scaling, window_size=(-1, 0), **grouped)[None], None


def flas_convolution(hidden_states, weight, bias=None, activation=None, seq_idx=None, cu_seq_lens_q=None, **kwargs):
    """The signature that the built-in block calls, channels first, over flash-linear-attention's kernel."""
    from fla.modules.causal_conv1d import causal_conv1d

    rows = hidden_states.transpose(1, 2)
    return causal_conv1d(rows, weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)[0].transpose(1, 2)


def make_model(config: dict, arm: str, device: str):
    kind, family, builtin = ARMS[arm], family_of(config), stock_module(config)
    set_seed(0)
    module = (
        import_module(f"transformers_packed.models.{family}.modeling_{family}") if kind.model == "ours" else builtin
    )
    with torch.device(device):
        cls = getattr(module, CLASSES[family])
        text_config = AutoConfig.for_model(**config)
        model = cls._from_config(text_config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    if kind.attention != "sdpa":
        model.set_attn_implementation(kind.attention)
    if kind.experts and kind.experts != "liger":
        model.set_experts_implementation(kind.experts)
    if kind.liger:
        use_liger(model, family, builtin, kind.experts == "liger")
    if "+qlora" in arm:
        quantize(model, kind.model == "ours")
    if "+float8base" in arm:
        store_in_float8(model)
    if "+float8" in arm:
        use_float8(model)
    if "+torchao" in arm:
        use_torchao(model, "+compile" in arm)
    adapted = with_lora(model, "+prepared" in arm) if "lora" in arm else model
    if "+mtp" in arm:
        model.config.mtp_num_hidden_layers = 1
        losses = (MtpLoss(alone=True),) if "+mtp-only" in arm else (*OWN, MtpLoss(0.1))
        train_losses(losses, None, adapted)
    return adapted


def inside(model: torch.nn.Module) -> Callable[[torch.nn.Module, str], bool]:
    """A filter of the layers that `use_float8` chooses."""
    ends = tuple(f"layers.{i}." for i in (0, model.config.num_hidden_layers - 1))

    def chosen(layer: torch.nn.Module, name: str) -> bool:
        middle = "layers." in name and not any(end in name for end in ends)
        return isinstance(layer, torch.nn.Linear) and middle and not name.endswith(SENSITIVE)

    return chosen


def use_torchao(model: torch.nn.Module, compiled: bool) -> None:
    """Convert the layers that `use_float8` chooses."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, module_filter_fn=inside(model), config=config)
    for layer in model.modules():
        if compiled and isinstance(layer, Float8Linear):
            layer.compile(dynamic=False)


def store_in_float8(model: torch.nn.Module) -> None:
    """Keep the weights of the layers that `use_float8` chooses, and of experts, in float8 only."""
    from torchao.quantization import Float8WeightOnlyConfig, FqnToConfig, quantize_

    quantize_(model, Float8WeightOnlyConfig(), filter_fn=inside(model))
    for module in experts_of(model):
        quantize_(module, FqnToConfig(dict.fromkeys(EXPERTS, Float8WeightOnlyConfig())), filter_fn=None)


def use_liger(model: torch.nn.Module, family: str, builtin: ModuleType, experts: bool) -> None:
    """Liger's kernels on this model; the experts of a mixture keep their implementation unless `experts`."""
    from liger_kernel.transformers import monkey_patch
    from liger_kernel.transformers.model import output_classes
    from liger_kernel.transformers.swiglu import LigerQwen3MoeSwiGLUMLP

    # Liger 0.8.5 imports this name of an image model's output, which it defines only for other releases of Transformers.
    vars(output_classes).setdefault("LigerQwen3_5MoeCausalLMOutputWithPast", None)
    shared = [layer.mlp.shared_expert for layer in model.model.layers if hasattr(layer.mlp, "shared_expert")]
    originals = dict(vars(builtin))
    getattr(monkey_patch, f"apply_liger_kernel_to_{family}")(model=model, swiglu=experts or not shared)
    # It also replaces the classes, which the other arms are made of.
    vars(builtin).update(originals)
    if not experts:
        for module in shared:
            monkey_patch._patch_swiglu_module(module, LigerQwen3MoeSwiGLUMLP)


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules with weights of routed experts that are not yet quantized."""
    found = (module for module in model.modules() if "gate_up_proj" in module._parameters)
    return [module for module in found if type(module.gate_up_proj) is torch.nn.Parameter]


def quantize(model: torch.nn.Module, experts: bool = True) -> None:
    """Replace the weights that `from_pretrained` would replace, with double quantization. Stock classes keep `experts`."""
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and not keeps_dtype(name):
            model.set_submodule(name, in_4bit(layer, nf4(torch.bfloat16)))
    for module in experts_of(model) if experts else ():
        for name in EXPERTS:
            set_weights(module, name, ExpertsIn4bit.of(getattr(module, name).data, double=True))
    model.is_loaded_in_4bit = True


def make_base(config: dict, kind: str, device: str, on_host: str = "") -> torch.nn.Module:
    """A causal model of random weights: in bfloat16, NF4, torchao's float8, or as released, in FP8, NVFP4 or as AWQ has them.

    Its experts in bfloat16 exist for one layer at a time, unless they stay so. With `on_host`, "experts" or all "layers", those
    of a layer go to host memory before the next ones are made.
    """

    def on_meta() -> torch.nn.Module:
        with registered(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)

    model = on_meta()
    if kind == "nf4":
        with loading_to_host(on_host == "layers") if on_host else nullcontext():
            initialize_in_4bit(model, nf4(torch.bfloat16), device)
        return model
    if kind == "fp8":
        store = in_blocks_of(on_meta)
    else:
        store = {"bfloat16": keep, "float8": store_experts}.get(kind, partial(store_in_groups, kind=kind))
    for name, module in initialized_modules(model, device):
        stored = store(name, module)
        if stored is not module:
            model.set_submodule(name, stored)
        if on_host and {*EXPERTS} <= stored._parameters.keys():
            move_to_host(stored.requires_grad_(False))
        elif on_host == "layers" and isinstance(stored, torch.nn.Linear):
            stored.cpu()
    model.tie_weights()
    if kind == "float8":
        store_in_float8(model)
    return model


def keep(name: str, module: torch.nn.Module) -> torch.nn.Module:
    return module


def store_experts(name: str, module: torch.nn.Module) -> torch.nn.Module:
    if module in experts_of(module):
        store_in_float8(module)
    return module


def store_in_groups(name: str, module: torch.nn.Module, kind: str) -> torch.nn.Module:
    linear = type(module) is torch.nn.Linear and not keeps_dtype(name)
    for parameter in ("weight",) if linear else EXPERTS if module in experts_of(module) else ():
        weight = getattr(module, parameter)
        groups = in_groups(weight.shape, kind, weight.device)
        setattr(module, parameter, torch.nn.Parameter(groups, requires_grad=False))
    return module


def in_blocks_of(on_meta: Callable[[], torch.nn.Module]) -> Callable[[str, torch.nn.Module], torch.nn.Module]:
    """What stores a module of a model as Transformers' class for FP8 if it has one."""
    in_blocks = on_meta()
    replace_with_fp8_linear(in_blocks, ["lm_head", *SENSITIVE], FineGrainedFP8Config(), pre_quantized=True)

    def store(name: str, module: torch.nn.Module) -> torch.nn.Module:
        stored = in_blocks.get_submodule(name)
        if not isinstance(stored, (FP8Linear, FP8Experts)):
            return module
        fill_blocks(stored.to_empty(device=next(module.parameters()).device), module)
        return stored

    return store


def in_groups(shape: torch.Size, kind: str, device: str) -> PackedWeight:
    """Random weights of a standard deviation near 0.02, in NVFP4, or in 4 bit with groups of 128 columns as AWQ has them."""
    *others, rows, columns = shape
    values = torch.randint(256, (*others, rows, columns // 2), dtype=torch.uint8, device=device)
    if kind == "nvfp4":
        scale = torch.full((*others, rows, columns // 16), 1.75, device=device).to(torch.float8_e4m3fn)
        whole = torch.full((*others, 1), 256.0, device=device)
        return PackedWeight(Groups(values, scale, kind, torch.bfloat16, whole=whole, divided=True), torch.bfloat16)
    scale = torch.full((*others, rows, columns // 128), 0.0043, dtype=torch.float16, device=device)
    return PackedWeight(
        Groups(values, scale, "int4", torch.float16, torch.full_like(scale, 8).to(torch.uint8)), torch.bfloat16
    )


def quantized_in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in e4m3, and scales of blocks of 128 rows and columns, each with its largest element at the largest number."""
    blocks = weight.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).float()
    scale = blocks.abs().amax((-3, -1)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scale[..., None, :, None]).view(weight.shape).to(torch.float8_e4m3fn), scale


def fill_blocks(stored: torch.nn.Module, module: torch.nn.Module) -> None:
    """Store the weights of a module in float8 with scales of blocks."""
    for parameter, scale in stored.named_parameters():
        if parameter.endswith("_scale_inv"):
            name = parameter.removesuffix("_scale_inv")
            getattr(stored, name).data, scale.data = quantized_in_blocks(getattr(module, name).data)
    stored.requires_grad_(False)


def with_lora(model: torch.nn.Module, prepared: bool, experts: bool = True) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if prepared:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    mixture = experts and getattr(model.config, "num_experts", None)
    # In Qwen3-Next, PEFT takes these names for the experts, at twice the rank, and finds no way to the shared expert.
    taken = LORA_MLP if model.config.model_type == "qwen3_next" else ()
    lora = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=[name for name in LORA_LAYERS if name not in taken],
        target_parameters=list(LORA_EXPERTS) if mixture else None,
    )
    model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        # Products with zeros take less power, and the GPU's clock depends on it.
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def prompts_of(lengths: list[int], labelled: float) -> list[int]:
    """The tokens at the start of each document that are no targets."""
    return [n - max(1, round(labelled * n)) for n in lengths]


def make_batches(
    lengths: list[int], vocab_size: int, arm: str, batch_size: int, device: str, labelled: float = 1.0
) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, vocab_size, (n,), generator=generator) for n in lengths]
    prompts = prompts_of(lengths, labelled)
    kind = ARMS[arm]
    to = lambda batch: {k: x.to(device) if torch.is_tensor(x) else x for k, x in batch.items()}  # noqa: E731
    if kind.packed:
        # What the built-in classes read on the device as well; ours take the host's copy of `cu_seqlens`.
        collator = DataCollatorWithFlattening(
            return_cu_seqlens=True, return_seq_idx=True, return_flash_attn_kwargs=True, on_leak="ignore"
        )
        labels = [[-100] * prompt + x[prompt:].tolist() for x, prompt in zip(documents, prompts, strict=True)]
        samples = zip(documents, labels, strict=True)
        batch = collator([{"input_ids": x.tolist(), "labels": targets} for x, targets in samples])
        if kind.model == "ours":
            keep = ("input_ids", "labels", "position_ids")
            return [to({k: batch[k] for k in keep}) | {"cu_seqlens": batch["cu_seqlens"]}]
        batch.pop("cu_seqlens")
        return [to(batch)]
    batches = []
    for start in range(0, len(documents), batch_size):
        rows = documents[start : start + batch_size]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in rows], batch_first=True)
        batches.append(to({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}))
    return batches


def upstream_gradients(batches: list[dict], hidden_size: int, tokens: int) -> list[torch.Tensor]:
    """The same random numbers for a token in every arm, and 0 at padding."""
    rows = torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16() / tokens
    gradients = []
    for batch in batches:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        now, rows = rows.to(ids.device).split([int(mask.sum()), len(rows) - int(mask.sum())])
        gradients.append(now.new_zeros(*ids.shape, hidden_size).masked_scatter_(mask[..., None], now))
    return gradients


class Arm:
    """A model with its batches; `step()` is forward and backward over all of them."""

    def __init__(self, name: str, config: dict, lengths: list[int], args):
        self.name, self.device, prompts = name, args.device, prompts_of(lengths, args.labelled)
        # The first tokens of a document have no target, one in the trunk and two in the head.
        self.targets, self.mtp_targets = (
            sum(max(0, n - max(prompt, ahead)) for n, prompt in zip(lengths, prompts, strict=True)) for ahead in (1, 2)
        )
        self.model = make_model(config, name, args.device)
        if args.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if "+graphs" in name:
            use_cuda_graphs(self.model, graph_length(sum(lengths)))
        self.batches = make_batches(lengths, config["vocab_size"], name, args.batch, args.device, args.labelled)
        self.upstream = upstream_gradients(self.batches, config["hidden_size"], sum(lengths)) if args.no_head else None
        self.builtin, self.use_flash_qla = stock_module(config), ARMS[name].flash_qla

    def loss(self, index: int) -> torch.Tensor:
        """The loss of a batch; without the head, the product of the last hidden state and fixed random numbers."""
        batch = self.batches[index]
        if self.upstream is None:
            items = {"num_mtp_items_in_batch": self.mtp_targets} if "+mtp" in self.name else {}
            return self.model(**batch, num_items_in_batch=self.targets, **items).loss
        model = self.model.get_base_model() if "lora" in self.name else self.model
        hidden = model.model(**{name: x for name, x in batch.items() if name != "labels"}).last_hidden_state
        return (hidden * self.upstream[index]).sum(dtype=torch.float32)

    def step(self) -> float:
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for index in range(len(self.batches)):
            with torch.autocast(self.device, torch.bfloat16, enabled="lora" in self.name):
                loss = self.loss(index)
            loss.backward()
            total = total + loss.detach()
        return total

    def bytes_of_weights_and_gradients(self) -> int:
        """After a step, while the gradients exist."""
        tensors = [x for weight in self.model.parameters() for x in (weight, weight.grad) if x is not None]
        return sum(x.numel() * x.element_size() for x in tensors)

    def run(self) -> float:
        # FLA looks for the other package in each call.
        original = self.builtin.torch_chunk_gated_delta_rule
        if not self.use_flash_qla:
            self.builtin.torch_chunk_gated_delta_rule = without_flash_qla
        try:
            return self.step()
        finally:
            self.builtin.torch_chunk_gated_delta_rule = original


def without_flash_qla(*args, **kwargs):
    from inspect import signature, unwrap

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    kernel = unwrap(chunk_gated_delta_rule)
    known = signature(kernel).parameters
    return kernel(*args, **{name: value for name, value in kwargs.items() if name in known})
