"""`clawstream doctor`: what this machine lacks, each in one line with what to do about it."""
