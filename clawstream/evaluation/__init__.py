"""Measuring a policy on questions it was never trained on, beside a frozen control."""
