"""What `python -m server` can be asked: each command calls one room below and ends with its exit code."""
