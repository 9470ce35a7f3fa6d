"""The folder that a job writes: claims of its shards, their files, uploads, and the merged index."""
