"""The client process: local training, its memory, and the way to a server."""
