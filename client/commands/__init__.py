"""What `python -m client` can be asked."""
