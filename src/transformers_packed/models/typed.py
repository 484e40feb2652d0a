"""Classes of Transformers and of this package as type checkers see them. At run time, they are plain bases."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from typing import Any, Protocol

    import torch
    from transformers import PreTrainedModel as ModelBase
    from transformers.utils import ModelOutput as OutputBase

    from .cuda_graphs import LayerGraphs

    class TextModel(Protocol):
        """A text model that may run its layers as CUDA graphs."""

        config: Any
        training: bool
        layers: torch.nn.ModuleList
        layer_graphs: LayerGraphs | None
        _modules: dict[str, torch.nn.Module | None]

else:
    ModelBase = TextModel = OutputBase = object
