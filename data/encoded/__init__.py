"""Encoded sets: their manifests, where they are, and how their shards are fetched and read into batches."""
