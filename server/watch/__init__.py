"""Who is told of a run: terminal, JSON lines, Prometheus, trackers. None of them can change, slow or end it."""
