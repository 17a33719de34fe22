"""The scoreboard: measures the promises of the client, and a naive client for comparison. See `__main__`."""
