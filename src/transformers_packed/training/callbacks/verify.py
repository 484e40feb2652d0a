"""Before the first step, a small batch of the user's own data shows whether packed training equals what it stands for.

The real Trainer computes a few documents of some dozens of tokens its own way, after accelerate has wrapped the model:

* Isolation: the last hidden states of one document, times fixed random weights, have a gradient of exactly 0 with
  respect to the embeddings of every other document. Hidden states and not the loss, because trainers of preferences have
  no loss per document, and a router's loss couples documents by design.
* Loss: without dropout and noise, the loss of the row and its gradient with respect to the embeddings equal those of a
  padded batch of the same documents, which the user's own collator makes. On a CPU, the model does not pack that batch.
  In 16 bits, a difference is rounding if float32 shows none, and if the padded batch is about as far from float32.
  Trainers of preferences compare log-probabilities, because their first loss is a constant.
* Parts of a row: on processes that share rows, the sum of the losses of the parts and its gradient with respect to the
  embeddings equal those of the whole row, which each process computes for the other comparisons.
* Evaluation: the real evaluation loop returns as many predictions, labels and targets as a few samples have, of which
  the last batch is not full.

This costs a forward and a backward per document, a step of the row and of the padded batch, and a small evaluation.
Weights, gradients, random states, and the counters and metrics of the Trainer remain as they were.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.utils import logging

from ...audit.isolation import UnseenError, indices_of, leak_between, watch
from ...audit.model_state import quiet
from ...data.documents import PaddedSamples, is_packed
from ...data.excerpts import cut_around_target, excerpts, places_of, targets_in, targets_of
from ...data.samples import documents_of, has_items
from ...errors import described, input_error, is_out_of_memory
from ...models.cuda_graphs import without_graphs
from ...models.padding import PaddedBatch
from ...models.registry import inner_model
from ...models.releases import prepare_inputs, token_logps, training_metrics
from ...models.untouched import gathers_weights
from ...ops.autotuning import tuned_in_threads
from ...parallel.collectives import all_gather
from ..apply import undo
from ..checks import say
from ..restore import (
    against_other_rows,
    as_before,
    beside_ddp,
    drop_gradients,
    in_float32,
    not_packing,
    replace_collator,
    replaced_collator,
    same_trainer,
    say_nothing,
    trunk_too,
    without_cache,
)
from ..sequence_parallel import PartCollator
from ..setup import Setup
from ..typed import Trainer
from ..verify import BARS, PADDED, DifferenceError, Measured, check_leak, compare, is_as_close, precision_of
from ..warm_up import compiles_kernels, make_row, only_loss
from .warm_up import WarmUpCallback, evaluates


logger = logging.get_logger(__name__)

# Documents of the row, and the most tokens of each. Their lengths differ, so that means over documents and over tokens do.
_LENGTHS = (20, 48, 32)
Found = TypeVar("Found")


class VerifyCallback(TrainerCallback):
    """Verifies a set-up of [`configure_packing`] when training starts, once for each model and dataset.

    A difference is undone with the reason if the set-up was chosen automatically, and is an error otherwise.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.
        setup ([`Setup`]):
            What was applied to it.
    """

    def __init__(self, trainer: Trainer, setup: Setup):
        self.trainer, self.setup, self._verified = trainer, setup, ()

    @classmethod
    def add(cls, trainer: Trainer, setup: Setup) -> None:
        """Add this callback after the one that compiles kernels, and before those that watch training."""
        callbacks = [x for x in trainer.callback_handler.callbacks if type(x) is not cls]
        at = sum(type(x) is WarmUpCallback for x in callbacks)
        trainer.callback_handler.callbacks[:] = [*callbacks[:at], cls(trainer, setup), *callbacks[at:]]

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        trainer, key = self.trainer, (id(self.trainer.model), id(self.trainer.train_dataset))
        if self._verified == key or state.global_step >= state.max_steps:
            return
        start = time.perf_counter()
        difference: DifferenceError | None = None
        try:
            said = self._together(lambda: self._reason() or self._verify(train_dataloader))
        except DifferenceError as error:
            difference = error
        except Exception as error:
            # Other processes may wait for this one.
            if args.world_size > 1:
                error.add_note("This happened while packing was verified. Pass verify=False to skip it.")
                raise
            said = f"Not verified: {described(error)}."
        self._verified = key
        if difference is not None:
            self._refuse(difference, train_dataloader)
            return
        seconds = time.perf_counter() - start
        say(trainer, said if said.startswith("Not verified") else f"{said} ({seconds:.1f} s).")

    def _reason(self) -> str | None:
        """Why this set-up cannot be verified."""
        why = against_other_rows(self.trainer)
        if self.trainer.args.torch_compile:
            why = "torch_compile=True, and a compiled model shows no gradients of its embeddings"
        return None if why is None else f"Not verified: {why}."

    def _anywhere(self, found: bool) -> bool:
        """Whether it is so on any process. All of them have to go on in the same way."""
        if self.trainer.args.world_size == 1:
            return found
        flag = torch.tensor([int(found)], device=self.trainer.args.device)
        return bool(self.trainer.accelerator.gather(flag).any())

    def _together(self, check: Callable[[], Found]) -> Found:
        """The result of a check. A difference on any process is raised on all of them.

        Trainers exchange tensors in what follows, where a process that is alone would wait for the others.
        """
        difference = None
        try:
            found = check()
        except DifferenceError as error:
            difference = error
        if self._anywhere(difference is not None):
            raise difference or DifferenceError("another process found a difference")
        return found

    def _refuse(self, difference: ValueError, loader: Any) -> None:
        trainer, setup = self.trainer, self.setup
        ours = next(
            (change.value for change in setup.changes if change.name == "data_collator"), trainer.data_collator
        )
        # A collator that the user has set since may contain ours, and loaders of shared rows give each to several processes.
        explicit = setup.options.mode != "auto" or setup.options.trains_mtp or setup.options.shares_rows
        if explicit or trainer.data_collator is not ours:
            raise difference
        callbacks = trainer.callback_handler.callbacks
        undo(trainer, setup)
        trainer.remove_callback(self)
        for callback in callbacks:
            # Training is just beginning for all that were there.
            if callback not in trainer.callback_handler.callbacks:
                vars(callback)["on_train_begin"] = say_nothing
        if setup.padded is not None:
            replace_collator(loader, ours, trainer.data_collator)
        say(trainer, f"Packing off, training is unchanged: {difference}")

    def _verify(self, loader: Any) -> str:
        trainer = self.trainer
        wrapped = trainer.model_wrapped
        model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        # No graph is worth recording for a short row.
        with (
            without_graphs(model),
            as_before(model, trainer.args.device),
            beside_ddp(wrapped),
            same_trainer(trainer),
            trunk_too(model),
            tuned_in_threads(),
        ):
            if self.setup.mode == "batches":
                return _verify_batches(trainer, model, loader, self._together)
            documents, why = excerpts(getattr(loader, "dataset", None), _LENGTHS)
            samples = [documents] if is_packed(trainer.train_dataset) else documents
            with whole_rows(trainer, loader):
                row = {} if why else loader.collate_fn(samples)
                places = [] if why else places_of(row, documents)
                if places is None:
                    why, places = "the collator changes the tokens of samples", []
                if self._anywhere(why is not None):
                    return f"Not verified: {why or 'another process has no row for it'}."
                words, found = self._verify_rows(model, loader, documents, row, places)
            if self.setup.parallel is not None:
                words += _verify_parts(trainer, model, loader.collate_fn(samples), places, found)
            return f"Verified packing on {len(documents)} documents: {words}{_verify_evaluation(trainer)}"

    def _verify_rows(self, model, loader: Any, documents: list, row: dict, places: list) -> tuple[str, Measured]:
        """Compare the documents in a row with one another, and the row with their padded batch.

        Returns the findings in words, and the loss and the gradient of the row.
        """
        trainer, words = self.trainer, "gradients between documents are 0"
        columns = getattr(trainer.data_collator, "token_columns", ())

        @_stops_training()
        def isolated() -> None:
            check_leak(leak_between(model, lambda: _loss(trainer, model, row), row, places), len(documents))

        def step() -> Measured:
            return _step(trainer, model, row, places)

        def step_padded() -> Measured:
            # Where kernels are compiled, those of a batch that is not packed would take longer than the check.
            with nullcontext() if compiles_kernels(trainer.args.device) else not_packing(model), without_cache(model):
                return _step(trainer, model, batch, places_of(batch, documents) or [])

        if trainer.is_fsdp_enabled:
            words = "gradients between documents were not looked at, because FSDP frees weights"
        else:
            self._together(isolated)
        with quiet(model):
            found = self._together(_stops_training()(step))
            with replaced_collator(loader, trainer.data_collator, self.setup.padded or PaddedSamples(columns)):
                batch = _collate_padded(loader, documents, columns)
            padded = step_padded()
            precision, note = precision_of(model, trainer.args), ""
            different = compare(*found, *padded, precision)
            if self._anywhere(different is not None):
                # Something may draw random numbers, or change in each forward, as the vectors of spectral norms do.
                if compare(*step(), *found, precision) and different:
                    different, note = None, ", which differs from run to run"
            if precision == "half" and self._anywhere(different is not None):
                why = _beyond_rounding(model, step, step_padded, found, padded)
                if different and why:
                    different += f" {why}"
                elif different:
                    different, note = None, ", which differ by rounding: float32 is equal"

        def equal() -> None:
            if different:
                raise DifferenceError(f"{different} {PADDED}")

        self._together(equal)
        return f"{words}; loss {found[0]:.4f}, padded {padded[0]:.4f}{note}", found


def _beyond_rounding(
    model, step: Callable[[], Measured], step_padded: Callable[[], Measured], found: Measured, padded: Measured
) -> str | None:
    """Why rounding to 16 bits does not explain a difference, or `None` if it does.

    It does if the row equals the padded batch in float32, and is in 16 bits about as close to that as the padded batch.
    Gradients of some models change by half with the order of sums in bfloat16, so no bar for 16 bits alone tells.
    """
    if gathers_weights(model):
        return "Float32 would show whether this is rounding, but weights are sharded."
    try:
        with in_float32(model):
            row, exact = step(), step_padded()
            different = compare(*row, *exact, precision_of(model))
    except Exception as error:
        return f"Float32 would show whether this is rounding, but it stopped: {described(error)}."
    if different or row[1].shape != found[1].shape:
        return "This is more than rounding: float32 differs too."
    return None if is_as_close(found, padded, exact) else "This is more than rounding: padded is closer to float32."


@contextmanager
def whole_rows(trainer: Trainer, loader: Any) -> Iterator[None]:
    """Let each process compute whole rows and the loss of training in one process meanwhile."""
    cut, parallel = trainer.data_collator, getattr(trainer, "sequence_parallel", None)
    args, average = trainer.args, trainer.args.average_tokens_across_devices
    # A process that stops in a step would let the others wait for its number of targets.
    args.average_tokens_across_devices = False
    try:
        if parallel is None or not isinstance(cut, PartCollator):
            yield
            return
        trainer.data_collator, trainer.sequence_parallel = cut.rows, None
        with replaced_collator(loader, cut, cut.rows):
            yield
    finally:
        args.average_tokens_across_devices = average
        if parallel is not None:
            trainer.data_collator, trainer.sequence_parallel = cut, parallel


def _verify_parts(trainer: Trainer, model, part: dict, places: list, expected: Measured) -> str:
    """Compare the parts of a row on the processes that share it with the whole row."""
    group, size = trainer.sequence_parallel.group, trainer.sequence_parallel.size
    config = inner_model(model).config.get_text_config()
    if trainer.sequence_parallel.data_parallel_size > 1 and getattr(config, "output_router_logits", False):
        # It counts once for each row of a step, so not as often here as in a step of one row.
        return "; parts of the row were not compared, because routers have a loss for each row of a step"
    batch, items = _items(trainer, part)
    with quiet(model), watch(model) as seen:
        loss = trainer.training_step(model, dict(batch), items).detach()
    # The mean over the processes follows in training.
    parts = None if seen.embeddings is None else seen.embeddings.grad
    drop_gradients(model)
    dist.all_reduce(loss, group=group)
    mean, gradient = loss.item() / size, expected[1]
    if parts is not None and len(gradient):
        every = all_gather(parts, 1, group)[0] / size
        gradient = every[torch.cat(places).to(every.device)].float()
    if different := compare(mean, gradient, *expected, precision_of(model, trainer.args), "the whole row"):
        raise DifferenceError(f"{different} Train without sequence parallelism, or pass verify=False.")
    return f"; {size} parts of the row {mean:.4f}"


@contextmanager
def _stops_training() -> Iterator[None]:
    """Errors are differences meanwhile, because the first step would stop too."""
    try:
        yield
    except (DifferenceError, UnseenError):
        raise
    except Exception as error:
        # Training stops with it too, and padded batches need more memory.
        if is_out_of_memory(error):
            raise
        message = input_error("a step of training on packed rows", described(error), PADDED)
        raise DifferenceError(str(message)) from error


def _collate_padded(loader: Any, documents: list, columns: Sequence[str]) -> dict[str, Any]:
    try:
        return loader.collate_fn(documents)
    except (ValueError, TypeError):
        # A collator that cannot pad labels, which packed training does not need.
        return PaddedSamples(tuple(columns))(documents)


def _verify_batches(trainer: Trainer, model, loader: Any, together: Callable[[Callable], Any]) -> str:
    """Compare a padded batch that the model packs with one that it does not pack."""
    batch = _padded_batch(trainer, model, loader)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    inner = inner_model(model)
    if getattr(inner, "share_prompts", False):
        words = f"gradients between rows were not looked at, because rows share prompts{_saved(ids, mask)}"
    else:
        rows = [torch.arange(ids.shape[1])[real] + at * ids.shape[1] for at, real in enumerate(mask.bool().cpu())]

        def forward() -> None:
            with trainer.compute_loss_context_manager():
                model(input_ids=ids, attention_mask=mask, use_cache=False)

        leak = leak_between(model, forward, batch, rows)
        together(lambda: check_leak(leak, len(rows)))
        words = "gradients between rows are 0"
    with quiet(model):
        packed = _scores(trainer, model, batch)
        with not_packing(model):
            padded = _scores(trainer, model, batch)
    error = float((packed - padded).norm() / padded.norm().clamp(min=1e-12))
    if not error <= BARS[precision_of(model, trainer.args)][1]:
        expected = "log-probabilities of the packed batch that equal those of the padded batch"
        raise DifferenceError(str(input_error(expected, f"a relative difference of {error:.1e}", PADDED)))
    return f"Verified packing on {len(ids)} rows: {words}; log-probabilities differ by {error:.0e} from padded ones"


def _saved(ids: torch.Tensor, mask: torch.Tensor) -> str:
    """The tokens of a batch that are computed if documents share prompts, in words."""
    batch = PaddedBatch.from_attention_mask(mask, mask.device, ids)
    given, computed = int(mask.sum()), 0 if batch is None else batch.boundaries.total_length
    return f" ({computed:,} of {given:,} tokens are computed)" if 0 < computed < given else ""


def _padded_batch(trainer: Trainer, model, loader: Any) -> dict[str, Any]:
    """A batch of the trainer, or prompts with completions if only a generation makes batches."""
    device = trainer.args.device
    if token_logps(trainer) is not None:
        lengths = (40, 24, 40, 32)
        row = make_row(model, list(lengths), PaddedSamples(), device)
        return {name: row[name] for name in ("input_ids", "attention_mask")}
    samples = sorted((loader.dataset[at] for at in range(min(16, len(loader.dataset)))), key=_size)
    return prepare_inputs(trainer, loader.collate_fn(samples[:2]))


def _size(sample: Mapping[str, Any]) -> int:
    return sum(len(x) for x in sample.values() if hasattr(x, "__len__"))


def _scores(trainer: Trainer, model, batch: dict[str, Any]) -> torch.Tensor:
    """The log-probabilities that a trainer of preferences computes for a batch: of each token, or the means it logs."""
    with trainer.compute_loss_context_manager(), torch.no_grad():
        if (compute := token_logps(trainer)) is not None:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            return compute(model, ids, mask, ids.shape[1] - 1)[0].float()[mask[:, 1:] == 1]
        training_metrics(trainer).clear()
        loss = only_loss(trainer.compute_loss(model, dict(batch)))
    logged = training_metrics(trainer)
    return torch.tensor([loss.item(), *(logged[name][-1] for name in sorted(logged) if name.startswith("logps"))])


def _verify_evaluation(trainer: Trainer) -> str:
    """Count what the evaluation loop returns for a few samples, of which the last batch is not full."""
    args, dataset = trainer.args, trainer.eval_dataset
    if not evaluates(trainer) or trainer.compute_metrics is None or args.prediction_loss_only or not dataset:
        return ""
    dataset = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    if not has_items(dataset):
        return "; evaluation not verified, because its samples are a stream"
    rows = [dataset[at] for at in range(min(2 * args.world_size + 1, len(dataset)))]
    rows = [[cut_around_target(sample, _LENGTHS[0]) for sample in documents_of(row)] for row in rows]
    documents = list(chain.from_iterable(rows))
    found = _evaluate(trainer, rows if is_packed(dataset) else documents)
    expected = {"documents": len(documents), "targets": sum(map(targets_of, documents))}
    if found["targets"] is None or not expected["targets"]:
        del expected["targets"], found["targets"]
    wanted, got = (" and ".join(f"{number} {what}" for what, number in x.items()) for x in (expected, found))
    if found != expected:
        raise DifferenceError(str(input_error(f"an evaluation of {wanted}", got, PADDED)))
    return f"; evaluation of {got} is complete"


def _evaluate(trainer: Trainer, dataset: Any) -> dict[str, int | None]:
    """The predictions and the targets that the evaluation loop returns for a dataset, in batches of 2."""
    seen: list[tuple[Any, Any]] = []

    def record(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        seen.append((_first(prediction.predictions), _first(prediction.label_ids)))
        return {}

    trainer.compute_metrics, trainer.callback_handler.callbacks = record, []
    # A loader that persists would be that of an earlier evaluation.
    small = {"per_device_eval_batch_size": 2, "dataloader_num_workers": 0, "dataloader_prefetch_factor": None}
    vars(trainer.args).update(small, dataloader_persistent_workers=False)
    trainer.evaluation_loop(trainer.get_eval_dataloader(dataset), "Verification")
    targets = [targets_in(np.asarray(torch.as_tensor(labels).cpu())) for _, labels in seen if labels is not None]
    return {"documents": sum(len(x) for x, _ in seen), "targets": sum(targets) if targets else None}


def _first(value: Any) -> Any:
    """The first array of nested results of a model."""
    while isinstance(value, tuple | list | dict):
        value = next(iter(value.values() if isinstance(value, dict) else value), None)
    return value


def _items(trainer: Trainer, batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A batch on the device, as the Trainer gets it from its loader, and its number of items."""
    moved = {name: x.to(trainer.args.device) if hasattr(x, "to") else x for name, x in batch.items()}
    (batch,), items = trainer.get_batch_samples(iter([moved]), 1, trainer.args.device)
    trainer.current_gradient_accumulation_steps = 1
    return batch, items


def _loss(trainer: Trainer, model, batch: dict[str, Any]) -> torch.Tensor:
    batch, items = _items(trainer, batch)
    with trainer.compute_loss_context_manager():
        return only_loss(trainer.compute_loss(model, prepare_inputs(trainer, batch), num_items_in_batch=items))


def _step(trainer: Trainer, model, batch: dict[str, Any], places: list[torch.Tensor]) -> Measured:
    """The loss of the Trainer's own step, and its gradient with respect to the documents' embeddings."""
    batch, items = _items(trainer, batch)
    with watch(model) as seen:
        loss = trainer.training_step(model, dict(batch), items).item()
    gradient = None if seen.embeddings is None else seen.embeddings.grad
    drop_gradients(model)
    if gradient is None:
        return loss, torch.zeros(0)
    indices = torch.cat(indices_of(gradient, batch, places)) if places else torch.zeros(0, dtype=torch.long)
    return loss, gradient.flatten(0, 1)[indices.to(gradient.device)].float()
