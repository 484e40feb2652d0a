"""The head of multi-token prediction on a GPU: packed rows against documents alone, with graphs, float8 and a Trainer."""

import copy
import tempfile
import unittest

import torch
from common.gpu import needs_gpu, report
from common.real_heads import model_on_gpu
from mixins.model import total_relative_error
from parameterized import parameterized

from transformers_packed import (
    DataCollatorWithFlattening,
    PackedTrainer,
    PackedTrainingArguments,
    add_mtp,
    mtp_acceptance,
    use_cuda_graphs,
    use_float8,
)
from transformers_packed.models.losses import OWN, MtpLoss


LENGTHS = [300, 1, 2, 63, 64, 594]
DECLARED = {"qwen3_next_moe": "num_nextn_predict_layers"}


def make_model(family="qwen3_5", dtype=torch.bfloat16):
    model = model_on_gpu(family, dtype, **{DECLARED.get(family, "mtp_num_hidden_layers"): 1})
    add_mtp(model)
    model.losses = (*OWN, MtpLoss(0.5))
    return model


def make_samples():
    generator = torch.Generator().manual_seed(1)
    samples = [{"input_ids": torch.randint(1, 97, (n,), generator=generator).tolist()} for n in LENGTHS]
    for sample in samples:
        # Two thirds of a document are its prompt.
        ids = sample["input_ids"]
        sample["labels"] = [-100] * (2 * len(ids) // 3) + ids[2 * len(ids) // 3 :]
    return samples


def row_of(samples):
    batch = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")(samples)
    return {name: x.cuda() if name != "cu_seqlens" else x for name, x in batch.items() if isinstance(x, torch.Tensor)}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}


@needs_gpu
class HeadOnGpuTest(unittest.TestCase):
    @parameterized.expand(["qwen3_5", "qwen3_5_moe", "qwen3_next_moe"])
    def test_a_row_equals_its_documents(self, family):
        model, samples = make_model(family), make_samples()
        trunk, head = (sum(x != -100 for s in samples for x in s["labels"][ahead:]) for ahead in (1, 2))
        alone = sum(
            model(
                **{name: torch.tensor([x]).cuda() for name, x in sample.items()},
                num_items_in_batch=trunk,
                num_mtp_items_in_batch=head,
            ).loss
            for sample in samples
        )
        expected, loss = gradients(model, alone), model(**row_of(samples)).loss
        error = total_relative_error(gradients(model, loss), expected)
        report(f"mtp head in a row, {family}", loss=abs(loss.item() - alone.item()), gradients=error)
        self.assertLess(abs(loss.item() - alone.item()), 2e-2)
        self.assertLess(error, 3e-2)

    def test_beside_the_graphs_of_the_trunk(self):
        plain = make_model()
        graphs = use_cuda_graphs(copy.deepcopy(plain), sum(LENGTHS))
        row = row_of(make_samples())
        found = [gradients(model, model(**row).loss) for model in (graphs, plain)]
        self.assertTrue(graphs.model.layer_graphs._graphs)
        error = total_relative_error(*found)
        report("mtp head beside graphs", gradients=error)
        self.assertLess(error, 1e-2)

    def test_in_float8(self):
        model, row = make_model(), row_of(make_samples())
        expected = gradients(model, model(**row).loss)
        use_float8(model, module_filter=lambda layer, name: name.startswith("mtp.layers") and "mlp" in name)
        error = total_relative_error(gradients(model, model(**row).loss), expected)
        report("mtp head with an MLP in float8", gradients=error)
        self.assertTrue(0 < error < 0.1)

    @parameterized.expand(
        [({"mtp_loss_weight": 0.3},), ({"mtp_only": True},), ({"mtp_loss_weight": 0.3, "float8": True},)]
    )
    def test_trainer(self, options):
        """Warm-up, the check of the first step, bf16 and the log."""
        model = make_model(dtype=torch.float32)
        del model.mtp
        args = PackedTrainingArguments(
            tempfile.mkdtemp(),
            max_steps=20,
            packing=True,
            max_length=2048,
            per_device_train_batch_size=1,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            bf16=True,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        samples = [{"input_ids": [(i * 7 + n) % 90 for i in range(500)]} for n in range(40)]
        samples = [sample | {"labels": sample["input_ids"]} for sample in samples]
        trainer = PackedTrainer(model, args, train_dataset=samples)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "mtp_loss" in entry]
        self.assertEqual(trainer.model.mtp.fc.weight.dtype, torch.float32)
        self.assertLess(log[-1]["mtp_loss"], log[0]["mtp_loss"])
        with torch.autocast("cuda", torch.bfloat16):
            found = mtp_acceptance(trainer.model, samples[:4], steps=3)
        report(f"mtp {options}", mtp_loss=log[-1]["mtp_loss"], acceptance=log[-1]["mtp_acceptance"])
        self.assertEqual(found.drafted[:, 0].tolist(), [498] * 4)
