"""Pictures and captions to latents and text embeddings, offline."""
