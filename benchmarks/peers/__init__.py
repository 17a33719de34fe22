"""Clients of the service that are compared, behind one small interface: see `common`."""
