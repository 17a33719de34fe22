"""Clients of the service to measure side by side, behind one small interface: see `common`."""
