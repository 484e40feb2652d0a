"""Sizes of released models, as arguments of their configurations."""

_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "linear_num_value_heads", "tie_word_embeddings",
)  # fmt: skip
# As in benchmarks/shapes.py. The defaults of the configuration are the sizes of 9B.
SIZES = {
    "0.8B": dict(zip(_NAMES, (1024, 3584, 24, 8, 2, 16, True), strict=True)),
    "4B": dict(zip(_NAMES, (2560, 9216, 32, 16, 4, 32, True), strict=True)),
    "9B": {},
    "27B": dict(zip(_NAMES, (5120, 17408, 64, 24, 4, 48, False), strict=True)),
}
