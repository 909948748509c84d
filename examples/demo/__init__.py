"""The demo: a scripted user talks to a small real model through the gateway, and the model learns what the user wants.

Nothing but the user is simulated: Apache Kafka, the engine, gateway, judge, teacher and trainer run as processes of
their own, and the user's program never calls the trainer.
"""
