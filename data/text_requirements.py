"""Whether the text of token data fits a model: number of positions and size of the vocabulary."""

from __future__ import annotations

from typing import Any

from data.bpe import Vocabulary


def check_text(requirements: dict[str, Any], positions: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Compares the text of token data with what a model needs.

    Args:
        requirements: what the model needs; text_positions and text_vocabulary are compared.
        positions: number of text tokens per sample.
        vocabulary: the data's vocabulary; None if it does not exist yet, as in a dry run.

    Returns:
        The other requirements, which the encoded set's manifest must fit.

    Raises:
        ValueError: the text does not fit the model.
    """
    wanted = requirements.get("text_positions", positions)
    if wanted != positions:
        raise ValueError(
            f"tokens: text_positions is {positions}, the recipe expects {wanted}; give data.positions the model's "
            "number of text positions"
        )
    if vocabulary is not None and (wanted := requirements.get("text_vocabulary", vocabulary.size)) != vocabulary.size:
        raise ValueError(
            f"{vocabulary.where}: text_vocabulary is {vocabulary.size}, the recipe expects {wanted}; give the model as "
            "many text tokens as the vocabulary has entries, or train another with precompute/vocabulary.py"
        )
    return {name: value for name, value in requirements.items() if name not in ("text_positions", "text_vocabulary")}
