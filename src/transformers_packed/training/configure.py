"""`configure_packing`: padding-free or packed training for an existing Trainer, in one line."""

from typing import Any, cast

import torch
from transformers import Trainer

from ..errors import input_error
from ..models.registry import inner_model
from ..models.releases import TRAINING, check_names
from ..parallel_methods import AttentionMethod, DeltaRuleMethod
from . import typed
from .apply import applied_to, apply, undo_last
from .callbacks.verify import VerifyCallback
from .checks import say
from .options import Mode, Options
from .setup import decide


def configure_packing(
    trainer: Trainer,
    packing: Mode | bool = "auto",
    max_length: int | None = None,
    *,
    float8: bool = False,
    batch_invariant: bool = False,
    share_prompts: bool = False,
    cuda_graphs: bool | None = None,
    verify: bool = True,
    mtp_loss_weight: float = 0.0,
    mtp_only: bool = False,
    teacher: Any = None,
    distill_weight: float = 0.5,
    distill_beta: float = 0.0,
    distill_temperature: float = 1.0,
    sequence_parallel_size: int = 1,
    sequence_parallel_gated_delta_rule: DeltaRuleMethod = "state",
    sequence_parallel_attention: AttentionMethod | None = None,
    **plan_options: Any,
) -> Trainer:
    """Train without padding: patch the model if its family needs it, and replace the collator and the dataset.

    Call this function after building a Trainer and before `trainer.train()`. It prints one line with the active mode,
    or with the reason why packing is off. Before the first step, a few documents of the dataset, or of a stream's first
    batch, are verified against a padded batch, and a second line has the figures. Afterwards, `trainer.args.packing` and
    `trainer.args.padding_free` hold the active mode, and the log has packing metrics ([`PackingMetricsCallback`]). Models
    that the Trainer's `model_init` creates later are patched as well. Trainer no longer waits for the GPU in each step:
    batches are copied with `non_blocking=True`, and losses that are not finite are left out of the log on the GPU. DDP keeps
    the gradients in its buckets, of 100 MB unless `ddp_bucket_cap_mb` is set. It does not search for parameters without a
    gradient in language models with classes of their own here, at most one adapter and no loss of the user, unless
    `ddp_find_unused_parameters` is set. A step that leaves one out is then an error.

    * `"padding_free"`: concatenates the samples of a batch into one packed row. Batches, steps and learning rate are
      unchanged; only the padding is not computed.
    * `True` or `"pack"`: plans rows of up to `max_length` tokens over the whole dataset ([`PackingDataset`], or
      [`IterablePackingDataset`] for a stream). `per_device_train_batch_size` counts rows. Rows are read in the order
      of the plan (`train_sampling_strategy="sequential"`), and the plan fills all batches. A sampler of the user, which
      numbers samples, is an error.
    * `"auto"`: trains padding-free if it is safe according to the audit of the model, and useful. Otherwise the
      Trainer is unchanged, as it is if a row may reach code of the user: a loss, a training step or a loop. With
      `sequence_parallel_size` above 1, this is an error instead. Rows that are already packed (TRL's `packing=True`,
      [`PackingDataset`]) stay packed.
    * `"batches"`: the model packs the padded batches of any Trainer, whose collator, loss and metrics stay. The check before
      the first step runs the Trainer's own step with packing and without.
    * `False` or `"off"`: leaves the Trainer as it was built, but refuses to resume packed rows. If its own dataset
      or collator packs rows, the line says so.

    A second call first undoes the one before, so that only its arguments count. What you have changed in between stays.
    After training, so do a head of multi-token prediction and the classes of a model that is wrapped for training.

    The environment variable `TRANSFORMERS_PACKED_DISABLE_AUTO=1` turns `"auto"` off.

    Evaluation reads packed rows if it needs only their loss. Predictions, metrics, generation and methods of the user get
    the padded batches of the Trainer's own collator, or of one that pads labels if that does not. Packed rows of an
    evaluation dataset become their documents.

    TRL's `DPOTrainer`, `KTOTrainer`, `GRPOTrainer`, `RLOOTrainer` and `DistillationTrainer` keep their padded batches, which
    the policy and the reference model or the teacher then run as packed rows. So do `RewardTrainer`, any
    Trainer of a classifier, and `SentenceTransformerTrainer`. `packing=True` is not possible.

    `float8=True` is independent of the mode. Without packing, it patches the model as well, and the batches stay
    padded.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer, or a trainer of TRL, before training.
        packing (`str` or `bool`, *optional*, defaults to `"auto"`):
            `"auto"`, `"padding_free"`, `True` (`"pack"`), `"batches"` or `False` (`"off"`).
        max_length (`int`, *optional*):
            Maximum number of tokens per row for `packing=True`. Defaults to `trainer.args.max_length`.
        float8 (`bool`, *optional*, defaults to `False`):
            Train linear layers, and experts that are stored in float8, with products in float8 ([`use_float8`]).
        batch_invariant (`bool`, *optional*, defaults to `False`):
            Give the tokens of a document the same bits in every row and batch ([`batch_invariant`]), for the whole process
            until packing is configured anew. The check before the first step compares documents with their rows, bit by bit.
            If packing is not possible, this is an error.
        share_prompts (`bool`, *optional*, defaults to `False`):
            For TRL's trainers of preferences and of reinforcement learning, and for `packing="batches"`: compute once what
            documents of a batch begin with in common, such as the prompt of several answers.
        cuda_graphs (`bool`, *optional*):
            Run the layers of rows as CUDA graphs ([`use_cuda_graphs`]). By default, a row is measured before the first
            step on a GPU. Graphs stay on until the end of training if they make it faster and their memory is free, and a
            line says so. Rows of batches that are not packed differ in length: graphs then serve 95 % of them.
        verify (`bool`, *optional*, defaults to `True`):
            Compare a few documents with a padded batch before the first step. A difference turns `"auto"` off, and is an
            error in other modes, with shared rows and in a stream.
        mtp_loss_weight (`float`, *optional*, defaults to 0.0):
            Also train the model's head of multi-token prediction, with this weight of its loss. 0.1 is usual. The head of
            the checkpoint becomes a module of the model ([`add_mtp`]).
        mtp_only (`bool`, *optional*, defaults to `False`):
            Train only that head. The rest of the model is frozen and runs without gradients.
        teacher (`PreTrainedModel`, *optional*):
            Distill a model with the same vocabulary: also train the divergence of the model from it at all targets. The
            teacher is frozen, patched, and moved to the device of the model, or sharded as the model is under FSDP2. It
            reads the same rows. No checkpoint has it. Evaluation reports the loss of the model alone.
        distill_weight (`float`, *optional*, defaults to 0.5):
            The share of the divergence in the loss, `(1 - distill_weight) * loss + distill_weight * divergence`. With 1,
            the labels only say which tokens are targets.
        distill_beta (`float`, *optional*, defaults to 0.0):
            The divergence: 0 is the forward `KL(teacher || model)`, 1 the reverse one, and what lies between the
            generalized Jensen-Shannon divergence with this share of the teacher.
        distill_temperature (`float`, *optional*, defaults to 1.0):
            Divisor of all logits in the divergence, which is not multiplied by its square.
        sequence_parallel_size (`int`, *optional*, defaults to 1):
            The number of neighboring processes that share a row. Each computes a part of its tokens
            ([`SequenceParallel`]). Loss and gradients are those of the whole row, and so is the loss of an evaluation.
        sequence_parallel_gated_delta_rule (`str`, *optional*, defaults to `"state"`):
            How the processes share linear-attention layers, `"state"` or `"heads"`. `"heads"` needs a
            `sequence_parallel_size` above 1.
        sequence_parallel_attention (`str`, *optional*):
            How the processes share full-attention layers, `"heads"` or `"gather"`. By default the method with less
            communication. A method needs a `sequence_parallel_size` above 1.
        plan_options (`Any`, *optional*):
            Additional arguments of [`PackingDataset`] or [`IterablePackingDataset`] for `packing=True`, such as
            `overlong`.

    Returns:
        `transformers.Trainer`: the same object.

    Raises:
        `ValueError`: bad arguments, or `True`, `"padding_free"`, `float8=True` or a `sequence_parallel_size` above 1 is
            not possible. The message names the reason and the argument to change. The Trainer is then unchanged, and an
            earlier set-up stays.
            `trainer.train()` raises it if packed training differs from padded training.

    Example:

    ```python
    >>> import tempfile
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Trainer, TrainingArguments
    >>> from transformers_packed import configure_packing
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> samples = [{"input_ids": [n] * n, "labels": [n] * n} for n in range(2, 10)]
    >>> args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, use_cpu=True, report_to="none")
    >>> trainer = Trainer(Qwen3_5ForCausalLM(config), args, train_dataset=samples)
    >>> trainer = configure_packing(trainer)
    Padding-free on: about 1.4 x fewer tokens computed than in padded batches; isolation by reference (gated delta rule), \
reference (causal convolution), per_document(sdpa) (attention)
    >>> trainer.args.padding_free, trainer.args.packing
    (True, False)

    ```
    """
    options = Options(**{name: value for name, value in locals().items() if name != "trainer"})
    if not isinstance(trainer, Trainer):
        fix = "For a loop of your own, call patch_model(model)."
        raise input_error("a transformers.Trainer", type(trainer).__name__, fix)
    if teacher is not None:
        if not isinstance(teacher, torch.nn.Module):
            fix = "Load it: AutoModelForCausalLM.from_pretrained(...)."
            raise input_error("a model as the teacher", type(teacher).__name__, fix)
        options.teacher = inner_model(teacher)
    check_names(TRAINING)
    built = cast(typed.Trainer, trainer)
    earlier, callbacks = applied_to(built), list(built.callback_handler.callbacks)
    built.callback_handler.callbacks[:] = [x for x in callbacks if not isinstance(x, VerifyCallback)]
    stays = undo_last(built)
    try:
        setup = decide(built, options)
        if apply(built, setup, earlier):
            stays.append("the model keeps classes of this package, because it is wrapped for training")
    except Exception:
        if earlier is not None:
            apply(built, earlier.setup, earlier)
        built.callback_handler.callbacks[:] = [applied_to(built) if x is earlier else x for x in callbacks]
        raise
    if setup.mode != "off" and verify:
        VerifyCallback.add(built, setup)
    return say(built, "; ".join([setup.line, *([] if setup.facts.added else stays)]))
