"""What the benchmark scripts share: a client that puts load on a server, and their reports."""
