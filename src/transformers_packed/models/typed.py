"""Classes of Transformers and of this package as type checkers see them. At run time, they are plain bases."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedModel as ModelBase
    from transformers.utils import ModelOutput as OutputBase
else:
    ModelBase = OutputBase = object
