"""Data for packed training.

* Rows: `collator.py` makes them of batches, `dataset.py` of map-style datasets, and `streaming.py` of streams;
  `planning/` chooses the samples of each row, and knows what a row costs in time and memory.
* Samples: `records/` makes them of chats, prompts and texts. `samples.py` finds their real tokens, `overlong.py` treats
  those longer than a row, and `tables.py` reads Arrow tables without decoding.
* Shared tokens: `trees.py`.
* For whoever looks at rows before training or in evaluation: `documents.py`, `excerpts.py` and `usual_rows.py`.
"""
