"""`clawstream status`: is it learning, and if not, why not."""
