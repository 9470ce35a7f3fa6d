"""Whether an encoded set is whole, and equal to a new encoding of some of its samples."""
