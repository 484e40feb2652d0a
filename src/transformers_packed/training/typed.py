"""`Trainer` with the types that its attributes have once it is built, for type checkers. It is Transformers' class."""

from typing import TYPE_CHECKING, Any

import transformers


if TYPE_CHECKING:
    import torch

    class Arguments(transformers.TrainingArguments):
        """With the options that `configure_packing`, `PackedTrainingArguments` and TRL's arguments add."""

        packing: bool | None
        padding_free: bool | None
        eval_packing: bool | None
        max_length: int | None
        # An `AcceleratorConfig`, made of what was passed.
        accelerator_config: Any

    class Trainer(transformers.Trainer):
        model: torch.nn.Module
        args: Arguments
        data_collator: Any
        train_dataset: Any
        eval_dataset: Any
        # Of a Trainer whose processes share rows: they, and whether they have compared a row.
        sequence_parallel: Any
        _compared_rows: bool
else:
    Trainer = transformers.Trainer
