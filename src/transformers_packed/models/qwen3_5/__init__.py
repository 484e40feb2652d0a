"""Qwen3.5 text models for packed rows. `modeling_qwen3_5.py` is generated from `modular_qwen3_5.py`."""
