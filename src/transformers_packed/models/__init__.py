"""Models for packed rows: hand-written `modular_*.py`, generated `modeling_*.py`, and Auto class registration."""
