"""Page transfers over libfabric, and the XLA FFI call that triggers them from inside jit."""
