"""Models for packed rows: hand-written `modular_*.py`, generated `modeling_*.py`, and Auto class registration.

* Families: `family.py` says what a record is, and `families.py` has all records. A family with classes of its own has a
  folder; `generic.py` and `mixers.py` serve the others. `verdict.py` decides whether a model keeps documents apart.
* From a stock model to ours: `registry.py`, `replacements.py`, `packed_model.py` and `text_model.py`. `releases.py` is the
  only file that names private parts of other libraries, `versions.py` adapts to their releases, and `installed.py` lists
  what changes in them while a model needs it.
* A forward: `inputs.py` (what the call is), `masks.py`, `padding.py`, `vision.py`, `trunk_row.py`, `outputs.py`,
  `losses/`, `trl_head.py`, and `cuda_graphs.py` with `inspections.py` and `recordings.py`.
* Linear layers: `projections.py` decides whether an op computes a layer, and `untouched.py` whether a fused op may stand
  for a module. `lora.py`, `adapters.py`, `quantization.py`, `quantized_weights.py`, `experts_quantizer.py`, `float8.py`,
  `float8_marks.py` and `experts.py` know a kind of weight each.
* Numbers: `sizes.py`, `memory.py`, `parameters.py` and `optimizers.py`.
* The head of multi-token prediction: `mtp.py` (in checkpoints and beside adapters), `mtp_head.py` (trained).
"""
