"""The kernels that a training needs, as far as they follow from its models, its rows and its set-up.

Whatever trains takes them from here: [`warm_up`], Trainers, and the commands. [`start_compiling`] starts what compiles
longest before anything waits for it, and [`warm_up`] runs the rows that select the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

import torch
from transformers import PreTrainedConfig

from ..models.families import family_of
from ..models.losses import losses_of
from ..models.registry import inner_model
from ..models.segments import segment_tokens_of
from ..models.sizes import DeltaRule
from ..ops.backends import flash_qla
from ..ops.backends.flash_qla_kernels import CUT, TREES, WHOLE, Kernels
from ..parallel_methods import DeltaRuleMethod


# Documents of the rows, if the caller does not know better.
_MOST_DOCUMENTS = 128
# Tokens of a document in the short rows, and the most in the row of full length. A document of two chunks of 64 tokens
# has both a full chunk and the state between chunks.
_SHORT, _LONG = 128, 4096


@dataclass(frozen=True)
class Needs:
    """What of a training selects its kernels, beside its models and their dtype.

    Args:
        max_length (`int`):
            Most tokens of a row.
        max_documents (`int`, *optional*):
            Most documents of a row. Defaults to 128.
        trees (`bool`, *optional*, defaults to `False`):
            Whether rows have trees of samples, groups of answers or shared prompts.
        segment_tokens (`float`, *optional*):
            Tokens of the segments in which layers compute long rows. Defaults to whole rows.
        processes (`int`, *optional*, defaults to 1):
            Processes that share a row.
        method (`str`, *optional*, defaults to `"state"`):
            How they share the delta rule, as in [`SequenceParallel`].
    """

    max_length: int
    max_documents: int | None = None
    trees: bool = False
    segment_tokens: float = inf
    processes: int = 1
    method: DeltaRuleMethod = "state"

    @property
    def calls(self) -> frozenset[tuple[bool, bool]]:
        """The calls of a delta rule, by whether they begin with states and end with them."""
        cut = self.segment_tokens < self.max_length or (self.processes > 1 and self.method == "state")
        return TREES if self.trees else CUT if cut else WHOLE

    def heads(self, rule: DeltaRule) -> tuple[int, int]:
        """The heads of keys and of values that a process computes."""
        share = self.processes if self.method == "heads" else 1
        return rule.key_heads // share, rule.heads // share

    @property
    def rows(self) -> list[list[int]]:
        """The lengths of the documents of each row to run.

        Numbers of documents double from 1 to `max_documents`. Rows with a multiple of 64 tokens and with an odd number of
        tokens take turns. The first and the last two rows have one document, or few, and as few and as many tokens as
        `max_length` permits.
        """
        longest = self.max_length
        most = min(_MOST_DOCUMENTS if self.max_documents is None else self.max_documents, longest // 2)
        numbers = [1]
        while numbers[-1] < most:
            numbers.append(min(2 * numbers[-1], most))
        rows = []
        for at, number in enumerate([1, *numbers]):
            tokens = min(max(_SHORT, 4 * -(-number // 16) * 16), longest)
            rows.append(split(tokens - at % 2, number))
        rows += [split(tokens, -(-longest // _LONG)) for tokens in (longest - 1, longest)]
        return [row for at, row in enumerate(rows) if row not in rows[:at]]

    @property
    def trees_to_run(self) -> list[int]:
        """The tokens of each row with a tree to run."""
        return [tokens for tokens in (_SHORT - 1, _SHORT) if self.trees and tokens <= self.max_length]


def split(tokens: int, number: int) -> list[int]:
    """Return `number` lengths that differ by at most one and add up to `tokens`."""
    return [(at + 1) * tokens // number - at * tokens // number for at in range(number)]


def start_for(model: torch.nn.Module, device: torch.device, dtype: torch.dtype, needs: Needs) -> list[Kernels]:
    """Start as [`start_compiling`] for a model that is loaded, and for the models that its losses read.

    The model tells of segments of rows, and of prompts that rows share.
    """
    inner = inner_model(model)
    trees = needs.trees or getattr(inner, "share_prompts", False)
    segment = min(needs.segment_tokens, segment_tokens_of(model.modules()))
    started = start_compiling(inner.config, device, dtype, replace(needs, trees=trees, segment_tokens=segment))
    # They have no gradients, so their rows are whole.
    others: Iterable = (other for loss in losses_of(model) for other in loss.models)
    return started + [x for one in others for x in start_compiling(one.config, device, dtype, needs, trains=False)]


def start_compiling(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, needs: Needs, trains: bool = True
) -> list[Kernels]:
    """Start threads that compile what takes longest, the kernels of FlashQLA, for computation in `dtype`.

    The configuration of a model is enough, so its weights may be loaded meanwhile. The first row waits for them. `trains`
    is whether the model has gradients.
    """
    family = family_of(config)
    if family.sizes is None or family.rule != "gated_delta_rule":
        return []
    rule = family.sizes(config.get_text_config()).delta_rule
    dims = rule.key_dim, rule.value_dim
    return flash_qla.start_compiling(device, dtype, needs.heads(rule), dims, needs.calls, trains)
