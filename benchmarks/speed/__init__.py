"""The speed harness: the cost of a request, an inventory and a stream, compared with other clients."""
