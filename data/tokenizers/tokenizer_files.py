"""Names of the files in which tokenizers of transformers are stored, beside the weights of a model. Imports nothing."""

# Options, among which may be the paths of other files.
OPTION_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# All of them: with equal weights, other files may give other embeddings.
TOKENIZER_FILES = (
    *OPTION_FILES, "tokenizer.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
)  # fmt: skip
