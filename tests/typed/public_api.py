"""A program of a user, which mypy checks (`make quality`) and `tests/test_public_api.py` runs.

Every public name has the type that a caller expects.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, assert_type

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from transformers_packed import (
    AuditReport,
    DataCollatorWithFlattening,
    GradientReleaseCallback,
    IterablePackingDataset,
    MtpAcceptance,
    PackedTrainer,
    PackedTrainingArguments,
    PackingCost,
    PackingDataset,
    PackingMetricsCallback,
    PackingPlan,
    PackingStateCallback,
    SequenceBoundaries,
    Verified,
    add_mtp,
    audit_model,
    batch_invariant,
    configure_packing,
    keep_experts_in_host_memory,
    keep_layers_in_host_memory,
    mtp_acceptance,
    pack_dataset,
    patch_model,
    per_document_logps,
    per_document_loss,
    plan_packing,
    register,
    registered,
    set_loss_normalization,
    unpatch_model,
    unregister,
    use_cuda_graphs,
    use_float8,
    verify_packing,
    warm_up,
)
from transformers_packed.ops import glu
from transformers_packed.parallel import SequenceParallel


def mixtures(model: Qwen3_5MoeForCausalLM) -> None:
    assert_type(keep_experts_in_host_memory(model), Qwen3_5MoeForCausalLM)
    assert_type(keep_layers_in_host_memory(model), Qwen3_5MoeForCausalLM)


def models(model: Qwen3_5ForCausalLM) -> None:
    """Functions that return their argument keep its class."""
    register()
    with registered():
        unregister()
    assert_type(patch_model(model), Qwen3_5ForCausalLM)
    assert_type(use_cuda_graphs(model, max_length=2048), Qwen3_5ForCausalLM)
    with batch_invariant():
        model.eval()
    assert_type(use_cuda_graphs(use_float8(patch_model(model)), 64), Qwen3_5ForCausalLM)
    assert_type(use_float8(model, lambda module, name: "mlp" in name), Qwen3_5ForCausalLM)
    batch = DataCollatorWithFlattening(model=model, return_cu_seqlens=True)(
        [{"input_ids": [5, 6]}, {"input_ids": [7]}]
    )
    assert_type(verify_packing(model, batch), Verified)
    report = audit_model(model, lengths=[3, 4], inputs=("position_ids",))
    assert_type(report, AuditReport)
    assert_type(report.ok, bool)
    assert_type(report.table(), str)
    assert_type(unpatch_model(model), Qwen3_5ForCausalLM)


def kernels(model: PreTrainedModel) -> list[float]:
    """On a GPU."""
    compiled = warm_up(model, 2048, max_documents=8, loss=lambda model, batch: model(**batch).loss)
    return [one.seconds for one in compiled]


def rows(samples: list[dict[str, list[int]]], model: PreTrainedModel) -> Iterator[Any]:
    """Samples are mappings of any kind."""
    plan = plan_packing([5, 3, 8], 8, overlong="truncate", balance=PackingCost(quadratic=0.1))
    assert_type(plan, PackingPlan)
    assert_type(plan.summary(), str)
    plan_packing(np.array([5, 3]), max_length=8)
    packed = PackingDataset(samples, max_length=8, overlong="split", plan=plan, cache="plans")
    row: list[Mapping[str, Any]] = packed[0]
    collator = DataCollatorWithFlattening(model=model, return_cu_seqlens=True, pad_to_multiple_of=64, pad_token_id=0)
    assert_type(collator([row]), dict[str, Any])
    assert_type(collator(samples), dict[str, Any])
    assert_type(collator(row, return_tensors="np"), dict[str, Any])
    yield from IterablePackingDataset(samples, 8, buffer_size=2, rank=0, world_size=1)
    yield pack_dataset(samples, 8, overlong="drop")


def losses(logits: torch.Tensor, labels: torch.Tensor, boundaries: SequenceBoundaries) -> torch.Tensor:
    """Boundaries are an object or cumulative lengths."""
    head: Callable[[torch.Tensor], torch.Tensor] = torch.nn.Linear(2, 3)
    loss = per_document_loss(logits, labels, boundaries, normalization="sum", head=head)
    logps = per_document_logps(logits, labels, boundaries.cu_seqlens)
    assert_type(SequenceBoundaries.from_lengths([1, 2], device="cpu"), SequenceBoundaries)
    lengths: Sequence[int] = boundaries.lengths
    assert_type(boundaries.num_documents, int)
    assert_type(boundaries.seq_idx, torch.Tensor)
    return loss.losses.sum() + logps.sums.sum() + sum(lengths)


def drafting(model: PreTrainedModel, samples: list[dict[str, list[int]]]) -> float:
    """The head of multi-token prediction is a module, and what it drafts is counted."""
    assert_type(add_mtp(model, dtype=torch.float32).detached, bool)
    found: MtpAcceptance = mtp_acceptance(model, samples, steps=3)
    return sum(found.rates) + found.loss


def training(model: PreTrainedModel, dataset: PackingDataset) -> None:
    """The Trainer and its arguments are those of Transformers, with more options."""
    trainer = Trainer(model, TrainingArguments("out", use_cpu=True), train_dataset=dataset)
    assert_type(configure_packing(trainer, True, max_length=64, float8=True, overlong="drop"), Trainer)
    set_loss_normalization(trainer, "sample")
    arguments = PackedTrainingArguments("out", packing=True, max_length=64, use_cpu=True)
    packed: Trainer = PackedTrainer(model, arguments, train_dataset=dataset)
    callbacks: list[TrainerCallback] = [PackingMetricsCallback(packed), PackingStateCallback()]
    callbacks.append(GradientReleaseCallback(packed))
    for callback in callbacks:
        packed.add_callback(callback)


def refused(trainer: Trainer, samples: list[dict[str, list[int]]], row: torch.Tensor) -> Iterator[Callable[[], Any]]:
    """Yield calls with a value that neither the function nor mypy accepts."""
    yield lambda: set_loss_normalization(trainer, "document")  # type: ignore[arg-type]
    yield lambda: per_document_loss(row, row, row, normalization="token")  # type: ignore[arg-type]
    yield lambda: configure_packing(trainer, "packing")  # type: ignore[arg-type]
    yield lambda: plan_packing([5, 3], 8, overlong="cut")  # type: ignore[arg-type]
    yield lambda: PackingDataset(samples, 8, truncation_side="both")  # type: ignore[arg-type]
    yield lambda: IterablePackingDataset(samples, 8, overlong="keep")  # type: ignore[arg-type]
    yield lambda: DataCollatorWithFlattening(on_leak="raise")  # type: ignore[arg-type]
    yield lambda: SequenceParallel(2, gated_delta_rule="gather")  # type: ignore[arg-type]
    yield lambda: SequenceParallel(2, attention="state")  # type: ignore[arg-type]
    yield lambda: glu(row, row, activation="gelu")  # type: ignore[arg-type]
