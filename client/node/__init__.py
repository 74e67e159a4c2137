"""A site's resident process and the only modules that know how a client reaches a server."""
