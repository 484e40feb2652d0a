"""`configure_packing` with `sequence_parallel_size` on stock Trainers, against the same Trainer in one process."""

import contextlib
import io
import tempfile
import unittest
from dataclasses import replace
from unittest import mock

import torch.distributed as dist
from common.processes import error_of, run_once, run_processes
from common.records import make_tokenizer
from common.trl_trainers import preference_trainer
from datasets import Dataset
from mixins.model import total_relative_error
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from scripts.trainer_arms import CONFIGS, OPTIONS, Samples, Stream, updates_and_log
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer

from transformers_packed import DataCollatorWithFlattening, configure_packing
from transformers_packed.parallel import SequenceParallel
from transformers_packed.training import apply as applying
from transformers_packed.training import compare
from transformers_packed.training.apply import apply, undo
from transformers_packed.training.callbacks import verify
from transformers_packed.training.options import Options
from transformers_packed.training.setup import decide


ROW = 96
OF_TRL = ("entropy", "mean_token_accuracy")
OF_ROWS = ("documents_per_row", "padding_avoided", "packing_fill", "expert_load_max", "experts_unused")


def make_model(family="qwen3_5", size=61, mtp=0):
    set_seed(0)
    config = CONFIGS[family]()
    config.num_attention_heads, config.vocab_size, config.mtp_num_hidden_layers = 4, size, mtp
    if "moe" in family:
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    return AutoModelForCausalLM.from_config(config)


def build(kind, size=1, processes=1, tuning="full", family="qwen3_5", mtp=0, evaluated=5, **arguments):
    """A Trainer of a user. Its steps have the same rows in one process and in several that share rows."""
    options = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2 * size // processes,
        "ddp_backend": "gloo" if processes > 1 else None,
        **OPTIONS,
        **arguments,
    }
    samples, lora = Samples(40).rows, None
    if tuning == "lora":
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    if kind == "trainer":
        model = make_model(family, mtp=mtp)
        model = model if lora is None else get_peft_model(model, lora)
        args = TrainingArguments(**options)
        return Trainer(model, args, train_dataset=samples, eval_dataset=samples[:evaluated])
    tokenizer = make_tokenizer()
    if kind == "completions":
        samples = [{"prompt": "q" * (1 + n % 7), "completion": "no" * (1 + n % 11)} for n in range(40)]
    args = SFTConfig(**{"bf16": False, "gradient_checkpointing": False, "max_length": None, **options})
    data = Dataset.from_list(samples)
    return SFTTrainer(
        make_model(family, max(61, len(tokenizer)), mtp),
        args,
        train_dataset=data,
        eval_dataset=data.select(range(evaluated)),
        processing_class=tokenizer,
        peft_config=lora,
    )


def train(kind, size, processes, mode, options):
    """Return the updates, the log of training, the metrics of evaluation, and what was printed."""
    trainer = build(kind, size, processes, **dict(options))
    length, weight = ROW if mode is True else None, 0.5 * dict(options).get("mtp", 0)
    if size == 1 and mode == "auto":
        # Alone, a batch of one sample has no use for it.
        mode = "padding_free"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        configure_packing(trainer, mode, length, sequence_parallel_size=size, mtp_loss_weight=weight)
        updates, log = updates_and_log(trainer)
        metrics = trainer.evaluate()
    return updates, log, metrics, stdout.getvalue()


def train_all(size, processes, arms):
    return [train(kind, size, processes, mode, options) for kind, mode, options in arms]


def state(trainer):
    """What `configure_packing` may change."""
    targets = trainer, trainer.args, trainer.accelerator, trainer.accelerator.dataloader_config
    callbacks = list(trainer.callback_handler.callbacks)
    return type(trainer), type(trainer.model), callbacks, *(dict(vars(x)) for x in targets)


def refusals():
    """Return for each set-up and mode the error, whether nothing changed, and what was printed."""
    leaf = {"input_ids": [1, 2], "labels": [1, 2]}
    trees = [{**leaf, "turns": [leaf, leaf]}] * 4

    def dpo():
        return preference_trainer(
            "dpo", tempfile.mkdtemp(), make_model(size=len(make_tokenizer())), ddp_backend="gloo"
        )

    def changed(**values):
        trainer = build("trainer", 2, 2)
        for name, value in values.items():
            setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)
        return trainer

    def with_parallelism(**sizes):
        trainer = build("trainer", 2, 2)
        trainer.accelerator.state.parallelism_config = mock.Mock(**{"cp_size": 1, "sp_size": 1, **sizes})
        return trainer

    cases = {
        "divides": lambda: build("trainer", 2, 2),
        "batch_rebalance": lambda: changed(train_sampling_strategy="batch_rebalance"),
        "a stream": lambda: changed(train_dataset=Stream(Samples(4).rows)),
        "trees for evaluation": lambda: changed(eval_dataset={"one": trees}, remove_unused_columns=False),
        "label_smoothing_factor": lambda: build("trainer", 2, 2, label_smoothing_factor=0.1),
        "compute_loss_func": lambda: changed(compute_loss_func=lambda *args, **kwargs: None),
        "compute_metrics": lambda: changed(compute_metrics=lambda prediction: {}),
        "sp_size": lambda: with_parallelism(sp_size=2),
        "DPO": dpo,
    }
    found = {}
    for name, make in cases.items():
        size, trainer = 3 if name == "divides" else 2, make()
        before, found[name] = state(trainer), []
        for mode in ("padding_free", "auto"):
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                message = error_of(configure_packing, trainer, mode, sequence_parallel_size=size)
            found[name].append((message, state(trainer) == before, stdout.getvalue()))
        trainer.accelerator.state.parallelism_config = None
    return found


