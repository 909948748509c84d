"""clawstream: online reinforcement learning from conversations, with Kafka's log as the system.

This package is the core shared by all services. It never imports torch and never imports a service.
"""

__version__ = "0.1.0"
