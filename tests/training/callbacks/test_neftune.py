"""NEFTune: each document of a packed row gets noise of the same size as alone in the stock class."""

import peft
import pytest
import torch
from mixins.configure import ConfigureTestCase
from mixins.model import total_relative_error
from parameterized import parameterized
from scripts.configured_arms import build
from scripts.trainer_arms import CONFIGS, OPTIONS, Samples, collate_padded, updates_and_log
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from transformers_packed import SequenceBoundaries, configure_packing, patch_model
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.models.versions import checkpointing_argument
from transformers_packed.parallel.shard import RowShard
from transformers_packed.training.callbacks.neftune import document_lengths


ALPHA = 5.0
STOCK = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
# Rows of the same number of tokens with other documents. A compiler traces them once.
SAME_TOTAL = {
    "dataset": [{"input_ids": [1 + n % 60] * n, "labels": [1 + n % 60] * n} for n in (40, 5, 17, 30, 3, 50, 22, 17)],
    "train_sampling_strategy": "sequential",
}


def make(model_type: str = "qwen3_5"):
    set_seed(0)
    configs = {**CONFIGS, "llama": lambda: STOCK, "gpt_oss": lambda: tiny_config("gpt_oss")}
    return AutoModelForCausalLM.from_config(configs[model_type]())


class OnFirstStep(TrainerCallback):
    """Calls a function before the first step. Forwards before it verify packing."""

    def __init__(self, function):
        self.function = function

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.function()


class NeftuneTest(ConfigureTestCase):
    def trainer(self, model, collator=None, cls=Trainer, dataset=None, **arguments) -> Trainer:
        options = {"per_device_train_batch_size": 4, "max_steps": 2, "neftune_noise_alpha": ALPHA, **OPTIONS}
        args = TrainingArguments(self.directory, **options | arguments)
        return cls(model, args, train_dataset=dataset or Samples(16), data_collator=collator)

    def check_noise(self, trainer: Trainer):
        """Train, and compare the inputs of the first layer with the embeddings of the tokens."""
        model = trainer.model.get_base_model() if isinstance(trainer.model, peft.PeftModel) else trainer.model
        text = model.model
        batches, seen = [], []
        handles = [
            text.register_forward_pre_hook(lambda _, args, kwargs: batches.append(kwargs), with_kwargs=True),
            text.layers[0].register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            ),
        ]
        weight = text.embed_tokens.weight.detach().clone()
        trainer.args.learning_rate = 0.0
        trainer.add_callback(OnFirstStep(lambda: (batches.clear(), seen.clear())))
        trainer.train()
        for handle in handles:
            handle.remove()
        # Gradient checkpointing leaves a hook of its own.
        left = [hook.__qualname__ for hook in text.embed_tokens._forward_hooks.values()]
        self.assertFalse([name for name in left if "make_inputs_require_grads" not in name])
        self.assertFalse(trainer.model._forward_pre_hooks)
        return batches, seen, weight

    def check_documents(self, trainer: Trainer):
        batches, seen, weight = self.check_noise(trainer)
        self.assertGreaterEqual(len(batches), 2)
        # A layer may run on documents alone, or again in backward.
        rows = [x for x in seen if x.shape[0] == 1][:: len(seen) // len(batches)]
        self.assertEqual(len(rows), len(batches))
        documents = 0
        for batch, row in zip(batches, rows, strict=True):
            noise = (row.detach() - weight[batch["input_ids"]])[0]
            starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
            for start, end in zip(starts, [*starts[1:], len(noise)], strict=True):
                bound = ALPHA / ((end - start) * noise.shape[1]) ** 0.5
                largest = float(noise[start:end].abs().max())
                self.assertLessEqual(largest, bound * 1.001)
                self.assertGreater(largest, bound * 0.8)
                documents += 1
        self.assertGreater(documents, len(batches))

    @parameterized.expand(
        [
            ("qwen3_5", {checkpointing_argument(): True}),
            ("llama", {}),
        ]
    )
    def test_configured(self, model_type, arguments):
        self.check_documents(configure_packing(self.trainer(make(model_type), **arguments)))

    @parameterized.expand([("qwen3_5", SAME_TOTAL), ("llama", {})])
    @pytest.mark.slow
    def test_compiled(self, model_type, options):
        trainer = self.trainer(make(model_type), torch_compile=True, torch_compile_backend="eager", **options)
        self.check_documents(configure_packing(trainer))

    def test_rows_and_adapters(self):
        model = peft.get_peft_model(make(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        self.check_documents(configure_packing(self.trainer(model), True, 128))

    def test_sft(self):
        trainer = build("sft", directory=self.directory, neftune_noise_alpha=ALPHA, max_steps=2)
        self.check_documents(configure_packing(trainer))

    @parameterized.expand(["gpt_oss"])
    def test_documents_alone_get_the_built_in_noise(self, model_type):
        """Rows of one document use the same random numbers as the stock class, and thus get its updates."""
        updates = []
        for packed in (False, True):
            trainer = self.trainer(make(model_type), collate_padded, per_device_train_batch_size=1)
            if packed:
                trainer.data_collator = default_data_collator
                configure_packing(trainer, "padding_free")
            updates.append(updates_and_log(trainer)[0])
        self.assertLess(total_relative_error(updates[1], updates[0]), 4e-5)

    def test_padded_batches_through_our_model(self):
        """Padded batches keep their noise, although our model could skip the padding."""
        updates = []
        for ours in (False, True):
            model = make()
            trainer = self.trainer(patch_model(model) if ours else model, collate_padded)
            updates.append(updates_and_log(trainer)[0])
        self.assertLess(total_relative_error(updates[1], updates[0]), 1e-6)

    def test_parts_of_rows_know_whole_documents(self):
        row = SequenceBoundaries.from_lengths([3, 4, 1])
        parts = torch.cat([document_lengths(RowShard.cut(row, rank, 2)) for rank in range(2)], 1)
        self.assertEqual(parts.tolist(), [[3, 3, 3, 4, 4, 4, 4, 1]])
