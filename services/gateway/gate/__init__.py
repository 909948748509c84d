"""The weight gate: which engine may serve which weights, and who tells them to change.

Every gateway routes by what the log says of the engines (`weights-applied`); one of them, the owner of the partition
of `weights` in the group `weight-gate`, moves the engines to the version that the pointer names.

Reads `weights`, `weights-applied`. Writes `weights-applied`.
"""