def refused_by_auto():
    """Return the error of a custom step, which the explicit modes trust, and what is printed."""
    trainer = build("trainer", 2, 2)
    trainer.training_step = lambda *args: None
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        return error_of(configure_packing, trainer, sequence_parallel_size=2), stdout.getvalue()


def applied_and_undone():
    """Return whether a Trainer is as before after `undo`, and the processes that share a row after each call."""
    trainer = build("sft", 2, 2)
    before = state(trainer)
    configured = decide(trainer, Options(packing=True, max_length=ROW, sequence_parallel_size=2))
    untouched = state(trainer) == before
    apply(trainer, configured)
    shares = [trainer.sequence_parallel.size]
    undo(trainer, configured)
    # These two say that packing is off.
    arguments = before[4]
    arguments.update(packing=False, padding_free=False)
    undone = state(trainer) == before
    for size in (1, 2, 1):
        with contextlib.redirect_stdout(io.StringIO()):
            configure_packing(trainer, True, ROW, sequence_parallel_size=size)
        parallel = getattr(trainer, "sequence_parallel", None)
        shares.append(parallel and parallel.size)
    return untouched, shares, undone


def failing(where):
    """Return the error of `apply`, whether the Trainer and its parameters are as before, and the groups that are left."""
    trainer = build("trainer", 2, 2, mtp=1)
    configured = decide(trainer, Options(packing=True, max_length=ROW, mtp_only=True, sequence_parallel_size=2))
    groups, before = dist.distributed_c10d._world.pg_map, (state(trainer), parameters(trainer.model))
    count, fail = len(groups), mock.Mock(side_effect=RuntimeError("the network is gone"))
    if where == "preparation":
        configured = replace(configured, prepare=(fail,))
    forms = SequenceParallel if where == "preparation" else fail
    with mock.patch.object(applying, "SequenceParallel", forms):
        error = error_of(apply, trainer, configured)
    # The default group works as before.
    dist.barrier()
    same = (state(trainer), parameters(trainer.model)) == before
    return error, same, hasattr(trainer, "sequence_parallel"), len(groups) - count


def parameters(model):
    return {name: x.requires_grad for name, x in model.named_parameters()}


def stopped(name):
    """Return the error of a training with this change by the user after `configure_packing`."""
    trainer = build("trainer", 2, 2)
    rows = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        configure_packing(trainer, "padding_free", sequence_parallel_size=2, verify=name == "average")
    if name == "average":
        trainer.args.average_tokens_across_devices = False
    elif name == "dataloader":
        trainer.get_train_dataloader = lambda: DataLoader(Samples(8), batch_size=2, collate_fn=rows)
    return error_of(trainer.predict, Samples(4).rows) if name == "predict" else error_of(trainer.train)


def differing(kind, size, what):
    """Return the error of a training in which only the second process finds this in the check before the first step."""
    trainer = build(kind, size, 2, evaluated=3)
    if what == "difference" and size == 1:
        trainer.args.eval_strategy, trainer.compute_metrics = "epoch", lambda prediction: {}
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        configure_packing(trainer, "padding_free", sequence_parallel_size=size)
        with mock.patch.object(*FOUND[what]) if dist.get_rank() else contextlib.nullcontext():
            error = error_of(trainer.train)
    return error or stdout.getvalue()


# What finds something in the check.
FOUND = {
    "difference": (compare, "_difference", mock.Mock(return_value="expected the same.")),
    "leak": (verify, "check_leak", mock.Mock(side_effect=verify.DifferenceError("expected no leak."))),
    "no row": (verify, "places_of", mock.Mock(return_value=None)),
}
ARMS = {
    "trainer": ("trainer", True, ()),
    "trainer, one sample": ("trainer", "auto", (("per_device_train_batch_size", 1),)),
    "trainer, random rows": ("trainer", "padding_free", (("train_sampling_strategy", "random"),)),
    "sft, mtp": ("sft", True, (("mtp", 1),)),
    "sft, lora": ("sft", True, (("tuning", "lora"),)),
    "sft, packed by TRL": ("sft", "auto", (("packing", True), ("max_length", ROW))),
    "sft, completions": ("completions", True, ()),
}


