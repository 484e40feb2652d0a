"""Optimizers that train all weights: AdamW and Muon of torch, and others that take less memory. docs/how_to/low_memory.md compares them."""

from dataclasses import dataclass

from ..errors import input_error


# Bytes of a block's scale.
_AO, _BNB, _FLASH = 4 / 256, 4 / 256, 2 / 32


@dataclass(frozen=True)
class Optimizer:
    """An AdamW, or Muon for hidden matrices and AdamW for the other weights, and what it keeps for each weight.

    Args:
        package (`str`):
            Its package, by its name on PyPI.
        weights (`str`):
            The dtype in which weights are trained with it. Others round small updates away, or take more memory.
        moment (`float`, *optional*):
            Bytes per weight of each of the two moments. By default, moments have the dtype of the weight.
        embedding_moment (`float`, *optional*):
            The same for weights of embeddings. Defaults to `moment`.
        correction (`float`, *optional*, defaults to 0.0):
            Bytes per weight for the part of an update that a weight in bfloat16 has no bits for.
        releases (`bool`, *optional*, defaults to `False`):
            Whether a weight is updated in the backward as soon as its gradient is there, which is then freed.
        shards (`bool`, *optional*, defaults to `True`):
            Whether it takes weights that FSDP2 shards.
        options (`str`, *optional*):
            The `optim_args` of `TrainingArguments`.
        orthogonalizes (`bool`, *optional*, defaults to `False`):
            Whether hidden matrices are trained by Muon, with one moment.
    """

    package: str
    weights: str
    moment: float | None = None
    embedding_moment: float | None = None
    correction: float = 0.0
    releases: bool = False
    shards: bool = True
    options: str | None = None
    orthogonalizes: bool = False

    def states(self, width: int, weights: int, embeddings: int = 0, matrices: int = 0) -> float:
        """The bytes of its states for so many weights of `width` bytes, some of them those of embeddings and hidden matrices."""
        moment = width if self.moment is None else self.moment
        embedded = moment if self.embedding_moment is None else self.embedding_moment
        spared = moment * matrices if self.orthogonalizes else 0
        return (2 * moment + self.correction) * weights + 2 * (embedded - moment) * embeddings - spared


DEFAULT = "adamw_torch_fused"
EACH_BACKWARD = "Each backward updates the weights."
NO_MATRICES = f"Choose {DEFAULT}: the factors of adapters are no hidden matrices."
_AT_RANDOM = "bf16_stochastic_round=True"
# Those of torch, torchao and bitsandbytes have the names of `TrainingArguments.optim`. With torch 2.13 and torchao 0.18,
# FSDP2's parts of weights in bfloat16 stop `torch.compile`. Trainer leaves the moments of embeddings to bitsandbytes in
# float32.
OPTIMIZERS = {
    DEFAULT: Optimizer("torch", "float32"),
    "muon": Optimizer("torch", "float32", orthogonalizes=True),
    "adamw_torch_8bit": Optimizer("torchao", "bfloat16", 1 + _AO, shards=False, options=_AT_RANDOM),
    "adamw_torch_4bit": Optimizer("torchao", "bfloat16", 1 / 2 + _AO, shards=False, options=_AT_RANDOM),
    "adamw_8bit": Optimizer("bitsandbytes", "float32", 1 + _BNB, embedding_moment=4, shards=False),
    "paged_adamw_8bit": Optimizer("bitsandbytes", "float32", 1 + _BNB, embedding_moment=4, shards=False),
    "flash_adamw": Optimizer("flashoptim", "bfloat16", 1 + _FLASH, correction=1),
    "flash_adamw_release": Optimizer("flashoptim", "bfloat16", 1 + _FLASH, correction=1, releases=True),
}


def optimizer_named(name: str) -> Optimizer:
    """Return an optimizer, or raise a `ValueError` that lists their names."""
    if name not in OPTIMIZERS:
        raise input_error(f"an optimizer of {', '.join(OPTIMIZERS)}", repr(name))
    return OPTIMIZERS[name]


def dtype_of_weights(name: str, adapters: bool) -> str:
    """Return the dtype of a model's weights in `transformers-packed train` on a GPU. Those below adapters are frozen."""
    return "bfloat16" if adapters else OPTIMIZERS[name].weights


def check_optimizer(name: str, weights: str, rows: int, option: str = "", adapters: bool = False) -> Optimizer:
    """Return an optimizer, or raise the `ValueError` of what it cannot train.

    Args:
        name (`str`):
            A name of `OPTIMIZERS`.
        weights (`str`):
            The dtype of the trained weights.
        rows (`int`):
            The rows of a step.
        option (`str`, *optional*):
            The option of a command that has the name.
        adapters (`bool`, *optional*, defaults to `False`):
            Whether adapters alone are trained.
    """
    optimizer = optimizer_named(name)
    if optimizer.correction and weights != optimizer.weights:
        fix = "LoRA adapters are in float32." if weights == "float32" else ""
        raise input_error(f"trained weights in {optimizer.weights} with {name}", weights, fix, option=option)
    if optimizer.orthogonalizes and adapters:
        raise input_error(f"all weights trained with {name}", "LoRA adapters", NO_MATRICES, option=option)
    if optimizer.releases and rows > 1:
        raise input_error(f"one row per step with {name}", f"{rows} rows", EACH_BACKWARD, option=option)
    return optimizer
