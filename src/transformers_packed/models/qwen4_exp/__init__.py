"""Qwen4-Exp for packed rows. `modeling_qwen4_exp.py` is generated from `modular_qwen4_exp.py`."""
