"""Kimi Linear for packed rows. `modeling_kimi_linear.py` is generated from `modular_kimi_linear.py`."""
