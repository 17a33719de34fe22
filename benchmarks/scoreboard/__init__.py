"""The scoreboard: what the client promises, measured, with a naive client beside it. See `__main__`."""
