"""Text to numbers: byte-level BPE vocabularies, and CLIP's tokenizers."""
