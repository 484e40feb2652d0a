"""Which samples share a row: the plan, how it is made, and what rows cost."""