class StockTrainersTest(unittest.TestCase):
    @parameterized.expand(ARMS)
    def test_equals_one_process(self, name):
        number = list(ARMS).index(name)
        expected, log, metrics, _ = run_once(train_all, 1, 1, 1, (ARMS[name],))[0][0]
        for rank, results in enumerate(run_once(train_all, 2, 2, 2, tuple(ARMS.values()))):
            updates, found, evaluated, said = results[number]
            if rank == 0:
                self.assertIn("2 processes share each row", said)
                self.assertIn("2 parts of the row", said)
            self.assertEqual(set(updates), set(expected))
            self.assertLess(total_relative_error(updates, expected), 1e-5)
            names = ["loss", *(OF_TRL if "sft" in name else ())]
            for mine, theirs in zip(found, log, strict=True):
                self.assertIn("tokens_per_second", mine)
                self.assertNotIn("rank_imbalance", mine)
                figures = [x for x in OF_ROWS if x in theirs]
                for key in (*names, *figures):
                    self.assertAlmostEqual(mine[key], theirs[key], delta=2e-5 * max(1, abs(theirs[key])), msg=key)
            for key in (f"eval_{key}" for key in names):
                self.assertAlmostEqual(evaluated[key], metrics[key], delta=1e-5 * max(1, abs(metrics[key])), msg=key)

    @parameterized.expand(
        [
            ("divides", "a size that divides the 2 processes, got 3"),
            ("batch_rebalance", "a sampler that distributes them itself"),
            ("a stream", "a stream, from which each process would read different samples"),
            ("trees for evaluation", "samples of one document each, got trees or groups"),
            ("label_smoothing_factor", "got label_smoothing_factor"),
            ("compute_loss_func", "got compute_loss_func"),
            ("compute_metrics", "got compute_metrics"),
            ("sp_size", r"got ParallelismConfig\(sp_size=2\).*Pass sequence_parallel_size=2 to configure_packing"),
            ("DPO", "got sequence_parallel_size=2 with DPOTrainer.*Leave it out.*share_prompts=True"),
        ]
    )
    def test_refuses_before_anything_changes(self, name, reason):
        for found in run_once(refusals, 2):
            for error, unchanged, printed in found[name]:
                self.assertRegex(error, reason)
                self.assertTrue(unchanged)
                self.assertEqual(printed, "")

    def test_auto_mode_says_the_same_everywhere(self):
        for message, printed in run_processes(refused_by_auto, 2):
            self.assertRegex(message, "expected methods of known trainers, got a custom training_step")
            self.assertEqual(printed, "")

    def test_undo(self):
        """`decide` changes nothing, and `undo` what `apply` has changed."""
        for untouched, shares, undone in run_processes(applied_and_undone, 2):
            self.assertTrue(untouched)
            self.assertTrue(undone)
            self.assertEqual(shares, [2, None, 2, None])

    @parameterized.expand(["groups", "preparation"])
    def test_a_failure_changes_nothing(self, where):
        for found in run_processes(failing, 2, where):
            self.assertEqual(found, ("the network is gone", True, False, 0))

    @parameterized.expand(
        [
            ("average", r"^expected the loss \S+ of the whole row, got .* Train without sequence parallelism"),
            ("dataloader", "^expected a part of a row, got a batch that is not cut"),
            ("predict", "got predict, which needs whole documents"),
        ]
    )
    def test_changes_afterwards_are_found(self, name, message):
        for error in run_processes(stopped, 2, name):
            self.assertRegex(error, message)

    @parameterized.expand(
        [
            ("parts", "trainer", 2, "difference", "^expected the same. This is more than rounding: .* Use padded"),
            ("evaluation", "trainer", 1, "difference", "^expected the same. This is more than rounding: .* Use"),
            ("metrics", "sft", 1, "leak", "^expected no leak."),
        ]
    )
    def test_processes_leave_the_check_together(self, _, kind, size, what, message):
        """A process that goes on alone waits for the others: in parts of the row, in evaluation, or in TRL's metrics."""
        other, own = run_processes(differing, 2, kind, size, what)
        self.assertEqual(other, "another process found a difference")
        self.assertRegex(own, message)

    def test_processes_compare_together(self):
        said, _ = run_processes(differing, 2, "trainer", 2, "no row")
        self.assertIn("Not verified: another process has no row, or no gradients, for it.", said)

    def test_in_one_process(self):
        trainer = build("trainer")
        for mode in (True, "auto"):
            with self.assertRaisesRegex(ValueError, "expected a default process group, got none. Start the processes"):
                configure_packing(trainer, mode, ROW if mode is True else None, sequence_parallel_size=2)
