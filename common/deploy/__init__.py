"""What both sides of a deployment share: keys, addresses, logs, health, checks before the start."""
