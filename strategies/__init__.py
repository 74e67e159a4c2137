"""The algorithms, one file each with both halves, and the round that carries them."""
