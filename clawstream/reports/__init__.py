"""Gaps that no guard sees in one step: whom the policy learns from, and whether the judge rewards what people want."""
