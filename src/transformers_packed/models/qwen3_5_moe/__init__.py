"""Qwen3.5-MoE for packed rows. `modeling_qwen3_5_moe.py` is generated from `modular_qwen3_5_moe.py`."""
