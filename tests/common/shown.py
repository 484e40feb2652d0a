"""What tests show for each kind of quantized weights. `docs/write_features.py` writes it on the page.

An entry belongs to a test, as a decorator of it or as the list of its cases. Without the test, there is no entry.
"""

from collections.abc import Callable

from parameterized import parameterized


FEATURES = (
    "dequantized to the bits of the library",
    "LoRA of linear layers",
    "LoRA of experts",
    "a packed row equals its documents",
    "gradient checkpointing",
    "CUDA graphs",
    "experts in host memory",
    "FP8 products (`--float8`)",
    "`--load-in-4bit`",
    "DDP",
    "FSDP, DeepSpeed",
    "an adapter is saved and loaded",
    "training goes on after a stop",
    "an adapter is merged into dequantized weights",
    "`save_pretrained` of the base",
    "a head of multi-token prediction is kept",
)
# The columns of the table, and the kinds by which tests name their cases.
KINDS = {
    "`fp8`": ("fp8",),
    "FP8 by row": ("fp8_rows",),
    "FP8, other scales": ("fp8_blocks", "fp8_whole"),
    "W4A16": ("w4a16", "w4a16_zeros", "w4a16_rows"),
    "W8A16": ("w8a16", "int8"),
    "NVFP4": ("nvfp4", "modelopt"),
    "AWQ": ("awq",),
    "GPTQ": ("gptq", "gptq_v2", "gptq_8_bit"),
    "GPTQ, `desc_act`": ("gptq_order",),
    "AutoRound": ("auto_round", "auto_round_gptq"),
    "torchao FP8": ("torchao",),
    "bitsandbytes 4 bit": ("nf4", "fp4"),
}
SHOWN: dict[tuple[str, str], str] = {}
# Cases beside those of quantized weights.
_PLAIN = ("float32", "bfloat16")
_COLUMNS = {kind: column for column, kinds in KINDS.items() for kind in kinds}


def shows(kind: str, *features: str, says: str = "yes") -> Callable:
    """Say that a test shows features for a kind, or that they are refused: `says="error"`."""

    def decorated(test: Callable) -> Callable:
        assert test.__name__.startswith("test_"), test
        _add([kind], features, says)
        return test

    return decorated


def shows_for_each(cases: list, *features: str, says: str = "yes") -> Callable:
    """Run a test for each of the cases, which are kinds or begin with one, and say that it shows features for these."""
    _add([case if isinstance(case, str) else case[0] for case in cases], features, says)
    return parameterized.expand(cases)


def _add(kinds: list[str], features: tuple[str, ...], says: str) -> None:
    for kind in (kind for kind in kinds if kind not in _PLAIN):
        for feature in features:
            entry = _COLUMNS[kind], FEATURES[FEATURES.index(feature)]
            if SHOWN.setdefault(entry, says) != says:
                raise ValueError(f"{' and '.join(entry)}: tests say {SHOWN[entry]} and {says}")
