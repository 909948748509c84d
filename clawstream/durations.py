"""Lengths of time for people."""


def duration(seconds: float) -> str:
    """In the largest unit of which there are at least two: `95 s`, `12 min`, `3.4 h`, `2.0 d`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"
