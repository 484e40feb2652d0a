"""The class that mixins extend, for type checkers. At run time they have no base."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedModel as ModelBase
else:
    ModelBase = object
