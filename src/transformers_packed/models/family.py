"""`Family`, one record per model family: what anyone may ask about it. `families.py` has the records and finds them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import transformers
from packaging.version import Version
from transformers import PreTrainedConfig

from .sizes import Sizes


@dataclass(frozen=True)
class Own:
    """The family has classes of this package, which take boundaries as an argument and are named like the stock classes.

    Args:
        also (`tuple`, *optional*):
            Models that the stock Auto classes do not build: (Auto class, configuration class, model class).
    """

    also: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Mixer:
    """How a token mixer runs on a packed row: on each document separately, or on the whole row.

    The whole row needs a function of this package, or kernels of the stock forward that accept boundaries.

    Args:
        outputs (`tuple[int]`, *optional*, defaults to `(0,)`):
            If the module returns a tuple, the indices of the elements with one entry per token. The other elements
            become `None`.
        masked (`bool`, *optional*, defaults to `False`):
            Whether the module is attention and needs a causal mask for the documents it runs on.
        keywords (`tuple[str]`, *optional*):
            The keyword arguments (from `SequenceBoundaries.kernel_kwargs`) that pass the boundaries to its kernels.
        kernels (`tuple[str]`, *optional*):
            The functions of the modeling module that must be kernels, not torch references, to run on the whole row.
        row (`str`, *optional*):
            The function of `mixers.ROWS` that computes the module on the whole row.
        keeps_apart (`bool`, *optional*, defaults to `False`):
            Whether the stock forward keeps documents apart too, with the mask that the model makes.
    """

    outputs: tuple[int, ...] = (0,)
    masked: bool = False
    keywords: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    row: str = ""
    keeps_apart: bool = False


@dataclass(frozen=True)
class Mixers:
    """Token mixers that ignore document boundaries run on each document separately.

    Args:
        classes (`Mapping[str, Mixer]`):
            The stock classes, by name. Without any, disabling the cache of the text model is enough.
    """

    classes: Mapping[str, Mixer]


@dataclass(frozen=True)
class Unpacked:
    """The base model runs on the documents as a right-padded batch.

    Args:
        base (`str`):
            The stock class of the base model.
        cause (`str`):
            The reason why the stock class mixes documents.
        shifts_labels (`bool`, *optional*, defaults to `True`):
            Whether the loss compares a token's logits with the next label. Otherwise no target crosses a boundary.
    """

    base: str
    cause: str
    shifts_labels: bool = True


@dataclass(frozen=True)
class Isolated:
    """The stock model keeps documents apart when position ids restart. It needs no change."""


@dataclass(frozen=True)
class Refused:
    """The model cannot compute packed rows correctly, for this reason."""

    why: str


# The ways for which a model gets classes of this package.
PATCHED = (Own, Mixers, Unpacked)


# Why an indexer cannot run under ZeRO-3, for `input_error`.
INDEXER_UNDER_ZERO_3 = (
    "layers that all rows run, because ZeRO-3 gathers their weights from all processes",
    "an indexer, which only long documents need",
    "Train with ZeRO-2 or FSDP2.",
)


@dataclass(frozen=True, eq=False)
class Family:
    """A model family of Transformers. Its name is that of the modeling module.

    Args:
        name (`str`):
            The stock classes are in `transformers.models.<name>.modeling_<name>`.
        apart (*optional*):
            How its documents stay apart in a packed row, or why they cannot. `None` if nobody has measured it.
        since (`str`, *optional*, defaults to `"5.16"`):
            The first release of Transformers whose classes ours can take the place of.
        title (`str`, *optional*):
            Its name in texts, with the releases whose checkpoints are of these classes.
        methods (`tuple[str]`, *optional*):
            The methods of stock classes that classes of this package call.
        experts (`str`, *optional*):
            The stock class of a mixture's experts, which this package's op computes.
        taken_for_experts (`tuple[str]`, *optional*):
            The names of linear layers that PEFT takes for weights of experts, because checkpoints name them so.
        sensitive (`tuple[str]`, *optional*):
            The names of linear layers whose errors grow along a document, so they stay in full precision.
        takes_images (`bool`, *optional*, defaults to `False`):
            Whether packed rows of its vision-language models may hold images.
        rule (`str`, *optional*, defaults to `"gated_delta_rule"`):
            The op of the recurrent layers, for families with classes of this package.
        has_indexer (`bool`, *optional*, defaults to `False`):
            Whether layers of attention choose keys by an indexer, which gets no gradient and runs for long documents only.
        has_mtp (`bool`, *optional*, defaults to `False`):
            Whether its checkpoints may have a head of multi-token prediction that this package trains.
        has_graphs (`bool`, *optional*, defaults to `False`):
            Whether its layers can run as CUDA graphs.
        has_float8 (`bool`, *optional*, defaults to `False`):
            Whether its linear layers were trained in float8.
        has_host_layers (`bool`, *optional*, defaults to `True`):
            Whether all of its decoder layers can be in host memory, if it has classes of this package.
        implies_head (`bool`, *optional*, defaults to `False`):
            Whether servers take a configuration that says nothing of a head of multi-token prediction for one with it.
        sizes (`Callable`, *optional*):
            Reads the sizes of a text configuration, for families whose cost, memory and parts of rows are known.
    """

    name: str
    apart: Own | Mixers | Unpacked | Isolated | Refused | None = None
    since: str = "5.16"
    title: str = ""
    methods: tuple[str, ...] = ()
    experts: str = ""
    taken_for_experts: tuple[str, ...] = ()
    sensitive: tuple[str, ...] = ()
    takes_images: bool = False
    rule: str = "gated_delta_rule"
    has_indexer: bool = False
    has_mtp: bool = False
    has_graphs: bool = False
    has_float8: bool = False
    has_host_layers: bool = True
    implies_head: bool = False
    sizes: Callable[[PreTrainedConfig], Sizes] | None = None

    @property
    def is_supported(self) -> bool:
        """Whether this release of Transformers has the classes that ours take the place of."""
        return Version(transformers.__version__) >= Version(self.since)

    @property
    def stock(self) -> str:
        """The name of the stock module."""
        return f"transformers.models.{self.name}.modeling_{self.name}"

    @property
    def mixers(self) -> Mapping[str, Mixer]:
        """The classes of [`Mixers`], empty for other families."""
        return self.apart.classes if isinstance(self.apart, Mixers) else {}

    @property
    def rows(self) -> frozenset[str]:
        """The functions of this package that compute modules of [`Mixers`] on the whole row."""
        return frozenset(mixer.row for mixer in self.mixers.values() if mixer.row)
