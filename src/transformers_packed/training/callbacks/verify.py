"""Before the first step, a small batch of the user's own data shows whether packed training equals what it stands for.

The real Trainer computes a few documents of some dozens of tokens its own way, after accelerate has wrapped the model:

* Isolation: the last hidden states of one document, times fixed random weights, have a gradient of exactly 0 with
  respect to the embeddings of every other document. Hidden states and not the loss, because trainers of preferences have
  no loss per document, and a router's loss couples documents by design.
* Loss: without dropout and noise, the loss of the row and its gradient with respect to the embeddings equal those of a
  padded batch of the same documents, which the user's own collator makes, and so do the gradients of the weights. On a
  CPU, the model does not pack that batch. `compare.py` tells differences from rounding and noise.
  Trainers of preferences compare log-probabilities, because their first loss is a constant.
* Length: both again for documents of up to `_LONG` tokens, if the data has them.
* Bits: with `batch_invariant`, the last hidden states of a document on a GPU are those of the document alone.
* Parts of a row: on processes that share rows, the sum of the losses of the parts and its gradient with respect to the
  embeddings equal those of the whole row, which each process computes for the other comparisons.
* Evaluation: the real evaluation loop returns as many predictions, labels and targets as a few samples have, of which
  the last batch is not full.

This costs a forward and a backward per document, two steps of a row and of a padded batch, and a small evaluation.
Weights, gradients, random states, and what the Trainer, its modules and its data keep remain as they were (`state.py`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ...audit.isolation import UnseenError, changed_by_others, leak_between
from ...audit.model_state import as_before, quiet
from ...data.documents import is_packed
from ...data.excerpts import STREAM, cut_around_target, excerpts, places_of, source_of, targets_in, targets_of
from ...data.samples import documents_of, has_items
from ...errors import alternatives, described, input_error, is_out_of_memory
from ...models.cuda_graphs import without_graphs
from ...models.losses import losses_of
from ...models.registry import inner_model
from ...models.segments import few_segments
from ...ops.compilations import tuned_in_threads
from ...ops.offload import all_checkpoints
from ..apply import Setup, undo
from ..checks import say
from ..compare import (
    BATCH,
    GRADIENT,
    LOSS,
    PADDED,
    DifferenceError,
    Result,
    Side,
    check_bits,
    check_leak,
    find_difference,
    precision_of,
    relative_error,
    together,
)
from ..padded_steps import REWARD, SCORES, PaddedStep, columns_of, real_batch
from ..restore import (
    against_other_rows,
    beside_ddp,
    exact_for,
    inside_ddp,
    replace_collator,
    same_trainer,
    say_nothing,
    trunk_too,
)
from ..state import DATA, State
from ..steps import Row, step_of_parts, whole_rows
from ..typed import Trainer
from .first_batch import FirstBatch
from .later_changes import LaterChanges
from .resume import PackingPlanCallback
from .warm_up import WarmUpCallback, evaluates, start_threads


# Documents of the row, and the most tokens of each. Their lengths differ, so that means over documents and over tokens do.
_LENGTHS, _LONG = (20, 48, 32), (384, 512, 448)
# Seconds that a CPU may take for a step on a row of longer documents, as its time for a short one tells.
_PATIENCE = 1.0


class VerifyCallback(TrainerCallback):
    """Verifies a set-up of [`configure_packing`] whenever training starts: anything may have changed since the last time.

    A difference is undone with the reason if the set-up was chosen automatically, and is an error otherwise.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.
        setup ([`Setup`]):
            What was applied to it.
    """

    def __init__(self, trainer: Trainer, setup: Setup):
        self.trainer, self.setup = trainer, setup
        self._later: LaterChanges | None = None

    @classmethod
    def add(cls, trainer: Trainer, setup: Setup) -> None:
        """Add this callback after those that refuse other rows and compile kernels, and before those that watch training."""
        callbacks = [x for x in trainer.callback_handler.callbacks if type(x) is not cls]
        at = sum(type(x) in (PackingPlanCallback, WarmUpCallback) for x in callbacks)
        trainer.callback_handler.callbacks[:] = [*callbacks[:at], cls(trainer, setup), *callbacks[at:]]

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        trainer = self.trainer
        if state.global_step >= state.max_steps:
            return
        start_threads(trainer)
        self._later = None
        if against_other_rows(trainer) is not None or not FirstBatch.put_in(trainer, train_dataloader, self._check):
            if self._check(train_dataloader):
                self._later = LaterChanges(trainer.model_wrapped)

    def on_step_begin(self, args, state, control, train_dataloader=None, **kwargs):
        """Look again at a model that other callbacks have changed since training began."""
        later, self._later = self._later, None
        if later is None:
            return
        # An evaluation may have left other kernels. Trainer does this next.
        self.trainer.model_wrapped.train()
        if self._anywhere(later.need_a_check()):
            with later.without_hooks_of_libraries():
                self._check(train_dataloader, ", with the changes of callbacks,")

    def _check(self, train_dataloader: Any, again: str = "") -> bool:
        """Verify the set-up, and say what was found. Returns whether it was verified. `again` are words, if training has begun."""
        trainer, args = self.trainer, self.trainer.args
        start = time.perf_counter()
        verified = False
        try:
            said = self._together(lambda: self._verify(train_dataloader))
            said = f"Verified packing{again} on {said} ({time.perf_counter() - start:.1f} s)."
            verified = True
        except DifferenceError as error:
            self._refuse(error, train_dataloader, bool(again))
            return False
        except UnseenError as error:
            said = f"Not verified: {error}."
        except Exception as error:
            # Other processes may wait for this one.
            if args.world_size > 1:
                error.add_note("This happened while packing was verified. Pass verify=False to skip it.")
                raise
            said = f"Not verified: {described(error)}."
        say(trainer, said)
        return verified

    def _anywhere(self, found: bool) -> bool:
        """Whether it is so on any process. All of them have to go on in the same way."""
        return bool(self._most(found))

    def _most(self, value: float) -> float:
        """The highest value of all processes."""
        if self.trainer.args.world_size == 1:
            return value
        own = torch.tensor([float(value)], device=self.trainer.args.device)
        return self.trainer.accelerator.gather(own).max().item()

    def _together(self, check: Callable[[], Result]) -> Result:
        return together(check, self._anywhere)

    def _refuse(self, difference: ValueError, loader: Any, has_begun: bool) -> None:
        trainer, setup = self.trainer, self.setup
        ours = next((x.value for x in setup.changes if x.name == "data_collator"), trainer.data_collator)
        # A collator that the user has set since may contain ours, and loaders of shared rows give each to several processes.
        facts = setup.facts
        explicit = facts.options.mode != "auto" or bool(facts.added) or facts.options.shares_rows
        # Training has begun with the first batch.
        explicit = explicit or has_begun or isinstance(loader, FirstBatch) or facts.options.batch_invariant
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
        """Return the findings in words, or raise the error of what differs or of what is unknown."""
        trainer = self.trainer
        if (why := against_other_rows(trainer)) is not None:
            raise UnseenError(why)
        wrapped = trainer.model_wrapped
        model = inside_ddp(wrapped)
        # No graph is worth recording for a short row, no segment of training is that short, and no input that small.
        with (
            without_graphs(model),
            few_segments(),
            all_checkpoints(),
            as_before(model),
            same_trainer(trainer, model, loader) as state,
            beside_ddp(wrapped),
            trunk_too(model),
            tuned_in_threads(),
        ):
            verify = self._verify_batches if self.setup.mode == "batches" else self._verify_data
            words = verify(model, loader, state)
        # Which large tensors have changed is known by now.
        return f"{words}; not put back: {', '.join(dict.fromkeys(state.left))}" if state.left else words

    def _verify_data(self, model, loader: Any, state: State) -> str:
        """Compare rows of the dataset with what they stand for."""
        trainer = self.trainer

        def make() -> Row:
            _check_unread(loader, state)
            return self._row(model, loader, _LENGTHS)

        with whole_rows(trainer, loader):
            row = self._together(make)
            words, seconds = self._verify_row(row)
            words += self._verify_longer(row, loader, seconds)
        if self.setup.parallel is not None:
            words += self._verify_parts(row, loader)
        words = f"{len(row.documents)} documents of up to {row.longest} tokens: {words}"
        return words + _verify_evaluation(trainer)

    def _row(self, model, loader: Any, lengths: tuple[int, ...]) -> Row:
        """The row that the loader makes of documents of these lengths."""
        documents, why = excerpts(loader.dataset, lengths)
        if why is not None:
            raise UnseenError(why)
        batch = loader.collate_fn(self._samples(documents))
        places = places_of(batch, documents)
        if places is None:
            raise UnseenError("the collator changes the tokens of samples")
        return Row(self.trainer, model, loader, self.setup.padded, documents, batch, places)

    def _samples(self, documents: list) -> list:
        return [documents] if is_packed(self.trainer.train_dataset) else documents

    def _verify_row(self, row: Row) -> tuple[str, float]:
        """Compare the documents of a row. Returns the findings in words, and the seconds of a step."""
        words = "gradients between documents are 0"
        if self.trainer.is_fsdp_enabled:
            words = "gradients between documents were not looked at, because FSDP frees weights"
        seconds, losses = self._compare(row)
        return f"{words}; loss {losses}{self._bits(row.model, row.loss, row.batch, row.places)}", seconds

    def _bits(self, model, forward: Callable, batch: dict, places: list) -> str:
        """Compare documents with the same ones alone, bit by bit, if the set-up promises that they are equal.

        On a CPU, functions such as `exp` round the last elements of a tensor in another way, so nothing is compared.
        """
        if not self.setup.facts.options.batch_invariant or self.trainer.args.device.type == "cpu":
            return ""

        def look() -> None:
            with quiet(model), self.trainer.compute_loss_context_manager():
                check_bits(changed_by_others(model, forward, batch, places))

        self._together(look)
        return "; documents have the bits that they have alone"

    def _look_between(
        self, model, forward: Callable, batch: dict, places: list, errors: AbstractContextManager
    ) -> UnseenError | None:
        """Look for gradients between documents, and return why there are none to look at, if so."""

        def look() -> None:
            with errors:
                leak = leak_between(model, forward, batch, places)
            check_leak(leak, len(places))

        try:
            self._together(look)
        except UnseenError as error:
            # What follows tells whether this is so in a padded batch too.
            return error
        return None

    def _compare(self, row: Row) -> tuple[float, str]:
        """Look for gradients between the documents of a row, and compare it with its padded batch.

        Returns the seconds of a step, and the losses in words.
        """
        unseen = None
        if not self.trainer.is_fsdp_enabled:
            unseen = self._look_between(row.model, row.loss, row.batch, row.places, _stops_training())
        with quiet(row.model):
            side = self._together(_stops_training()(lambda: Side(row.step)))
            padded = Side(row.step_padded)
            note = self._find(row.model, side, padded)
        if unseen is not None:
            raise unseen
        return side.seconds, f"{side.loss:.4f}, padded {padded.loss:.4f}{note}"

    def _find(self, model, row: Side, other: Side, what: str = BATCH, fix: str = PADDED) -> str:
        """Compare two sides in the precision of the Trainer. A difference on any process is raised on all of them."""
        precision = precision_of(model, self.trainer.args), exact_for(model, self.trainer.args)
        words: Any = {"what": what, "fix": fix, "anywhere": self._anywhere}
        return self._together(lambda: find_difference(row, other, *precision, **words))

    def _verify_longer(self, short: Row, loader: Any, seconds: float) -> str:
        """Compare a row of longer documents with its padded batch, where there are any and time allows."""
        args, most = self.trainer.args, sum(_LONG)
        if args.device.type == "cpu":
            # Processes that share a row need equal lengths, and their clocks differ.
            most = int(short.batch["input_ids"].numel() * _PATIENCE / self._most(seconds))
        lengths = tuple(min(length, most * length // sum(_LONG)) for length in _LONG)

        def make() -> Row:
            row = self._row(short.model, loader, lengths) if min(lengths) > short.longest else short
            if row.longest <= short.longest:
                raise UnseenError("no time, or no longer documents")
            return row

        try:
            row = self._together(make)
        except UnseenError:
            return ""
        what = f"documents of up to {row.longest} tokens"
        try:
            return f"; for {what} {self._compare(row)[1]}"
        except UnseenError as error:
            return f"; {error}, for {what}"
        except torch.OutOfMemoryError:
            # Other processes may wait for this one.
            if args.world_size > 1:
                raise
            return f"; no memory for {what}"

    def _verify_parts(self, row: Row, loader: Any) -> str:
        """Compare the parts of a row on the processes that share it with the whole row."""
        trainer, model, sequence_parallel = self.trainer, row.model, self.trainer.sequence_parallel
        reasons = (loss.against_parts(inner_model(model)) for loss in losses_of(model))
        why = next(filter(None, reasons), None)
        if sequence_parallel.data_parallel_size > 1 and why is not None:
            return f"; parts of the row were not compared, because {why}"
        part = loader.collate_fn(self._samples(row.documents))
        with quiet(model):
            parts = Side(lambda: step_of_parts(trainer, model, part, row.places))
            whole = Side(whole_rows(trainer, loader)(row.step))
            fix = "Train without sequence parallelism, or pass verify=False."
            try:
                found = f"{parts.loss:.4f}{self._find(model, parts, whole, 'the whole row', fix)}"
            except UnseenError as error:
                found = str(error)
        return f"; {sequence_parallel.size} parts of the row {found}"

    def _verify_batches(self, model, loader: Any, state: State) -> str:
        """Compare the Trainer's step on a padded batch that the models pack with that on one that they do not pack."""
        trainer, record = self.trainer, self.setup.facts.record
        if record.batch is None:
            _check_unread(loader, state)
        batch = record.batch(trainer, model) if record.batch else real_batch(trainer, loader)
        step = PaddedStep(trainer, model, (model, *record.models(trainer)[:-1]), record.measure, batch)
        words, unseen = self._look_between_rows(model, batch)
        with quiet(model):
            # A batch on which the trainer itself stops tells nothing.
            padded = Side(partial(step.run, False))
            packed = self._together(_stops_training()(lambda: Side(partial(step.run, True))))
            note = self._find(model, packed, padded)
        if unseen is not None:
            raise unseen
        step.check(padded)
        compared = [name for name in (LOSS, GRADIENT, SCORES, REWARD) if name in padded.runs[0]]
        error = max(relative_error(packed, padded, name) for name in compared)
        computed = f"{step.tokens[True]} of {step.tokens[False]} tokens are computed"
        words += f"{alternatives(compared, 'and')} differ by {error:.0e} from padded ones{note}"
        return f"a batch of which {computed}: {words}"

    def _look_between_rows(self, model, batch: Any) -> tuple[str, UnseenError | None]:
        """Look for gradients between the rows of a batch, or of each of its columns, such as queries and documents.

        Returns the findings in words, and why there are none to look at, if so.
        """
        columns = columns_of(batch)
        if not columns:
            return "", None
        if getattr(inner_model(model), "share_prompts", False):
            return "gradients between rows were not looked at, because rows share prompts; ", None
        found = [self._look_between_rows_of(model, ids, mask, whole="" in columns) for ids, mask in columns.values()]
        bits, unseen = zip(*found, strict=True)
        return f"gradients between rows are 0{bits[0]}; ", next(filter(None, unseen), None)

    def _look_between_rows_of(
        self, model, ids: torch.Tensor, mask: torch.Tensor, whole: bool
    ) -> tuple[str, UnseenError | None]:
        ids, mask = (x.to(self.trainer.args.device) for x in (ids, mask))
        rows = [torch.arange(ids.shape[1])[real] + at * ids.shape[1] for at, real in enumerate(mask.bool().cpu())]
        batch = {"input_ids": ids, "attention_mask": mask}
        # Something else calls the model on columns.
        model = model if whole else inner_model(model)

        def forward() -> None:
            with self.trainer.compute_loss_context_manager():
                model(**batch, use_cache=False)

        bits = self._bits(model, forward, batch, rows)
        return bits, self._look_between(model, forward, batch, rows, nullcontext())


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


def _check_unread(loader: Any, state: State) -> None:
    """Raise the error of samples that cannot be read beside training."""
    if not has_items(source_of(getattr(loader, "dataset", None))):
        raise UnseenError(STREAM)
    consumed = next((x for x in state.left if x.startswith(DATA)), None)
    if consumed is not None:
        raise UnseenError(f"reading samples would consume {consumed}")


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
