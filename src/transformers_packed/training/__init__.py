"""Training on packed rows: the Trainer integration, losses per document, sequence parallelism and callbacks.

* Set-up: `options.py` declares each option once. [`configure_packing`] reads a Trainer (`facts.py`), asks its record
  (`trainers.py`) and the reasons against packing (`checks.py`), decides (`setup.py`) on changes, and
  makes them (`apply.py`). `trainer.py` is a Trainer with packing built in.
* Check before the first step: `callbacks/verify.py` runs it, `steps.py` and `padded_steps.py` measure both sides,
  `compare.py` judges, and `restore.py` and `state.py` put everything back. `verify.py` checks a model alone.
* Step: `losses.py` and `added_losses.py` (losses per document, and beside those of the stock model),
  `sequence_parallel.py`, `graphs.py`, `run_ahead.py`, `kernels.py`, `warm_up.py`, `optimizers.py`, `evaluation.py`, `callbacks/`.
"""
