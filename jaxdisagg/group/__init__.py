"""The processes of one node: how they talk, start, and keep in step."""
