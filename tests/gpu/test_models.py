"""Whole models on a GPU against the CPU in float32, packed against documents alone: `make test-gpu`."""

import copy
import unittest
import warnings

import torch
from accelerate import dispatch_model
from common.gpu import kept, lengths_of, needs_gpu, report, synchronising_is_an_error
from common.real_heads import FAMILIES, REAL_HEADS, on_gpu, random_documents
from mixins.model import alone, gradients, packed_batch, padded_batch, relative_error, total_relative_error
from mixins.vision import document as make_document
from mixins.vision import vision_config
from parameterized import parameterized
from transformers import Qwen3_5Config, set_seed
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed import DataCollatorWithFlattening, SequenceBoundaries, patch_model, unpatch_model
from transformers_packed.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers_packed.ops import dispatch, implementations_used


LENGTHS = (1, 2, 3, 63, 64, 65, 130, 300, 700)
ATTENTION = ("sdpa", "flex_attention", "flash_attention_2")


@needs_gpu
class CudaModelsTest(unittest.TestCase):
    def setUp(self):
        dispatch._used.clear()

    def models(self, family, dtype, attention="sdpa"):
        """Build a float32 model on the CPU, the oracle on documents alone, and one on the GPU with its weights."""
        cls, config_class, options = FAMILIES[family]
        if "num_experts" in options and dtype == torch.bfloat16:
            # All experts process all tokens, because rounding may change the experts that a router chooses.
            options = {**options, "num_experts_per_tok": options["num_experts"]}
        set_seed(0)
        oracle = cls._from_config(config_class(**REAL_HEADS | options), attn_implementation="sdpa")
        with torch.no_grad():
            for name, parameter in oracle.named_parameters():
                if "norm" in name or "dt_bias" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                parameter.copy_(parameter.to(dtype))
        model = cls._from_config(config_class(**REAL_HEADS | options), dtype=dtype).cuda()
        try:
            model.set_attn_implementation(attention)
        except ImportError as error:
            self.skipTest(str(error))
        model.load_state_dict(oracle.state_dict())
        return oracle.train(), model.train()

    def check(self, name, model, oracle, documents, bars, **batch):
        def on_the_cpu():
            logits, loss = alone(oracle, documents)
            return [x.detach() for x in logits], loss.detach(), gradients(oracle, loss)

        logits, loss, expected = kept(name, on_the_cpu)
        output = model(**on_gpu(batch or packed_batch(documents)))
        pairs = zip(output.logits[0].float().cpu().split([len(d) for d in documents]), logits, strict=True)
        figures = {
            "logits": max(relative_error(a, b) for a, b in pairs),
            "loss": ((output.loss.float().cpu() - loss).abs() / loss).item(),
            "gradients": total_relative_error(
                {name: x.float().cpu() for name, x in gradients(model, output.loss).items()}, expected
            ),
        }
        used = ", ".join(names[-1] for names in implementations_used().values())
        report(f"{name} ({used})", **figures)
        self.assertLess(figures["logits"], bars[0])
        self.assertLess(figures["loss"], bars[0])
        self.assertLess(figures["gradients"], bars[1])

    @parameterized.expand([(family, attention) for family in FAMILIES for attention in ATTENTION])
    def test_bfloat16(self, family, attention):
        oracle, model = self.models(family, torch.bfloat16, attention)
        self.check(f"{family}, bfloat16", model, oracle, random_documents(LENGTHS), (2e-2, 5e-2))

    @parameterized.expand([(1,), (34,), (1000,)])
    def test_65536_tokens(self, documents):
        oracle, model = self.models("qwen3_5", torch.bfloat16)
        documents = random_documents(lengths_of(documents))
        self.check(f"qwen3_5, bfloat16, 65536 tokens in {len(documents)}", model, oracle, documents, (2e-2, 5e-2))

    @parameterized.expand([(family,) for family in FAMILIES])
    def test_float32(self, family):
        oracle, model = self.models(family, torch.float32)
        self.check(f"{family}, float32", model, oracle, random_documents(LENGTHS), (1e-4, 1e-4))

    def test_compiled(self):
        """`torch.compile` with its default backend computes what the model computes without it."""
        _, model = self.models("qwen3_5", torch.bfloat16)
        compiled = torch.compile(model)
        self.addCleanup(torch._dynamo.reset)
        for number, more in enumerate((0, 1, 64, 7, 100)):
            batch = on_gpu(packed_batch(random_documents([*LENGTHS, *[9 + more] * more])))
            expected = model(**batch)
            with torch._dynamo.config.patch(error_on_recompile=number > 2):
                output = compiled(**batch)
            self.assertLess(relative_error(output.logits, expected.logits), 2e-2)
            found = gradients(model, output.loss)
            self.assertLess(total_relative_error(found, gradients(model, expected.loss)), 5e-2)

    def test_autocast(self):
        oracle, model = self.models("qwen3_5", torch.float32)
        with torch.autocast("cuda", torch.bfloat16):
            self.check("qwen3_5, float32 under autocast", model, oracle, random_documents(LENGTHS), (2e-2, 5e-2))

    def test_gradient_checkpointing_changes_nothing(self):
        _, model = self.models("qwen3_5", torch.bfloat16)
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        batch = on_gpu(packed_batch(random_documents(LENGTHS)))
        expected = gradients(model, model(**batch).loss)
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            actual = gradients(model, model(**batch).loss)
            self.assertTrue(all(torch.equal(actual[name], expected[name]) for name in expected), reentrant)

    @parameterized.expand([("qwen3_5", attention) for attention in ATTENTION] + [("qwen3_next", "sdpa")])
    def test_no_document_sees_another(self, family, attention):
        _, model = self.models(family, torch.bfloat16, attention)
        poisons = (0.5,) if attention == "flex_attention" else (0.5, float("nan"))
        batch = on_gpu(packed_batch(random_documents(LENGTHS)))
        embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach()
        del batch["labels"]
        with torch.no_grad():
            before = model(inputs_embeds=embeds, **batch).logits[0].split(LENGTHS)
        for document in range(len(LENGTHS)):
            for poison in poisons:
                changed = embeds.clone()
                changed[0].split(LENGTHS)[document].mul_(poison)
                with torch.no_grad():
                    after = model(inputs_embeds=changed, **batch).logits[0].split(LENGTHS)
                same = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
                self.assertEqual(same, [i != document for i in range(len(LENGTHS))])
            leaf = embeds.clone().requires_grad_()
            model(inputs_embeds=leaf, **batch).logits[0].split(LENGTHS)[document].float().square().sum().backward()
            reached = [bool(part.count_nonzero()) for part in leaf.grad[0].split(LENGTHS)]
            self.assertEqual(reached, [i == document for i in range(len(LENGTHS))])
        report(f"{family}, {attention}, bfloat16", others="bit for bit the same", gradients="exactly 0 across")

    @parameterized.expand(
        [("qwen3_5", attention) for attention in ATTENTION]
        + [(family, "sdpa") for family in FAMILIES if family != "qwen3_5"]
    )
    def test_does_not_wait_for_the_gpu(self, family, attention):
        _, model = self.models(family, torch.bfloat16, attention)
        for documents in (34, 35):
            lengths = lengths_of(documents)
            boundaries = SequenceBoundaries.from_lengths(lengths, device="cuda")
            input_ids = torch.cat(random_documents(lengths))[None].cuda()
            batch = {"input_ids": input_ids, "labels": input_ids, "boundaries": boundaries}
            if documents == 34:
                # Compile and tune.
                model(**batch).loss.backward()
                continue
            with synchronising_is_an_error():
                model(**batch).loss.backward()

    @parameterized.expand([(family,) for family in FAMILIES])
    def test_padding_is_packed(self, family):
        """A padded batch gives the results of the packed row, with one host sync for the mask."""
        _, model = self.models(family, torch.bfloat16)
        documents = random_documents(LENGTHS)
        row = on_gpu(packed_batch(documents))
        for side in ("left", "right"):
            batch = on_gpu({**padded_batch(documents, side), "use_cache": False})
            packed, padded = model(**row), model(**batch)
            real = batch["attention_mask"].bool()
            self.assertLess(relative_error(padded.logits[real], packed.logits[0]), 1e-2)
            self.assertFalse(padded.logits[~real].any())
            self.assertLess(relative_error(padded.loss, packed.loss), 1e-3)
            want, got = gradients(model, packed.loss), gradients(model, padded.loss)
            self.assertLess(total_relative_error(got, want), 1e-2)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self.addCleanup(torch.cuda.set_sync_debug_mode, "default")
            inputs = {name: batch[name] for name in ("input_ids", "use_cache")}
            # Another tensor, because the mask that was read last is not read again.
            inputs["attention_mask"] = batch["attention_mask"].clone()
            model.model(**inputs).last_hidden_state.sum().backward()
            torch.cuda.set_sync_debug_mode("default")
        waits = [str(w.message) for w in caught if "synchronizing CUDA operation" in str(w.message)]
        self.assertEqual(len(waits), 1, waits)

    @parameterized.expand([("on_the_gpu", None), ("spread_by_accelerate", 1)])
    def test_patch_a_model_that_is_there(self, _, on_the_host):
        oracle, _ = self.models("qwen3_5", torch.float32)
        documents = random_documents(LENGTHS)
        model = builtin.Qwen3_5ForCausalLM(oracle.config)
        model.load_state_dict(oracle.state_dict())
        if on_the_host is None:
            model.cuda()
        else:
            devices = {f"model.layers.{i}": "cpu" if i == on_the_host else 0 for i in range(4)}
            devices |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), 0)
            dispatch_model(model, devices)
        before = [(x.device.type, x.data_ptr()) for x in model.parameters()]
        self.assertIs(type(patch_model(model)), qwen3_5.Qwen3_5ForCausalLM)
        with torch.no_grad():
            logits = model(**on_gpu(packed_batch(documents))).logits[0].cpu()
            self.assertLess(relative_error(logits, torch.cat(alone(oracle, documents)[0])), 1e-5)
        self.assertIs(type(unpatch_model(model)), builtin.Qwen3_5ForCausalLM)
        self.assertEqual([(x.device.type, x.data_ptr()) for x in model.parameters()], before)

    def test_vision_language(self):
        config = Qwen3_5Config(
            **vision_config(
                {
                    **REAL_HEADS,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1e4,
                        "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10],
                    },
                }
            )
        )
        config.vision_config.out_hidden_size = REAL_HEADS["hidden_size"]
        set_seed(0)
        oracle = qwen3_5.Qwen3_5ForConditionalGeneration._from_config(copy.deepcopy(config)).train()
        oracle.to(torch.bfloat16).float()
        model = qwen3_5.Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16).cuda().train()
        model.load_state_dict(oracle.state_dict())
        documents = [
            make_document(9, 0, images=[(1, 4, 6)]),
            make_document(70, 1),
            make_document(130, 2, images=[(1, 4, 4), (1, 8, 4)], videos=[(2, 4, 4)]),
        ]
        collate = DataCollatorWithFlattening(return_cu_seqlens=True, model=oracle, on_leak="ignore")
        logits = [oracle(**collate([d])).logits[0] for d in documents]
        output = model(**on_gpu(collate(documents)))
        lengths = [len(d["input_ids"]) for d in documents]
        error = max(
            relative_error(a.float().cpu(), b) for a, b in zip(output.logits[0].split(lengths), logits, strict=True)
        )
        report("qwen3_5 with images and videos, bfloat16", logits=error)
        self.assertLess(error, 2e-2)
        output.loss.backward()

    def test_generates_as_on_the_cpu(self):
        """The cached path: a chunked prefill, then one token at a time."""
        oracle, model = self.models("qwen3_5", torch.bfloat16)
        (prompt,) = random_documents([70])
        logits = oracle(prompt[None]).logits[0]
        cache, outputs = None, []
        with torch.no_grad():
            for step in (prompt[:64], *prompt[64:, None]):
                output = model.eval()(step[None].cuda(), past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                outputs.append(output.logits[0].float().cpu())
        error = relative_error(torch.cat(outputs), logits.detach())
        report("qwen3_5 with a cache, bfloat16", logits=error)
        self.assertLess(error, 2e-2)
