"""Runs and watches the processes of one TOML file: `clawstream up`, `down`, `status` and `logs`.

The supervisor knows services by name and starts them as `python -m services.<name>`; it imports none of them.
"""
