"""Tasks in a terminal: the policy gives commands, a sandbox runs them, a verifier decides.

`python -m examples.environments.terminal --gateway http://127.0.0.1:8000/v1`; see docs/environments.md.
"""
