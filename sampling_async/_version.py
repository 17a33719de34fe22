"""The version, where the build and the User-Agent find it."""

__version__ = "0.1.0"
