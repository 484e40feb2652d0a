"""Alias of `trainer`, for checkpoints whose `training_args.bin` has this module path."""

from .trainer import PackedTrainer, PackedTrainingArguments  # noqa: F401
