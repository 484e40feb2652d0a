"""A check that every step gives each trained parameter a gradient, for DDP that does not search for unused ones."""

from transformers import TrainerCallback

from ...errors import input_error


class EveryGradient(TrainerCallback):
    """Stops training before a step in which a parameter has no gradient, because DDP has not summed all of them then."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # Once, because walking through all modules in each step takes the host milliseconds.
        parameters = model.named_parameters() if args.world_size > 1 else ()
        self.trained = [(name, x) for name, x in parameters if x.requires_grad]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        missing = [name for name, x in self.trained if x.grad is None]
        if missing:
            got = f"none for {len(missing)} of them, such as {missing[0]}"
            raise input_error("a gradient of each trained parameter", got, "Pass ddp_find_unused_parameters=True.")
