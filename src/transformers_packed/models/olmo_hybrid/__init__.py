"""OLMo-Hybrid for packed rows. `modeling_olmo_hybrid.py` is generated from `modular_olmo_hybrid.py`."""
