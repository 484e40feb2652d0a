"""Problems and slow parts of a machine or a model, found from versions, devices and configurations.

No weights are loaded: a model is built on the meta device, and the verifiers of the ops receive tensors of a few rows.
"""

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils.generic import is_flash_attention_requested

from ..errors import input_error
from ..foreign import attention_of
from ..models.checkpoint_kinds import is_dequantized_at_loading, store_in_blocks, stored_as
from ..models.families import OWN, families_of, family_of
from ..models.family import Mixers, Own, Refused, Unpacked
from ..models.float8 import share_in_float8
from ..models.mtp import declares_head, find_head
from ..models.packed_model import PackedModelMixin
from ..models.padding import why_padded
from ..models.registry import check_transformers, patch_model
from ..models.releases import auto_class, builds, supports_flash_attention
from ..models.replacements import REPLACEMENTS
from ..models.sizes import sizes_for_ops
from ..models.stored_weights import why_not_in_float8
from ..models.verdict import judge, text_config
from ..ops.attention import serves_packed_rows
from ..ops.dispatch import Setting, availability, is_kernel
from .checkpoint import lacking_weights


Ops = Mapping[str, tuple[str | None, list[tuple[str, str]]]]

# Reasons of verifiers end with the command that installs what is missing.
_COMMAND = re.compile(r" \((pip install [^()]+)\)")
# The op that needs no kernel if another op has one: each convolution is the fallback of the other.
_EITHER = {"causal_conv1d": "causal_conv1d_qkv", "causal_conv1d_qkv": "causal_conv1d"}
# The measured shapes of Qwen3.5, the most parameters of a model that is taken for each, and the longest rows that were
# faster in CUDA graphs (docs/measured/short_rows.md).
_FASTER_IN_GRAPHS = (("0.8B", 1e9, 4096), ("4B", 5e9, 2048))
_LONG_ROW = 16384
_SDPA = 'attn_implementation="sdpa"'
_UNKNOWN = "is not known to keep the documents of a packed row apart"
# Of the products in layers. A step of 0.8B, with less, gains 2 % in FP8, and one of 4B, with more, 29 %
# (docs/measured/float8.md).
_WORTH_FLOAT8 = 0.5


@dataclass(frozen=True)
class Finding:
    """A fact about a machine or a model.

    Args:
        level (`str`):
            `"problem"` (wrong results, or a missing kernel), `"warning"` (slow) or `"note"`.
        text (`str`):
            The fact.
        fix (`str`, *optional*):
            The command or the argument that changes it.
    """

    level: Literal["problem", "warning", "note"]
    text: str
    fix: str = ""


@dataclass
class Diagnosis:
    """The ops that a packed row in training would run on a device, the model, and the findings about both."""

    device: str
    dtype: str
    ops: Ops = field(default_factory=dict)
    model: dict[str, object] | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no finding is a problem."""
        return all(finding.level != "problem" for finding in self.findings)


def diagnose(
    device: torch.device | str,
    config: PreTrainedConfig | None = None,
    attention: str | None = None,
    *,
    name: str = "MODEL",
    trust_remote_code: bool = False,
) -> Diagnosis:
    """Find problems and slow parts of training on packed rows.

    Args:
        device (`torch.device` or `str`):
            The device to train on.
        config (`PreTrainedConfig`, *optional*):
            Configuration of the model. By default, head dimensions are those of the released models.
        attention (`str`, *optional*):
            The attention implementation. Defaults to that of the model, or SDPA without one.
        name (`str`, *optional*, defaults to `"MODEL"`):
            Name or path of the model, for commands in the findings.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to allow custom code from the checkpoint.

    Returns:
        [`Diagnosis`]: the ops that would run, and the findings.

    Raises:
        `ImportError`: the installed Transformers lacks an API that our models use.
        `ValueError`: the configuration is not one of a language model.
    """
    check_transformers()
    device = torch.device(device)
    dtype = _training_dtype(device, config)
    found = Diagnosis(str(device), str(dtype).removeprefix("torch."))
    found.findings += _of_device(device)
    # The model changes its configuration.
    in_float32 = config is not None and config.dtype == torch.float32
    model = None if config is None else empty_model(config, trust_remote_code)
    ours = True
    if model is not None:
        attention = attention or attention_of(text_config(model))
        judged = list(_of_model(model, name))
        found.findings += judged
        ours = bool(families_of(model, Own))
        found.model = _describe(model, isolated=all(finding.level != "problem" for finding in judged))
        found.findings += _of_padding(model) if ours else _of_masks(model, attention, device)
        found.findings += _of_weights(model.config, device) if ours else ()
        lacking = list(_of_files(name))
        # The head may be in a file that is not there.
        has_mtp = not lacking and any(family.has_mtp for family in families_of(model))
        found.findings += _of_head(model.config) if has_mtp else lacking
    if ours:
        found.ops = _ops_of(model, device, dtype, attention or "sdpa")
        found.findings += _of_ops(found.ops, device)
        if in_float32 and device.type != "cpu":
            text = "The weights are in float32, for which the gated delta rule has a kernel only under autocast."
            found.findings.append(Finding("note", text, "bf16=True"))
        found.findings += _of_speed(model, found.ops, device)
    return found


def empty_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build the stock language model of a configuration without memory for its weights.

    Raises:
        `ValueError`: there is no such model, or it cannot be built.
    """
    auto = auto_class(config)
    if not builds(auto, config) and not trust_remote_code:
        fix = "Choose a model that generates text."
        raise input_error("a causal language model", f"the type {config.model_type}", fix)
    try:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # A configuration or custom model code may raise anything.
        reason = " ".join(str(error).split())
        raise ValueError(f"a model of type {config.model_type} cannot be built: {reason}") from error


