"""Packing metrics in the Trainer's log: speed, fill, documents, padding avoided, and balance of the ranks.

All values come from the shapes of the model inputs and from integers on the host, so no step waits for the GPU.
Document lengths stay on the device until the next log.
"""

import time
from contextlib import ExitStack

import numpy as np
import torch
from accelerate.utils import gather
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from ...boundaries import SequenceBoundaries
from ...data.planning.cost import PackingCost
from ...data.planning.rows import mean_of_longest
from ...errors import described, input_error
from ...models.inputs import tokens_of
from ...models.parameters import trained_share
from ...models.registry import inner_model, transformers_model
from ...models.releases import rows_per_batch
from ...ops.dispatch import implementations_used
from ...parallel import RowShard
from ...shared_prompts import SharedPrompts
from .expert_load import ExpertLoad


logger = logging.get_logger(__name__)

# Dense float16 or bfloat16 operations per second, from the vendors' data sheets. The first matching name counts.
PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "T4": 65e12,
}


class PackingMetricsCallback(TrainerCallback):
    """Adds packing metrics to the Trainer's log, and prints a summary line at the end of training.

    [`configure_packing`] adds it before the other callbacks, so that they report its metrics with the loss:

    * `tokens_per_second`: tokens of all processes, without padding, per second between two logs. The time for
      evaluation and saving is excluded.
    * `documents_per_row`: documents per packed row, or per batch in padding-free mode. In all metrics, a tree of
      documents counts as one of as many tokens as are computed for it.
    * `padding_avoided`: the fraction of padding in padded batches of the same documents. For packed rows, in batches
      of 8 in random order, as in the plan.
    * `packing_fill`, for packed rows: the fraction of the rows that holds tokens. All batches count as full.
    * `rank_imbalance`, with several processes: the extra cost of a step's slowest process relative to the mean, in
      operations if they are known, else in tokens. Processes that share rows count as one.
    * `share_of_peak`, on a known GPU in half precision: the operations of forward and backward as a fraction of the
      GPU's peak. The recomputation of gradient checkpointing does not count.
    * `expert_load_max`, for the mixtures of experts of this package: the largest number of tokens that chose the same
      expert of a layer, relative to the mean over the experts of that layer. 1 is perfectly even.
    * `experts_unused`, for the same models: the fraction of the experts of all layers that no token chose.

    The two metrics of experts count the tokens of all processes, without padding, since the last log.

    Calls of the model itself are counted. If a loss calls its parts instead, the metrics are left out of the log.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.
        row_tokens (`int`, *optional*):
            Maximum number of tokens per packed row.
    """

    def __init__(self, trainer: Trainer, row_tokens: int | None = None):
        self.trainer, self.row_tokens = trainer, row_tokens
        self._hooks = ExitStack()
        self._start()

    def _start(self) -> None:
        self._clear()
        self._total, self._seconds = np.zeros(5, dtype=np.int64), 0.0
        self._since = self._mark = time.perf_counter()

    def _clear(self) -> None:
        # [tokens, documents, tokens of padded batches, micro-batches, those that were not counted] for each step of this
        # process since the last log, and the lengths of its documents.
        self._steps: list[np.ndarray] = []
        self._lengths: list[torch.Tensor] = []
        self._now_lengths: list[torch.Tensor] = []
        self._now, self._counted = np.zeros(5, dtype=np.int64), False

    def on_train_begin(self, args, state, control, **kwargs):
        model = transformers_model(self.trainer.model)
        self._cost, self._operations = known_cost(model), known_cost(model, quadratic_weight=1)
        # Forward, gradients of the activations, and gradients of the trained weights.
        self._passes = 2 + trained_share(model)
        self._peak = _peak(args, model)
        self._packed = self.row_tokens is not None or getattr(args, "packing", False) is True
        self._hooks.close()
        # Hooks on the module that the Trainer calls, so they run outside of compiled graphs.
        called = self.trainer.model_wrapped
        self._load = ExpertLoad(model, args.device)
        self._hooks.callback(self._load.close)
        self._hooks.enter_context(called.register_forward_pre_hook(self._count, with_kwargs=True))
        if self._load:
            self._hooks.enter_context(called.register_forward_hook(self._add_load))
        self._start()

    def _add_load(self, module, positional, output) -> None:
        if module.training and torch.is_grad_enabled():
            self._load.add()

    def _count(self, module, positional, batch) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        try:
            self._add(batch)
            self._counted = True
        except Exception as error:
            # A call that the model supports, but these statistics do not, must not stop training.
            logger.warning_once(f"The log has no packing metrics, because counting stopped with {described(error)}.")

    def _add(self, batch: dict) -> None:
        ids = tokens_of(batch)
        if ids is None:
            raise input_error("input_ids or inputs_embeds by name", "none")
        tokens, padding = ids.shape[1], batch.get("padding_tokens") or 0
        shard = batch.get("boundaries")
        if isinstance(shard, RowShard):
            cumulative, tokens, padding = shard.row.cu_seqlens, shard.row.total_length, shard.row.padding_tokens
        else:
            cumulative = _ends_of_documents(batch, ids)
        lengths = cumulative.diff()
        if padding:
            lengths, tokens = lengths[:-1], tokens - padding
        padded = 0
        if not self._packed and len(lengths):
            longest = None if "parent_of" in batch else batch.get("max_length_q")
            # Ignore it if it is the length of the padding.
            padded = len(lengths) * (longest if longest and longest != padding else int(lengths.max()))
        if not isinstance(shard, RowShard):
            self._load.start(tokens)
        else:
            self._load.start(min(max(tokens - shard.start, 0), shard.total_length))
            if shard.rank:
                # The first of the processes that share a row counts it.
                self._now_lengths.append(lengths[:0])
                return
        self._now += (tokens, len(lengths), padded, 1, 0)
        self._now_lengths.append(lengths)

    def on_substep_end(self, args, state, control, **kwargs):
        self._now[-1] += not self._counted
        self._counted = False

    def on_step_end(self, args, state, control, **kwargs):
        self.on_substep_end(args, state, control)
        self._steps.append(self._now)
        self._lengths += self._now_lengths
        self._now, self._now_lengths = np.zeros(5, dtype=np.int64), []
        self._mark = time.perf_counter()

    def on_evaluate(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self._since += now - self._mark
        self._mark = now

    on_save = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and "loss" in logs and self._steps:
            figures = self._figures(args)
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)
        self._mark = time.perf_counter()

    def _figures(self, args) -> dict[str, float]:
        """The metrics of all processes since the last log. Empty if not all of their calls were counted."""
        lengths = torch.cat(self._lengths).cpu() if self._lengths else torch.empty(0, dtype=torch.int64)
        if self._packed and len(lengths):
            # Added to the first step, because only the sum over steps is used.
            self._steps[0][2] = round(len(lengths) * mean_of_longest(lengths.numpy()))
        by_step = lengths.double().split([step[1] for step in self._steps])
        counts = torch.from_numpy(np.stack(self._steps)).to(args.device)
        squares = torch.stack([x.square().sum() for x in by_step]).float().to(args.device)
        # [ranks, steps, 5], [ranks, steps]. The ranks of a tensor-parallel group compute the same rows.
        copies = self.trainer.get_tp_size()
        counts, squares = (gather(x[None]).cpu()[::copies] for x in (counts, squares))
        seconds = time.perf_counter() - self._since
        load = self._load.figures()
        self._clear()
        self._since = time.perf_counter()
        tokens, documents, padded, batches, uncounted = sums = counts.sum((0, 1)).tolist()
        if uncounted or not tokens:
            logger.warning_once("The log has no packing metrics of steps whose loss does not call the model itself.")
            return {}
        self._total += sums
        self._seconds += seconds

        def rows_of(cost: PackingCost | None) -> torch.Tensor:
            tokens = counts[..., 0].double()
            if cost is None:
                return tokens
            return (cost.linear + cost.chunked) * tokens + cost.quadratic * squares.double()

        figures = {
            "tokens_per_second": round(tokens / seconds, 1),
            "documents_per_row": round(documents / self._rows(batches), 2),
            "padding_avoided": round(1 - tokens / padded, 4),
        }
        if self.row_tokens is not None:
            figures["packing_fill"] = round(tokens / self._rows(batches) / self.row_tokens, 4)
        parallel = getattr(self.trainer, "sequence_parallel", None)
        sharing = 1 if parallel is None else parallel.size
        if len(counts) > sharing:
            # Those that share a row compute equal parts of it.
            costs = rows_of(self._cost)[::sharing]
            figures["rank_imbalance"] = round(float((costs.amax(0) / costs.mean(0)).mean() - 1), 4)
        if self._operations is not None and self._peak is not None:
            done = self._passes * float(rows_of(self._operations).sum())
            figures["share_of_peak"] = round(done / seconds / args.world_size / self._peak, 4)
        return figures | load

    def _rows(self, batches: int) -> int:
        """The number of rows in full batches. Trainer may have found the batch size automatically."""
        return batches * (rows_per_batch(self.trainer) if self._packed else 1)

    def on_train_end(self, args, state, control, **kwargs):
        if self._steps:  # steps after the last log
            self._figures(args)
        self._hooks.close()
        tokens, documents, padded, batches, _ = self._total.tolist()
        if not state.is_world_process_zero or not tokens:
            return
        what = "Packing" if self._packed else "Padding-free"
        fill = f"fill {tokens / self._rows(batches) / self.row_tokens:.1%}, " if self.row_tokens is not None else ""
        used = "; ".join(f"{op}: {', '.join(names)}" for op, names in implementations_used(isolating=True).items())
        tqdm.write(
            f"{what}: {documents:,} documents with {tokens:,} tokens in {self._seconds:.1f} s, "
            f"{tokens / self._seconds:,.0f} tokens/s; {fill}padding avoided {1 - tokens / padded:.1%} "
            f"({padded / tokens:.1f} x fewer tokens computed)" + (f"; ran {used}" if used else "")
        )


