"""The server process: runs, comparisons of runs, reports of both."""
