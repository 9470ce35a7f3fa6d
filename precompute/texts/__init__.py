"""Vocabularies, and texts packed into rows of tokens."""
