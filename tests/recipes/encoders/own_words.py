"""A folder of open_clip that has a tokenizer of its own."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def give_tokenizer(folder, words):
    """Writes a tokenizer of these words, which stand for the numbers from 2 on, and names it in the config."""
    numbers = {word: number for number, word in enumerate(("<pad>", "<unknown>", *words))}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "own"
    (folder / "open_clip_config.json").write_text(json.dumps(config))
