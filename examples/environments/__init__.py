"""Environments: programs that give the policy tasks through the gateway and say how it went.

They are clients like any agent. They know the gateway's address and nothing of the log, and may run anywhere.
"""
