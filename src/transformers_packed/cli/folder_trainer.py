"""The Trainer of the `train` command: its checkpoints and the model appear in the output folder when they are complete."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from .run_folder import LAST_FILES, PARTIAL, left


# Words in torch's RuntimeError for a file that cannot be written. torch raises RuntimeError for many other reasons.
_TORCH_WRITES = ("PytorchStreamWriter", "inline_container", "unexpected pos")


class RunFolderTrainer(Trainer):
    """The stock Trainer with atomic writes of checkpoints and the model.

    Raises:
        `OSError`: a file cannot be written. The message names the file, the reason, and the checkpoint for `--resume`.
    """

    def _get_output_dir(self, trial):
        return str(Path(super()._get_output_dir(trial), PARTIAL))

    def _save_checkpoint(self, model, trial):
        name = f"checkpoint-{self.state.global_step}"
        save = super()._save_checkpoint
        self._write(name, lambda partial: save(model, trial), lambda partial: [name])
        if self.args.should_save:
            rotate_checkpoints(self.args.output_dir, self.args.save_total_limit)

    def save_to_folder(self) -> None:
        """Save the model and its tokenizer in the output folder, next to the checkpoints."""

        def names(partial: Path) -> list[str]:
            return sorted((path.name for path in partial.iterdir()), key=lambda name: (name in LAST_FILES, name))

        self._write("the model", lambda partial: self.save_model(str(partial)), names)

    def _write(self, what: str, write: Callable[[Path], None], names: Callable[[Path], list[str]]) -> None:
        """Call `write`, then move the files `names`, in this order, from the partial folder to the output folder."""
        folder = Path(str(self.args.output_dir))
        partial = folder / PARTIAL
        try:
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            write(partial)
            self.accelerator.wait_for_everyone()
            for name in names(partial) if self.args.should_save else ():
                if (folder / name).is_dir():
                    os.replace(folder / name, partial / f"earlier-{name}")
                os.replace(partial / name, folder / name)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch raises a RuntimeError, safetensors its own
            if isinstance(error, RuntimeError) and not any(name in str(error) for name in _TORCH_WRITES):
                raise
            reason, free = " ".join(str(error).split()), shutil.disk_usage(folder).free / 2**20
            why = f"with {free:,.0f} MiB of free space ({reason}); {left(folder)}"
            raise OSError(f"{what} cannot be written to {folder}, {why}") from error
        finally:
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
