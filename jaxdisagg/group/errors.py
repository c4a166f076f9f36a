"""The error of a node whose processes do not work together; importing it imports nothing else."""


class GroupError(Exception):
    """Processes of a node that did not find each other or lost one; the text says which."""
