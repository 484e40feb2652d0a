"""Models for packed rows: hand-written `modular_*.py`, generated `modeling_*.py`, and how the Auto classes find them."""
