"""Checkpoints of both engines: written, copied to a bucket, read without running code, and converted."""
