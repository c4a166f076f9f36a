"""What a machine can do for a deployment, and what is missing and why: `jaxdisagg doctor`.

One subject a file: its `probe` asks the machine, in a process of its own, and gives plain values;
its `findings` judge them.
"""
