"""The old place of `trainer`, which `training_args.bin` of earlier checkpoints names."""

from .trainer import PackedTrainer, PackedTrainingArguments  # noqa: F401
