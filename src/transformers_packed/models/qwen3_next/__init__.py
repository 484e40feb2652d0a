"""Qwen3-Next for packed rows. `modeling_qwen3_next.py` is generated from `modular_qwen3_next.py`."""
