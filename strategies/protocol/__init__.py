"""A round over messages, for every algorithm: who is asked, what is sent, what is accepted. It names no algorithm."""
