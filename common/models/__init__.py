"""Networks, and what is done to their inputs."""
