"""Old names of ops keep working, with a warning that gives the new one."""

import unittest
import warnings

import torch

from transformers_packed import ops


ROW, HEADS = torch.linspace(-1, 1, 24).view(1, 2, 12), torch.linspace(-1, 1, 16).view(1, 2, 2, 4)
WEIGHT, LAYER = torch.linspace(0, 1, 4), torch.linspace(0, 1, 24).view(3, 8)
GATE, LINEAR = ROW.flip(-1), torch.linspace(0, 1, 36).view(3, 12)
CONV = {"key_heads": 1, "key_dim": 2, "value_dim": 4}
ANGLES = torch.linspace(0, 1, 4).view(1, 2, 2)
# Old name, a call by it, and the same call by the new one.
NAMES = [
    (
        "convolved_query_key_value",
        lambda op: op(ROW, LINEAR.view(12, 3), **CONV),
        lambda: ops.causal_conv1d_qkv(ROW, LINEAR.view(12, 3), **CONV),
    ),
    (
        "decay_and_rate",
        lambda op: op(ROW, GATE, LINEAR[0], LINEAR[1]),
        lambda: ops.gated_delta_gates(ROW, GATE, LINEAR[0], LINEAR[1]),
    ),
    (
        "normed_rotary",
        lambda op: op(torch.cat([HEADS] * 2, -1), HEADS, WEIGHT, WEIGHT, cos=ANGLES, sin=ANGLES),
        lambda: ops.qk_norm_rope(torch.cat([HEADS] * 2, -1), HEADS, WEIGHT, WEIGHT, ANGLES, ANGLES),
    ),
    (
        "gated_rms_norm_linear",
        lambda op: op(HEADS, HEADS, WEIGHT, weight=LAYER, impl="reference"),
        lambda: ops.gated_rms_norm(HEADS, HEADS, WEIGHT, linear_weight=LAYER),
    ),
    ("swiglu", lambda op: op(GATE, up=ROW), lambda: ops.glu(GATE, ROW)),
    ("swiglu_linear", lambda op: op(GATE, ROW, weight=LINEAR), lambda: ops.glu(GATE, ROW, LINEAR)),
    (
        "sigmoid_gate",
        lambda op: op(GATE, hidden_states=ROW),
        lambda: ops.glu(GATE, ROW, activation="sigmoid"),
    ),
    (
        "sigmoid_gate_linear",
        lambda op: op(GATE, ROW, LINEAR, impl="auto"),
        lambda: ops.glu(GATE, ROW, LINEAR, activation="sigmoid"),
    ),
]


class OldNamesTest(unittest.TestCase):
    def test_they_warn_and_compute_the_same(self):
        for name, old, new in NAMES:
            with self.subTest(name):
                # `assertWarns` looks into every module, and some releases of Transformers then import torchvision.
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    op = getattr(ops, name)
                texts = [str(one.message) for one in caught if one.category is DeprecationWarning]
                self.assertTrue(any(f"ops.{name} is " in text for text in texts), texts)
                torch.testing.assert_close(old(op), new(), rtol=0, atol=0)

    def test_others_are_unknown(self):
        with self.assertRaisesRegex(AttributeError, "no_op"):
            ops.no_op  # noqa: B018


if __name__ == "__main__":
    unittest.main()