def _training_dtype(device: torch.device, config: PreTrainedConfig | None) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    stored = None if config is None else config.dtype
    return torch.float16 if stored == torch.float16 else torch.bfloat16


def _of_device(device: torch.device) -> Iterator[Finding]:
    if device.type != "cpu":
        return
    yield Finding("note", "On a CPU all ops run in PyTorch. Training there is for tests.")
    if shutil.which("nvidia-smi"):
        version = f"its CUDA {torch.version.cuda} needs a newer driver, or GPUs are hidden (CUDA_VISIBLE_DEVICES)"
        reason = version if torch.version.cuda else "it is a build without CUDA"
        fix = "nvidia-smi" if torch.version.cuda else "pip install --force-reinstall torch"
        yield Finding("problem", f"This machine has nvidia-smi, but torch finds no GPU: {reason}.", fix)


def _of_model(model: PreTrainedModel, name: str) -> Iterator[Finding]:
    """Yield whether the stock model and the patched one keep documents apart, and patch `model`."""
    leak, _ = judge(model, "position_ids")
    try:
        patch_model(model)
    except ValueError as error:
        known = families_of(model, Refused)
        yield Finding("problem", f"patch_model: {error}", "" if known else f"transformers-packed audit {name}")
        return
    if leak is not None:
        text = f"Transformers' own {type(model).__name__} mixes the documents of a packed row."
        yield Finding("note", text, "transformers_packed.register() before loading, or patch_model(model) after")


def _of_padding(model: PreTrainedModel) -> Iterator[Finding]:
    """Yield why padded batches would be computed with their padding in training, which uses no cache."""
    for module in model.modules():
        if isinstance(module, PackedModelMixin) and hasattr(module, "layers"):
            if why := why_padded(module, {"use_cache": False}):
                yield Finding("warning", f"Padded batches are computed with their padding: {why}.")


def _of_files(name: str) -> Iterator[Finding]:
    """Yield the first file of weights that a local directory lacks. Without any, it may be meant to have none."""
    lacking = lacking_weights(name)
    text = f"{name} has no {lacking}, so its weights cannot be loaded."
    if lacking == SAFE_WEIGHTS_NAME:
        yield Finding("note", text)
    elif lacking:
        yield Finding("problem", text, "download or save it again")


def _of_weights(config: PreTrainedConfig, device: torch.device) -> Iterator[Finding]:
    """Yield how a quantized checkpoint is stored, and whether LoRA trains on it."""
    try:
        stored = stored_as(config)
    except ValueError as error:
        yield Finding("problem", str(error))
        return
    if stored is not None:
        fate = "Its weights stay so"
        if is_dequantized_at_loading(config, device):
            fate = "On this device, Transformers dequantizes its weights at loading"
        text = f"The checkpoint is in {stored.title}. {fate}, and LoRA trains on them."
        yield Finding("note", text, "train --lora")


