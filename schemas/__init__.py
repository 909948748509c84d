"""The contracts: events, topics, JSON Schemas and their examples. Imports nothing of clawstream."""
