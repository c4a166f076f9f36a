"""Settings of all tests. No fixtures here: each folder has its own."""

import os

from hypothesis import settings

# a shared or slow machine must not fail a test, so no example has a time limit (pytest-timeout
# bounds the whole test); with CI set the examples are the same in every run
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
