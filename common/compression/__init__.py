"""Compressors of flat vectors, and error feedback around them."""
