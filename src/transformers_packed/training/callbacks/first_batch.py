"""The first batch of a stream. Only training reads a stream, so its samples are known when the first batch is made."""

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from ...data.excerpts import source_of
from ...data.samples import has_items
from ..typed import Trainer
from .later_changes import LaterChanges


class FirstBatch:
    """In place of the collator of a data loader: shows the samples of the first batch before it collates them.

    As a data loader has, it has a `collate_fn` and a `dataset`, the samples. With several processes, all of them are shown
    those of the main process.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer, before training.
        collate_fn (`Callable`):
            The collator.
        show (`Callable`):
            Gets this object. Meanwhile, modules have the hooks that they have now, and those that the user's code adds.
    """

    def __init__(self, trainer: Trainer, collate_fn: Callable, show: Callable[["FirstBatch"], None]):
        self.trainer, self.collate_fn = trainer, collate_fn
        self.dataset: list = []
        self._show: Callable | None = show
        self._later = LaterChanges(trainer.model_wrapped)

    @classmethod
    def put_in(cls, trainer: Trainer, loader: Any, show: Callable[["FirstBatch"], None]) -> bool:
        """Show the first batch of a data loader if it reads a stream in this process. Returns whether it does."""
        here = getattr(loader, "num_workers", None) == 0
        if not here or has_items(source_of(getattr(loader, "dataset", None))):
            return False
        loader = getattr(loader, "base_dataloader", loader)
        loader.collate_fn = cls(trainer, loader.collate_fn, show)
        return True

    def __call__(self, samples: list) -> Any:
        show, self._show = self._show, None
        if show is not None:
            everywhere = [samples]
            if self.trainer.args.world_size > 1:
                broadcast_object_list(everywhere)
            self.dataset = everywhere[0]
            with self._later.without_hooks_of_libraries():
                show(self)
            self.dataset = []
        return self.collate_fn(samples)
