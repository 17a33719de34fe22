"""The speed harness: what a request, an inventory and a stream cost, beside other clients in the same run."""
