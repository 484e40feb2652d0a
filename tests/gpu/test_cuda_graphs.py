"""Layers that run as CUDA graphs on a GPU, against the same layers without graphs: `make test-gpu`."""

import copy
import io
import tempfile
import unittest
from contextlib import nullcontext, redirect_stdout
from functools import partial
from importlib.util import find_spec
from unittest import mock

import torch
import torch.distributed as dist
from common.blocks import LAYERS
from common.families import tiny_model
from common.four_bit import store_in_nf4
from common.gpu import needs_gpu, report
from common.processes import run_processes
from common.real_heads import model_on_gpu, row_on_gpu
from common.shown import shows
from mixins.model import total_relative_error
from parameterized import parameterized
from torch.nn.parallel import DistributedDataParallel
from transformers import set_seed

from transformers_packed import PackedTrainer, PackedTrainingArguments, patch_model, use_cuda_graphs
from transformers_packed.models import cuda_graphs
from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.models.families import EXPERT_WEIGHTS, family_of
from transformers_packed.ops import dispatch, implementations_used
from transformers_packed.ops.backends import fla
from transformers_packed.ops.grouped_dequantization import Groups
from transformers_packed.training.callbacks.expert_load import ExpertLoad


ROW_LENGTH = 1024
# Full rows, whose results have to be identical with and without graphs, and short rows.
FULL = {"several": [300, 1, 63, 64, 596], "one": [1024], "thirty": [34] * 29 + [38]}
SHORT = {"one": [700], "several": [3, 500, 64, 1], "six": [20] * 6}


# Families with other rules, and options with heads of a size that kernels take. All experts compute all tokens, because
# rounding may change the experts that a router chooses.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "initializer_range": 0.02}
WIDE |= {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 8, "n_group": 1}
LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
OTHERS = {
    "kimi_linear": {"linear_head_dim": 64, "mlp_layer_types": ["dense"] * 4, **LATENT},
    "kimi_linear, mixture": {"linear_head_dim": 64, **LATENT, **EXPERTS},
    "bailing_hybrid": {"head_dim": 64, **LATENT, **EXPERTS},
    "olmo_hybrid": {"linear_key_head_dim": 96, "linear_value_head_dim": 192, "head_dim": 64},
}


def rule(name):
    """Allow only this implementation of the gated delta rule, or any if none is given."""
    from importlib import import_module

    table = import_module("transformers_packed.ops.gated_delta_rule").IMPLEMENTATIONS
    return mock.patch.dict(table, {name: table[name]}, clear=True) if name != "first" else nullcontext()


def models_of(family="qwen3_5", dtype=torch.bfloat16):
    """Build a model with graphs and one without."""
    if family in OTHERS:
        plain = patch_model(tiny_model(family.partition(",")[0], **WIDE | OTHERS[family]).to("cuda", dtype))
    else:
        plain = model_on_gpu(family, dtype)
    return use_cuda_graphs(copy.deepcopy(plain), ROW_LENGTH), plain


def graphs_of(model):
    graphs = model.model.layer_graphs
    return len(graphs._graphs) if graphs else 0


def steps_under_ddp():
    """Return losses and gradients for some rows of this rank, with graphs and without, and the warnings."""
    warnings, results = [], []
    with mock.patch.object(cuda_graphs.logger, "warning_once", warnings.append):
        for model in models_of():
            wrapped, losses = DistributedDataParallel(model, device_ids=[dist.get_rank()]), []
            for number, lengths in enumerate((*FULL.values(), *SHORT.values())):
                # The first rows only accumulate gradients.
                with wrapped.no_sync() if number < 2 else nullcontext():
                    loss = wrapped(**row_on_gpu(lengths, seed=2 * number + dist.get_rank())).loss
                    loss.backward()
                losses.append(loss.item())
            results += [losses, {name: x.grad.float().cpu() for name, x in model.named_parameters()}]
    return *results, warnings


