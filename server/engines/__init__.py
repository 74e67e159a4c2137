"""Where clients run without a server: in this process, in worker processes, on Ray. Every one gives the same bits."""
