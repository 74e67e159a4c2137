"""Which way is better, of a metric that does not say so itself: by its name."""

from __future__ import annotations

import re

LOWER = frozenset({"loss", "objective", "error", "err", "mae", "mse", "rmse", "mape", "smape", "nll", "perplexity"}) | {
    *("brier", "ece", "wer", "cer", "distance", "deviation", "regret", "divergence", "entropy")
}
"""Words of names of which less is better: errors, losses, distances."""


def higher_by_name(name: str) -> bool:
    """Whether more is better of a metric called so: unless one of its words is of `LOWER`."""
    return not LOWER & set(re.split(r"[^a-z0-9]+", name.lower()))
