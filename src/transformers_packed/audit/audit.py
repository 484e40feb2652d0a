"""`audit_model`: whether documents of a packed row depend on one another, or on where they stand."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..foreign import attention_of
from ..models.registry import transformers_model
from ..models.releases import has_hooks
from ..shared_prompts import SharedPrompts
from .invariance import default_lengths, measure_invariance
from .model_state import audit_state, off_zero, silenced
from .probe import SHARED, Probe, conv_width
from .report import SOURCES, AuditReport, SourceResult


def audit_model(
    model: torch.nn.Module,
    *,
    lengths: Sequence[int] | None = None,
    parent_of: Sequence[int] | None = None,
    inputs: Sequence[str] = ("position_ids", "all"),
    tolerance: float | None = None,
    gradients: bool = True,
    invariance: bool = False,
    seed: int = 0,
) -> AuditReport:
    """Measure whether a causal language model keeps the documents of a packed row apart, in forward and backward.

    With `invariance`, measure instead whether a document has the same bits wherever it stands: alone, in packed rows, in
    padded batches and under gradient checkpointing. Leaks are then not measured.

    Any model that Transformers can run is supported: stock models, models of this package and custom code, in any
    dtype and on any device, with any attention implementation, gradient checkpointing, PEFT or `torch.compile`. For a
    vision-language model the audit covers text only. The model runs in training mode with every dropout set to 0 and
    without a cache. The audit then restores its mode, hooks, gradients, configuration, buffers and the random state.

    Args:
        model (`torch.nn.Module`):
            The model to audit.
        lengths (`Sequence[int]`, *optional*):
            The length in tokens of each document in the row, at least two documents. The default alternates short and
            long documents with about 400 tokens in total: 1, 2, the convolution width minus 1, 63, 64, 65 and 200.
            With `invariance`, the lengths of the documents that are moved, at least one. The default is 37 and 112, on a
            GPU 37, 300 and 1,500.
        parent_of (`Sequence[int]`, *optional*):
            For each of `lengths`, the index of the earlier document that it continues, or -1: a row with shared prompts
            ([`SharedPrompts`]). A document may then depend on its ancestors, and `"parent_of"` is the only source of
            boundaries.
        inputs (`Sequence[str]`, *optional*, defaults to `("position_ids", "all")`):
            The boundaries to pass to the model: `"position_ids"`, `"seq_idx"`, `"cu_seq_lens"` (with `max_length_q`
            and `max_length_k`), several of these joined with `+`, or `"all"`, which passes everything that the
            collator returns with every flag set. With `invariance`, rows have the last of these that the model accepts.
        tolerance (`float`, *optional*):
            The largest relative change that is not a leak. By default the threshold is derived from measured noise.
        gradients (`bool`, *optional*, defaults to `True`):
            Whether to audit gradients too. With `invariance`, whether to measure forwards for a backward: with gradient
            checkpointing, and in CUDA graphs.
        invariance (`bool`, *optional*, defaults to `False`):
            Whether to measure this, and not leaks. The report has the largest difference of each placement, and the
            operations that bring it ([`Invariance`]).
        seed (`int`, *optional*, defaults to 0):
            The random seed of the tokens.

    Returns:
        [`AuditReport`]: a report with one verdict per source of boundaries. If the model raises an error on a source,
            the verdict is `"refused"`, with the error message. A model that is not causal or cannot run at all is
            refused for every source. With `invariance`, the report has no sources.

    Raises:
        `ValueError`: an argument is malformed, `model` contains no Transformers model, or the model has no weights.
            With `invariance`, also `parent_of` or `tolerance`.

    Example:

    ```python
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed import audit_model, patch_model
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> model = patch_model(Qwen3_5ForCausalLM(config))
    >>> report = audit_model(model, lengths=[20, 1, 30])
    >>> report.ok, report.leaks
    (True, [])
    >>> report = audit_model(model, lengths=[32], invariance=True)
    >>> report.invariance.placements[0].name, report.invariance.placements[0].logps
    ('alone again', [0.0])

    ```
    """
    inner = _model_with_weights(model)
    width = conv_width(inner)
    if lengths is None:
        lengths = default_lengths(inner) if invariance else [65, 1, 200, max(width - 1, 1), 63, 2, 64]
    lengths = list(lengths)
    _check_row(lengths, parent_of, inputs, fewest=1 if invariance else 2)
    if invariance and (parent_of, tolerance) != (None, None):
        raise input_error("no parent_of and no tolerance with invariance=True", f"{parent_of=}, {tolerance=}")
    if parent_of is not None:
        inputs = (SHARED,)
    name = f"{type(inner).__module__.partition('.')[0]}.{type(inner).__name__}"
    report = AuditReport(name, _settings(inner) | {"seed": seed}, lengths, {}, [])
    options = (parent_of or [-1] * len(lengths), width, tolerance, gradients, seed, report.notes)
    if invariance:
        with silenced(model):
            report.invariance = measure_invariance(Probe(model, lengths, *options), inputs)
        return report
    with off_zero(model), audit_state(model, report.notes):
        probe = Probe(model, lengths, *options)
        refusal = probe.refusal(probe.prepare)
        for name in dict.fromkeys(inputs):
            refused = refusal or probe.refusal(probe.source, name, report)
            if refused:
                report.sources[name] = SourceResult("refused", refused)
    report.leaks.sort(key=lambda leak: -leak.size)
    return report


def _model_with_weights(model: torch.nn.Module) -> transformers.PreTrainedModel:
    """Return the Transformers model in `model`, or raise the error of [`audit_model`]."""
    inner = transformers_model(model) if isinstance(model, torch.nn.Module) else None
    if inner is None:
        raise input_error("a Transformers model, or a module that contains one", type(model).__name__)
    for name, module in inner.named_modules():
        # Weights offloaded by accelerate are also on the meta device. They are loaded when their module is called.
        offloaded = has_hooks(module) and module is not inner.get_input_embeddings()
        if not offloaded and any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            fix = "Load or initialize its weights first, and do not offload embeddings."
            raise input_error("a model with weights", f"{name} on the meta device", fix)
    return inner


def _check_row(lengths: list[int], parent_of: Sequence[int] | None, inputs: Sequence[str], fewest: int) -> None:
    if len(lengths) < fewest or any(not isinstance(n, int) or n < 1 for n in lengths):
        number = "two documents" if fewest == 2 else "one document"
        raise input_error(f"lengths of at least {number}, each with at least 1 token", lengths)
    if parent_of is not None:
        # Raises the error for prompts that do not fit.
        SharedPrompts.of(SequenceBoundaries.from_lengths(lengths), parent_of)
    elif not inputs or isinstance(inputs, str) or any(not set(name.split("+")) <= set(SOURCES) for name in inputs):
        raise input_error(f"inputs among {', '.join(SOURCES)}", repr(inputs))


def _settings(model: transformers.PreTrainedModel) -> dict[str, Any]:
    parameter = next(model.parameters())
    cuda = parameter.device.type == "cuda"
    return {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(parameter.device) if cuda else parameter.device.type,
        "attention": str(attention_of(model.config.get_text_config())),
        "torch": f"torch {torch.__version__}",
        "transformers": f"transformers {transformers.__version__}",
    }
