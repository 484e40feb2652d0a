"""Sizes of released models, as arguments of their configurations."""

# As in benchmarks/step.py. The defaults of the configuration are the sizes of 9B.
SIZE_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": True,
}
