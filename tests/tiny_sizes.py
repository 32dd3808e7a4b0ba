"""Sizes of tiny models, by the names that most configurations of transformers have for them."""

SIZES = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