def store_in_nvfp4(model: torch.nn.Module) -> None:
    """Give linear layers and experts random weights as a quantized checkpoint has them."""
    generator = torch.Generator("cuda").manual_seed(0)
    for name, old in list(model.named_parameters()):
        if name.endswith((*(f"{layer}.weight" for layer in LAYERS), *EXPERT_WEIGHTS)):
            *others, rows, columns = old.shape
            values = torch.randint(256, (*others, rows, columns // 2), device="cuda", generator=generator)
            scale = torch.full((*others, rows, columns // 16), 1.75, device="cuda").to(torch.float8_e4m3fn)
            whole = torch.full((*others, 1), 256.0, device="cuda")
            groups = Groups(values.to(torch.uint8), scale, "nvfp4", torch.bfloat16, whole=whole, divided=True)
            path, _, name = name.rpartition(".")
            weight = torch.nn.Parameter(PackedWeight(groups, torch.bfloat16), requires_grad=False)
            setattr(model.get_submodule(path), name, weight)


STORED = {"nvfp4": store_in_nvfp4, "nf4": partial(store_in_nf4, dtype=torch.bfloat16)}


@needs_gpu
class CudaGraphsOnGpuTest(unittest.TestCase):
    def setUp(self):
        dispatch._used.clear()
        self.warnings, self.precision = [], nullcontext()
        patch = mock.patch.object(cuda_graphs.logger, "warning_once", self.warnings.append)
        patch.start()
        self.addCleanup(patch.stop)

    def step(self, model, row):
        model.zero_grad()
        with self.precision:
            loss = model(**row).loss
        loss.backward()
        return loss.item(), {name: x.grad.float() for name, x in model.named_parameters() if x.requires_grad}

    def compare(self, graphed, plain, rows):
        """Return the largest difference of the loss and of all gradients together, over all rows."""
        losses, gradients = [], []
        # Losses of earlier rows may still be held during the next recording.
        with self.precision:
            held = [model(**row_on_gpu([64])).loss for model in (graphed, plain)]
        for loss in held:
            loss.backward()
        for lengths in rows:
            (a, found), (b, expected) = (self.step(model, row_on_gpu(lengths)) for model in (graphed, plain))
            losses.append(abs(a - b) / b)
            gradients.append(total_relative_error(found, expected))
        self.assertEqual(self.warnings, [])
        return max(losses), max(gradients)

    @parameterized.expand(
        [(family, kernel) for family in ("qwen3_5", "qwen3_next") for kernel in ("first", "fla")]
        + [("qwen3_5_moe", "first"), ("qwen3_next_moe", "first")]
    )
    def test_computes_what_the_layers_do(self, family, kernel):
        graphed, plain = models_of(family)
        with rule(kernel):
            full, short = (self.compare(graphed, plain, rows.values()) for rows in (FULL, SHORT))
            # Run again: each of these rows has a graph by then.
            again = self.compare(graphed, plain, FULL.values())
        graphs = graphed.model.layer_graphs._graphs
        self.assertEqual(len(graphs), 2)
        used = ", ".join(names[0] for names in implementations_used(isolating=True).values())
        report(
            f"CUDA graphs: {family}, {kernel} ({used})",
            **{"full rows, loss": full[0], "full rows, gradients": full[1]},
            **{"shorter rows, loss": short[0], "shorter rows, gradients": short[1]},
        )
        # The backward of attention adds up in any order. Without graphs, gradients differ as much between runs.
        self.assertEqual((full[0], again[0]), (0, 0))
        for loss, gradient in (full, short, again):
            self.assertLess(loss, 1e-3)
            self.assertLess(gradient, 1e-2)

    @parameterized.expand([(family, attention) for family in OTHERS for attention in (True, False)])
    def test_other_families(self, family, attention):
        if family == "olmo_hybrid" and (problem := fla._backward_problem()):
            self.skipTest(problem)
        graphed, plain = models_of(family)
        use_cuda_graphs(graphed, ROW_LENGTH, attention=attention)
        full, short = (self.compare(graphed, plain, rows.values()) for rows in (FULL, SHORT))
        again = self.compare(graphed, plain, FULL.values())
        self.assertEqual(graphs_of(graphed), 2)
        used = implementations_used(isolating=True)
        report(
            f"CUDA graphs: {family}{', without attention' * (not attention)} ({used})",
            **{"full rows, loss": full[0], "full rows, gradients": full[1]},
            **{"shorter rows, loss": short[0], "shorter rows, gradients": short[1]},
        )
        for loss, gradient in (full, short, again):
            self.assertLess(loss, 1e-3)
            self.assertLess(gradient, 1e-2)
        self.assertEqual(used[family_of(plain).rule], ["fla"])

    def test_a_longer_row_between_replays(self):
        """Its backward keeps nothing of the rule of Kimi-Linear that a graph would use, and frees nothing that it uses."""
        graphed, plain = models_of("kimi_linear")
        rows = [FULL["several"], [ROW_LENGTH + 500, 1], FULL["several"], [ROW_LENGTH], FULL["several"]]
        for number, lengths in enumerate(rows):
            (a, found), (b, expected) = (self.step(model, row_on_gpu(lengths)) for model in (graphed, plain))
            # Memory that a graph does not own has other values by then.
            torch.full((1 << 26,), torch.nan, device="cuda")
            self.assertLess(abs(a - b) / b, 1e-3, number)
            self.assertLess(total_relative_error(found, expected), 1e-2, number)
        (reason,) = self.warnings
        self.assertIn("more than max_length", reason)

    @parameterized.expand([(family, again) for family in ("qwen3_5", "qwen3_5_moe") for again in (False, True)])
    def test_attention_outside(self, family, again):
        """Layers of attention run between graphs, which have to run in the order of their recordings."""
        graphed, plain = models_of(family)
        use_cuda_graphs(graphed, ROW_LENGTH, attention=False)
        for model in (graphed, plain) if again else ():
            model.gradient_checkpointing_enable({"use_reentrant": False})
        full, short = (self.compare(graphed, plain, rows.values()) for rows in (FULL, SHORT))
        self.assertEqual(len(graphed.model.layer_graphs._graphs), 2)
        report(
            f"CUDA graphs without attention: {family}{', gradient checkpointing' * again}",
            **{"full rows, gradients": full[1], "shorter rows, loss": short[0], "shorter rows, gradients": short[1]},
        )
        self.assertEqual(full[0], 0)
        self.assertLess(short[0], 1e-3)
        self.assertLess(max(full[1], short[1]), 1e-2)

    @parameterized.expand([(attention, again) for attention in (True, False) for again in (False, True)])
    def test_router_logits(self, attention, again):
        """Those of each layer are outputs of a graph, with gradients of the load balancing loss."""
        graphed, plain = models_of("qwen3_5_moe")
        use_cuda_graphs(graphed, ROW_LENGTH, attention=attention)
        for model in (graphed, plain):
            model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
            if again:
                model.gradient_checkpointing_enable({"use_reentrant": False})
        full, short = (self.compare(graphed, plain, rows.values()) for rows in (FULL, SHORT))
        self.assertEqual(len(graphed.model.layer_graphs._graphs), 2)
        for lengths in (*FULL.values(), *SHORT.values()):
            found, expected = (model(**row_on_gpu(lengths)) for model in (graphed, plain))
            self.assertEqual(found.router_logits[0].shape, (sum(lengths), graphed.config.num_experts))
            for a, b in zip(found.router_logits, expected.router_logits, strict=True):
                self.assertLess((a - b).float().norm(), 1e-2 * b.float().norm())
            (found.loss + expected.loss).backward()
        report(f"CUDA graphs with logits of routers{', gradient checkpointing' * again}", **{"gradients": full[1]})
        self.assertLess(max(full[0], short[0]), 1e-3)
        self.assertLess(max(full[1], short[1]), 1e-2)

    @parameterized.expand([("a hook",), ("a change",)])
    def test_a_part_without_its_graph(self, kind):
        """The others run in the memory that all recordings share."""
        layers = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}
        plain = model_on_gpu("qwen3_5", **layers)
        graphed = use_cuda_graphs(copy.deepcopy(plain), ROW_LENGTH, attention=False)
        self.compare(graphed, plain, FULL.values())
        for model in (graphed, plain):
            mlp = model.model.layers[2].mlp
            if kind == "a hook":
                mlp.register_forward_hook(lambda *args: 2 * args[-1])
            else:
                mlp.up_proj.weight.data = 2 * mlp.up_proj.weight.data
        for number, lengths in enumerate([*FULL.values(), *SHORT.values()]):
            (a, found), (b, expected) = (self.step(model, row_on_gpu(lengths)) for model in (graphed, plain))
            self.assertLess(abs(a - b) / b, 1e-3, number)
            self.assertLess(total_relative_error(found, expected), 1e-2, number)
        self.assertEqual((len(self.warnings), graphs_of(graphed)), (1 if kind == "a change" else 6, 2))

    def test_load_of_experts(self):
        """Graphs count the choices of real tokens, but neither padding nor the forwards before a recording."""
        rows, totals = [*FULL.values(), *SHORT.values(), *FULL.values()], []
        for model in models_of("qwen3_5_moe"):
            load = ExpertLoad(model, torch.device("cuda", torch.cuda.current_device()))
            for lengths in rows:
                load.start(sum(lengths))
                loss = model(**row_on_gpu(lengths)).loss
                load.add()
                loss.backward()
            (total,) = load._totals
            totals.append(total[:, :-1].double().cpu())
            choices = sum(map(sum, rows)) * model.config.num_experts_per_tok
            self.assertEqual(totals[-1].sum(1).tolist(), [choices] * len(total))
            load.close()
        self.assertEqual(self.warnings, [])
        # Rounding may change some choices in short rows.
        self.assertLess(((totals[0] - totals[1]).norm() / totals[1].norm()).item(), 1e-2)

    def test_gradients_add_up(self):
        graphed, plain = models_of()
        for model in (graphed, plain):
            for lengths in (*FULL.values(), *SHORT.values()):
                model(**row_on_gpu(lengths)).loss.backward()
        found, expected = (
            {name: x.grad.float() for name, x in model.named_parameters()} for model in (graphed, plain)
        )
        self.assertLess(total_relative_error(found, expected), 1e-2)

    def test_autocast(self):
        graphed, plain = models_of(dtype=torch.float32)
        self.precision = torch.autocast("cuda", torch.bfloat16)
        figures = self.compare(graphed, plain, FULL.values())
        # Each replay casts the weights again.
        for model in (graphed, plain):
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(3)
        changed = self.compare(graphed, plain, FULL.values())
        report(
            "CUDA graphs: float32 under autocast",
            loss=max(figures[0], changed[0]),
            gradients=max(figures[1], changed[1]),
        )
        for loss, gradient in (figures, changed):
            self.assertLess(loss, 1e-3)
            self.assertLess(gradient, 1e-2)

    @parameterized.expand([(False,), (True,)])
    @unittest.skipUnless(find_spec("peft"), "needs peft")
    def test_lora(self, checkpointing):
        import peft

        wrapped = []
        for model in models_of():
            set_seed(0)
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            config = peft.LoraConfig(target_modules="all-linear", r=8, init_lora_weights=False)
            wrapped.append(peft.get_peft_model(model, config))
        loss, gradient = self.compare(*wrapped, FULL.values())
        report(f"CUDA graphs: LoRA{' with gradient checkpointing' * checkpointing}", loss=loss, gradients=gradient)
        self.assertLessEqual(loss, 0 if checkpointing else 1e-3)
        self.assertLess(gradient, 1e-2)

    @parameterized.expand(STORED)
    @unittest.skipUnless(find_spec("peft"), "needs peft")
    @shows("nvfp4", "CUDA graphs", "gradient checkpointing")
    @shows("nf4", "CUDA graphs", "gradient checkpointing")
    def test_stored_weights(self, kind):
        """Layers and experts in fewer bits, whose weights each replay dequantizes."""
        import peft

        if kind == "nf4" and not find_spec("bitsandbytes"):
            self.skipTest("needs bitsandbytes")
        wrapped = []
        for model in models_of("qwen3_5_moe"):
            STORED[kind](model)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            config = {"target_modules": list(LAYERS), "target_parameters": list(EXPERT_WEIGHTS)}
            set_seed(0)
            wrapped.append(peft.get_peft_model(model, peft.LoraConfig(r=8, init_lora_weights=False, **config)))
        loss, gradient = self.compare(*wrapped, FULL.values())
        report(f"CUDA graphs: LoRA on {kind} with gradient checkpointing", loss=loss, gradients=gradient)
        self.assertEqual(loss, 0)
        self.assertLess(gradient, 1e-2)
        self.assertEqual(len(wrapped[0].base_model.model.model.layer_graphs._graphs), 2)

    @parameterized.expand([("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_next", 1), ("qwen3_5_moe", 1)])
    def test_checkpointing(self, family, step):
        """Layers that the graphs compute again have the gradients of layers that are computed again without them."""
        graphed, plain = models_of(family)
        kept = self.reserved_by(graphed)
        use_cuda_graphs(graphed, ROW_LENGTH)
        for model in (graphed, plain):
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for number, layer in enumerate(model.model.layers):
                layer.gradient_checkpointing = number % step == 0
        less = self.reserved_by(graphed)
        loss, gradient = self.compare(graphed, plain, FULL.values())
        report(
            f"CUDA graphs: {family}, gradient checkpointing of each layer with number % {step} == 0",
            loss=loss,
            gradients=gradient,
            **{"memory of the graphs, of that without checkpointing": less / kept},
        )
        self.assertEqual(loss, 0)
        self.assertLess(gradient, 1e-2)

    def reserved_by(self, model):
        """Return the bytes that the allocator keeps for the graphs of a row."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        model(**row_on_gpu([1024])).loss.backward()
        model.zero_grad()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    def test_gradients_of_other_rows_share_their_memory(self):
        """Rows of other numbers of documents have recordings of their own, but they keep no gradients."""
        graphed, _ = models_of()
        weights = sum(x.nbytes for x in graphed.model.layers.parameters())
        allocated = []
        for lengths in ([1024], FULL["thirty"]):
            graphed(**row_on_gpu(lengths)).loss.backward()
            graphed.zero_grad()
            allocated.append(torch.cuda.memory_allocated())
        self.assertEqual(graphs_of(graphed), 2)
        more = (allocated[1] - allocated[0]) / weights
        report("CUDA graphs: memory of another recording, of that of the weights", ratio=more)
        self.assertLess(more, 0.5)

    @parameterized.expand([("by itself", None), ("asked for", True), ("never", False)])
    def test_trainer(self, name, wanted):
        """`PackedTrainer` measures rows and memory, and no graph is recorded after the first step."""
        _, model = models_of(dtype=torch.float32)
        samples = [{"input_ids": [n % 96 + 1] * n, "labels": [n % 96 + 1] * n} for n in range(2, 300)]
        output = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(output):
            args = PackedTrainingArguments(
                folder,
                packing=True,
                max_length=ROW_LENGTH,
                per_device_train_batch_size=1,
                max_steps=8,
                cuda_graphs=wanted,
                verify=False,
                bf16=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            trainer = PackedTrainer(model, args, train_dataset=samples)
            recorded = []
            step = trainer.training_step
            trainer.training_step = lambda *args, **kwargs: (recorded.append(graphs_of(model)), step(*args, **kwargs))[
                1
            ]
            trainer.train()
        lines = [line for line in output.getvalue().splitlines() if "CUDA graphs" in line]
        report(f"CUDA graphs: PackedTrainer, {name}", decision=" ".join(lines) or "none")
        self.assertEqual(len(lines), wanted is None)
        if wanted is None:
            # Eight small layers are bound by the host, on any host.
            self.assertTrue(lines[0].startswith("CUDA graphs on, because a row takes"), lines)
        # Before the second of the eight steps, rows may be tried without graphs.
        (number,) = set(recorded[-7:])
        self.assertEqual(number > 0, wanted is not False)
        # Graphs that the Trainer chose itself end with the training.
        self.assertEqual(graphs_of(model), number if wanted else 0)
        self.assertEqual(self.warnings, [])

    @unittest.skipUnless(torch.cuda.device_count() > 1, "needs two CUDA devices")
    def test_under_ddp(self):
        results = run_processes(steps_under_ddp, 2, backend="nccl")
        figures = []
        for losses, found, expected_losses, expected, warnings in results:
            self.assertEqual(warnings, [])
            worst = max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True))
            figures.append((worst, total_relative_error(found, expected)))
            # Both ranks have the average of their gradients.
            self.assertEqual(total_relative_error(found, results[0][1]), 0)
        loss, gradient = (max(x) for x in zip(*figures, strict=True))
        report("CUDA graphs: two GPUs under DistributedDataParallel", loss=loss, gradients=gradient)
        self.assertLess(loss, 1e-3)
        self.assertLess(gradient, 1e-2)

    def test_trains(self):
        graphed, plain = models_of()
        losses = []
        for model in (graphed, plain):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses.append([])
            for seed in range(8):
                optimizer.zero_grad()
                loss = model(**row_on_gpu([300, 724], seed=seed % 2)).loss
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
        found, expected = map(torch.tensor, losses)
        report("CUDA graphs: 8 steps of AdamW", losses=((found - expected).abs() / expected).max().item())
        self.assertLess(((found - expected).abs() / expected).max().item(), 1e-2)
        self.assertLess(found[-1].item(), 0.95 * found[0].item())

    @parameterized.expand([("first", "qwen3_5"), ("fla", "qwen3_5"), ("first", "kimi_linear, mixture")])
    def test_documents_stay_apart(self, kernel, family):
        graphed, _ = models_of(family)
        lengths = [300, 100, 64, 500]
        row = {name: x for name, x in row_on_gpu(lengths).items() if name != "labels"}
        changed = dict(row, input_ids=row["input_ids"].clone())
        changed["input_ids"][0, 300:400] = changed["input_ids"][0, 300:400] % 96 + 1
        with rule(kernel):
            a, b = (graphed.model(**x).last_hidden_state[0].detach().split(lengths) for x in (row, changed))
            embeddings = graphed.model.embed_tokens(row.pop("input_ids")).detach().requires_grad_()
            output = graphed.model(inputs_embeds=embeddings, **row).last_hidden_state[0].split(lengths)[1]
            (gradient,) = torch.autograd.grad(output.float().square().sum(), embeddings)
        for document in range(4):
            self.assertEqual(torch.equal(a[document], b[document]), document != 1)
            reached = bool((gradient[0].split(lengths)[document] != 0).any())
            self.assertEqual(reached, document == 1)
        self.assertEqual(self.warnings, [])
        report(f"CUDA graphs: {family}, {kernel}", others="bit for bit the same", gradients="exactly 0 across")
