"""The form of all messages between the processes of a node, which two other files define."""

import msgspec


class GroupMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all, those of messages.py and of fabric_messages.py, which messages.py unites."""
