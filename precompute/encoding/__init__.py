"""The job that encodes images and captions: decoding, batches, encoders, and the writer of shards."""
