"""Planning of packed rows: the plan, the planner and the cost model."""
