"""The ground floor, below everything and without torch: what every command shares.

- `base.cli`: a user's mistake, flags from dataclasses, output that never fails, how a command runs
- `base.files`: files and folders that are whole or as they were, and locks
- `base.timing`: times that can be compared on a busy machine
"""
