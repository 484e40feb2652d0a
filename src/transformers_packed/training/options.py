"""The options of packing: their names, types, defaults and help, the values that they take, and what excludes them.

[`configure_packing`], [`PackedTrainingArguments`] and the command line have their options from here. Torch is not
imported, because the command line shows its help without.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ..errors import input_error
from ..parallel_methods import AttentionMethod, DeltaRuleMethod, is_size


Mode = Literal["auto", "padding_free", "pack", "batches", "off"]


def option(default: Any, help: str) -> Any:
    """A field of arguments, with its help on the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class TrainingOptions:
    """The options that [`configure_packing`], which documents them, shares with [`PackedTrainingArguments`]."""

    max_length: int | None = option(None, "Maximum number of tokens per packed row.")
    float8: bool = option(False, "Train linear layers, and experts in FP8, with products in float8.")
    batch_invariant: bool = option(False, "Give a document the same bits in every row and batch.")
    cuda_graphs: bool | None = option(None, "Run the layers as CUDA graphs (default: where a measured row is faster).")
    verify: bool = option(True, "Compare a few documents with a padded batch before the first step.")
    mtp_loss_weight: float = option(0.0, "Weight of the loss of the head of multi-token prediction.")
    mtp_only: bool = option(False, "Train only the head of multi-token prediction, with the rest frozen.")
    distill_weight: float = option(0.5, "Share of the divergence from the teacher in the loss.")
    distill_beta: float = option(0.0, "That divergence: 0 is forward KL, 1 reverse KL, between them Jensen-Shannon.")
    distill_temperature: float = option(1.0, "Divisor of the logits of both models in that divergence.")
    sequence_parallel_size: int = option(1, "Processes that share a row, each a part of it; launch with torchrun.")
    sequence_parallel_gated_delta_rule: DeltaRuleMethod = option("state", "How they share linear-attention layers.")
    sequence_parallel_attention: AttentionMethod | None = option(None, "How they share full-attention layers.")


@dataclass(kw_only=True)
class Options(TrainingOptions):
    """All arguments of [`configure_packing`] but the Trainer."""

    packing: Mode | bool = "auto"
    share_prompts: bool = False
    teacher: Any = None
    plan_options: dict[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> Any:
        """A `Mode`, or another value that is an error."""
        return ("pack" if self.packing else "off") if isinstance(self.packing, bool) else self.packing

    @property
    def shares_rows(self) -> bool:
        """Whether several processes compute each row."""
        return self.sequence_parallel_size != 1

    @property
    def own_weight(self) -> float:
        """The factor of the model's own losses beside that of a teacher."""
        return 1.0 if self.teacher is None else 1 - self.distill_weight

    @property
    def methods(self) -> dict[str, Any]:
        """How processes share layers, arguments of [`SequenceParallel`]."""
        attention = self.sequence_parallel_attention
        return {"gated_delta_rule": self.sequence_parallel_gated_delta_rule, "attention": attention}

    def check(self) -> None:
        """Raise a `ValueError` for a value that an option does not take, or for options that exclude each other."""
        modes, rules, ways = get_args(Mode), get_args(DeltaRuleMethod), (None, *get_args(AttentionMethod))
        for name, words, wrong in (
            ("packing", f"True, False or one of {modes}", self.mode not in modes),
            ("mtp_loss_weight", "0 or more", not self.mtp_loss_weight >= 0),
            ("distill_beta", "0 to 1", not 0 <= self.distill_beta <= 1),
            ("distill_weight", "above 0 and up to 1", not 0 < self.distill_weight <= 1),
            ("distill_temperature", "above 0", not self.distill_temperature > 0),
            ("sequence_parallel_size", "1 or more", not is_size(self.sequence_parallel_size)),
            ("sequence_parallel_gated_delta_rule", rules, self.sequence_parallel_gated_delta_rule not in rules),
            ("sequence_parallel_attention", ways, self.sequence_parallel_attention not in ways),
        ):
            if wrong:
                raise input_error(f"{name} of {words}", repr(getattr(self, name)))
        given = {x.name for x in fields(self) if (value := getattr(self, x.name)) != x.default and value is not False}
        packing, size = f"packing={self.packing!r}", f"sequence_parallel_size={self.sequence_parallel_size}"
        off, frozen = f"{packing} or padding_free=False", "mtp_only=True, whose trunk runs without gradients"
        shares, methods = self.shares_rows, [f"sequence_parallel_{x}" for x in self.methods]
        distills = [f"distill_{x}" for x in ("weight", "beta", "temperature")]
        # When options are wrong, which ones, what they need, and what it is instead.
        for wrong, names, needed, got in (
            (self.mode != "pack", ["max_length", *sorted(self.plan_options)], "packing=True", packing),
            (
                self.mode == "off",
                ["share_prompts", "cuda_graphs", "batch_invariant", "sequence_parallel_size"],
                "packing other than False",
                off,
            ),
            (not shares, methods, "sequence_parallel_size above 1", size),
            (self.mtp_only, ["cuda_graphs", "teacher"], "no mtp_only", frozen),
            (self.teacher is None, distills, "a teacher", "none"),
            (shares, ["cuda_graphs", "batch_invariant"], "sequence_parallel_size=1", size),
        ):
            if wrong and (which := ", ".join(name for name in names if name in given | set(self.plan_options))):
                raise input_error(f"{needed} with {which}", got, f"Pass {needed}, or remove {which}.")