def known_cost(model: torch.nn.Module, **options) -> PackingCost | None:
    """The cost of a forward pass of the model, or `None` if its operations are unknown."""
    try:
        return PackingCost.from_config(inner_model(model).config, **options)
    except ValueError:
        return None


def _ends_of_documents(batch: dict, ids: torch.Tensor) -> torch.Tensor:
    """The cumulative lengths of the documents of tokens `[1, T, ...]`, of which a tree is one."""
    tokens = ids.shape[1]
    cumulative, parent_of = batch.get("cu_seq_lens_q"), batch.get("parent_of")
    if parent_of is None and cumulative is not None:
        return cumulative
    if parent_of is None and batch.get("position_ids") is not None:
        positions = batch["position_ids"].reshape(-1, tokens)[0]
        starts = positions == positions[0]
        return torch.cat((starts.nonzero()[:, 0], starts.new_tensor([tokens], dtype=torch.long)))
    row = SequenceBoundaries.from_kwargs(batch, tokens) or SequenceBoundaries.from_lengths([tokens])
    if parent_of is None:
        return row.cu_seqlens
    # The model reads the parents on the host as well.
    trees = row if isinstance(row, SharedPrompts) else SharedPrompts.of(row, parent_of)
    return SequenceBoundaries.from_lengths(trees.tree_lengths, device=ids.device).cu_seqlens


def _peak(args, model) -> float | None:
    if args.device.type != "cuda" or not (args.bf16 or args.fp16 or model.dtype in (torch.float16, torch.bfloat16)):
        return None
    name = torch.cuda.get_device_name(args.device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
