"""What a client remembers between rounds: versions that count once the server has accepted their upload."""