def _of_head(config: PreTrainedConfig) -> Iterator[Finding]:
    """Yield whether a local checkpoint has the head of multi-token prediction that its configuration declares."""
    folder = config.name_or_path
    if not folder or not any(Path(folder).glob("*.safetensors")):
        return
    if find_head(config):
        text = "The checkpoint has a head of multi-token prediction (mtp). Saved checkpoints keep it."
        if declares_head(config):
            text += " To train it too, use train --mtp, or mtp_loss_weight=0.1 in Python."
        elif not family_of(config).implies_head:
            text += " The configuration does not declare it, so servers do not use it."
        yield Finding("note", text)
    elif declares_head(config):
        text = "The configuration declares a head of multi-token prediction (mtp), and the checkpoint has none."
        fix = 'set "mtp_num_hidden_layers": 0 in config.json'
        yield Finding("problem", f"{text} vLLM does not start with it.", fix)


def _describe(model: PreTrainedModel, isolated: bool) -> dict[str, object]:
    ours = set(REPLACEMENTS.values())
    classes = {type(module) for module in model.modules()}
    stock = {cls for cls in classes - ours if cls.__module__.startswith("transformers.")}
    return {
        "class": type(model).__name__,
        "family": family.title if (family := family_of(model)) else "",
        "parameters": model.num_parameters(),
        "support": _support(model) if isolated else "none",
        "ours": sorted(cls.__name__ for cls in classes & ours),
        "stock": sorted(cls.__name__ for cls in stock),
    }


def _support(model: PreTrainedModel) -> str:
    if families_of(model, Own):
        return "classes of this package with fused ops"
    for way in (family.apart for family in families_of(model)):
        if isinstance(way, Unpacked):
            return f"the base model computes the documents as padded batches, because {way.cause}"
    mixed = families_of(model, Mixers)
    if any(family.rows for family in mixed):
        return "modules that mix along the row compute it with the ops of this package"
    if mixed:
        return "modules that mix along the row run on each document, or on the row if their kernels take boundaries"
    return "Transformers' own classes keep documents apart"


def _of_masks(model: PreTrainedModel, attention: str, device: torch.device) -> Iterator[Finding]:
    """Yield a finding if attention mixes documents, or applies a mask over the whole row."""
    if families_of(model, Unpacked):
        return
    if not serves_packed_rows(attention, device):
        yield Finding("problem", f"Attention {attention} {_UNKNOWN} on {device.type}.", _SDPA)
    elif attention == "sdpa" and any("causal_attention" in family.rows for family in families_of(model, Mixers)):
        return
    elif device.type != "cpu" and attention in ("sdpa", "eager") and supports_flash_attention(model):
        install = "" if find_spec("flash_attn") else " (pip install flash-attn)"
        fix = f'attn_implementation="flash_attention_2"{install}'
        yield Finding("warning", f"Attention {attention} applies a mask over the whole row.", fix)


def _ops_of(model: PreTrainedModel | None, device: torch.device, dtype: torch.dtype, attention: str) -> Ops:
    """Return the ops of one of our models, with one implementation of attention."""
    sizes = {} if model is None else sizes_for_ops(text_config(model))
    planned = availability(Setting(device, dtype, **sizes))
    found = {op: planned[op] for op in planned if not op.startswith("attention ")}
    # Without a model, those of Qwen's families are checked.
    used = {family.rule for family in (OWN[:1] if model is None else families_of(model, Own))}
    # No family with classes of this package scans as Mamba and Mamba-2 do.
    scans = set() if model is None else {"ssd", "selective_scan"}
    for op in {*scans, *(family.rule for family in OWN)} - used:
        del found[op]
    if model is not None and "expert_width" not in sizes:
        del found["experts"]
    op = f"attention {attention}"
    if op not in planned and is_flash_attention_requested(requested_attention_implementation=attention):
        planned[op] = attention, []
    found[op] = planned.get(op, (None, [(attention, _UNKNOWN)]))
    long = f"{op} of long documents"
    if long in planned and device.type == "cuda":
        found[long] = planned[long]
    return found


def _of_ops(ops: Ops, device: torch.device) -> Iterator[Finding]:
    """Yield the ops without a kernel on a GPU, together if one command installs the kernels."""
    slow: dict[str, list[tuple[str, str]]] = {}
    for op, (runs, refused) in ops.items():
        if op == "linear_float8":
            continue
        if runs is None:
            yield Finding("problem", f"{op}: {_reasons(refused)}.", _SDPA)
        elif device.type != "cpu" and not any(is_kernel(ops[one][0]) for one in (op, _EITHER.get(op, op))):
            slow[op] = [(found[1], reason) for _, reason in refused if (found := _COMMAND.search(reason))]
    yield from _of_slow_ops(ops, slow)


