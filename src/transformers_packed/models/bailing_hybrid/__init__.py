"""Bailing-Hybrid (Ling) for packed rows. `modeling_bailing_hybrid.py` is generated from `modular_bailing_hybrid.py`."""
