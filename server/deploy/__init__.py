"""A server that is really deployed: SuperLink and clients as processes, keys, certificates, who may join."""
