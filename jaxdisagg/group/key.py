"""The secret that the processes of a node share, by which they know each other."""

import os

KEY_VARIABLE = "JAXDISAGG_GROUP_KEY"
LEAST_CHARACTERS = 16


def group_key() -> bytes:
    """The key from the environment. Raises ValueError when there is none, or a short one."""
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < LEAST_CHARACTERS:
        raise ValueError(
            f"{KEY_VARIABLE}: the processes of a node need a common secret of "
            f"{LEAST_CHARACTERS} characters or more in this environment variable"
        )
    return key.encode()