def _of_slow_ops(ops: Ops, slow: dict[str, list[tuple[str, str]]]) -> Iterator[Finding]:
    """Yield the ops of `slow`, each with the commands that install a kernel and the reasons that name them."""
    counts = Counter(command for commands in slow.values() for command, _ in commands)
    grouped: dict[str, list[str]] = {}
    for op, commands in slow.items():
        runs, refused = ops[op]
        if commands:
            # The command for most ops. Among equals the last one, because earlier kernels need compilers.
            command = max(reversed(commands), key=lambda pair: counts[pair[0]])[0]
            grouped.setdefault(command, []).append(op)
        else:
            fix = _SDPA if op == "attention eager" else ""
            because = f": {_reasons(refused)}" if refused else ""
            yield Finding("warning", f"{op} runs as {runs}{because}.", fix)
    for command, names in grouped.items():
        reasons = [
            f"{name} {_COMMAND.sub('', reason)}"
            for name, reason in dict.fromkeys(pair for op in names for pair in ops[op][1])
            if command in reason
        ]
        yield Finding("problem", f"No kernel for {', '.join(names)}: {'; '.join(dict.fromkeys(reasons))}.", command)


def _reasons(refused: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name} {reason}" for name, reason in refused)


def _of_speed(model: PreTrainedModel | None, ops: Ops, device: torch.device) -> Iterator[Finding]:
    """Yield whether CUDA graphs and float8 speed up training on a GPU."""
    if device.type == "cpu":
        if find_spec("fla") and find_spec("triton"):
            text = "While flash-linear-attention is installed, Transformers' own linear attention needs a GPU."
            yield Finding("note", f"{text} That of this package does not.")
        return
    dense = model is None or ("experts" not in ops and any(family.has_graphs for family in families_of(model)))
    attention = next(runs for op, (runs, _) in ops.items() if op.startswith("attention "))
    # Rows with another rule were not measured at these sizes.
    rule, _ = ops.get(OWN[0].rule, (None, []))
    if dense and attention == "varlen_attn" and is_kernel(rule):
        yield from _of_graphs(model)
    if model is None or any(family.has_float8 for family in families_of(model)):
        yield _of_float8(model, *ops["linear_float8"], has_experts="experts" in ops)


def _of_float8(
    model: PreTrainedModel | None, runs: str | None, refused: list[tuple[str, str]], has_experts: bool
) -> Finding:
    """Return whether products in float8 are worth their casts, for one of the models that can have them."""
    if runs is None:
        return Finding("note", f"Linear layers cannot run in FP8: {_reasons(refused)}.")
    if model is None:
        return Finding("note", "FP8 speeds up large layers on long rows.", "float8=True")
    store_in_blocks(model.config, model)
    share = share_in_float8(model, _LONG_ROW)
    computes = f"FP8 computes {share:.0%} of the products in layers on rows of {_LONG_ROW:,} tokens"
    if any(why_not_in_float8(x) == "" and not isinstance(x, torch.nn.Linear) for x in model.modules()):
        return Finding("note", f"{computes}, with experts, which are stored in FP8.", "float8=True")
    if has_experts:
        text = f"{computes}, because experts stay in bfloat16 unless they are stored in FP8. No step of a mixture was measured with it."
        return Finding("note", text)
    if share < _WORTH_FLOAT8:
        return Finding("note", f"{computes} and saves little, because the other layers are too small.")
    return Finding("note", f"{computes}, which is faster (measured at 4B and 9B).", "float8=True")


def _of_graphs(model: PreTrainedModel | None) -> Iterator[Finding]:
    size = 0 if model is None else model.num_parameters()
    shapes = [(shape, tokens) for shape, most, tokens in _FASTER_IN_GRAPHS if size <= most]
    for shape, tokens in shapes if model is None else shapes[:1]:
        text = f"Rows of up to {tokens:,} tokens are bound by the host, rows of {_LONG_ROW:,} by the GPU"
        text = f"{text} (measured on an H200 at the {shape} shape)."
        yield Finding("note", text, f"use_cuda_graphs(model, max_length={tokens})")
    if not shapes:
        text = f"Rows of {_LONG_ROW:,} tokens are bound by the GPU; short rows were not measured at this size."
        yield Finding("note", text)
