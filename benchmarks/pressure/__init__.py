"""The laboratory of pressure: storms, overload and deadlines in virtual time."""
