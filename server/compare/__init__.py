"""Plans of many runs: which cells there are, who runs them, what was tuned, whether it was fair."""
