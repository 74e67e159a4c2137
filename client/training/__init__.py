"""Local steps: batches, passes, optimizers, device. Nothing here knows messages or memory on disk."""
