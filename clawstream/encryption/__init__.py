"""Content encrypted per session, with keys in a compacted topic: deleting a key makes retained records unreadable."""
