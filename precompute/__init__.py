"""Encodes images and captions to latents, text embeddings and tokens, offline."""
