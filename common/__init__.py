"""What the server, the clients and the strategies share."""
